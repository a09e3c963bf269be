"""Finds the line whose result is the first that is not finite when a loss stops being a number.

At that step, nothing but the graph of the loss is there: the values that its nodes have saved tell
the operation. Graphs of steps have one form, so the same place in the graph of a step whose calls
are recorded tells the line, whether that comes earlier or later. Only on a CPU, where looking at
values does not wait.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from torch import Tensor

from flatout.measure.attach.lines import Line

LINE = "flatout.line"
"""Key of the line that made a node, in the node's metadata."""
ARGUMENTS = {"self": 0, "input": 0, "other": 1, "target": 1, "weight": 1}
ARGUMENTS |= {"mat1": 1, "batch1": 1, "mat2": -1, "batch2": -1}
"""Which argument of an operation a value is that its node has saved. Others are results."""

FIRST = 2
"""Losses in which roots of 0 are looked for."""
MAKERS = re.compile(r"Div|Exp|Log|Pow|Reciprocal|Rsqrt|Sqrt")
"""Names of nodes whose results may be not finite although their arguments are. Others are taken to
pass values on."""


STEEP = re.compile("Sqrt|Pow")
"""Names of nodes whose gradients may be infinite where their arguments are 0."""


class Origin:
    """Where the first values are made that are not finite."""

    def __init__(self) -> None:
        self._bad: tuple[int, str] | None = None
        """The place of the node that made the first value, and its name."""
        self._steep: tuple[int, str] | None = None
        """That of a root of 0 in the first losses, whose gradient is not finite."""
        self._looks = 0
        self.is_data = False
        """Whether no operation with a graph has made it: it is part of the data."""
        self._recorded: dict[tuple[int, str] | None, Line] = {}
        """Lines of nodes by their places and names, in a step whose calls were recorded."""

    @property
    def line(self) -> Line | None:
        """The line, if it is known."""
        return self._recorded.get(self._bad)

    def look(self, loss: Tensor) -> None:
        """Look at the graph of a loss, before its backward pass."""
        root: Any = loss.grad_fn
        if type(loss) is not Tensor or not loss.is_cpu:  # one in parts may need all ranks
            return
        is_bad = self._bad is None and not math.isfinite(loss.item())
        is_new = LINE in root.metadata and not self._recorded
        self._looks += 1
        is_first = self._looks <= FIRST
        if not (is_bad or is_new or is_first):
            return
        nodes, line = nodes_below(root), None
        for place, node in enumerate(nodes):
            is_steep = STEEP.match(node.name()) and getattr(node, "_saved_exponent", 0) < 1
            if is_first and is_steep and any((each == 0).any() for each in _saved(node).values()):
                self._steep = place, node.name()
            line = node.metadata.get(LINE, line)  # an operation's inner nodes follow it
            if is_new and line is not None:
                self._recorded[place, node.name()] = line
        if not is_bad:
            return
        bad = [
            (len(nodes_below(node)), place, name)
            for place, node in enumerate(nodes)
            for name, value in _saved(node).items()
            if not (value < math.inf).all()  # -inf is a mask
        ]
        _, place, name = min(bad, default=(0, 0, ""))
        node = nodes[place]
        if name in ARGUMENTS:
            made_by = node.next_functions[ARGUMENTS[name]][0]
            self.is_data, node = made_by is None, made_by or node
        while (
            not self.is_data and len(below := _unknown(node)) == 1 and not MAKERS.match(node.name())
        ):
            (node,) = below
        # those of weights come from the step before
        is_weight = hasattr(node, "variable")
        self._bad = self._steep if is_weight else None
        self._bad = self._bad or (nodes.index(node), "" if is_weight else node.name())


def nodes_below(root: Any) -> list[Any]:
    """Return the nodes of a graph from one of them on, in an order that only its form decides."""
    found, stack = dict[Any, None](), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = None
            stack += [each for each, _ in reversed(node.next_functions)]
    return [*found]


def _saved(node: Any) -> dict[str, Tensor]:
    """Return the tensors that a node has saved, or the weights that it is for, by their names.

    Those that a checkpoint of activations computes again are not asked for.
    """
    found = dict[str, Tensor]()
    for name in dir(node):
        if name == "variable" or name.startswith("_raw_saved_"):
            with suppress(AttributeError, RuntimeError):  # several, or none
                value = getattr(node, name).data
                if isinstance(value, Tensor) and value.is_floating_point():
                    found[name.removeprefix("_raw_saved_")] = value
    return found


def _unknown(node: Any) -> list[Any]:
    """Return the nodes that made the arguments of a node which it has not saved."""
    count = len(node.next_functions)
    known = {ARGUMENTS[name] % count for name in _saved(node) if name in ARGUMENTS and count}
    every = enumerate(node.next_functions)
    return [each for place, (each, _) in every if each is not None and place not in known]
