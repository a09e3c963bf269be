"""`verify --resume`: trains a recipe with and without a stop, and compares every bit. No torch.

Three `flatout train`: one to the end, one that is stopped, and one that resumes it. Equal runs have
equal digests in the manifests of their checkpoints, an equal state but for the elapsed time, and
equal records.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig, flat
from flatout.config.sections import CheckpointConfig, LogConfig
from flatout.config.trust import forget
from flatout.display import Display, amount
from flatout.errors import ConfigError, HardwareError, RunFailed, Stopped
from flatout.hardware.machine import pick_device, probe
from flatout.measure.scripts.request import Request
from flatout.measure.trial import error_in, last_words, require_one_process, run_recipe
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import read_state
from flatout.training.run_dir import layout

DEFAULT_STEPS = (5, 5)
MOST_SHOWN = 5
"""Differences of each checkpoint, and of the records, that are shown."""
RECORDED = ("train/", "val/", "tokens")
"""Prefixes of the recorded values that do not depend on speed."""
FIXED = (
    "Checking with train.deterministic=true: without it kernels of a GPU sum in no fixed order, "
    "and any two runs differ in the last bits."
)
KERNELS = "kernels that sum in no fixed order. Set train.deterministic=true, and verify again."
BEFORE = (
    "random numbers that train.seed does not seed, or work in the order of a set: the runs differ "
    "before the stop."
)
AFTER = (
    "state outside the state_dict, a generator of your own, or a data loader whose position does "
    "not determine what comes next. docs/resuming.md has each with its fix."
)


class ResumeProof(Stored):
    """The comparison of a run that was stopped and resumed with one that was not."""

    steps_before: int
    """Steps before the stop."""
    steps_after: int
    """Steps after it."""
    device: str
    """The device."""
    deterministic: bool
    """Whether every kernel sums in a fixed order: on a CPU, or with train.deterministic."""
    made_deterministic: bool
    """Whether train.deterministic was set only for this check."""
    is_equal: bool
    """Whether every bit is equal."""
    tensors: int
    """Tensors compared: weights, buffers and optimizer state."""
    bytes: int
    """The size of the files compared."""
    values: int
    """Values compared: position in the data, counters, learning rates."""
    figures: int
    """Recorded values compared: losses, gradient norms, learning rates, token counts."""
    first_step: int | None
    """The first step after which something differs."""
    first_tensor: str | None
    """The first tensor that differs, at the stop or else at the end."""
    differences: list[str]
    """One sentence each, the first ones."""
    causes: list[str]
    """The usual causes of the difference, each with its fix."""

    def display(self) -> Display:
        """Return the result, what differs and why, and what was compared."""
        first, after = self.steps_before, self.steps_after
        apart = "" if self.is_equal else "not "
        how = "equal" if self.is_equal else "differ from"
        where = "in every bit" if self.is_equal else f"first after step {self.first_step}"
        headline = (
            f"Resuming is {apart}exact.\n{first} + {after} steps with a stop between them "
            f"{how} {first + after} steps, {where}, on {self.device}."
        )
        notes = [
            *self.differences,
            f"Compared: {self.tensors:,} tensors of weights and optimizer state at the stop and at "
            f"the end, {self.values:,} values of the state, {amount(self.bytes, 'bytes')}, and "
            f"{self.figures:,} recorded values.",
            *(f"Possible cause: {cause}" for cause in self.causes),
        ]
        if self.made_deterministic:
            notes.append(FIXED.replace("Checking", "Checked"))
        if self.is_equal and not self.deterministic:
            notes.append(
                "train.deterministic=false: kernels may sum in a different order in another run. "
                "Here they did not."
            )
        return Display(headline, notes=notes)


def steps_of(text: str | None, config: RunConfig) -> tuple[int, int]:
    """Return the steps before and after the stop that `--steps N,M` states.

    Without it, a recipe of fewer than ten steps is stopped in its middle.
    Raises: ConfigError when the text is not two numbers, or the recipe has fewer steps.
    """
    total = config.train.steps
    if text is not None:
        found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
        steps = (int(found[1]), int(found[2])) if found else (0, 0)
        if not all(steps):
            raise ConfigError(
                f"--steps {text!r} is not two numbers of steps.",
                fix="Write --steps 5,5: five steps, a stop, and five more.",
            )
    else:
        whole = min(total or math.inf, sum(DEFAULT_STEPS))
        steps = (int(whole // 2), int(whole - whole // 2))
    if total is not None:
        require_length(total, steps)
    return steps


def require_length(total: int, steps: tuple[int, int]) -> None:
    """Check that a recipe of `total` steps can be stopped and continued for these steps.

    Raises: ConfigError.
    """
    if total < 2:
        raise ConfigError(
            "A recipe of 1 step cannot be stopped and resumed.", fix="Set train.steps=2, or more."
        )
    if total < sum(steps):
        raise ConfigError(
            f"--steps {steps[0]},{steps[1]} needs {sum(steps)} steps, but the recipe has {total}.",
            fix=f"Give --steps {total // 2},{total - total // 2}, or set train.steps={sum(steps)}.",
        )


def prove_resume(
    config: RunConfig, steps: tuple[int, int], *, progress: Progress = SILENT
) -> ResumeProof:
    """Train a recipe with and without a stop, and return what differs.

    On a GPU it trains with train.deterministic=true: otherwise any two runs differ.

    Cost: twice the N + M steps, three starts, and four checkpoints of disk.
    Raises: UsageError, RunFailed as training does.
    """
    require_one_process("verify --resume")
    stop, end = steps[0], sum(steps)
    device, _ = pick_device(config.train.device, probe())
    makes_deterministic = device.startswith("cuda") and not config.train.deterministic
    if makes_deterministic:
        config = config.with_values({"train.deterministic": True})
        progress.say(FIXED)
    # several ranks stop one step later, and save there too
    kept = end // stop + (1 if config.train.devices in (None, 1) else 3)
    saves = CheckpointConfig(every_steps=stop, keep=kept, best=False)
    asked = config.model_copy(update={"checkpoint": saves, "log": LogConfig(every=1, to=())})
    with tempfile.TemporaryDirectory(prefix="flatout-verify-") as name:
        whole, parts = Path(name) / "whole", Path(name) / "parts"
        try:
            reached = _train(asked, whole, end, f"Training to step {end} without a stop", progress)
            if reached < end:
                require_length(reached, steps)
            chosen = layout.read_config(whole)
            assert chosen is not None, "a run that has trained has a configuration"
            stopped = _train(chosen, parts, stop, f"Training to step {stop}", progress)
            if stopped >= reached:
                raise ConfigError(
                    f"The run reached its last step, {reached}, before it could be stopped: "
                    "several processes stop one step later.",
                    fix=f"Set train.steps={reached + 2}, or more.",
                )
            what = f"Resuming at step {stopped}, to step {end}"
            _train(chosen, parts, max(end - stopped, 1), what, progress)
            with progress.task("Comparing every bit"):
                return compare_runs(
                    whole, parts, chosen, (stop, stopped, reached), is_forced=makes_deterministic
                )
        finally:
            for folder in (whole, parts):
                forget(folder)


def _train(config: RunConfig, run: Path, steps: int, what: str, progress: Progress) -> int:
    """Train or resume a run for some steps, as if it were then stopped by Ctrl+C.

    Returns: the step that it reached.
    Raises: the error of the run; RunFailed when its process died.
    """
    with progress.task(what):
        ran = run_recipe(config, run, Request(interrupt_after=steps, to_the_end=True), math.inf)
    if ran.code in (0, Stopped.exit_code):
        return max(catalog.steps(run), default=0)
    error = error_in(ran.output)
    if isinstance(error, HardwareError) and str(run.parent) in error.what:  # its disk is full
        fix = "Free space there, or set TMPDIR to a directory on a larger disk."
        raise HardwareError(error.what, fix=fix)
    raise error or RunFailed(
        f"{what}: the process ended with code {ran.code}: {last_words(ran.output)}.",
        fix="Try the same recipe with `flatout train`.",
    )


def compare_runs(
    whole: Path, parts: Path, config: RunConfig, steps: tuple[int, int, int], *, is_forced: bool
) -> ResumeProof:
    """Compare two run directories at the last save before the stop, and at the end.

    `steps` are those of that save, of the stop, and of the end.
    Raises: CheckpointError when a file cannot be read.
    """
    saved, stop, end = steps
    left, right = _figures(whole), _figures(parts)
    figures = sorted(left.keys() | right.keys())
    apart = [key for key in figures if left.get(key) != right.get(key)]
    groups = [[f"Step {at[0]}: {at[1]} {shown(left.get(at), right.get(at))}." for at in apart]]
    differing = [step for step, _ in apart]
    tensors, num_bytes, values, names = 0, 0, 0, list[str]()
    for step in (saved, end):
        one, other = (catalog.checkpoint_path(run, step) for run in (whole, parts))
        ours, theirs = _state(one), _state(other)
        changed = [*tensors_apart(one, other)]
        texts = [f"{name} differs" for name in changed] + [
            f"{key} {shown(ours.get(key), theirs.get(key))}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        groups.append([f"Checkpoint of step {step}: {text}." for text in texts])
        differing += [step] if texts else []
        names += changed
        tensors += len(catalog.read_index(one).tensors)
        num_bytes += sum(file.bytes for file in catalog.read_manifest(one).files.values())
        values += len(ours)
    lines = []
    for group in groups:
        more = len(group) - MOST_SHOWN
        lines += [*group[:MOST_SHOWN], *([f"... and {more:,} more."] if more > 0 else [])]
    is_fixed = config.train.deterministic or config.train.device.startswith("cpu")
    causes = []
    if differing:
        own = ", ".join(sorted(config.references()))
        causes = [
            *([] if is_fixed else [KERNELS]),
            BEFORE if differing[0] <= stop else AFTER,
            *([f"Your own code in this recipe: {own}."] if own else []),
        ]
    return ResumeProof(
        steps_before=stop,
        steps_after=end - stop,
        device=config.train.device,
        deterministic=is_fixed,
        made_deterministic=is_forced,
        is_equal=not differing,
        tensors=tensors,
        bytes=num_bytes,
        values=values,
        figures=len(figures),
        first_step=differing[0] if differing else None,
        first_tensor=names[0] if names else None,
        differences=lines,
        causes=causes,
    )


def tensors_apart(one: Path, other: Path) -> Iterator[str]:
    """Yield the tensors that differ in two checkpoints, weights first.

    Files of equal digests have equal tensors. Others are read, one tensor of each at a time.
    """
    import torch
    from safetensors import safe_open

    ours, theirs = (
        {name: each.sha256 for name, each in catalog.read_manifest(path).files.items()}
        for path in (one, other)
    )
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name[0] == "o", name)):
        if not name.endswith(".safetensors") or ours.get(name) == theirs.get(name):
            continue
        if name not in ours or name not in theirs:
            yield f"all of {name}"
            continue
        with safe_open(one / name, "pt") as left, safe_open(other / name, "pt") as right:
            common = {*left.keys()} & {*right.keys()}
            for key in sorted({*left.keys()} | {*right.keys()}, key=_in_order):
                pair = (left, right) if key in common else ()
                bits = [each.get_tensor(key).reshape(-1).view(torch.uint8) for each in pair]
                if not bits or not torch.equal(*bits):
                    yield key


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which block 2 comes before block 10."""
    return [(len(part), part) if part.isdecimal() else (0, part) for part in name.split(".")]


def _figures(run: Path) -> dict[tuple[int, str], float]:
    """Return the recorded values that do not depend on speed, by step and name."""
    return {
        (int(record["step"]), name): value
        for record in layout.read_records(run)
        for name, value in record.items()
        if name.startswith(RECORDED)
    }


def _state(checkpoint: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's state under dotted keys, without the elapsed time."""
    state = read_state(checkpoint)
    ranks = {str(number): values for number, values in enumerate(state["ranks"])}
    found = flat({"values": state["values"], "ranks": ranks})
    found.pop("values.elapsed_s", None)
    return found


def shown(one: object, other: object) -> str:
    """Return how two values differ. Long ones are not shown."""
    texts = [json.dumps(each, default=str) for each in (one, other)]
    return "differs" if max(map(len, texts)) > 40 else f"differs: {texts[0]} -> {texts[1]}"
