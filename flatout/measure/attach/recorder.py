"""Records what a script calls in torch: which lines train, attention, float64, kept graphs."""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakIdKeyDictionary

from flatout.config.registry import is_user_code
from flatout.measure.attach.causality import are_own, laid_out, predicted
from flatout.measure.attach.guard import guarded
from flatout.measure.attach.inputs import classes_in, padding_id, sorted_classes
from flatout.measure.attach.learning import some_of
from flatout.measure.attach.lines import (
    MIN_SAMPLES,
    Line,
    LineTotals,
    line_of,
    stack_of,
    user_frame,
    user_lines,
)
from flatout.measure.attach.origin import LINE, Origin
from flatout.measure.attach.sites import seen_in
from flatout.measure.attach.work import SEQUENCES, Work

KEY = "flatout"
"""Key of a step's mark in the metadata of its graph."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""Name of the nodes of weights."""
KEPT_STEPS = 50
"""Last steps whose graphs are looked for."""
MIN_ATTENTION = 32
"""Fewest tokens from which a softmax over all pairs of them counts."""
CONTAINERS = (list, deque, dict, set)
"""Of these, a script's variables are looked at."""
LOSSES_OF_LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss")
NORMALISED = ("Softmax", "Sigmoid")
"""Loss functions that take logits, the last one their logarithms, and nodes of probabilities."""
PAIRED = ("Div", "Mul", "Cat", "Bmm", "Sum")
"""Nodes of logits that are products of features."""
ARRANGES = re.compile(
    "(Unsafe)?View|Reshape|Transpose|Permute|T0|TBack|.*queeze|Select|Slice|Clone"
)
LIMIT = re.compile(
    r"(?i)((capacity|maxlen|max_?size|(buffer|memory|replay|queue)_?(size|len))|\.(n|cap|limit))$"
)
"""Names of numbers that say how long a container beside them becomes."""
WRITES = re.compile("(?!__).*_|__(set|setitem|i(add|sub|mul|truediv))__")
"""Functions that change their first argument."""
MOST_DEEP, KEPT = 3, 9
"""Objects in objects that are looked at, and fewest graphs in one that are those of steps."""
MOST_ATTRIBUTES = 100
"""An object with more is no record of a script."""
MOST_CALLS = 50_000
"""Calls of a step that are noted. Each takes a few dozen microseconds."""
DECOMPOSES = re.compile(
    "linalg_(norm|cond|matrix)|"
    "(linalg_)?(svd|eig|qr$|cholesky|lstsq|p?inv(erse|_ex)?$|solve|lu(_|$)|(slog|log)?det$)"
)
"""Functions that decompose matrices."""
OF_SUMS = re.compile("(Add|Sub|Mul|Div)Backward0")
"""The nodes of sums and of running averages."""
SKIPPED = ("__get__", "backward")
"""Attributes, such as .grad, and what the loop's phases show."""
EARLY_STEP = 4
"""Step after which the sizes of containers are noted."""
MARK_DEPTH = 16
"""Nodes below the loss at which its graph is marked once more: outputs may be kept without it."""


class CallRecorder(TorchFunctionMode):
    """Notes the calls of a loop's thread in torch by the line of user code that makes them.

    Inside, each call takes some microseconds longer. Calls made by other calls are part of them.
    Of a step with more than MOST_CALLS, the others are not noted.
    """

    def __init__(self, phase: Callable[[], str | None], work: Work | None = None) -> None:
        super().__init__()
        self.work = work
        self.trains: set[Line] = set()
        """Lines whose calls use weights, compute something that a backward pass goes through, or
        start one.
        """
        self.found = LineTotals()
        """Lines of `op`, `softmax`, `float64`, `broadcast` and others, as in `Evidence.sites`."""
        self.classes = defaultdict[tuple[Line, int], list[Counter[int]]](list)
        """For each loss of classes, those of its targets, by line and number of all classes."""
        self._padded: list[tuple[int, float] | None] = []
        """For each mean loss of tokens, what `padding_id` returned for its targets."""
        self._phase = phase
        self._open: list[tuple[Any, Line, float, int]] = []
        """Nodes that no backward pass has gone through, the lines that made them, the seconds that
        this took, and the step.
        """
        self._made: Any = WeakIdKeyDictionary()
        """Of results without a graph, the lines that made them and their arguments."""
        self.inputs: list[Tensor] = []
        """Those of the last pass of the loop's model."""
        self.predicted: int | None = None
        """Which of them has the tokens that a loss predicts from those before."""
        self._weights: Any = WeakIdKeyDictionary()
        """Those that were used before, and whether an optimizer has them."""
        self._places = set[int]()
        """Addresses of the weights that optimizers have."""
        self._fresh: list[tuple[weakref.ref[Parameter], Line]] = []
        """Those that were not used before this step, and where."""
        self._steps = self._calls = 0
        self.rows = 0
        """Most rows of the results of any weights in a pass."""
        self._rows = Counter[int]()
        """Those of the pass so far, by the identity of the weights."""
        self.is_cut = False
        """Whether a step had too many calls. Then nothing is known of what they do to others."""
        self._hook = register_optimizer_step_pre_hook(guarded(self._note_update))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hook.remove()
        self._open.clear()
        self.inputs.clear()
        if self.found.total("created") < self._steps - 1:
            self.found.counts.pop("created", None)  # once for all that follow
        if self.work is not None:
            self.work.close()

    def end_step(self) -> None:
        """End a step. What an optimizer has taken since was not created for one pass."""
        for reference, line in self._fresh if self._steps else ():
            weights = reference()
            if weights is None or not self._weights[weights]:
                self.found.add("created", line, 0.0)
        self._fresh.clear()
        for _, line, seconds, step in self._open:
            if step == self._steps - 1:  # a pass of the next step may have gone through it
                self.found.add("dropped", line, seconds)
        self._steps, self._calls = self._steps + 1, 0
        if self.work is not None:
            self.work.end_step()

    def note_backward(self, roots: Sequence[Tensor], *, adds: bool = True) -> None:
        """Note which lines a backward pass from some tensors goes through.

        `adds`: it adds to the gradients of weights, which ends a micro-batch.
        """
        nodes = [one.grad_fn for one in roots]
        reached = set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in reached:
                reached.add(node)
                nodes += [each for each, _ in node.next_functions]
        self.trains |= {line for node, line, *_ in self._open if node in reached}
        self._rows.clear()
        lines = [*user_lines(stack_of(sys._getframe(1)))]
        line = lines[0] if lines else None
        if self.work is not None:
            with torch._C.DisableTorchFunction():
                self.work.note_backward(reached, line, tuple(lines[1:]), adds=adds)
        if line is not None:  # the pass also starts there
            self.trains.add(line)
        self._open = [each for each in self._open if each[0] not in reached]

    def _note_update(self, optimizer: Any, *_: object) -> None:
        """Note which lines made gradients, without a backward pass."""
        for group in optimizer.param_groups:
            for weights in group["params"]:
                self._weights[weights] = True
                self._places.add(weights.data_ptr())
                if weights.grad is not None:
                    self.trains |= self._made.get(weights.grad, set())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._calls += 1
        if self._calls > MOST_CALLS:
            self.is_cut = True
            if self.work is not None:
                self.work.close()
                self.work = None
            return func(*args, **(kwargs or {}))
        start_s = time.perf_counter()
        returned = func(*args, **(kwargs or {}))
        guarded(self._note)(func, args, kwargs, returned, time.perf_counter() - start_s)
        return returned

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, returned: Any, seconds: float
    ) -> None:
        """Note a call."""
        every = returned if isinstance(returned, tuple) else (returned,)
        result = next((one for one in every if isinstance(one, Tensor)), None)
        name, phase = func.__name__, self._phase()
        if phase not in ("forward", "other", "compute"):
            return
        if name in SKIPPED:
            # torch's own code, which clears and clips gradients, asks for them, too
            by_script = is_user_code(sys._getframe(3).f_code.co_filename)
            is_gradient = result is not None and getattr(func, "__self__", None) is Tensor.grad
            if by_script and is_gradient and self.work is not None:
                self.work.gradients[result] = args[0]
            return
        line = user_frame(sys._getframe(1))
        if line is None:
            return
        is_gradient = getattr(func, "__self__", None) is Tensor.grad
        if WRITES.fullmatch(name) and not is_gradient and self._has_any(tree_leaves(args[:1])):
            self.found.add("written", line, seconds)
        given = tree_leaves(args) if SEQUENCES.fullmatch(name) else args
        weights = next((one for one in given if isinstance(one, Parameter)), None)
        if weights is not None and result is not None and result.dim() and "embed" not in name:
            self._rows[id(weights)] += result.numel() // (result.shape[-1] or 1)
            self.rows = max(self.rows, self._rows[id(weights)])
        if self.work is not None:
            self.work.note(func, args, kwargs, returned, line, seconds)
        if result is None:
            return
        self.found.add("op", line, 0.0)
        if DECOMPOSES.match(name):
            self.found.add("decomposition", line, seconds)
        uses_weights = any(isinstance(one, Parameter) for one in args)
        if phase == "forward" and (uses_weights or "dropout" in name):  # also that of the inputs
            self.trains.add(line)
        if result.grad_fn is None:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self._made[result] = {line}.union(*(self._made.get(one, ()) for one in given))
            return
        self._open.append((result.grad_fn, line, seconds, self._steps))
        _metadata(result.grad_fn)[LINE] = line
        self._note_fresh(args if phase == "forward" else (), line)
        two = [one for one in args if isinstance(one, Tensor)]
        # targets have no gradient, as the other side of pairs of predictions has
        if len(two) == 2 and phase != "forward" and two[0].requires_grad != two[1].requires_grad:
            column, row = sorted((one.shape for one in two), key=len, reverse=True)
            is_square = name.endswith("_loss") or column[:1] * 2 == result.shape
            if is_square and column == (*row, 1) and len(row) == 1 and row[0] > 1:
                self.found.add("broadcast", line, seconds)
        if name.endswith(("cross_entropy", "_loss", "_logits")):
            self._note_loss(name, two, kwargs or {}, line, seconds)
        pairs = every[1] if name == "multi_head_attention_forward" else None
        if name == "softmax" and result.dim() > 2 and result.shape[-1] == result.shape[-2]:
            pairs = result
        if pairs is not None and pairs.shape[-1] >= MIN_ATTENTION:
            self.found.add("softmax", line, seconds)
        if result.dtype == torch.float64:
            self.found.add("float64", line, seconds)

    def _has_any(self, every: list[Any]) -> bool:
        """Return whether some values are those of weights that an optimizer has."""
        with suppress(RuntimeError):  # a sparse one has no address
            return any(
                self._weights.get(one) or one.data_ptr() in self._places
                for one in filter(torch.is_tensor, every)
            )
        return False

    def _note_fresh(self, args: tuple[Any, ...], line: Line) -> None:
        """Note weights that were not used before, and are no copy of those of an optimizer."""
        for one in args:
            if isinstance(one, Parameter) and one.requires_grad and one not in self._weights:
                known = (each for each, is_updated in self._weights.items() if is_updated)
                same = (each for each in known if each.shape == one.shape)
                if not any(bool((some_of(each) == some_of(one)).all()) for each in same):
                    self._fresh.append((weakref.ref(one), line))
                self._weights[one] = False

    def sorted_classes(self, steps: int) -> int | None:
        """Return the number of classes in successive steps, if each step has few of them."""
        for (_, most), seen in self.classes.items():
            number = sorted_classes(seen) if len(seen) == steps else None  # one loss in each
            # of several losses, some have a class for all rows that come from one place
            if number is not None and (number > 1 or most > 2 or len(self.classes) == 1):
                return number
        return None

    def padded_targets(self) -> tuple[int, float] | None:
        """Return the id of padding and its share of the targets, if every loss counts it."""
        first, shares = self._padded[:1], [one[1] for one in self._padded if one]
        is_one = first and first[0] and all(one and one[0] == first[0][0] for one in self._padded)
        return (first[0][0], statistics.fmean(shares)) if is_one and first[0] else None

    def _note_loss(
        self, name: str, given: list[Tensor], kwargs: Any, line: Line, seconds: float
    ) -> None:
        """Note what a loss is given."""
        if name in ("cross_entropy", "nll_loss") and len(given) > 1:
            with torch._C.DisableTorchFunction():
                self._note_padding(given[1], kwargs, line)
                if given[1].shape in [one.shape[:1] for one in self.inputs]:  # one for each row
                    found = classes_in(given[1])
                    # a contrastive loss has the true pair in the same column of every row
                    if len(found) > 1 or not _maker(given[0].grad_fn).startswith(PAIRED):
                        self.classes[line, given[0].shape[1]].append(found)
                if self.predicted is None:
                    self.predicted = predicted(self.inputs, given[1])
                if are_own(self.inputs, given[1]):
                    self.found.add("unshifted", line, seconds)
                sizes, known = _sizes_before(given[0]), laid_out(self.inputs, given[1])
                if sizes not in known and sizes[::-1] in known:
                    self.found.add("interleaved", line, seconds)
        if name in LOSSES_OF_LOGITS and given and _maker(given[0].grad_fn).startswith(NORMALISED):
            self.found.add("normalised", line, seconds)
        if name == "binary_cross_entropy" and given[:1] and given[0].requires_grad:
            self.found.add("rounded", line, seconds)

    def _note_padding(self, targets: Tensor, kwargs: Any, line: Line) -> None:
        """Note the padding that a mean loss counts among its targets, if it has several per row."""
        tokens = [one for one in self.inputs if one.dim() == 2 and not one.is_floating_point()]
        is_padded = any(padding_id(one, rows) for one in tokens for rows in one.shape)
        sizes = {size for one in tokens for size in one.shape if 1 < size < len(targets)}
        every = (padding_id(targets, rows) for rows in sizes | {len(targets)})
        found = next(filter(None, every), None) if is_padded else None
        weight, is_mean = kwargs.get("weight"), kwargs.get("reduction", "mean") == "mean"
        ignored = (kwargs.get("ignore_index"), -100)
        if found and (found[0] in ignored or not (weight is None or weight[found[0]])):
            found = None
        self._padded.append(found if is_mean else None)
        self.found.add("padded-loss", line, 0.0)


def own_lines(
    sampled: LineTotals, steps: int, recorder: CallRecorder | None, loop: Sequence[Line]
) -> tuple[LineTotals, float]:
    """Return the lines that do no training work, and the seconds that phases do not show.

    Those are what other lines outside of phases train with, without what the lines that do not
    train take inside of the forward pass.

    Without a recorder, it is not known which lines of the forward pass are the model's, and outside
    of it those that name a loss count as training. The seconds are those of an average step.
    `loop` has the lines that lead to the loop, and call no function in each step.
    """
    found, training_s = LineTotals(), 0.0
    found.callers = {line: at for line, at in sampled.callers.items() if at not in loop}
    for kind in ("python", "compute") if recorder is not None else ("python",):
        for line, total_s in sampled.seconds[kind].items():
            if line in sampled.counts["data"]:
                continue  # what the loop's own line takes is the loader's, such as its memory
            if recorder is not None and recorder.is_cut and line not in recorder.found.counts["op"]:
                continue  # it may train
            trains = line in recorder.trains if recorder is not None else "loss" in line_of(*line)
            if trains:
                training_s += total_s / steps * (kind == "python")
            elif sampled.counts[kind][line] >= MIN_SAMPLES:
                found.add("own", line, total_s / steps)
                training_s -= total_s / steps * (kind == "compute")
    return found, training_s


class _Mark:
    """Lives as long as the graph in whose metadata it is."""


class Graphs:
    """Notices graphs that stay in memory after their step."""

    def __init__(self) -> None:
        self._marks: deque[weakref.ref[_Mark]] = deque(maxlen=KEPT_STEPS)
        self.origin = Origin()
        self._sizes: dict[str, int] = {}
        """Lengths of the script's containers after some steps."""
        self.filling = ""
        """A container that grows up to a length which the script states."""

    def mark(self, loss: Tensor) -> None:
        """Mark the graph of a step by its loss, and a node below it."""
        if loss.grad_fn is not None:
            mark = _Mark()
            *_, deep = itertools.islice(_chain(loss.grad_fn), MARK_DEPTH)
            _metadata(loss.grad_fn)[KEY] = _metadata(deep)[KEY] = mark
            self._marks.append(weakref.ref(mark))
            with torch._C.DisableTorchFunction():  # no call of the script
                self.origin.look(loss)
        if len(self._marks) == EARLY_STEP:
            self._sizes = _sizes(guarded(held_by)(sys._getframe(1)) or {})

    def kept(self) -> float | None:
        """Return the share of the last steps, without two, whose graphs are in memory."""
        earlier = [*self._marks][:-2]
        return sum(mark() is not None for mark in earlier) / len(earlier) if earlier else None

    def grown(self, frame: FrameType | None) -> tuple[str, str]:
        """Return the container of the calling user code that grew most, and what it holds.

        That is "hooks", "tensors", in this order before others, or "". No name: none grows.
        """
        held, found = held_by(frame), list[tuple[bool, bool, int, str]]()
        self.filling = ""
        for name, size in _sizes(held).items():
            grown = size - self._sizes.get(name, size)
            if grown >= len(self._marks) / 2 > EARLY_STEP:
                path, each = name.rpartition(".")[0], held.get(name, ())  # a cache has only a size
                beside = (one for key, one in held.items() if key.rpartition(".")[0] == path)
                limits = (one for one in beside if type(one) is int)
                most = getattr(each, "maxlen", None) or max(limits, default=0)
                if size <= most:
                    self.filling = name * (size < most) or self.filling
                    continue
                kept = each.values() if isinstance(each, dict) else each
                has_tensors = any(isinstance(one, Tensor) for one in tree_leaves([*kept][-1:]))
                found.append((name.endswith("_hooks"), has_tensors, grown, name))
        is_hooks, has_tensors, _, most = max(found, default=(False, False, 0, ""))
        return most, "hooks" if is_hooks else "tensors" * has_tensors


def _sizes(held: dict[str, Any]) -> dict[str, int]:
    """Return the lengths of containers, and those of the caches of user code's functions."""
    found = {name: len(one) for name, one in held.items() if not isinstance(one, (int, Tensor))}
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})
        if not is_user_code(str(names.get("__file__") or "<")):
            continue
        classes = (vars(one) for one in [*names.values()] if isinstance(one, type))
        for each in (names, *classes):
            caches = [one for one in each.values() if type(one) is functools._lru_cache_wrapper]
            for one in caches:
                found[f"the lru_cache of {one.__qualname__}"] = one.cache_info().currsize
    return found


def held_by(frame: FrameType | None) -> dict[str, Any]:
    """Return the tensors, containers and limits that the calling user code can reach, by names.

    Of a model, these are those that its modules have besides their weights.
    """
    found, seen = dict[str, Any](), set[int]()
    while frame is not None:
        held = [*seen_in(frame).items()] if is_user_code(frame.f_code.co_filename) else []
        for name, value in held:
            kind = type(value)  # a proxy may not want to be asked
            if kind is int and LIMIT.search(name):
                found[name] = value
            is_ours = kind.__module__.startswith("flatout.")
            # a dataset may keep its rows
            if id(value) in seen or is_ours or issubclass(kind, (ModuleType, Dataset, DataLoader)):
                continue
            seen.add(id(value))
            if issubclass(kind, (Tensor, *CONTAINERS)):
                found[name] = value
            if issubclass(kind, nn.Module):
                modules = [*value.named_modules(prefix=name)]
                held += [
                    (f"{path}.{key}", one)
                    for path, each in modules
                    if each is value or id(each) not in seen
                    for key, one in [*vars(each).items()]
                    if key[0] != "_" or (one and key.endswith("_hooks"))
                ]
                hooks = ((path, one._backward_hooks) for path, one in value.named_parameters(name))
                held += [(f"{path}._backward_hooks", each) for path, each in hooks if each]
                seen |= {id(each) for _, each in modules}
                continue
            own = value if issubclass(kind, dict) else getattr(value, "__dict__", {})
            shown = "{}[{!r}]" if own is value else "{}.{}"
            if len(re.findall(r"[.[]", name)) < MOST_DEEP and len(own) < MOST_ATTRIBUTES:
                every = ((key, one) for key, one in [*own.items()] if isinstance(key, (str, int)))
                held += [(shown.format(name, key), one) for key, one in every]
        frame = frame.f_back
    return found


def keeper_of_graphs(frame: FrameType | None) -> str:
    """Return the variable of the calling user code, or of its objects, that keeps graphs.

    It is a container of tensors with graphs, or a long sum of losses. "" without one.
    """
    for name, value in held_by(frame).items():
        if type(value) is int:
            continue
        if isinstance(value, Tensor):
            some = itertools.islice(_chain(value.grad_fn), 4 * KEPT)  # of a running average, too
            terms = itertools.takewhile(lambda node: OF_SUMS.match(node.name()), some)
            nodes = [node for node in terms if node.name() == "AddBackward0"][:KEPT]
        else:
            kept = value.values() if isinstance(value, dict) else value
            last = [tree_leaves(each) for each in [*kept][-KEPT:]]
            nodes = [e for e in last if any(one.grad_fn for one in filter(torch.is_tensor, e))]
        if len(nodes) == KEPT:
            return name
    return ""


def _maker(node: Any) -> str:
    """Return the name of the node that made a result's values, however they are arranged since."""
    return next((one.name() for one in _chain(node) if not ARRANGES.match(one.name())), "")


def _sizes_before(logits: Tensor) -> tuple[int, ...]:
    """Return the first two sizes that logits had before they were flattened. () if they had not."""
    views = (one for one in itertools.islice(_chain(logits.grad_fn), 4) if "View" in one.name())
    sizes = getattr(next(views, None), "_saved_self_sym_sizes", ())
    return tuple(sizes[:2]) if len(sizes) == 3 and logits.dim() == 2 else ()


def _metadata(node: Any) -> dict[str, Any]:
    """Return what torch keeps with a node of a graph for as long as the node."""
    found: dict[str, Any] = node.metadata
    return found


def _chain(node: Any) -> Iterator[Any]:
    """Yield a node and those below it that are first in its way to a weight."""
    while node is not None:
        yield node
        below = (each for each, _ in node.next_functions)
        node = next((one for one in below if one and one.name() != ACCUMULATE), None)
