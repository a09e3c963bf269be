"""Measures a recipe on this machine, and returns the evidence.

What is known before the first step, such as the estimate of the memory, is looked at first. Then
the recipe is a command like any other, `flatout train`, which is measured as a script is.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, FlatoutError
from flatout.hardware.machine import probe
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import DEFAULT_SECONDS, Request
from flatout.measure.diagnose.alternatives import LIMIT_S, with_alternatives
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.preflight import prepare
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.evidence import Evidence, Failure
from flatout.measure.resolving import apart
from flatout.measure.trial import GRACE_S, QUIET, Ran, error_in, killed_by, last_words, run_recipe
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint.catalog import steps_between_saves
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES

LONG_RUN_STEPS = 10_000_000
"""The measured run is extended to this length, so that it cannot end before it is measured."""
RECORDED = ("compile_fallback", "peak_tflops", "peak_source", "mfu")
"""Facts that the files of the measured run show."""
KNOWN = frozenset(
    {"config", "machine", "device", "parameters", "tokens_per_step", "planned_steps", "total_gib"}
    | {"losses", "grad_norms", "failure", "source"}
)
"""Facts that are known better than the steps show them."""


def diagnose_recipe(
    config: RunConfig,
    *,
    seconds: float = DEFAULT_SECONDS,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Evidence:
    """Check a configuration on this machine, run it for some seconds, and return the evidence.

    No step is taken when something already known keeps the run from starting. What may be faster
    on a CPU is tried after it, for at most four times `seconds` and the starts of its processes.
    Raises: UsageError when the configuration cannot be resolved; RunFailed.
    """
    root = Path("runs") if Path("runs").is_dir() else Path()  # the disk of the runs
    for old in root.glob(".diagnose-*"):  # of a process that was killed an hour ago
        if time.time() - old.stat().st_mtime > 3600:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".diagnose-", dir=root) as folder:
        found, stated = apart(config, prepared, config, Path(folder), cache)
        if any(one.harm == "fails" for one in diagnosis_of(found).findings) or stated is None:
            return found
        progress.say("Nothing keeps the run from starting. Measuring its steps.")
        limit_s = LIMIT_S + 6 * seconds
        with progress.task("Measuring (about half a minute)"):
            request = Request(seconds=seconds, is_trial=True, limit_s=limit_s)
            ran = run_recipe(stated, Path(folder) / "run", request, limit_s + GRACE_S)
            found = measured(found, ran, Path(folder) / "run", limit_s)
        return with_alternatives(found, config, seconds, progress)


def prepared(
    config: RunConfig, folder: Path, cache: Path | None = None
) -> tuple[Evidence, RunConfig | None]:
    """Return what is known before the first step, and the configuration of the measured run."""
    try:
        known = prepare(config, folder, cache)
    except FlatoutError:
        raise
    except (Exception, SystemExit) as error:  # of the user's own model or optimizer
        failure = failure_of(error, 0)
        return Evidence(source="preflight", config=config, machine=probe(), failure=failure), None
    if known.resolved is None:
        return known.evidence, None
    values = {"train.steps": LONG_RUN_STEPS, "schedule.warmup": known.warmup_steps}
    return known.evidence, known.resolved.stated().with_values(QUIET | values)


def measured(before: Evidence, ran: Ran, folder: Path, limit_s: float) -> Evidence:
    """Return what is known before the first step with what the measured run shows.

    A failure of the run is evidence too. Saves and evaluations are divided by the steps between
    them in the run that is planned.
    """
    answer = ran.answer
    known: dict[str, Any] = {"source": "measured run"}
    with suppress(CheckpointError):  # it has ended before its first record
        recorded = recorded_evidence(folder)
        known |= {name: getattr(recorded, name) for name in RECORDED}
        if recorded.compile_fallback is not None:
            known["speedups"] = recorded.speedups
        last = min(answer.once.get("steps", LONG_RUN_STEPS), before.planned_steps or LONG_RUN_STEPS)
        for name in ("losses", "grad_norms"):
            known[name] = tuple(one for one in getattr(recorded, name) or () if one[0] <= last)
    found, config = answer.evidence, before.config
    if (failure := answer.failure) is not None:  # the directory that it may name is removed
        said = [one for one in failure.message.split(". ") if folder.parent.name not in one]
        known["failure"] = failure.model_copy(update={"message": ". ".join(said)})
    if found is None or not found.step_s or config is None:
        known.setdefault("failure", ending_of(ran, limit_s))
        return before.model_copy(update=known)
    for name, field in Evidence.model_fields.items():
        if name not in KNOWN and getattr(found, name) != field.default:
            known[name] = getattr(found, name)
    step_s, tokens = found.step_s, before.tokens_per_step or 0
    save_s, score_s = answer.once.get("save"), answer.once.get("score")
    if save_s is not None:
        minutes = config.checkpoint.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
        per_epoch = (before.planned_steps or 0) / (before.epochs or 1.0)
        every = steps_between_saves(config.checkpoint, per_epoch)
        save_s /= every or max(60 * minutes / step_s, 1.0)
    if score_s is not None and config.train.eval_every:
        most = before.val_tokens or 0
        limit = config.train.eval_tokens
        score_s *= most if limit in (None, "all") else min(int(limit), most)
        score_s /= config.train.eval_every
    else:
        score_s = None
    known |= {
        "checkpoint_s": save_s,
        "evaluation_s": score_s,
        "tokens_per_s": tokens / step_s,
        "notes": (*before.notes, *found.notes),
    }
    extra_s = (save_s or 0.0) + (score_s or 0.0)
    known["step_s"] = step_s + extra_s
    known["remaining_s"] = (before.planned_steps or 0) * known["step_s"]
    replaced = {name: seconds + extra_s for name, seconds in found.counterfactual_s.items()}
    return before.model_copy(update=known | {"counterfactual_s": replaced})


def ending_of(ran: Ran, limit_s: float) -> Failure:
    """Return how a process ended which reported no error."""
    error, said, code = error_in(ran.output), last_words(ran.output), ran.code
    if error is not None:
        return failure_of(error, 0)
    if not ran.has_ended:
        return Failure(kind="hang", message=f"The run did not end within {limit_s:.0f} s.")
    if code == -signal.SIGKILL:
        return Failure(kind="killed", message=f"The process {killed_by(code)}.")
    how = killed_by(code) if code and code < 0 else f"ended with exit code {code}"
    return Failure(kind="error", message=f"The process {how}: {said}")
