"""Accounts for the work of some steps by lines of user code, without a rule for any of them.

What a line takes that does not use weights, with its part of the backward pass; what it computes
again from the same values; what goes backward again through the same graph; and what has no effect:
results that nobody reads, gradients that are zero, and those that are cleared before an optimizer
uses them. Only on a CPU, whose calls return when they are done.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from flatout.measure.attach.guard import guarded
from flatout.measure.attach.learning import are_zero, some_of
from flatout.measure.attach.lines import Line, LineTotals
from flatout.measure.evidence import CallSite

DRAWS = re.compile(r"rand|dropout|bernoulli|multinomial|normal_?$|uniform|poisson|exponential")
"""Functions whose results differ although their arguments are the same."""
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, slice, type(...))
"""Types of arguments that are compared by their values."""
INHERENT = re.compile(
    r"linear|matmul|mm|einsum|conv|pool|norm|attention|cross_entropy|nll_loss|embedding|lstm|gru"
)
"""Functions that are the model's own work, with weights or without."""
MOST_NODES = 512
"""Most nodes of the graph that a call makes: what it was given may be in an object or a closure."""
SOME = 64
"""Values of a gradient that are looked at first."""

PRODUCT = re.compile("[Mm]m|onvolution")
"""Nodes of matrix products and convolutions."""
CHOICE = re.compile("A?[Mm]ax|A?[Mm]in|Median|Topk|Sort|Kth|Relu|Thresh|Clamp|Hard|Where|Adaptive")
"""Nodes whose gradients are zero where values are not chosen, which are needed to choose."""
LEAST_UNUSED, ALMOST_ALL = 0.25, 0.95
"""Share of the rows of a product that the loss does not use, and of its values: below, activation
functions may be the reason."""
SEQUENCES = re.compile("lstm|gru|rnn_tanh|rnn_relu")
"""Functions that take whole sequences, whose states need no results of calls before."""
MANY_USES, MOST_NEAR = 16, 64
"""Uses of the same weights that one call could make, and nodes that are looked at for a result."""
HALF = 0.5
"""Part of a backward pass that computes gradients of weights, and not of their inputs."""

Token = Any
"""What is equal where two arguments certainly have the same values."""


@dataclass
class _Pass:
    """A backward pass."""

    line: Line | None
    """Where it starts."""
    above: tuple[Line, ...] = ()
    """The lines that lead there, which tell the losses of one function apart."""
    seconds: float = 0.0
    weights: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    """Those that it gives gradients which nothing has used yet, their versions and some values."""
    size: int = 0
    """Numbers of all weights that it gives gradients."""
    is_read: bool = False
    """Whether the script computes with these gradients, such as projections of several losses."""


class Work:
    """The work of a thread's steps. Times are those of the steps in which it listens."""

    def __init__(self) -> None:
        self.found = LineTotals()
        """Lines of `line`, `model`, `repeated`, `again`, `discarded`, `growing`, `unread`,
        `unused` and `zero`, as in `Evidence.sites`."""
        self._numbers, self._count = WeakIdKeyDictionary(), count()
        """A number for each tensor that a call was given."""
        self._results = WeakIdKeyDictionary()
        """Tokens and versions of results."""
        self._calls: dict[Token, tuple[list[Token], Token]] = {}
        """The arguments and the results of the calls of the step before, by line, function and
        number."""
        self._now: dict[Token, tuple[list[Token], Token]] = {}
        self._times: Counter[Token] = Counter()
        self._steps = 0
        self._made: dict[Any, tuple[Line, float, int]] = {}
        """Nodes that no backward pass has gone through: line, seconds and step of their calls."""
        self._passes, self._hooks = [_Pass(None)], list[Any]()
        self._used, self._discarded = Counter[Any](), defaultdict[Any, list[float]](list)
        """How often gradients are used, and the seconds of those that are cleared, by the line of
        the pass, its callers and the weights."""
        self._behind = set[Any]()
        """Nodes of a pass whose results a product uses."""
        self._read: list[Any] = []
        """Nodes whose results something reads that has no gradient, such as `.item()`."""
        self._reached: set[Line] = set()
        self._sizes, self._earlier = Counter[Line](), Counter[Line]()
        """Arguments that calls of lines were given, in this step and in the one before."""
        self._growing: set[Line] | None = None
        """Lines with more of them in each step than in the one before."""
        self.gradients = WeakIdKeyDictionary()
        """The weights of gradients that the script's own code has asked for."""
        self._unread: defaultdict[Line, float] = defaultdict(float)
        self._zero: defaultdict[Line, float] = defaultdict(float)
        self._not_zero: set[Line] = set()
        self._with_weights: set[Line] = set()
        self._uses: dict[Token, tuple[int, Any]] = {}
        """How often a micro-batch has used weights at a line, and the last result of that."""
        self._looped: set[Line] = set()
        """Lines that use the same weights again and again, independently of each other."""

    def note(
        self, func: Any, args: Any, kwargs: Any, result: Any, line: Line, seconds: float
    ) -> None:
        """Note a call and its result."""
        uses_weights = any(isinstance(one, torch.nn.Parameter) for one in args)
        uses_weights |= torch._C._functorch.maybe_current_level() is not None  # as what it maps
        self._with_weights |= {line} if uses_weights else set()
        is_inherent = uses_weights or INHERENT.search(getattr(func, "__name__", ""))
        kind = "model" if is_inherent else "line"
        self.found.add(kind, line, seconds)
        given = tree_leaves((args, kwargs))
        for one in given if func.__name__ != "zero_" else ():
            if isinstance(one, Tensor) and one in self.gradients:
                self._note_read(self.gradients[one])
        self._sizes[line] += len(given)
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        self._note_repeated(func, given, results, line, seconds)
        made: list[Any] = [one.grad_fn for one in results if one.grad_fn is not None]
        before: list[Any] = [
            one.grad_fn for one in given if isinstance(one, Tensor) and one.grad_fn is not None
        ]
        if not made:
            self._read += before
            return
        nodes, new = [*made], list[Any]()
        while nodes and len(new) < MOST_NODES:
            node = nodes.pop()
            if node is None or node in self._made or node in before or node.name()[-4:] == "Grad":
                continue
            self._made[node] = (line, 0.0, self._steps)
            new.append(node)
            nodes += [each for each, _ in node.next_functions]
        for node in new:
            self._made[node] = (line, seconds / len(new), self._steps)
            self._time(node, kind, line, seconds / len(new))
        self._note_use(func, given, before, made[0], line)

    def _note_use(
        self, func: Any, given: Sequence[Any], before: Sequence[Any], made: Any, line: Line
    ) -> None:
        """Count the uses of weights at a line, unless each needs the result of the one before."""
        weights = next((one for one in given if isinstance(one, torch.nn.Parameter)), None)
        if weights is None:
            return
        uses, last = self._uses.get((id(weights), line), (0, None))
        if SEQUENCES.fullmatch(func.__name__):
            before = [given[0].grad_fn]
        if last is not None and last in _near(before):
            uses = -MANY_USES
        self._uses[id(weights), line] = uses + 1, made
        self._looped |= {line} if uses + 1 >= MANY_USES else set()

    def note_backward(
        self,
        reached: set[Any],
        line: Line | None,
        above: tuple[Line, ...] = (),
        *,
        adds: bool = True,
    ) -> None:
        """Note the nodes that a backward pass goes through: its line, and those that call it."""
        if adds:
            self._uses.clear()
        for node in reached & self._made.keys():
            self._reached.add(self._made.pop(node)[0])
        self._behind.clear()
        while self._hooks:
            self._hooks.pop().remove()
        self._passes = [one for one in self._passes if self._is_pending(one)]
        self._passes.append(_Pass(line, above))
        for node in reached:
            if (weights := getattr(node, "variable", None)) is not None:
                self._hooks.append(node.register_prehook(partial(self._note_given, weights)))

    def _note_read(self, weights: Tensor) -> None:
        """Note that the script computes with the gradient of some weights: it is not in vain."""
        for one in self._passes:
            left = [each for each in one.weights if each[0] is not weights]
            one.is_read |= len(left) < len(one.weights)
            one.weights = left

    @guarded
    def _note_given(self, weights: Tensor, _: object) -> None:
        """Note that the pass gives weights their gradient: it may only go elsewhere."""
        now = self._passes[-1]
        now.weights.append((weights, weights._version, some_of(weights)))
        now.size += weights.numel()

    def _is_pending(self, one: _Pass) -> bool:
        """Note which gradients of a pass were cleared unused. Return whether some are left."""
        left, part = list[tuple[Tensor, int, Tensor]](), 1.0
        for weights, version, values in one.weights[::-1]:
            is_used = weights._version != version or (some_of(weights) != values).any()
            if is_used:
                self._used[one.line, one.above, id(weights)] += 1
            if one.line is not None and not is_used:
                if weights.grad is None or are_zero([weights.grad]):
                    seconds = part * weights.numel() / one.size * one.seconds
                    self.found.add("discarded", one.line, seconds)
                    self._discarded[one.line, one.above, id(weights)].append(seconds)
                    continue
                left.insert(0, (weights, version, values))
            part = HALF  # what leads on to these weights is needed
        one.weights = left
        return bool(left)

    def end_step(self) -> None:
        """End a step: what it made must be read in the next one at the latest."""
        seen, nodes = set(), self._read
        while nodes:
            node = nodes.pop()
            if node in self._made and node not in seen:
                seen.add(node)
                nodes += [each for each, _ in node.next_functions if each is not None]
        for node, (line, seconds, step) in [*self._made.items()]:
            if node in seen:
                self._reached.add(line)
            elif step < self._steps:
                self._unread[line] += seconds
            if node in seen or step < self._steps:
                del self._made[node]
        if self._earlier:
            grown = {line for line, size in self._sizes.items() if size > self._earlier[line] > 0}
            self._growing = grown if self._growing is None else self._growing & grown
        self._earlier, self._sizes = self._sizes, Counter()
        self._calls, self._now = self._now, {}
        self._times.clear()
        self._uses.clear()
        self._steps += 1

    def sites(self, steps: int, work_s: float) -> dict[str, tuple[CallSite, ...]]:
        """Return the lines by kind, in steps whose calls take `work_s` when nobody listens."""
        listened_s = sum(sum(self.found.seconds[kind].values()) for kind in ("line", "model"))
        return self.found.sites(max(steps, listened_s / work_s if work_s else 0.0))

    def close(self) -> None:
        """Tell what had no effect in all steps, and what lines take that never use weights."""
        for line in self._with_weights:
            self.found.seconds["model"][line] += self.found.seconds["line"].pop(line, 0.0)
            self.found.counts["line"].pop(line, None)
        for line, seconds in self._unread.items():
            if line not in self._reached:
                self.found.add("unread", line, seconds)
        for line, seconds in self._zero.items():
            if line not in self._not_zero:
                self.found.add("zero", line, seconds)
        every = self.found.seconds
        grown = self._growing or set()
        # a horizon that grows on purpose calls the model more often
        for line in grown if grown.isdisjoint(self._with_weights) else ():
            self.found.add("growing", line, every["line"][line] + every["model"][line])
        for line in self._looped:
            self.found.add("looped", line, every["model"][line])
        self._made.clear()
        self.note_backward(set(), None)
        del self._passes[:-1]
        for one, cleared in self._discarded.items():
            if 0 < self._used[one] <= len(cleared):  # fewer are of steps that were given up
                self.found.add("lost", one[0], sum(cleared))

    def _note_repeated(
        self, func: Any, given: Sequence[Any], results: list[Tensor], line: Line, seconds: float
    ) -> None:
        """Note a call whose arguments have the values that they had in the step before."""
        name = getattr(func, "__name__", "")
        place = (line, name)
        key = (*place, self._times[place])
        self._times[place] += 1
        tokens = [self._token(one) for one in given]
        if None in tokens or not results or DRAWS.search(name):
            return
        before, made = self._calls.get(key, (None, None))
        if before == tokens:
            self.found.add("repeated", line, seconds)
        else:
            made = (key, self._steps)
        self._now[key] = tokens, made
        for number, one in enumerate(results):
            if one._base is None and not one.is_inference():
                self._results[one] = (made, number), one._version

    def _token(self, one: Any) -> Token:
        """Return what identifies the values of an argument, or None."""
        if isinstance(one, PLAIN):
            return (type(one), str(one))
        if type(one) not in (Tensor, torch.nn.Parameter) or one.is_inference():
            return None  # which has no version
        root = one if one._base is None else one._base
        place = (one.storage_offset(), one.shape, one.stride()) if root is not one else ()
        known, version = self._results.get(root, (None, None))  # type: ignore[no-untyped-call]
        if known is not None and version == root._version:
            return (known, place)
        if root not in self._numbers:
            self._numbers[root] = next(self._count)
        # a script that writes weights.data leaves their version as it is
        values = tuple(some_of(root).tolist()) if isinstance(root, torch.nn.Parameter) else ()
        return (self._numbers[root], root._version, place, values)

    def _time(self, node: Any, kind: str, line: Line, forward_s: float) -> None:
        """Time a node's part of backward passes, and see whether its gradients are zero."""
        start_s, unused, first = 0.0, 0.0, list[_Pass | None]()
        is_product = PRODUCT.search(node.name())

        def before(gradients: Sequence[Tensor | None]) -> None:
            nonlocal start_s, unused
            is_last, unused = node not in self._behind, 0.0
            start_s = time.perf_counter()
            if torch._C._functorch.maybe_current_level() is not None:  # there are no values to see
                self._not_zero.add(line)
                return
            guarded(self._look)(gradients, line, forward_s)
            if is_product or CHOICE.match(node.name()):
                guarded(self._mark_behind)(node)
            if is_product and is_last:
                unused = guarded(unused_share)(gradients[0]) or 0.0
            start_s = time.perf_counter()

        def after(*_: object) -> None:
            seconds, now = time.perf_counter() - start_s, self._passes[-1]
            now.seconds += seconds
            self.found.seconds[kind][line] += seconds
            if first and first[0] and first[0].line and not first[0].is_read:
                self.found.add("again", first[0].line, seconds)
            # derivatives of derivatives need the graph once more
            first.append(None if torch.is_grad_enabled() else now)
            if line in self._zero:
                self._zero[line] += seconds
            if unused:
                self.found.add("unused", line, unused * (forward_s + seconds))

        node.register_prehook(before)
        node.register_hook(after)

    def _mark_behind(self, node: Any) -> None:
        """Note what leads to a product, or a choice: it brings the zeros in their gradients."""
        nodes = [node]
        while nodes:
            one = nodes.pop()
            before = [] if one is not node and PRODUCT.search(one.name()) else one.next_functions
            nodes += [each for each, _ in before if each is not None and each not in self._behind]
            self._behind |= {each for each, _ in before}

    def _look(self, gradients: Sequence[Tensor | None], line: Line, forward_s: float) -> None:
        """See whether all gradients of a node are zero, and not only those of other nodes."""
        if line in self._not_zero:
            return
        given = [one for one in gradients if one is not None and one.numel()]
        if not given or any(one.flatten()[:SOME].any() or one.any() for one in given):
            self._not_zero.add(line)
        else:
            self._zero[line] += forward_s


def _near(nodes: Sequence[Any]) -> set[Any]:
    """Return nodes and some of those below them, the nearest first."""
    found, now = set[Any](), [one for one in nodes if one is not None]
    while now and len(found) < MOST_NEAR:
        found |= {*now}
        now = [each for one in now for each, _ in one.next_functions if each and each not in found]
    return found


def unused_share(gradient: Tensor | None) -> float:
    """Return the share of a product's rows, or of nearly all of its values, with zero gradients.

    0 where that is little, and where all are zero, which is not about the product.
    Shapes: gradient (N, D), (B, N, D), or of a convolution (B, D, N, ...), whose rows are places.
    """
    if gradient is None or gradient.dim() < 2 or gradient.is_sparse:
        return 0.0
    used = gradient != 0
    by_row = 1 - min(float(used.any(dim).double().mean()) for dim in (1, -1))
    by_value = 1 - float(used.double().mean())
    share = by_value if by_value >= ALMOST_ALL else by_row
    return share if LEAST_UNUSED <= share < 1 else 0.0
