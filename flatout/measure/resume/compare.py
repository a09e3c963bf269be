"""Compares two runs of the same steps: every bit of their checkpoints, and their records. No torch.

The elapsed time is the only value that is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import flat
from flatout.json_io import JsonObject, parsing
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Entry, read_index
from flatout.training.checkpoint.contents import TensorFile, read_state
from flatout.training.run_dir.layout import read_records

TIMES = ("values.elapsed_s",)
"""Values of a state that differ between any two runs."""
RECORDED = ("train/", "val/", "tokens")
"""Prefixes of the figures in metrics.jsonl that do not depend on speed."""
FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True)
class Difference:
    """A tensor, a value or a recorded figure that is not equal in two runs."""

    name: str
    """`model/NAME`, `optimizer/N/NAME/FIELD`, the key of a value, or the name of a figure."""
    text: str
    """What differs, to follow the name."""


@dataclass(frozen=True)
class States:
    """The comparison of two checkpoints of one step."""

    step: int
    tensors: int
    """Tensors compared: weights, buffers and optimizer state."""
    num_bytes: int
    """Their size."""
    values: int
    """Values compared: random states, data position, counters, learning rates."""
    different_tensors: tuple[Difference, ...]
    different_values: tuple[Difference, ...]

    @property
    def are_equal(self) -> bool:
        """Whether every bit is equal."""
        return not self.different_tensors and not self.different_values


@dataclass(frozen=True)
class Records:
    """The comparison of what two runs recorded."""

    figures: int
    """Figures compared."""
    different: tuple[tuple[int, Difference], ...]
    """By step, in order."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs: at or just before the stop, at the end, and all figures."""

    stop: int
    """The step after which one of them was stopped."""
    at_stop: States
    at_end: States
    records: Records

    @property
    def is_equal(self) -> bool:
        """Whether every bit and every figure is equal."""
        return self.at_stop.are_equal and self.at_end.are_equal and not self.records.different

    @property
    def first_step(self) -> int | None:
        """The first step after which something differs; None when nothing does."""
        steps = [step for step, _ in self.records.different[:1]]
        steps += [one.step for one in (self.at_stop, self.at_end) if not one.are_equal]
        return min(steps, default=None)


def compare_runs(one: Path, other: Path, *, saved: int, stop: int, end: int) -> Comparison:
    """Compare two run directories with checkpoints of the steps `saved` and `end`.

    `other` was stopped after the step `stop`, which is `saved` or, with several ranks, the next.
    Raises: CheckpointError when a file cannot be read.
    """
    at_stop, at_end = (
        compare_states(catalog.checkpoint_path(one, step), catalog.checkpoint_path(other, step))
        for step in (saved, end)
    )
    return Comparison(stop, at_stop, at_end, compare_records(one, other))


def compare_states(one: Path, other: Path) -> States:
    """Compare every bit of two checkpoints of the same step.

    Memory: one tensor of each.
    Raises: CheckpointError when a file cannot be read.
    """
    left, right = read_index(one).tensors, read_index(other).tensors
    found = [_missing(name, in_first=name in left) for name in sorted(left.keys() ^ right.keys())]
    shared = sorted(left.keys() & right.keys(), key=_in_order)
    files = _Files(one), _Files(other)
    num_bytes = 0
    for name in shared:
        compared, difference = _compare_tensor(name, left[name], right[name], files)
        num_bytes += compared
        found += [difference] if difference else []
    values, different = _compare_values(one, other)
    return States(
        step=catalog.step_of(one),
        tensors=len(left.keys() | right.keys()),
        num_bytes=num_bytes,
        values=values,
        different_tensors=tuple(found),
        different_values=tuple(different),
    )


def compare_records(one: Path, other: Path) -> Records:
    """Compare the losses, gradient norms, learning rates and token counts that two runs recorded.

    JSON keeps every bit of a number.
    """
    left, right = _figures(one), _figures(other)
    keys = sorted(left.keys() | right.keys())
    different = [
        (step, _value_difference(name, left.get((step, name)), right.get((step, name))))
        for step, name in keys
        if left.get((step, name)) != right.get((step, name))
    ]
    return Records(len(keys), tuple(different))


class _Files:
    """The opened tensor files of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[str, TensorFile] = {}

    def read(self, file: str, name: str) -> NDArray[np.uint8]:
        if file not in self._opened:
            self._opened[file] = TensorFile(self._checkpoint / file)
        opened = self._opened[file]
        with parsing(opened.path):
            return opened.read(name)


def _compare_tensor(
    name: str, left: Entry, right: Entry, files: tuple[_Files, _Files]
) -> tuple[int, Difference | None]:
    """Return how many bytes of a tensor were compared, and its difference, if any."""
    if left != right:
        shapes = " -> ".join(f"{one.dtype} {list(one.shape)}" for one in (left, right))
        return 0, Difference(name, f"has another dtype, shape or division: {shapes}")
    num_bytes, elements, largest = 0, 0, 0.0
    for piece in left.slices:
        first, second = (one.read(piece.file, name) for one in files)
        num_bytes += first.size
        if np.array_equal(first, second):
            continue
        numbers = _numbers(first, left.dtype), _numbers(second, left.dtype)
        elements += int(np.count_nonzero(numbers[0] != numbers[1])) or 1
        gaps = np.abs(numbers[0].astype(np.float64) - numbers[1].astype(np.float64))
        largest = max(largest, float(np.max(np.nan_to_num(gaps, nan=math.inf, posinf=math.inf))))
    if not elements:
        return num_bytes, None
    whole = math.prod(left.shape)
    text = f"differs in {elements:,} of {whole:,} elements, by up to {largest:.3g}"
    return num_bytes, Difference(name, text)


def _numbers(data: NDArray[np.uint8], dtype: str) -> NDArray[np.generic]:
    """Return bytes as numbers of a dtype; those of 8-bit formats and unknown ones as integers.

    Shapes: data of one dimension; the result of one, shorter by the size of an element.
    """
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in FLOATS:
        return data.view(FLOATS[dtype])
    integers = {"int16": np.int16, "int32": np.int32, "int64": np.int64}
    return data.view(integers.get(dtype, np.uint8))


def _missing(name: str, *, in_first: bool) -> Difference:
    which = "without a stop" if in_first else "with the stop"
    return Difference(name, f"exists only in the run {which}")


def _compare_values(one: Path, other: Path) -> tuple[int, list[Difference]]:
    """Return how many values of the two states were compared, and those that differ."""
    left, right = _values(one), _values(other)
    names = sorted((left.keys() | right.keys()) - {*TIMES}, key=_in_order)
    different = [
        _value_difference(name, left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    ]
    return len(names), different


def _values(checkpoint: Path) -> JsonObject:
    """Return the values of a state under dotted keys, those of ranks under `ranks.R.`."""
    state = read_state(checkpoint)
    with parsing(checkpoint / catalog.STATE):
        ranks = {str(number): values for number, values in enumerate(state["ranks"])}
        return flat({"values": state["values"], "ranks": ranks})


def _value_difference(name: str, left: object, right: object) -> Difference:
    """Return the difference of two values; long ones are not shown."""
    shown = [json.dumps(value, default=str) for value in (left, right)]
    if max(map(len, shown)) > 40:
        return Difference(name, "differs")
    return Difference(name, f"differs: {shown[0]} -> {shown[1]}")


def _figures(run: Path) -> Mapping[tuple[int, str], float]:
    return {
        (int(record["step"]), name): value
        for record in read_records(run)
        for name, value in record.items()
        if name.startswith(RECORDED)
    }


def _in_order(name: str) -> tuple[object, ...]:
    """Return a sort key by which weights come first, and block 2 before block 10."""
    parts = (
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )
    return (name.startswith("optimizer/"), *parts)
