"""Runs a configuration through to its summary: plan, build, restore, execute."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from flatout.assembly.batch import sizes_of
from flatout.assembly.measured import advice, hardware_name
from flatout.assembly.preflight import check_settings, open_dataset
from flatout.assembly.resolve import checkpointing_notes, epoch_tokens
from flatout.assembly.run import Run, build, set_deterministic
from flatout.config.registry import RECIPES
from flatout.config.schema import RunConfig
from flatout.config.sections import TrainConfig
from flatout.data.store.mix import MixedDataset, members_of
from flatout.distributed.launch import num_processes
from flatout.distributed.mesh import make_mesh
from flatout.distributed.pipeline import completed
from flatout.distributed.rendezvous import (
    connect,
    disconnect,
    is_elastic,
    launcher,
    stated_ranks,
)
from flatout.distributed.spinning import spin_less_beside_others
from flatout.errors import ConfigError, FlatoutError, SmallerBatch, Stopped, signal_of
from flatout.hardware.machine import CpuTimes, Machine, as_torch_sees, pick_device, probe
from flatout.progress import SILENT, Progress
from flatout.storage.files import writing_run
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import shortened
from flatout.training.agreement import require_shared
from flatout.training.checkpoint.catalog import (
    DISK_BYTES_PER_PARAMETER,
    most_at_once,
    read_info,
)
from flatout.training.checkpoint.read_write import load
from flatout.training.checkpoint.weights import weights_of
from flatout.training.divergence import require_good_steps
from flatout.training.evaluation import (
    batch_shapes,
    warn_of_empty_steps,
    warn_of_unscored,
)
from flatout.training.finish import finish
from flatout.training.init_from import load_initial
from flatout.training.loop import Session, ends_early, fit
from flatout.training.metrics.log import Log
from flatout.training.metrics.loggers import configured_observers, require_loggers
from flatout.training.metrics.observers import Observer
from flatout.training.out_of_memory import explained, halving, peers_named, shortage
from flatout.training.rates import record
from flatout.training.run_dir import layout
from flatout.training.run_dir.data_location import keep_text_format
from flatout.training.run_dir.lock import hold_lock
from flatout.training.run_dir.runlog import record_exit, truncate_metrics
from flatout.training.run_dir.start import is_own
from flatout.training.run_plan import (
    RunPlan,
    RunRequest,
    agree_on_plan,
    dataset_of,
    require_same_settings,
)
from flatout.training.saving import closing_saver, environment_of, save_last
from flatout.training.signals import StopRequests, WorkInterrupted
from flatout.training.step import Dropped
from flatout.training.upload.uploader import claimed, send_rest, sending
from flatout.training.warmup import warm_up
from flatout.training.watchdog import Watchdog

FEW_ROWS = 0.1
"""Share of the embedding below which a dataset was probably prepared with a different tokenizer."""


def run_training(
    config: RunConfig,
    folder: Path,
    *,
    resume: str = "auto",
    trust_code: bool = False,
    observers: Sequence[Observer] = (),
    sample: Callable[[Run], str] | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> JsonObject:
    """Train a configuration, or resume it in its run directory, and return the run's summary.

    `cache` contains measurements on this hardware, which `auto` uses. None means there are none.
    Raises: Stopped when a signal ended the run after a save; UsageError before anything was
            changed; RunFailed.
    """
    began = CpuTimes.read()
    check_settings(config)
    machine = probe()
    device, device_reason = pick_device(config.train.device, machine)
    machine = as_torch_sees(machine, device)
    require_devices(config.train, machine)
    if device == "mps":
        require_mps_model(config, progress)
    set_deterministic(config.train.deterministic)  # NCCL reads it on connecting
    ranks = connect(device)
    with ExitStack() as stack, peers_named():
        stack.callback(disconnect)
        if device == "cuda" and ranks.world_size == 1 and config.train.devices is None:
            say_idle_gpus(progress)
        if ranks.rank == 0:
            stack.enter_context(hold_lock(folder, progress=progress))
            stack.enter_context(recorded_exit_code(folder))
        dataset = open_dataset(config)
        require_same_settings(ranks, config, dataset)
        request = RunRequest(
            config,
            folder,
            resume,
            trust_code,
            machine,
            ranks,
            device,
            device_reason,
            dataset,
            observers,
            sample,
            cache,
            progress,
            began,
        )
        while True:
            plan = agree_on_plan(request)
            if plan.start.summary is not None:
                if ranks.rank == 0:
                    send_rest(folder, plan.config.checkpoint, progress)
                return plan.start.summary
            require_shared(ranks, folder / layout.LOCK)
            try:
                return train_plan(request, plan)
            except SmallerBatch as smaller:  # the run directory has fewer rows for the next attempt
                if ranks.world_size > 1:
                    raise
                progress.say(f"{smaller.what} Starting again.")
            request = replace(request, resume="auto")
            gc.collect()  # the model of the attempt that failed is in reference cycles
            if "torch._dynamo" in sys.modules:  # importing it takes memory
                torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def train_plan(request: RunRequest, plan: RunPlan) -> JsonObject:
    """Build the planned run, restore it, train it to its end, and return its summary.

    Raises: Stopped when a signal ended it after a save; RunFailed.
    """
    run = build_run(request, plan)
    mesh, progress, is_resumed = run.mesh, request.progress, plan.checkpoint is not None
    if request.device == "cpu" and mesh.world_size == 1:  # ranks would see each other's load
        spin_less_beside_others(progress, request.began)
    say = progress.say if mesh.is_main else None
    with ExitStack() as stack:
        stack.callback(run.loader.close)
        stack.enter_context(explained(run))
        stack.enter_context(halving(run, is_auto=plan.rows_are_auto))
        differences = restore(run, plan, progress)
        observers, uploader = [*request.observers], None
        newest = plan.checkpoint
        saved = read_info(newest) if newest and is_own(newest, run.folder) else None
        if mesh.is_main:
            if (
                saved
                and saved.config_digest != (layout.read_config(run.folder) or run.config).digest()
            ):
                differences.append(
                    f"Settings in {layout.CONFIG} have changed since step-{saved.step}."
                )
            observers += configured_observers(run.config.log)
            store_plan(run, plan, progress)
            suggest_bench(run, plan, request)
            if mesh.world_size > 1 and is_elastic():
                sizes = shortened(sizes_of(run.config), 8)
                progress.say(f"torchrun may continue this run with {sizes} processes.")
        stack.enter_context(writing_run(run.folder))
        if mesh.is_main:
            lost = truncate_metrics(run.folder, saved, is_at_end=run.step == run.last_step)
            differences += [lost] if lost else []
            uploader = claimed(run.folder, run.config.checkpoint, is_resumed, progress)
            observers += [uploader] if uploader else []
        stack.enter_context(Watchdog(run, say=say))
        log = stack.enter_context(Log(run, observers, progress, run.config.log.to))
        stop = stack.enter_context(StopRequests(say=say, launcher=launcher()))
        stack.enter_context(
            sending(uploader, log.event, log.progress, stop.since_request_s, run.pulse.beat)
        )
        stack.enter_context(closing_saver(run, log))
        log_start(run, log, request, plan, differences)
        if not is_resumed and run.config.train.init_from is not None:
            # the run then no longer depends on the source of its weights
            with log.aside("checkpoint"):
                save_last(run, log)
        log.start()
        sample = stop.interrupting(request.sample) if request.sample else None
        session = Session(run, log, stop.requested, stop.requested_within_step, sample)
        try:
            warm_up(run, log, eval_shapes=batch_shapes(run), stop=stop)
            work = "step" if mesh.pipeline > 1 else "micro-batch"
            stop.waits_for = f"the {work} or save in progress"
            fit(session)
            require_good_steps(run, log, flush=True)
            if run.evaluation_due or (run.step < run.last_step and not ends_early(run)):
                raise WorkInterrupted
            stop.waits_for = "the batch of the final evaluation"
            with run.pulse.during("finishing"):
                summary = finish(session)
                log.end(summary)
        except (WorkInterrupted, Dropped):
            save_and_stop(session, stop)
    if mesh.is_main and log.is_steady:
        record(run, request, summary, log.cached_s)
    return summary


def save_and_stop(session: Session, stop: StopRequests) -> NoReturn:
    """Save, log how long that took after the request, and raise Stopped. Every rank calls it."""
    run, log = session.run, session.log
    stop.waits_for = "the save in progress"
    save_last(run, log)
    since_s = stop.since_request_s()
    seconds = None if since_s is None else round(since_s, 3)
    cause = None if seconds is None else stop.cause  # None: only another rank was asked
    after = "" if seconds is None else f" {seconds:.1f} s after {cause}"
    log.event("stop", cause=cause, saved_after_s=seconds)
    log.close()
    raise Stopped(
        f"Stopped at step {run.step} of {run.last_step}, and saved{after}.",
        fix="Run the same command again to continue.",
    )


def require_devices(train: TrainConfig, machine: Machine) -> None:
    """Check that this machine runs as many processes of the run as `train.devices` asks for.

    Raises: ConfigError; HardwareError, as `num_processes`.
    """
    wanted, ranks = num_processes(train.devices, train.device, machine), stated_ranks()
    if train.devices is None or wanted == ranks.local_world_size:
        return
    if ranks.world_size == 1:
        raise ConfigError(
            f"train.devices={train.devices} needs {wanted} processes, but this is one.",
            fix="Run `flatout train` in a shell without torchrun: it starts them. Or remove "
            "train.devices.",
        )
    raise ConfigError(
        f"train.devices={train.devices} asks for {wanted} processes on this machine, but "
        f"{ranks.local_world_size} were started.",
        fix="Remove train.devices, or start without torchrun.",
    )


def require_mps_model(config: RunConfig, progress: Progress) -> None:
    """Warn that MPS is untested, and check that the model does without float64.

    Raises: ConfigError for the eigenstate model.
    """
    if config.model.kind == "eigenstate":
        raise ConfigError(
            "model.kind=eigenstate computes its eigenvalues in float64, which train.device=mps "
            "does not support.",
            fix="Set train.device=cpu, or model.kind=transformer.",
        )
    progress.say(
        "flatout has never been run on MPS: compare the first losses with those of "
        "train.device=cpu."
    )


def say_idle_gpus(progress: Progress) -> None:
    """Show how to use the other GPUs, if there are any."""
    count = torch.cuda.device_count()
    if count > 1:
        progress.say(f"This run uses 1 of {count} GPUs. train.devices=all uses all of them.")


@contextmanager
def recorded_exit_code(folder: Path) -> Iterator[None]:
    """Record the process's exit in the run directory, with its code where schedulers can read it.

    Nothing is written if the process is killed or fails before the run exists.
    """
    with writing_run(folder):
        layout.clear_exit_code(folder)
    try:
        yield
    except BaseException as error:
        code = 1
        if isinstance(error, FlatoutError):
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = 128 + signal_of(error)
        if (folder / layout.CONFIG).exists():
            record_exit(folder, code, error)
        raise
    record_exit(folder, 0)


def build_run(request: RunRequest, plan: RunPlan) -> Run:
    """Build the planned run, at step 0, without the random weights that a checkpoint replaces."""
    require_loggers(plan.config.log)
    mesh = make_mesh(plan.config.parallel, request.device)
    with request.progress.task("Building the model"):
        return build(
            plan.config,
            machine=request.machine,
            mesh=mesh,
            dataset=dataset_of(request, plan.config),
            folder=request.folder,
            decisions=plan.decisions,
            draws=plan.checkpoint is None,
        )


def restore(run: Run, plan: RunPlan, progress: Progress) -> list[str]:
    """Load the planned checkpoint or initial weights, and return the differences to report.

    Raises: CheckpointError when it does not fit, before anything is written.
    """
    load_initial(run, plan.checkpoint, progress=progress)
    if plan.checkpoint is None:
        return []
    run.resumed_from = str(plan.checkpoint)
    found = load(run, plan.checkpoint, environment=environment_of(run), progress=progress)
    if plan.is_new:  # the checkpoint of another run's best step is not here
        run.best_val_loss = run.best_step = None
        run.evaluations_since_best = 0
    return found


def store_plan(run: Run, plan: RunPlan, progress: Progress) -> None:
    """Write the configuration of a new run, or what is new in it: its length or its data's path.

    Raises: HardwareError when the disk is too full.
    """
    folder, config = run.folder, run.config.checkpoint
    with writing_run(folder):
        with completed(run.core):
            num_saved = sum(tensor.numel() for tensor in weights_of(run).values())
        most = most_at_once(config, run.last_step, run.steps_per_epoch)
        needed_bytes = DISK_BYTES_PER_PARAMETER * num_saved * most
        layout.require_free_disk(folder, needed_bytes)
        if plan.start.origin is not None:  # first: a run that is killed here must not start over
            layout.append_event(folder, "origin", **plan.start.origin.model_dump())
        if plan.stored is not None:
            layout.write_config(folder, plan.stored, requested=plan.requested)
        if plan.is_new:
            keep_text_format(run.dataset, folder, progress=progress)


def suggest_bench(run: Run, plan: RunPlan, request: RunRequest) -> None:
    """Suggest `bench`, once per GPU, for a new run on a GPU without measurements."""
    gpu = hardware_name(run.machine, str(run.mesh.device))
    is_gpu = run.mesh.device.type == "cuda"
    if request.cache is None or gpu is None or not is_gpu or plan.checkpoint is not None:
        return
    recipe = run.config.name if run.config.name in RECIPES.names() else "RECIPE"
    line = advice(gpu, recipe, request.cache)
    if line is not None:
        request.progress.say(line)


def log_start(
    run: Run, log: Log, request: RunRequest, plan: RunPlan, differences: Sequence[str]
) -> None:
    """Log what the run starts with, and tell the user what is unexpected."""
    log.event(
        "resume" if plan.checkpoint else "start",
        from_checkpoint=run.resumed_from,
        **({"rejected": [*plan.start.rejected]} if plan.start.rejected else {}),
        last_step=run.last_step,
        epochs=request.config.train.epochs,
        init_from=run.config.train.init_from,
        parameters=run.num_parameters(),
        machine=run.machine.describe(),
        device=str(run.mesh.device),
        device_reason=request.device_reason,
        world_size=run.mesh.world_size,
        peak_tflops=run.peak.tflops if run.peak else None,
        peak_source=run.peak.source if run.peak else None,
        environment=environment_of(run),
    )
    if run.base is not None:
        trained, whole = sum(p.numel() for p in run.trained()), run.num_parameters()
        log.event("lora", base=run.base["path"], digest=run.base["digest"], trained=trained)
        log.progress.say(
            f"LoRA: {trained:,} of {whole:,} parameters are trained ({trained / whole:.2%}). The "
            f"others stay as in {run.base['path']}."
        )
    if plan.requested is not None and not plan.is_new:
        log.event("longer", steps=run.last_step)
    for decision in run.decisions:
        log.event("speedup", name=decision.name, on=decision.on, reason=decision.reason)
    short = shortage(run, rows_are_auto=plan.rows_are_auto)
    for note in [*checkpointing_notes(run.decisions), *short]:
        log.progress.say(note)
    for difference in differences:
        log.event("difference", text=difference)
        log.progress.say(difference)
    lines = []
    members = run.dataset.members if isinstance(run.dataset, MixedDataset) else ()
    for member in sorted(members, key=lambda member: -member.share):
        path, share = str(member.dataset.path), member.share
        tokens = epoch_tokens(member.dataset, run.config.data.seq_len)
        passes = share * run.last_step * run.tokens_per_step / tokens
        log.event("data", name=member.name, path=path, share=share, passes=passes)
        lines.append(
            f"{member.name}: {share:.1%} of the sequences, read {passes:.3g} times in this run."
        )
    if lines:
        log.progress.say(shortened(lines, 5, "\n"))
    warn_of_unscored(members_of(run.dataset), log.progress)
    warn_of_empty_steps(run, log.progress)
    known, rows, name = run.dataset.vocab_size, run.core.config.vocab_size, run.config.name
    if known < FEW_ROWS * rows:
        how = f", `flatout prepare ... --recipe {name}`" if run.config.data.tokenizer else ""
        log.progress.say(
            f"The tokenizer of the dataset has {known:,} tokens and the model {rows:,}: "
            f"{1 - known / rows:.0%} of its embedding is never used. Prepare the text with the "
            f"model's own tokenizer{how}, or set model.vocab_size=null."
        )
