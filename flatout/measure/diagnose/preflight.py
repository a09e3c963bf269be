"""What `diagnose` knows before the first step: the resolved run, its memory, data and machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.assembly.memory import estimate, memory_bytes, most_rows
from flatout.assembly.prediction import GIB, past_run, runs_here
from flatout.assembly.preflight import open_dataset
from flatout.assembly.resolve import epoch_tokens, known_peak, workload_of
from flatout.config.schema import RunConfig
from flatout.data.store.mix import members_of
from flatout.errors import DataError, HardwareError, MissingPackage
from flatout.hardware.machine import pick_device, probe
from flatout.measure.attach.lines import failure_of
from flatout.measure.evidence import Evidence
from flatout.measure.host import gpu_facts, host_facts
from flatout.measure.resolving import Resolved, resolve_on
from flatout.models.language_model import model_of
from flatout.optim.schedule import warmup_steps
from flatout.training.checkpoint.catalog import DISK_BYTES_PER_PARAMETER, most_at_once


@dataclass(frozen=True)
class Prepared:
    """What is known before the first step."""

    evidence: Evidence
    resolved: Resolved | None = None
    """The run. None when it cannot start."""
    warmup_steps: int = 0
    """Steps of the learning rate's warm-up in a run of the requested length."""


def prepare(asked: RunConfig, folder: Path, cache: Path | None = None) -> Prepared:
    """Resolve the configuration here, and return what is known, also of a run that cannot start.

    Raises: ConfigError when the configuration contradicts itself.
    """
    machine, device = probe(), None
    known: dict[str, Any] = {"source": "preflight", "config": asked, "machine": machine}
    known |= host_facts(folder) | {"device": asked.train.device}
    try:
        device, reason = pick_device(asked.train.device, machine)
        known |= {"device": device, "no_gpu_because": reason, **gpu_facts(machine, device)}
        stated = asked.with_values({"train.device": device})
        resolved = resolve_on(machine, stated, open_dataset(asked), cache)
    except (DataError, MissingPackage, HardwareError) as error:
        failure = failure_of(error, 0)
        if device and isinstance(error, HardwareError):  # only the memory can be too small
            failure = failure.model_copy(update={"kind": "out-of-memory"})
        return Prepared(Evidence(**known, failure=failure))
    config, dataset, on_gpu = resolved.config, resolved.dataset, device.startswith("cuda")
    rows, steps = int(config.batch.rows_per_device), config.train.steps or 0
    tokens_per_step, model = config.batch.tokens_per_step or 0, model_of(config)
    per_epoch = max(epoch_tokens(dataset, config.data.seq_len), 1) / max(tokens_per_step, 1)
    saved = model[0].num_parameters(model[1]) * most_at_once(config.checkpoint, steps, per_epoch)
    workload, available = workload_of(config), memory_bytes(machine, device, 1)
    members = [member.dataset for member in members_of(dataset)]
    peak = known_peak(machine, device, config.train.precision)
    shape = past_run(config, resolved.decisions, 1).digest
    fewer = (
        (run.tokens_per_s, run.rows_per_device)
        for run in runs_here(machine, device, cache)
        if run.digest == shape and run.tokens_per_s and not run.is_busy
        if run.rows_per_device < rows
    )
    best_rate, best_rows = max(fewer, default=(1.0, None))
    facts: dict[str, Any] = {
        "config": config,
        "speedups": tuple(resolved.speedups),
        "disk_needed_gib": DISK_BYTES_PER_PARAMETER * saved / GIB,
        "total_gib": machine.gpus[0].memory_gib if on_gpu else machine.memory_gib,
        "free_gib": available / GIB,
        "estimated_gib": estimate(workload, rows, config.batch.accumulate or 1).total / GIB,
        "rows_that_fit": most_rows(workload, available),
        "train_tokens": sum(member.split("train").num_tokens for member in members),
        "val_tokens": sum(member.split("val").num_tokens for member in members),
        "tokens_per_step": tokens_per_step,
        "planned_steps": steps,
        "epochs": steps / per_epoch,
        "best_rate": best_rate,
        "best_rows": best_rows,
        "peak_tflops": peak and peak.tflops,
        "peak_source": peak and peak.source,
    }
    warmup = warmup_steps(config.schedule, steps or 1)
    return Prepared(Evidence(**known | facts), resolved, warmup)
