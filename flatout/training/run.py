"""A run from its configuration to its summary: settle, build, resume, train, evaluate, save, sum
up.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from flatout.assembly.build import build
from flatout.assembly.parts import Decision
from flatout.assembly.preflight import check_places, open_dataset
from flatout.assembly.resolve import epoch_tokens, for_world_size, ops_of, resolve
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble, stored_decisions
from flatout.config.schema import RunConfig
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import MixedDataset, members_of
from flatout.data.store.shards import Dataset
from flatout.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FlatoutError,
    RunFailed,
    Stopped,
    in_shell,
)
from flatout.files import PART, copy_whole, understanding, writing_run
from flatout.hardware import Machine, pick_device, probe
from flatout.measured import advice, gains_here, gpu_name
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import Ranks, connect, disconnect, launcher
from flatout.progress import SILENT, Progress
from flatout.registry import RECIPES
from flatout.training.agreement import require_shared
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.read_write import load, load_weights
from flatout.training.evaluation import (
    EvaluationDropped,
    batch_shapes,
    warn_of_unscored,
    with_validation,
)
from flatout.training.finish import finish
from flatout.training.init_from import begin_from, run_of
from flatout.training.longer import Longer, lengthened, require_steps_left
from flatout.training.loop import (
    ends_early,
    environment_of,
    fit,
    keep_last,
    out_of_patience,
    reserve,
    saves_ended,
)
from flatout.training.metrics.log import Log
from flatout.training.metrics.observers import Observer
from flatout.training.out_of_memory import explained
from flatout.training.run_dir import layout
from flatout.training.run_dir.data_location import anywhere, require_tokenizer, stored_config
from flatout.training.run_dir.lock import hold_lock
from flatout.training.run_dir.lookup import resume_place
from flatout.training.signals import StopRequests
from flatout.training.warmup import warm_up
from flatout.trust import remember

DISK_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


@dataclass(frozen=True)
class Plan:
    """What every rank must agree on before a run is built."""

    config: RunConfig
    decisions: list[Decision]
    checkpoint: Path | None
    device_reason: str
    asked: RunConfig | None = None
    """Of a run that begins: the configuration as it was asked for. None where the folder holds the
    run already.
    """
    longer: Longer | None = None
    """Of a run that is made longer: what is written down once it is known that it can continue."""
    finished: dict[str, Any] | None = None
    """The summary of a run that has nothing left to do."""


def run_training(
    asked: RunConfig,
    place: Path,
    *,
    resume: str = "auto",
    trust_code: bool = False,
    observers: Sequence[Observer] = (),
    sample: Callable[[Run], str] | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Train the run that `asked` describes in the folder `place`, from its newest checkpoint if it
    has one; return its summary.

    `cache` holds what was measured on this hardware, which `auto` goes by; None: nothing.
    Raises: Stopped when a signal ended it after a save; UsageError before anything was changed;
            RunFailed.
    """
    check_places(asked)
    machine = probe()
    device = pick_device(asked.train.device, machine)
    torch.use_deterministic_algorithms(
        asked.train.deterministic
    )  # NCCL chooses its algorithms by it when the processes connect
    ranks = connect(device[0])
    with ExitStack() as stack:
        stack.callback(disconnect)
        if device[0] == "cpu" and ranks.world_size == 1:  # several ranks are busy beside each other
            warn_of_others(machine, progress)
        if ranks.rank == 0:
            stack.enter_context(hold_lock(place, progress=progress))
        dataset = open_dataset(asked, progress=progress)
        plan = agree(
            ranks,
            lambda: settle(
                asked, place, resume, trust_code, machine, ranks, device, dataset, cache, progress
            ),
        )
        if plan.finished is not None:
            return plan.finished
        require_shared(ranks, place)
        if plan.config.data.model_dump_json() != asked.data.model_dump_json():
            dataset = open_dataset(
                plan.config
            )  # of a mix, in the stored order, which belongs to what is read
        with exit_code_kept(place) if ranks.rank == 0 else nullcontext():
            mesh = make_mesh(plan.config.parallel, device[0])
            with progress.task("Building the model"):
                run = build(
                    plan.config,
                    machine=machine,
                    mesh=mesh,
                    dataset=dataset,
                    folder=place,
                    decisions=plan.decisions,
                )
            stack.callback(run.feed.close)
            with explained(run):
                differences = take_up(run, plan.checkpoint, progress)
                if mesh.is_main:
                    with writing_run(place):
                        keep(run, plan, progress)
                    say_unmeasured(run, plan, cache, progress)
                with writing_run(place):
                    return carry_out(run, plan, differences, observers, sample, progress)


def warn_of_others(machine: Machine, progress: Progress) -> None:
    """Say so when other processes use the cores: threads that wait for each other make that many
    times slower, not just slower.
    """
    busy_cores = psutil.cpu_percent(interval=0.2) / 100 * machine.cores
    if torch.get_num_threads() > 1 and busy_cores > 0.4:
        progress.say(
            f"Other processes use {busy_cores:.1f} of {machine.cores} cores. Threads that wait for each other can then be several times slower: "
            "set OMP_NUM_THREADS=1, or OMP_WAIT_POLICY=passive, or wait."
        )


@contextmanager
def exit_code_kept(place: Path) -> Iterator[None]:
    """Say in the run folder how the process ended, as schedulers need it; one that is killed, or
    never began a run, leaves nothing.
    """
    with writing_run(place):
        layout.clear_exit_code(place)
    try:
        yield
    except BaseException as error:
        code = (
            error.exit_code
            if isinstance(error, FlatoutError)
            else 128 + signal.SIGINT
            if isinstance(error, KeyboardInterrupt)
            else 1
        )
        if (place / layout.CONFIG).exists():
            layout.write_exit_code(place, code)
        raise
    layout.write_exit_code(place, 0)


def agree(ranks: Ranks, decide: Callable[[], Plan]) -> Plan:
    """Let the main rank decide, and return its plan on every rank: clocks and measurements differ,
    plans must not.
    """
    if ranks.world_size == 1:
        return decide()
    box: list[Plan | None] = [None]
    try:
        if ranks.rank == 0:
            box[0] = decide()
    finally:
        torch.distributed.broadcast_object_list(
            box, src=0
        )  # nothing, when the main rank failed: the others must not wait for ever
    if box[0] is None:
        raise RunFailed(
            "The main process could not start the run.", fix="Its own message says why."
        )
    return box[0]


def settle(
    asked: RunConfig,
    place: Path,
    resume: str,
    trust_code: bool,
    machine: Machine,
    ranks: Ranks,
    device: tuple[str, str],
    dataset: Dataset | MixedDataset,
    cache: Path | None,
    progress: Progress,
) -> Plan:
    """Decide, under the lock, what is run: the stored configuration when the folder holds a run,
    else a new one.

    Raises: ConfigError when `asked` contradicts the stored configuration; UntrustedCode when that
            names code which `asked` does not.
    """
    own_folder(place)
    stored = stored_config(place, asked, trust_code=trust_code) if resume != "never" else None
    if stored is not None:
        remember(place, stored.references())
    with writing_run(place):
        checkpoint = layout.resume_from(place, resume_place(resume), progress=progress)
    if stored is not None or checkpoint is not None:
        require_tokenizer(
            place if stored is not None or checkpoint is None else run_of(checkpoint) or place,
            dataset,
            checkpoint,
        )
    if stored is not None:
        return resumed(
            stored,
            asked,
            place,
            resume_place(resume),
            checkpoint,
            machine,
            ranks,
            device,
            dataset,
            progress,
        )
    with progress.task("Settling the configuration"):
        config, decisions = resolve(
            asked.with_values({"train.device": device[0]}),
            machine=machine,
            dataset=dataset,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            measured=gains_here(machine, device[0], cache),
        )
    if asked.train.patience and not with_validation(members_of(dataset)):
        raise DataError(
            "train.patience waits for a better validation loss, and there is no validation text.",
            fix="Leave train.patience out.",
        )
    if checkpoint is not None and asked.train.init_from is not None:
        raise ConfigError(
            "--resume takes everything from another run, train.init_from only its weights.",
            fix="Give one of the two.",
        )
    require_steps_left(place, config, checkpoint)
    config = begin_from(config, dataset, ops_of(assemble(decisions)), progress=progress)
    return Plan(anywhere(config), decisions, checkpoint, device[1], asked=asked)


def resumed(
    stored: RunConfig,
    asked: RunConfig,
    place: Path,
    resume: str,
    checkpoint: Path | None,
    machine: Machine,
    ranks: Ranks,
    device: tuple[str, str],
    dataset: Dataset | MixedDataset,
    progress: Progress,
) -> Plan:
    """Return the plan of a run that its folder holds already: it resumes, is made longer, or is
    finished.

    Raises: ConfigError when `asked` states a length that it cannot have.
    """
    summary = layout.read_summary(place)
    first = layout.read_asked(place)
    longer = lengthened(
        place,
        stored,
        asked,
        checkpoint,
        resume=resume,
        dataset=dataset,
        machine=machine,
        progress=progress,
    )
    if longer is not None:
        stored, checkpoint = longer.config, longer.checkpoint
    if (
        summary is not None
        and checkpoint is not None
        and (how_to_go_on := finished(place, stored, checkpoint, summary))
    ):
        progress.say(f"{place} is finished; its results are below. To train on, {how_to_go_on}.")
        kept = stored_decisions(stored, machine, asked=first)
        return Plan(stored, kept, checkpoint, device[1], finished=summary)
    if longer is not None:
        progress.say(longer.said)
    if device[0].partition(":")[0] != stored.train.device.partition(":")[0]:
        progress.say(
            f"This run started on {stored.train.device} and resumes on {device[0]}: losses will differ in the last bits."
        )
    if (
        longer is None
        and (known := layout.read_config(place)) is not None
        and stored.data != known.data
    ):
        layout.write_config(place, stored)  # moved data is found by `eval` too
    config = for_world_size(stored.with_values({"train.device": device[0]}), ranks.world_size)
    kept = stored_decisions(config, machine, asked=first)
    return Plan(config, kept, checkpoint, device[1], longer=longer)


def finished(
    place: Path, stored: RunConfig, checkpoint: Path, summary: Mapping[str, Any]
) -> str | None:
    """Return how a run that is finished could be trained on; None when it is not: there are steps,
    and patience, left.
    """
    step = catalog.step_of(checkpoint)
    if step >= (stored.train.steps or 0):
        if stored.schedule.kind == "cosine":
            return f"start another run: --resume {in_shell(place)} --run-dir DIR, with a larger train.steps"
        return f"set train.steps to more than {stored.train.steps}"
    with understanding(place / layout.SUMMARY):
        waited = (
            summary.get("stopped_early")
            and step == summary["steps"]
            and out_of_patience(stored.train, step, summary["best_step"])
        )
    if waited:
        return f"set train.patience to more than {stored.train.patience}, or to 0"
    return None


def keep(run: Run, plan: Plan, progress: Progress = SILENT) -> None:
    """Write down what a run that begins was settled to be: nothing is, before it is known that it
    can begin.

    Raises: HardwareError when the disk is too full; CheckpointError when the folder of its
            checkpoints is another run's.
    """
    parameters = sum(p.numel() for p in run.core.parameters())
    needed_bytes = DISK_BYTES_PER_PARAMETER * parameters * (run.config.checkpoint.keep + 2)
    layout.require_free_disk(run.folder, needed_bytes, directory=run.config.checkpoint.dir)
    if plan.longer is not None:
        plan.longer.store(run.folder, progress=progress)
    if plan.asked is not None:
        layout.write_config(run.folder, plan.config, asked=plan.asked)
        copy_whole(
            members_of(run.dataset)[0].dataset.path / TOKENIZER, run.folder / TOKENIZER
        )  # a trained model can be tried without its data


def say_unmeasured(run: Run, plan: Plan, cache: Path | None, progress: Progress) -> None:
    """Say of a run that begins on a GPU on which nothing has been measured how that is done; once a
    GPU.
    """
    gpu = gpu_name(run.machine, str(run.mesh.device))
    if cache is None or gpu is None or plan.checkpoint is not None:
        return
    line = advice(gpu, run.config.name if run.config.name in RECIPES.names() else "RECIPE", cache)
    if line is not None:
        progress.say(line)


def own_folder(place: Path) -> None:
    """Check that the folder is empty, a run's, or that of a first start which was killed before
    there was a run.

    Raises: CheckpointError when it holds other files: a run is not mixed with them.
    """
    for name in layout.WRITTEN:
        for half in place.glob(f"{name}.*{PART}"):
            half.unlink()
    found = sorted(path.name for path in place.iterdir() if path.name != layout.LOCK)
    if not {layout.CONFIG, layout.ASKED}.intersection(found) and (
        others := [name for name in found if name not in layout.STARTED]
    ):
        raise CheckpointError(
            f"{place} is not a run folder; it holds {', '.join(others[:4])}.",
            fix="Choose a new folder with --run-dir DIR.",
        )


def take_up(run: Run, checkpoint: Path | None, progress: Progress) -> list[str]:
    """Put into a run that is built what it begins from, if anything, and return the differences
    that should be said aloud.

    Raises: CheckpointError when it does not fit; nothing is written by then.
    """
    if checkpoint is not None:
        run.resumed_from = str(checkpoint)
        return load(
            run,
            checkpoint,
            environment=environment_of(run),
            check=catalog.check_size,
            progress=progress,
        )
    if run.config.train.init_from is not None:
        load_weights(
            run, Path(run.config.train.init_from), check=catalog.check_size, progress=progress
        )
    return []


def carry_out(
    run: Run,
    plan: Plan,
    differences: Sequence[str],
    observers: Sequence[Observer],
    sample: Callable[[Run], str] | None,
    progress: Progress,
) -> dict[str, Any]:
    """Train a run that is built, from where its checkpoint left it, to its summary."""
    if run.mesh.is_main:
        (run.folder / layout.SUMMARY).unlink(
            missing_ok=True
        )  # of an early end that is now trained on
    parameters = sum(p.numel() for p in run.core.parameters())
    say = progress.say if run.mesh.is_main else None
    with (
        Log(run, observers) as log,
        StopRequests(say=say, launcher=launcher()) as stop,
        saves_ended(run, log, progress=progress),
    ):
        log.event(
            "resume" if plan.checkpoint else "start",
            from_checkpoint=run.resumed_from,
            last_step=run.last_step,
            init_from=run.config.train.init_from,
            parameters=parameters,
            **_facts(run, plan),
        )
        if plan.longer is not None:
            log.event("longer", steps_before=plan.longer.steps_before, steps=run.last_step)
        for decision in run.decisions:
            log.event("speedup", name=decision.name, on=decision.on, reason=decision.reason)
        for difference in differences:
            log.event("difference", text=difference)
            progress.say(difference)
        for part in shares(run):
            log.event("data", **part)
            progress.say(
                f"{part['name']}: {part['share']:.1%} of the windows; the whole run reads its text {part['passes']:.3g} times."
            )
        warn_of_unscored(members_of(run.dataset), progress)
        if plan.checkpoint is None and run.config.train.init_from is not None:
            with log.aside():
                keep_last(
                    run, log, progress=progress
                )  # from here on the run no longer needs the one it began from
        log.start()
        run.feed.prime(run.last_step - run.step, progress=progress)
        warm_up(run, log, eval_shapes=batch_shapes(run), progress=progress)
        reserve(run, log, progress=progress)
        stop.waits_for = "the micro-batch, evaluation or save in progress"
        fit(run, log, stop, drop=stop.asked_within_step, sample=sample, progress=progress)
        if run.step < run.last_step and not ends_early(run):
            _stop(run, log, progress)
        stop.waits_for = "the batch of the final evaluation"
        try:
            summary = finish(run, log, sample, progress, drop=stop.asked_within_step)
        except EvaluationDropped:
            _stop(run, log, progress)
        log.end(summary)
    return summary


def shares(run: Run) -> Iterator[dict[str, Any]]:
    """Yield, for each data set of a mix, its share of the windows and how often the whole run reads
    it through.
    """
    if isinstance(run.dataset, MixedDataset):
        for part in run.dataset.members:
            own_tokens = epoch_tokens(part.dataset, run.config.data.seq_len)
            passes = part.share * run.last_step * run.tokens_per_step / own_tokens
            yield {
                "name": part.name,
                "path": part.dataset.origin,
                "share": part.share,
                "passes": passes,
            }


def _facts(run: Run, plan: Plan) -> dict[str, Any]:
    return {
        "machine": run.machine.describe(),
        "device": str(run.mesh.device),
        "device_reason": plan.device_reason,
        "world_size": run.mesh.world_size,
        "peak_tflops": run.peak.tflops if run.peak else None,
        "peak_source": run.peak.source if run.peak else None,
        "environment": environment_of(run),
    }


def _stop(run: Run, log: Log, progress: Progress) -> NoReturn:
    """Save and leave, so that the same command goes on."""
    keep_last(run, log, progress=progress)
    log.event("stop")
    log.close()
    raise Stopped(
        f"Stopped at step {run.step} of {run.last_step}, and saved.",
        fix="Run the same command again to continue.",
    )
