"""Measures a recipe on this machine, and returns the evidence.

What is known before the first step, such as the estimate of the memory, is looked at first. Then
the recipe is a command like any other, `flatout train`, which is measured as a script is. On a CPU,
it races against what `auto` would choose, where the recipe has chosen otherwise.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatout.assembly.memory import estimate, memory_bytes, workload_of
from flatout.assembly.preflight import open_dataset
from flatout.assembly.resolve import epoch_tokens, tokens_per_step
from flatout.assembly.speedup import Tolerance
from flatout.config.schema import RunConfig, parse_overrides
from flatout.data.store.mix import members_of
from flatout.errors import CheckpointError, DataError, FlatoutError, HardwareError, MissingPackage
from flatout.hardware.machine import GIB, as_torch_sees, pick_device, probe
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import DEFAULT_SECONDS, Request, Timing
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.evidence import Evidence
from flatout.measure.host import gpu_facts, host_facts
from flatout.measure.plan.prediction import most_rows
from flatout.measure.race import Race
from flatout.measure.resolving import apart, resolve_on
from flatout.measure.trial import QUIET, Result, run_recipe, try_recipe
from flatout.models.language_model import model_of
from flatout.optim.schedule import warmup_steps
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint.catalog import (
    DISK_BYTES_PER_PARAMETER,
    most_at_once,
    steps_between_saves,
)
from flatout.training.saving import DEFAULT_MINUTES_BETWEEN_SAVES

LIMIT_S = 150.0
"""Longest measured run before it counts as hanging. More seconds of steps extend it."""
LONG_RUN_STEPS = 10_000_000
"""The measured run is extended to this length, so that it cannot end before it is measured."""
RECORDED = ("compile_fallback", "peak_tflops", "peak_source", "mfu")
"""Facts that the files of the measured run show."""
KNOWN = frozenset(
    {"config", "machine", "device", "tokens_per_step", "planned_steps", "total_gib"}
    | {"losses", "failure", "source"}
)
"""Facts that are known better than the steps show them."""
OPEN = {"batch.rows_per_device": "auto", "batch.accumulate": None, "speedups": "auto"}
"""What a recipe may leave to `auto`."""
Prepared = tuple[Evidence, RunConfig | None]
"""What is known before the first step, and the configuration of the measured run, if it starts."""


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
    with tempfile.TemporaryDirectory(prefix=".diagnose-", dir=root) as folder:
        found, stated = apart(config, prepared, config, Path(folder), cache)
        if any(one.harm == "fails" for one in diagnosis_of(found).findings) or stated is None:
            return found
        progress.say("Nothing keeps the run from starting. Measuring its steps.")
        limit_s, run_dir = LIMIT_S + 6 * seconds, Path(folder) / "run"
        with progress.task("Measuring (about half a minute)"):
            request = Request(seconds=seconds, is_trial=True)
            ran = run_recipe(stated, run_dir, request, limit_s)
            found = measured(found, ran, run_dir)
        return with_auto(found, config, seconds, cache, progress)


def prepared(asked: RunConfig, folder: Path, cache: Path | None = None) -> Prepared:
    """Resolve the configuration here, and return what is known, also of a run that cannot start.

    Raises: ConfigError when the configuration contradicts itself.
    """
    machine, device = probe(), None
    known: dict[str, Any] = {"source": "preflight", "config": asked, "machine": machine}
    known |= host_facts(folder) | {"device": asked.train.device}
    try:
        device, reason = pick_device(asked.train.device, machine)
        known["machine"] = machine = as_torch_sees(machine, device)
        known |= {"device": device, "no_gpu_because": reason, **gpu_facts(machine, device)}
        stated = asked.with_values({"train.device": device})
        resolved = resolve_on(machine, stated, open_dataset(asked), cache)
        config, on_gpu = resolved.config, device.startswith("cuda")
        rows, steps = int(config.batch.rows_per_device), config.train.steps or 0
        per_step, (kind, shape) = tokens_per_step(config, resolved.dataset), model_of(config)
        per_epoch = max(epoch_tokens(resolved.dataset, config.data.seq_len), 1) / max(per_step, 1)
        saved = kind.num_parameters(shape) * most_at_once(config.checkpoint, steps, per_epoch)
        workload, available = workload_of(config), memory_bytes(machine, device, 1)
        data = [member.dataset for member in members_of(resolved.dataset)]
    except (Exception, SystemExit) as error:  # also of the user's own model or optimizer
        failure = failure_of(error, 0)
        if device and isinstance(error, HardwareError):  # only the memory can be too small
            failure = failure.model_copy(update={"kind": "out-of-memory"})
        elif isinstance(error, FlatoutError) and not isinstance(error, DataError | MissingPackage):
            raise
        return Evidence(**known, failure=failure), None
    known |= {
        "config": config,
        "speedups": tuple(resolved.speedups),
        "disk_needed_gib": DISK_BYTES_PER_PARAMETER * saved / GIB,
        "total_gib": torch.cuda.mem_get_info(device)[1] / GIB if on_gpu else machine.memory_gib,
        "free_gib": available / GIB,
        "estimated_gib": estimate(workload, rows, config.batch.accumulate or 1).total / GIB,
        "rows_that_fit": most_rows(workload, available),
        "train_tokens": sum(one.split("train").num_tokens for one in data),
        "val_tokens": sum(one.split("val").num_tokens for one in data),
        "tokens_per_step": round(per_step),
        "planned_steps": steps,
        "epochs": steps / per_epoch,
    }
    warmup = warmup_steps(config.schedule, steps or 1)
    longer = QUIET | {"train.steps": LONG_RUN_STEPS, "schedule.warmup": warmup}
    return Evidence(**known), resolved.stated().with_values(longer)


def measured(before: Evidence, ran: Result, folder: Path) -> Evidence:
    """Return what is known before the first step with what the measured run shows.

    A failure of the run is evidence too. Saves and evaluations are divided by the steps between
    them in the run that is planned.
    """
    found, once, config = ran.evidence, ran.once, before.config
    known: dict[str, Any] = {"source": "measured run"}
    with suppress(CheckpointError):  # it has ended before its first record
        recorded = recorded_evidence(folder)
        known |= {name: getattr(recorded, name) for name in RECORDED}
        if recorded.compile_fallback is not None:
            known["speedups"] = recorded.speedups
        last = min(once.get("steps", LONG_RUN_STEPS), before.planned_steps or LONG_RUN_STEPS)
        known["losses"] = tuple(one for one in recorded.losses or () if one[0] <= last)
    if (failure := ran.failure) is not None:  # the directory that it may name is removed
        said = [one for one in failure.message.split(". ") if folder.parent.name not in one]
        known["failure"] = failure.model_copy(update={"message": ". ".join(said)})
    if found is None or not found.step_s or config is None:
        return before.model_copy(update=known)
    for name, field in Evidence.model_fields.items():
        if name not in KNOWN and getattr(found, name) != field.default:
            known[name] = getattr(found, name)
    step_s, save_s, score_s = found.step_s, once.get("save"), once.get("score")
    if save_s is not None:
        minutes = config.checkpoint.every_minutes or DEFAULT_MINUTES_BETWEEN_SAVES
        per_epoch = (before.planned_steps or 0) / (before.epochs or 1.0)
        every = steps_between_saves(config.checkpoint, per_epoch)
        save_s /= every or max(60 * minutes / step_s, 1.0)
    if score_s is not None and config.train.eval_every:
        most, limit = before.val_tokens or 0, config.train.eval_tokens
        score_s *= most if limit in (None, "all") else min(int(limit), most)
        score_s /= config.train.eval_every
    else:
        score_s = None
    extra_s = (save_s or 0.0) + (score_s or 0.0)
    replaced = {name: seconds + extra_s for name, seconds in found.counterfactual_s.items()}
    return before.model_copy(
        update=known
        | {
            "checkpoint_s": save_s,
            "evaluation_s": score_s,
            "tokens_per_s": (before.tokens_per_step or 0) / step_s,
            "notes": (*before.notes, *found.notes),
            "step_s": step_s + extra_s,
            "remaining_s": (before.planned_steps or 0) * (step_s + extra_s),
            "counterfactual_s": replaced,
        }
    )


def with_auto(
    evidence: Evidence, asked: RunConfig, seconds: float, cache: Path | None, progress: Progress
) -> Evidence:
    """Return the evidence of a measured recipe with the step time of what `auto` would choose.

    `asked` is the recipe before it was resolved. It applies on a CPU, where the recipe does not
    leave that to `auto`. The smaller gain of two rounds counts, which take at most four times the
    measured seconds.
    """
    config, step_s = evidence.config, evidence.step_s
    if evidence.device != "cpu" or config is None or not step_s or 2 * step_s > seconds:
        return evidence  # otherwise a trial would be too short
    words = left_to_auto(config, asked, cache)
    part_s, name = seconds / 2, " ".join(words)  # half of each trial is its warm-up
    timing = Timing(seconds=part_s, warmup_s=part_s, limit_s=2 * part_s)

    def start(words: tuple[str, ...], _: int, limit_s: float) -> Result:
        setting = config.with_values(parse_overrides(words, RunConfig))
        return try_recipe(setting, timing, limit_s)

    race = Race(start, lambda *_: Tolerance.exact(), longest_s=LIMIT_S, name=" ".join)
    if words:
        with race.running(progress, f"Measuring {name}"):
            race.compare(words, (), rounds=2)
    if len(ratios := race.ratios(words, ())) < 2:
        return evidence
    aside_s = (evidence.checkpoint_s or 0.0) + (evidence.evaluation_s or 0.0)
    found = {name: (step_s - aside_s) / min(ratios) + aside_s}
    return evidence.model_copy(update={"counterfactual_s": {**evidence.counterfactual_s, **found}})


def left_to_auto(config: RunConfig, asked: RunConfig, cache: Path | None) -> tuple[str, ...]:
    """Return the settings that `auto` would choose and a recipe on a CPU has not: rows, speedups.

    () where there are none, or nothing fits.
    """
    free = config.with_values({"train.precision": asked.train.precision, **OPEN})
    try:
        auto = resolve_on(probe(), free, open_dataset(asked), cache).config
    except HardwareError:
        return ()
    words = list[str]()
    if int(auto.batch.rows_per_device) >= 2 * int(config.batch.rows_per_device):
        words += [f"{key}={auto.value(key)}" for key in OPEN if key != "speedups"]
    if asked.speedups != "auto" and auto.speedups != config.speedups:
        words.append("speedups=auto")
    return tuple(words)
