"""What the inputs of a loop's forward passes show: rows, sizes, padding, the same batch."""

from __future__ import annotations

import itertools
import statistics
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
LEAST_EQUAL = 5
"""Batches that must equal the first one."""


class Inputs:
    """Notes the inputs of forward passes in training."""

    def __init__(self) -> None:
        self.rows: int | None = None
        """Rows of the last pass."""
        self.size = 0
        """Elements of the largest input of each pass of this step, added up."""
        self._padding: list[float] = []

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, reads: bool) -> None:
        """Note the inputs of a pass. `reads`: also what their values show, which waits for them."""
        sizes = (one.numel() for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        self.size += max(sizes, default=0)
        if torch._C._functorch.maybe_current_level() is None:
            self.rows = rows_of(args, kwargs)
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not reads or (used and torch.cuda.is_current_stream_capturing()):
            return
        # operations on other classes of tensors may need all ranks
        inputs = [one for one in tree_leaves((args, kwargs)) if type(one) is Tensor]
        with suppress(RuntimeError):  # inside of vmap, and on the device meta, there are no values
            self._padding += padding_of(inputs)

    def found(self) -> dict[str, Any]:
        """Return what was seen, by the names in `Evidence`."""
        return {
            "rows": self.rows,
            "padding": statistics.fmean(self._padding) if self._padding else None,
        }


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
        now = [one for one in tree_leaves(batch) if type(one) is Tensor and one.dim()]
        if not now:
            return
        before = self._before
        is_same = len(now) == len(before) and all(map(torch.equal, now, before))
        self._looks += 1 if is_same or not self._looks else LEAST_EQUAL + 1
        self._before = now if self._looks <= LEAST_EQUAL else []
        self.rows = len(now[0]) if self._looks == LEAST_EQUAL + 1 and is_same else None


def padding_of(inputs: Sequence[Tensor]) -> list[float]:
    """Return the share of padding columns in the widest integer inputs. [] means there are none.

    In a column of padding, and in all from there to an end of the rows, every row of each of these
    inputs has that input's one value, so masks and labels only confirm the padding of the tokens.
    Masks without tokens show nothing. Reading values waits for the device.
    Shapes: each integer input (B, T).
    """
    every = [one for one in inputs if one.dim() == 2 and one.numel() and one.dtype in WHOLE]
    width, padded = max((one.shape[1] for one in every), default=0), 0
    widest = [one for one in every if one.shape[1] == width]
    for end in (0, -1):
        same = [(one == one[0, end]).all(0).tolist() for one in widest]
        padded += len([*itertools.takewhile(all, [*zip(*same, strict=True)][:: end or 1])])
    if any(int(one.max()) > 1 for one in widest) and padded < width >= MIN_WIDTH:
        return [padded / width]
    return []


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the largest first dimension of the tensors in a call."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    return max((one.shape[0] for one in tensors if one.dim()), default=None)
