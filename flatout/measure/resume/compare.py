"""Compares two runs of the same steps: every bit of their checkpoints, and their records. No torch.

The elapsed time is the only value that is omitted. What differs, and when, suggests the causes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from flatout.config.schema import RunConfig, flat
from flatout.storage.json_io import JsonObject, parsing
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Entry, read_index
from flatout.training.checkpoint.contents import read_state
from flatout.training.run_dir.layout import read_records

TIMES = ("values.elapsed_s",)
"""Values of a state that differ between any two runs."""
RECORDED = ("train/", "val/", "tokens")
"""Prefixes of the values in metrics.jsonl that do not depend on speed."""
KERNELS = (
    "kernels of the GPU that sum in no fixed order. Set train.deterministic=true, which is slower, "
    "and verify again."
)
UNSEEDED = (
    "random numbers from a generator that train.seed does not seed, such as "
    "numpy.random.default_rng() or the clock. Draw them from torch's default generator."
)
UNORDERED = (
    "work in the order of a set, which differs between processes. Sort it, or use a list or dict."
)
HIDDEN_STATE = (
    "state outside the state_dict: a counter, a cache, or a running average that is a plain "
    "attribute, or a buffer registered with persistent=False. Register it as a buffer "
    "(self.register_buffer), or as a parameter."
)
OWN_GENERATOR = (
    "dropout or noise from your own torch.Generator, whose state is not saved. Use torch's "
    "default generator, which is."
)
OPTIMIZER = (
    "an optimizer that keeps something outside optimizer.state and optimizer.param_groups. Keep it "
    "there: checkpoints contain both."
)
DATA = (
    "a dataset that is read differently the second time: a file that changed meanwhile, or your "
    "own data loader, whose position does not determine what it yields next. Make it a function of "
    "the seed and the position."
)
RANDOM = (
    "code that draws a different number of random values after a resume, for example once per "
    "process instead of once per step. Draw the same numbers in every step."
)


@dataclass(frozen=True)
class Difference:
    """A tensor, a value or a recorded value that is not equal in two runs."""

    step: int
    kind: Literal["figure", "tensor", "value"]
    """A recorded value, or a tensor or value of the checkpoint of that step."""
    name: str
    """`model/NAME`, `optimizer/N/NAME/FIELD`, the key of a value, or the name of a metric."""
    text: str
    """What differs, to follow the name."""


@dataclass
class Comparison:
    """What two runs have at the stop, or just before it, and at the end, and what differs."""

    stop: int
    """The step after which one of them was stopped."""
    end: int
    tensors: int = 0
    """Tensors compared: weights, buffers and optimizer state."""
    num_bytes: int = 0
    """Their size."""
    values: int = 0
    """Values compared: random states, data position, counters, learning rates."""
    figures: int = 0
    """Recorded values compared."""
    different: list[Difference] = field(default_factory=list)
    """Values by step, then the tensors and values of each checkpoint, weights first."""

    @property
    def first_step(self) -> int | None:
        """The first step after which something differs. None when nothing does."""
        return min((one.step for one in self.different), default=None)


def compare_runs(one: Path, other: Path, *, saved: int, stop: int, end: int) -> Comparison:
    """Compare two run directories with checkpoints of the steps `saved` and `end`.

    `other` was stopped after the step `stop`, which is `saved` or, with several ranks, the next.
    Memory: one tensor of each.
    Raises: CheckpointError when a file cannot be read.
    """
    found, (left, right) = Comparison(stop, end), map(_figures, (one, other))
    found.figures = len(left.keys() | right.keys())
    for step, name in sorted(left.keys() | right.keys()):
        if text := _changed(left, right, (step, name)):
            found.different.append(Difference(step, "figure", name, text))
    for step in (saved, end):
        states = [catalog.checkpoint_path(run, step) for run in (one, other)]
        entries = [read_index(state).tensors for state in states]
        names = sorted(entries[0].keys() | entries[1].keys(), key=_in_order)
        found.tensors += len(names)
        for name, num_bytes, text in _compare_tensors(names, states, entries):
            found.num_bytes += num_bytes
            if text:
                found.different.append(Difference(step, "tensor", name, text))
        before, after = map(_values, states)
        names = sorted((before.keys() | after.keys()) - {*TIMES}, key=_in_order)
        found.values += len(names)
        for name in names:
            if text := _changed(before, after, name):
                found.different.append(Difference(step, "value", name, text))
    return found


def _compare_tensors(
    names: list[str], states: list[Path], entries: list[dict[str, Entry]]
) -> Iterator[tuple[str, int, str]]:
    """Yield the name of each tensor of two states, the bytes compared, and what differs."""
    import torch

    opened: Callable[[Path], Any] = cache(partial(safe_open, framework="pt"))
    for name in names:
        known = [each[name] for each in entries if name in each]
        if len(known) < 2:
            which = "without a stop" if name in entries[0] else "with the stop"
            yield name, 0, f"exists only in the run {which}"
            continue
        if known[0] != known[1]:
            shapes = " -> ".join(f"{entry.dtype} {list(entry.shape)}" for entry in known)
            yield name, 0, f"has a different dtype, shape or division: {shapes}"
            continue
        num_bytes, elements, largest = 0, 0, 0.0
        for piece in known[0].slices:
            pair = []
            for state in states:
                with parsing(state / piece.file):
                    pair.append(
                        opened(state / piece.file).get_tensor(piece.name or name).reshape(-1)
                    )
            num_bytes += pair[0].nbytes
            if torch.equal(*(each.view(torch.uint8) for each in pair)):
                continue
            first, second = (each.double() for each in pair)
            elements += int((first != second).sum()) or 1
            gaps = (first - second).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            largest = max(largest, float(gaps.max()))
        whole = math.prod(known[0].shape)
        text = f"differs in {elements:,} of {whole:,} elements, by up to {largest:.3g}"
        yield name, num_bytes, text if elements else ""


def _values(checkpoint: Path) -> JsonObject:
    """Return the values of a state under dotted keys, those of ranks under `ranks.R.`."""
    state = read_state(checkpoint)
    with parsing(checkpoint / catalog.STATE):
        ranks = {str(number): values for number, values in enumerate(state["ranks"])}
        return flat({"values": state["values"], "ranks": ranks})


def _figures(run: Path) -> dict[tuple[int, str], float]:
    """Return the losses, gradient norms, learning rates and token counts that a run recorded.

    JSON keeps every bit of a number.
    """
    return {
        (int(record["step"]), name): value
        for record in read_records(run)
        for name, value in record.items()
        if name.startswith(RECORDED)
    }


def _changed(left: Mapping[Any, object], right: Mapping[Any, object], key: object) -> str:
    """Return how two values differ, empty when they are equal. Long ones are not shown."""
    if left.get(key) == right.get(key):
        return ""
    shown = [json.dumps(each.get(key), default=str) for each in (left, right)]
    return "differs" if max(map(len, shown)) > 40 else f"differs: {shown[0]} -> {shown[1]}"


def _in_order(name: str) -> tuple[object, ...]:
    """Return a sort key by which weights come first, and block 2 before block 10."""
    parts = (
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )
    return (name.startswith("optimizer/"), *parts)


def causes_of(comparison: Comparison, config: RunConfig) -> list[str]:
    """Return the usual causes of a difference, the most likely one first, each with its fix.

    The last one names the code of the user's own, if there is any.
    """
    found = [] if is_deterministic(config) else [KERNELS]
    if (comparison.first_step or 0) <= comparison.stop:
        found += [UNSEEDED, UNORDERED]  # the runs differ before the stop
    else:
        names = {one.name for one in comparison.different if one.kind == "value"}
        is_data = bool(names & {"values.loader.position", "values.tokens"})
        found += [DATA] * is_data + [RANDOM] * any(".rng_" in name for name in names)
        found += [HIDDEN_STATE, OWN_GENERATOR]
        found += [OPTIMIZER] * config.optim.kind.count(":") + [DATA] * (not is_data)
    references = ", ".join(sorted(config.references()))
    return [*found, f"Your own code in this recipe: {references}."] if references else found


def is_deterministic(config: RunConfig) -> bool:
    """Return whether every kernel of a resolved configuration sums in a fixed order."""
    return config.train.deterministic or config.train.device.startswith("cpu")
