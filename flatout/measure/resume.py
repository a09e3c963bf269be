"""`verify --resume`: trains a recipe with and without a stop, and compares every bit. No torch.

Three `flatout train`: one to the end, one that is stopped, and one that resumes it. Equal runs have
equal digests in the manifests of their checkpoints, an equal state but for the elapsed time, and
equal records.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig, flat
from flatout.config.sections import CheckpointConfig, LogConfig
from flatout.config.trust import forget
from flatout.display import Display
from flatout.errors import ConfigError, RunFailed, Stopped
from flatout.hardware.machine import pick_device, probe
from flatout.measure.attach.request import Request
from flatout.measure.trial import error_in, require_one_process, run_recipe
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.storage.streams import shortened
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import read_state
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog

MOST_SHOWN = 10
RECORDED = ("train/", "val/", "tokens")
"""Prefixes of the recorded values that do not depend on speed."""
FIXED = (
    "Checked with train.deterministic=true: without it kernels of a GPU sum in no fixed order, "
    "and any two runs differ in the last bits."
)
BEFORE = (
    "They differ before the stop. Possible causes: random numbers that train.seed does not seed, "
    "work in the order of a set, or kernels that sum in no fixed order "
    "(train.deterministic=true)."
)
AFTER = (
    "Possible causes: state outside the state_dict, a generator of your own, or a data loader "
    "whose position does not determine what comes next."
)


class ResumeProof(Stored):
    """The comparison of a run that was stopped and resumed with one that was not."""

    steps_before: int
    """Steps before the stop."""
    steps_after: int
    """Steps after it."""
    device: str
    """The device."""
    made_deterministic: bool
    """Whether train.deterministic was set only for this check."""
    is_equal: bool
    """Whether every bit is equal."""
    bytes: int
    """The size of the files compared."""
    values: int
    """What was compared: files of tensors, values of the state, and recorded values."""
    first_step: int | None
    """The first step after which something differs."""
    differences: list[str]
    """One sentence each, the first ones."""

    def display(self) -> Display:
        """Return the result, what differs and why, and what was compared."""
        first, after = self.steps_before, self.steps_after
        how = "equal" if self.is_equal else "differ from"
        where = "in every bit" if self.is_equal else f"first after step {self.first_step}"
        headline = (
            f"Resuming is {'' if self.is_equal else 'not '}exact.\n{first} + {after} steps with a "
            f"stop between them {how} {first + after} steps, {where}, on {self.device}."
        )
        notes = [*self.differences, f"Compared: {self.values:,} values and digests."]
        if self.first_step is not None:
            why = BEFORE if self.first_step <= first else AFTER
            notes.append(f"{why} docs/resuming.md has each with its fix.")
        return Display(headline, notes=[*notes, *([FIXED] if self.made_deterministic else [])])


def steps_of(text: str | None, total: int | None) -> tuple[int, int]:
    """Return the steps before and after the stop that `--steps N,M` states.

    Without it, a recipe of fewer than ten steps in `total` is stopped in its middle.
    Raises: ConfigError when the text is not two numbers, or the recipe has fewer steps.
    """
    found = re.fullmatch(r"\s*([1-9]\d*)\s*,\s*([1-9]\d*)\s*", text or "")
    if text is not None and not found:
        raise ConfigError(
            f"--steps {text!r} is not two numbers of steps.",
            fix="Write --steps 5,5: five steps, a stop, and five more.",
        )
    if total == 1:
        raise ConfigError(
            "A recipe of 1 step cannot be stopped and resumed.", fix="Set train.steps=2, or more."
        )
    whole = min(total or 10, 10)
    steps = (int(found[1]), int(found[2])) if found else (whole // 2, whole - whole // 2)
    if total is not None and total < sum(steps):
        raise ConfigError(
            f"--steps {steps[0]},{steps[1]} needs {sum(steps)} steps, but the recipe has {total}.",
            fix=f"Give --steps {total // 2},{total - total // 2}, or set train.steps={sum(steps)}.",
        )
    return steps


def prove_resume(
    config: RunConfig, steps: tuple[int, int], *, progress: Progress = SILENT
) -> ResumeProof:
    """Train a recipe with and without a stop, and return what differs.

    On a GPU it trains with train.deterministic=true: otherwise any two runs differ.

    Cost: twice the N + M steps, three starts, and four checkpoints of disk.
    Raises: UsageError, RunFailed as training does.
    """
    require_one_process("verify --resume")
    device, _ = pick_device(config.train.device, probe())
    makes_deterministic = device.startswith("cuda") and not config.train.deterministic
    if makes_deterministic:
        config = config.with_values({"train.deterministic": True})
        progress.say(FIXED.replace("Checked", "Checking"))
    # several processes stop one step after they are asked to, so they are asked one step earlier
    stop, late = steps[0], int(config.train.devices not in (None, 1))
    end = stop + max(steps[1], 1 + late)
    saves = CheckpointConfig(every_steps=stop, keep="all", best=False)
    asked = config.model_copy(update={"checkpoint": saves, "log": LogConfig(every=1, to=())})
    with tempfile.TemporaryDirectory(prefix="flatout-verify-") as name:
        whole, parts = Path(name) / "whole", Path(name) / "parts"
        try:
            reached = _train(asked, whole, end, f"Training to step {end} without a stop", progress)
            if reached < sum(steps):
                steps_of(f"{steps[0]},{steps[1]}", reached)  # raises
            chosen = layout.read_config(whole)
            assert chosen is not None, "a run that has trained has a configuration"
            stopped = _train(chosen, parts, stop, f"Training to step {stop}", progress)
            if stopped >= reached:
                raise ConfigError(
                    f"The run reached its last step, {reached}, before it could be stopped: "
                    "several processes stop one step later.",
                    fix=f"Set train.steps={reached + 1}, or more.",
                )
            left = max(reached - stopped - (stopped - stop), 1)
            _train(chosen, parts, left, f"Resuming at step {stopped}, to step {reached}", progress)
            with progress.task("Comparing every bit"):
                found = compare_runs(whole, parts)
        finally:
            for folder in (whole, parts):
                forget(folder)
    return ResumeProof(
        steps_before=stopped,
        steps_after=reached - stopped,
        device=device,
        made_deterministic=makes_deterministic,
        **found,
    )


def _train(config: RunConfig, run: Path, steps: int, what: str, progress: Progress) -> int:
    """Train or resume a run for some steps, as if it were then stopped by Ctrl+C.

    Returns: the step that it reached.
    Raises: the error of the run; RunFailed when its process died.
    """
    with progress.task(what):
        ran = run_recipe(config, run, Request(interrupt_after=steps, to_the_end=True), math.inf)
    if ran.code in (0, Stopped.exit_code):
        return max(catalog.steps(run), default=0)
    why = ran.failure.message if ran.failure else "it ended too early"
    fix = "Try the same recipe with `flatout train`."
    raise error_in(ran.output) or RunFailed(f"{what} failed: {why}.", fix=fix)


def compare_runs(whole: Path, parts: Path) -> dict[str, Any]:
    """Compare the records and the checkpoints of two run directories, and return what differs.

    Raises: CheckpointError when a file cannot be read.
    """
    saved = sorted({*catalog.steps(whole)} & {*catalog.steps(parts)})
    one, other = (facts_of(run, saved) for run in (whole, parts))
    manifests = [catalog.read_manifest(catalog.checkpoint_path(whole, step)) for step in saved]
    lines = []
    for step, name in sorted(one.keys() | other.keys()):
        values = one.get((step, name)), other.get((step, name))
        if values[0] != values[1]:
            numbers = all(isinstance(value, int | float) for value in values)
            lines.append((step, f"{name} differs" + ": {} -> {}".format(*values) * numbers))
    return {
        "is_equal": not lines,
        "values": len(one),
        "bytes": sum(file.size_bytes for each in manifests for file in each.files),
        "first_step": lines[0][0] if lines else None,
        "differences": shortened(
            [f"Step {step}, {text}." for step, text in lines], MOST_SHOWN, "\n"
        ).splitlines(),
    }


def facts_of(run: Path, saved: Sequence[int]) -> dict[tuple[int, str], Any]:
    """Return what must be equal in two runs, by step and name: recorded values that do not depend
    on speed, the digests of tensor files, and the state without the elapsed time.
    """
    found: dict[tuple[int, str], Any] = {}
    for record in RunLog(run).records():
        for name in (name for name in record if name.startswith(RECORDED)):
            found[int(record["step"]), f"{layout.METRICS}: {name}"] = record[name]
    for step in saved:
        checkpoint = catalog.checkpoint_path(run, step)
        for file in catalog.read_manifest(checkpoint).files:
            if file.name.endswith(".safetensors"):
                found[step, file.name] = file.sha256
        state = read_state(checkpoint)
        for key, value in flat({"values": state["values"]}).items():
            if key != "values.elapsed_s":
                found[step, f"{catalog.STATE}: {key}"] = value
    return found
