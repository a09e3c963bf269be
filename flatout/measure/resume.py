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
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig, flat
from flatout.config.sections import CheckpointConfig, LogConfig
from flatout.config.trust import forget
from flatout.display import Display
from flatout.errors import ConfigError, HardwareError, RunFailed, Stopped
from flatout.hardware.machine import pick_device, probe
from flatout.measure.scripts.request import Request
from flatout.measure.trial import error_in, last_words, require_one_process, run_recipe
from flatout.progress import SILENT, Progress, readable_size
from flatout.storage.files import Stored
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import read_state
from flatout.training.run_dir import layout

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
    figures: int
    """Recorded values compared: losses, gradient norms, learning rates, token counts."""
    first_step: int | None
    """The first step after which something differs."""
    first_file: str | None
    """The first file that differs."""
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
        size = f"{readable_size(self.bytes)} of checkpoints and {self.figures:,} recorded values"
        notes = [*self.differences, f"Compared: {size}."]
        if self.first_step is not None:
            why = BEFORE if self.first_step <= first else AFTER
            notes.append(f"{why} docs/resuming.md has each with its fix.")
        return Display(headline, notes=[*notes, *([FIXED] if self.made_deterministic else [])])


def steps_of(text: str | None, config: RunConfig) -> tuple[int, int]:
    """Return the steps before and after the stop that `--steps N,M` states.

    Without it, a recipe of fewer than ten steps is stopped in its middle.
    Raises: ConfigError when the text is not two numbers, or the recipe has fewer steps.
    """
    total = config.train.steps
    found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text or "")
    whole = int(min(total or math.inf, 10))
    steps = (int(found[1]), int(found[2])) if found else (whole // 2, whole - whole // 2)
    if text is not None and not (found and all(steps)):
        raise ConfigError(
            f"--steps {text!r} is not two numbers of steps.",
            fix="Write --steps 5,5: five steps, a stop, and five more.",
        )
    require_length(total, steps)
    return steps


def require_length(total: int | None, steps: tuple[int, int]) -> None:
    """Check that a recipe of `total` steps can be stopped and continued for these steps.

    Raises: ConfigError.
    """
    if total == 1:
        raise ConfigError(
            "A recipe of 1 step cannot be stopped and resumed.", fix="Set train.steps=2, or more."
        )
    if total is not None and total < sum(steps):
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
                require_length(reached, steps)
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
    error = error_in(ran.output)
    if isinstance(error, HardwareError) and str(run.parent) in error.what:  # its disk is full
        fix = "Free space there, or set TMPDIR to a directory on a larger disk."
        raise HardwareError(error.what, fix=fix)
    raise error or RunFailed(
        f"{what}: the process ended with code {ran.code}: {last_words(ran.output)}.",
        fix="Try the same recipe with `flatout train`.",
    )


def compare_runs(whole: Path, parts: Path) -> dict[str, Any]:
    """Compare the records and the checkpoints of two run directories, and return what differs.

    Raises: CheckpointError when a file cannot be read.
    """
    apart: list[tuple[int, str, str]] = []
    left, right = _figures(whole), _figures(parts)
    for step, name in sorted(left.keys() | right.keys()):
        what = shown(left.get((step, name)), right.get((step, name)))
        apart += [(step, "metrics.jsonl", f"{name}{what}")] * bool(what)
    num_bytes, saved = 0, ({*catalog.steps(run)} for run in (whole, parts))
    for step in sorted(set.intersection(*saved)):
        one, other = (catalog.checkpoint_path(run, step) for run in (whole, parts))
        files, others = (catalog.read_manifest(path).files for path in (one, other))
        num_bytes += sum(file.bytes for file in files.values())
        for name in sorted(files.keys() | others.keys()):  # the model's before the optimizer's
            digests = {each[name].sha256 if name in each else None for each in (files, others)}
            if name.endswith(".safetensors") and len(digests) > 1:
                apart.append((step, name, "differs"))
        ours, theirs = _state(one), _state(other)
        for key in sorted(ours.keys() | theirs.keys()):
            what = shown(ours.get(key), theirs.get(key))
            apart += [(step, catalog.STATE, f"{key}{what}")] * bool(what)
    apart.sort(key=lambda each: each[0])
    lines = [f"Step {step}, {file}: {text}." for step, file, text in apart]
    more = len(lines) - MOST_SHOWN
    return {
        "is_equal": not apart,
        "bytes": num_bytes,
        "figures": len(left),
        "first_step": apart[0][0] if apart else None,
        "first_file": apart[0][1] if apart else None,
        "differences": lines[:MOST_SHOWN] + [f"... and {more:,} more."] * (more > 0),
    }


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
    """Return how two values differ, empty if they do not. Long ones are not shown."""
    if one == other:
        return ""
    texts = [json.dumps(each, default=str) for each in (one, other)]
    return " differs" if max(map(len, texts)) > 40 else f" differs: {texts[0]} -> {texts[1]}"
