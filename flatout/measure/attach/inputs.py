"""What a loop's steps are given: rows, sizes, padding, the same batch, values that tell nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

MIN_WIDTH = 32
"""Fewest tokens of a row from which padding counts."""
WHOLE = (torch.int64, torch.int32, torch.bool)
"""Types of tokens and masks."""
MIXED = 0.6
"""Share of the classes that a shuffled batch has up to which batches are sorted."""
LEAST_EQUAL = 5
"""Batches that must equal the first one."""
MUCH = 0.25
"""Share of the targets from which padding among them counts."""
EVEN, FAR = 3, 5
"""How many times as large as others the numbers of some of the first inputs may be, and how many
times as large as all of those that are far from them.
"""
MANY, LARGE, SPREAD = 64, 100, 20
"""Fewest values of an input that tell something, a large one, and the deviation of large ones."""


class Inputs:
    """Notes the inputs of forward passes in training."""

    def __init__(self) -> None:
        self.rows: int | None = None
        """Rows of the last pass."""
        self.size = 0
        """Elements of the largest input of each pass of this step, added up."""
        self._padding: list[float] = []
        self._tokens = 0
        """The tokens of the largest of them, padding included."""
        self._scales: list[float] = []
        """The mean size of the numbers of their inputs."""
        self._ragged: list[float] = []
        """Their shares of padding in all rows."""
        self._values: list[tuple[bool, bool]] = []
        """What `values_of` returned for the first passes."""

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, reads: bool) -> None:
        """Note the inputs of a pass. `reads`: also what their values show, which waits for them."""
        sizes = (one.numel() for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        self.size += max(sizes, default=0)
        self.rows = rows_of(args, kwargs)
        if not reads or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # type: ignore[no-untyped-call]
            return
        # operations on other classes of tensors may need all ranks
        inputs = plain_in((args, kwargs))
        # inside of vmap, and on the device meta, there are no values
        with torch.no_grad(), suppress(RuntimeError):
            tokens = [
                one for one in inputs if one.dim() == 2 and one.numel() and one.dtype in WHOLE
            ]
            self._padding += padding_of(tokens)
            self._tokens = max(self._tokens, *map(Tensor.numel, tokens), 0)
            every = (padding_id(one, rows) for one in tokens for rows in one.shape)
            self._ragged += [max((found[1] for found in every if found), default=0.0)]
            self._values += values_of(inputs)
            self._scales += [scale_of(inputs)]

    def found(self, late: Sequence[Sequence[Tensor]] = (), worked: int = 0) -> dict[str, Any]:
        """Return what was seen, by the names in `Evidence`.

        `late`: the inputs of late passes. `worked`: most rows of the results of a layer; with
        fewer than there are tokens, padding is left out of the work.
        """
        with torch.no_grad():
            first = statistics.fmean(self._scales or [0.0])
            scales = [scale_of(one) / (first or 1.0) for one in late]
        is_even = first and min(self._scales) > max(self._scales) / EVEN
        is_one_way = len(scales) > 1 and min(scales) > 0 and (min(scales) > 1 or max(scales) < 1)
        least = max(self._scales, default=0.0) * FAR  # beyond all that there was at first
        is_one_way = is_one_way and (is_even or min(scales, default=0.0) * first > least)

        def padded(shares: list[float]) -> float | None:
            share = statistics.fmean(shares) if shares else None
            is_left_out = share and worked and worked < (1 - share / 2) * self._tokens
            return None if is_left_out else share

        are_known = len(self._values) >= LEAST_EQUAL
        return {
            "rows": self.rows,
            "padding": padded(self._padding),
            "rescaled": min(scales, key=lambda one: abs(math.log(one))) if is_one_way else 1.0,
            "ragged": padded(self._ragged),
            "constant_inputs": are_known and all(is_constant for is_constant, _ in self._values),
            "large_inputs": are_known and all(are_large for _, are_large in self._values),
        }


def scale_of(inputs: Sequence[Tensor]) -> float:
    """Return the mean size of the numbers of some inputs. 0 where they are few, or no floats.

    What another layer has made, or what learns, does not count.
    """
    dense = (one for one in inputs if one.layout is torch.strided and not one.requires_grad)
    floats = [one for one in dense if one.is_floating_point() and one.numel() >= MANY]
    return max((float(one.float().abs().mean()) for one in floats), default=0.0)


class Batches:
    """Compares the first batches of the loader with each other."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []
        self._looks = 0
        self.rows: int | None = None
        """Rows of the batches, if all have the same values. None: they differ, or are few."""

    def look(self, batch: Any) -> None:
        """Note a batch."""
        if self._looks > LEAST_EQUAL:  # in every later step
            return
        every = tree_leaves(batch)
        now = [one for one in every if type(one) is Tensor and one.dim()]
        if not now or not all(isinstance(one, (Tensor, float)) for one in every if one is not None):
            return  # texts and arrays are not compared
        before = self._before
        is_same = len(now) == len(before) and all(map(torch.equal, now, before))
        self._looks += 1 if is_same or not self._looks else LEAST_EQUAL + 1
        # a loader may fill the same memory again
        self._before = [one.clone() for one in now] if self._looks <= LEAST_EQUAL else []
        self.rows = len(now[0]) if self._looks == LEAST_EQUAL + 1 and is_same else None


def padding_of(tokens: Sequence[Tensor]) -> list[float]:
    """Return the share of padding columns in the widest of some tokens. [] means there are none.

    In a column of padding, and in all from there to an end of the rows, every row of each of these
    inputs has that input's one value, so masks and labels only confirm the padding of the tokens.
    Masks without tokens show nothing. Reading values waits for the device.
    Shapes: each integer input (B, T).
    """
    found = list[float]()
    for every in (tokens, [one.t() for one in tokens]):  # with time first
        width, padded = max((one.shape[1] for one in every), default=0), 0
        widest = [one for one in every if one.shape[1] == width]
        for end in (0, -1):
            same = [(one == one[0, end]).all(0).tolist() for one in widest]
            padded += len([*itertools.takewhile(all, [*zip(*same, strict=True)][:: end or 1])])
        if any(int(one.max()) > 1 for one in widest) and padded < width >= MIN_WIDTH:
            found.append(padded / width)
    return [max(found)] if found else []


def values_of(inputs: Sequence[Tensor]) -> list[tuple[bool, bool]]:
    """Return whether all inputs have one value, and whether the numbers of one are far from 1.

    [] where they are too small to tell. Reading values waits for the device.
    """
    every = [one for one in inputs if one.dim() > 1 and one.numel() >= MANY and not one.grad_fn]
    is_constant = all(
        one.grad_fn is None and bool((one == one.flatten()[0]).all())
        for one in inputs  # small ones, and what a layer has made, may be the data
        if one.numel() > 1
    )
    are_large = any(
        float(one.abs().max()) > LARGE and float(one.float().std()) > SPREAD
        for one in every
        if one.is_floating_point()
    )
    return [(is_constant, are_large)] if every else []


def classes_in(targets: Tensor) -> Counter[int]:
    """Return how often targets have each class. Floats have none."""
    known = targets[targets >= 0]  # negative ones are ignored
    if targets.is_floating_point():
        return Counter()
    values, numbers = known.unique(return_counts=True)  # type: ignore[no-untyped-call]
    return Counter(dict(zip(values.tolist(), numbers.tolist(), strict=True)))


def sorted_classes(seen: Sequence[Counter[int]]) -> int | None:
    """Return the number of classes in successive batches, if each batch has few of them.

    `seen` is what `classes_in` returns for each. None: they are mixed, or too few to tell.
    """
    every = sum(seen, Counter[int]())
    if len(seen) < LEAST_EQUAL or any(one.total() < MANY / 8 for one in seen):
        return None
    if len(every) == 1:
        return 1 if every.total() >= 4 * MANY else None  # others may be rare
    rows = every.total() / len(seen)
    mixed = sum(1 - (1 - number / every.total()) ** rows for number in every.values())
    return len(every) if statistics.fmean(map(len, seen)) <= MIXED * mixed else None


def padding_id(targets: Tensor, rows: int) -> tuple[int, float] | None:
    """Return the value that fills up rows of different lengths, and its share of the targets.

    It is at one end of the rows, and nowhere else. None: there is none, or little of it.
    Shapes: targets (B, T) or (T, B), or flattened. `rows` is B.
    """
    if targets.is_floating_point() or targets.dim() > 2 or targets.numel() % rows:
        return None
    for rows_first in (targets.reshape(rows, -1), targets.reshape(-1, rows).t()):
        for each in (rows_first, rows_first.flip(1)):
            if each.shape[1] < LEAST_EQUAL:
                continue
            is_last = each == each[:, -1].mode().values
            lengths = is_last.flip(1).cumprod(1).sum(1)
            share = float(lengths.sum() / targets.numel())
            is_only = bool(is_last.sum() == lengths.sum()) and bool((lengths != lengths[0]).any())
            is_only &= bool(((lengths > 0) & (lengths < each.shape[1])).any())
            if is_only and share >= MUCH:
                return int(each[is_last][0]), share
    return None


def plain_in(given: Any) -> list[Tensor]:
    """Return the tensors of what a call is given, in order, without those of other classes."""
    return [one for one in tree_leaves(given) if type(one) is Tensor]


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the largest first dimension of the tensors in a call."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    return max((one.shape[0] for one in tensors if one.dim()), default=None)
