"""A run from its configuration to its summary: settle, build, resume, train, evaluate, save, sum up."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.config import RunConfig
from flatout.data.manifest import TOKENIZER
from flatout.data.shards import Dataset
from flatout.errors import ConfigError, RunFailed, Stopped
from flatout.hardware import Machine, Peak, fingerprint, peak_tflops, pick_device, probe
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import Ranks, connect, disconnect
from flatout.progress import SILENT, Progress
from flatout.run import Run, build, for_world_size, resolve
from flatout.selection import Decision, settled
from flatout.training import catalog, folder
from flatout.training.checkpoint import load, weights_sha256
from flatout.training.evaluation import Evaluation
from flatout.training.loop import draw_sample, eval_tokens, fit, take_evaluation, write_checkpoint
from flatout.training.metrics import Log
from flatout.training.observers import Observer
from flatout.training.signals import StopRequests
from flatout.training.warmup import warm_up

DISK_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


@dataclass(frozen=True)
class Plan:
    """What every rank must agree on before a run is built."""

    config: RunConfig
    decisions: list[Decision]
    checkpoint: Path | None
    device_reason: str
    finished: dict[str, Any] | None = None
    """The summary of a run that has nothing left to do."""


def run_training(
    asked: RunConfig,
    place: Path,
    *,
    resume: str = "auto",
    observers: Sequence[Observer] = (),
    sample: Callable[[Run], str] | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Train the run that `asked` describes in the folder `place`, from its newest checkpoint if it has one; return its summary.

    Raises: Stopped when a signal ended it after a save; UsageError before anything was changed.
    """
    machine = probe()
    device, reason = pick_device(asked.train.device, machine)
    ranks = connect(device)
    with ExitStack() as stack:
        stack.callback(disconnect)
        if ranks.rank == 0:
            stack.enter_context(folder.locked(place, progress=progress))
        dataset = open_dataset(asked)
        plan = agree(ranks, lambda: settle(asked, place, resume, machine, ranks, (device, reason), dataset, progress))
        if plan.finished is not None:
            return plan.finished
        mesh = make_mesh(plan.config.parallel, device)
        if mesh.is_main:
            folder.clear_exit_code(place)
        with progress.task("Building the model"):
            run = build(plan.config, machine=machine, mesh=mesh, dataset=dataset, folder=place, decisions=plan.decisions)
        stack.callback(run.feed.close)
        return carry_out(run, plan, observers, sample, progress)


def open_dataset(config: RunConfig) -> Dataset:
    """Open the data set that a configuration names.

    Raises: ConfigError when it names none; DataError when that folder holds none.
    """
    if config.data.path is None:
        raise ConfigError(
            "data.path is not set: there is nothing to train on.",
            fix="Prepare text with `flatout prepare FILE --out data/mine`, then add data.path=data/mine.",
        )
    return Dataset.open(config.data.path)


def agree(ranks: Ranks, decide: Callable[[], Plan]) -> Plan:
    """Let the main rank decide, and return its plan on every rank: clocks and measurements differ, plans must not."""
    if ranks.world_size == 1:
        return decide()
    box: list[Plan | None] = [None]
    try:
        if ranks.rank == 0:
            box[0] = decide()
    finally:
        torch.distributed.broadcast_object_list(box, src=0)  # nothing, when the main rank failed: the others must not wait for ever
    if box[0] is None:
        raise RunFailed("The main process could not start the run.", fix="Its own message says why.")
    return box[0]


def settle(
    asked: RunConfig,
    place: Path,
    resume: str,
    machine: Machine,
    ranks: Ranks,
    device: tuple[str, str],
    dataset: Dataset,
    progress: Progress,
) -> Plan:
    """Decide, under the lock, what is run: the stored configuration when the folder holds a run, else a new one, which is stored.

    Raises: ConfigError when `asked` contradicts the stored configuration.
    """
    stored = folder.stored_config(place, asked) if resume != "never" else None
    checkpoint = folder.resume_from(place, resume, progress=progress)
    summary = folder.read_summary(place)
    if stored is not None:
        if summary is not None and checkpoint is not None and catalog.step_of(checkpoint) >= (stored.train.steps or 0):
            return Plan(stored, settled(stored, machine), checkpoint, device[1], finished=summary)
        if device[0].partition(":")[0] != stored.train.device.partition(":")[0]:
            progress.say(f"This run began on {stored.train.device} and goes on on {device[0]}: losses will differ in the last bits.")
        config = for_world_size(stored.with_values({"train.device": device[0]}), ranks.world_size)
        return Plan(config, settled(config, machine), checkpoint, device[1])
    with progress.task("Settling the configuration"):
        config, decisions = resolve(asked.with_values({"train.device": device[0]}), machine=machine, dataset=dataset, world_size=ranks.world_size)
    folder.write_config(place, config, asked=asked)
    shutil.copyfile(dataset.path / TOKENIZER, place / TOKENIZER)  # a trained model can be tried without its data
    return Plan(config, decisions, checkpoint, device[1])


def carry_out(run: Run, plan: Plan, observers: Sequence[Observer], sample: Callable[[Run], str] | None, progress: Progress) -> dict[str, Any]:
    """Train a run that is built, from where its checkpoint left it, to its summary."""
    differences: list[str] = []
    if plan.checkpoint is not None:
        differences = load(run, plan.checkpoint, environment=fingerprint(str(run.mesh.device)), progress=progress)
        run.resumed_from = str(plan.checkpoint)
    parameters = sum(p.numel() for p in run.core.parameters())
    if run.mesh.is_main:
        folder.require_free_disk(run.folder, DISK_BYTES_PER_PARAMETER * parameters * (run.config.checkpoint.keep + 2))
    with Log(run, observers) as log, StopRequests() as stop:
        log.event("resume" if plan.checkpoint else "start", from_checkpoint=run.resumed_from, parameters=parameters, **_facts(run, plan))
        for decision in run.decisions:
            log.event("speedup", name=decision.name, on=decision.on, reason=decision.reason)
        for difference in differences:
            log.event("difference", text=difference)
            progress.say(difference)
        log.start()
        warm_up(run, log, progress=progress)
        fit(run, log, stop, sample=sample, progress=progress)
        if run.step < run.last_step:
            _stop(run, log, progress)
        summary = finish(run, log, sample, progress)
        log.end(summary)
    return summary


def _facts(run: Run, plan: Plan) -> dict[str, Any]:
    return {
        "machine": run.machine.describe(),
        "device": str(run.mesh.device),
        "device_reason": plan.device_reason,
        "world_size": run.mesh.world_size,
        "peak_tflops": run.peak.tflops if run.peak else None,
        "peak_source": run.peak.source if run.peak else None,
        "environment": fingerprint(str(run.mesh.device)),
    }


def _stop(run: Run, log: Log, progress: Progress) -> None:
    """Save and leave, so that the same command goes on."""
    write_checkpoint(run, log, progress=progress)
    log.event("stop")
    log.close()
    if run.mesh.is_main:
        folder.write_exit_code(run.folder, Stopped.exit_code)
    raise Stopped(f"Stopped at step {run.step} of {run.last_step}, and saved.", fix="Run the same command again to go on.")


def finish(run: Run, log: Log, sample: Callable[[Run], str] | None, progress: Progress) -> dict[str, Any]:
    """Evaluate on the whole validation split, save, sample, and write the summary."""
    with log.aside():
        evaluation = last_evaluation(run, log, progress)
        if run.best_step != run.step:  # the best is saved when it is found
            write_checkpoint(run, log, progress=progress)
        draw_sample(run, log, sample)
    log.close()
    log.keep_clock()
    wall_s = log.wall_s
    run.peak = best_peak(run)
    steady = log.steady_tokens_per_s()
    mfu = log.mfu(steady) if steady else None
    val_loss = evaluation.loss if evaluation else None
    tokens_here = sum_of_tokens(run, log)
    summary = {
        "run": str(run.folder),
        "steps": run.step,
        "tokens": run.tokens,
        "train_loss": log.curve[-1][1] if log.curve else None,
        "val_loss": val_loss,
        "best_val_loss": run.best_val_loss,
        "bits_per_byte": bits_per_byte(val_loss, run.dataset) if val_loss is not None else None,
        "tokens_per_s": steady,
        "wall_tokens_per_s": tokens_here / wall_s if tokens_here else None,
        "mfu": mfu,
        "mfu_of": run.peak.source if run.peak and mfu else "unknown: no data sheet, or a machine too busy to measure its own roof",
        "peak_gib": log.peak_gib(),
        "wall_s": wall_s,
        "elapsed_s": run.elapsed_s,
        "resumed_from": run.resumed_from,
        "weights_sha256": weights_sha256(catalog.checkpoint_path(run.folder, run.step)),
    }
    if run.mesh.is_main:
        log.event("end", **summary)
        folder.write_summary(run.folder, summary)
        folder.write_exit_code(run.folder, 0)
    return summary


def last_evaluation(run: Run, log: Log, progress: Progress) -> Evaluation | None:
    """Score the whole validation split, if there is one; where the run scored a part of it, that part first, for the best checkpoint."""
    if run.dataset.split("val").num_tokens < 2:
        return None
    if eval_tokens(run) is not None and run.config.train.eval_every:
        take_evaluation(run, log, max_tokens=eval_tokens(run), progress=progress)
    return take_evaluation(run, log, max_tokens=None, progress=progress)


def best_peak(run: Run) -> Peak | None:
    """Return the run's peak; one that was measured is measured again, and the better counts: a busy machine looks slow."""
    if run.peak is None or not run.peak.source.startswith("measured"):
        return run.peak
    again = peak_tflops(run.machine, str(run.mesh.device), run.arithmetic)
    return max(run.peak, again or run.peak, key=lambda peak: peak.tflops)


def sum_of_tokens(run: Run, log: Log) -> int:
    """Return the tokens trained on by this process."""
    return (run.step - log.first_step) * run.tokens_per_step


def bits_per_byte(val_loss: float, dataset: Dataset) -> float:
    """Return a loss in nats a token as bits a byte of validation text, which does not depend on the tokenizer."""
    split = dataset.split("val")
    return val_loss * (split.num_tokens - 1) / math.log(2) / split.text_bytes
