"""The run plan: the config to train and where to start, decided on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flatout.assembly.batch import for_world_size
from flatout.assembly.choices import Decision, parts_of, stored_decisions
from flatout.assembly.preflight import open_dataset
from flatout.assembly.resolve import padded_steps, resolve, steps_stated, with_evaluations
from flatout.config.schema import RunConfig, flat
from flatout.config.trust import remember
from flatout.data.store.mix import AnyDataset, members_of
from flatout.distributed.rendezvous import Ranks
from flatout.errors import CheckpointError, ConfigError, DataError, UsageError
from flatout.hardware.machine import CpuTimes, Machine
from flatout.models.lora import require_weights
from flatout.progress import Progress
from flatout.storage.files import PART, writing_run
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import shortened
from flatout.training.checkpoint import catalog
from flatout.training.evaluation import with_validation
from flatout.training.init_from import resolve_init_from, run_of
from flatout.training.metrics.observers import Observer
from flatout.training.run_dir import layout
from flatout.training.run_dir.data_location import (
    data_facts,
    located,
    require_same_data,
    require_tokenizer,
)
from flatout.training.run_dir.lookup import resume_path
from flatout.training.run_dir.runlog import RunLog
from flatout.training.run_dir.start import (
    Start,
    find_start,
    is_own,
    require_steps_left,
)
from flatout.training.upload.restore import restore_lost

if TYPE_CHECKING:
    from flatout.assembly.run import Run

LATER_S = 2.0
"""How much later other ranks fail than rank 0, whose error is shown first: a launcher ends all."""
PATHS_OF_DATA = ("data.path", "data.mix")


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `run_training`, with the machine and the data that the run uses."""

    config: RunConfig
    folder: Path
    resume: str
    """auto, never, or a checkpoint or run to resume from."""
    trust_code: bool
    """Whether the run's custom code may be imported."""
    machine: Machine
    ranks: Ranks
    device: str
    device_reason: str
    dataset: AnyDataset
    observers: Sequence[Observer]
    sample: Callable[[Run], str] | None
    cache: Path | None
    """Cache of measurements on this hardware, if any."""
    progress: Progress
    began: CpuTimes
    """What all processes had computed when the run started."""


@dataclass(frozen=True)
class RunPlan:
    """The decisions that all ranks must share before the run is built."""

    start: Start
    config: RunConfig
    """Fully resolved."""
    decisions: list[Decision]
    stored: RunConfig | None = None
    """What config.yaml is to have once the run is known to start. None: what it has."""
    requested: RunConfig | None = None
    """The configuration as the user wrote it, if it is new or has a new length."""
    rows_are_auto: bool = False
    """Whether flatout chose the rows of a micro-batch."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that it resumes from."""
        return self.start.checkpoint

    @property
    def is_new(self) -> bool:
        """Whether the run has never saved."""
        return self.start.stored is None


def require_same_settings(ranks: Ranks, config: RunConfig, dataset: AnyDataset) -> None:
    """Check that all processes have the same settings, tokens, and versions of flatout and torch.

    Only rank 0's are used. The paths of datasets may differ between machines.
    Raises: ConfigError, on every rank, that names a process and what differs.
    """
    if ranks.world_size == 1:
        return
    settings = {
        key: value for key, value in flat(config.to_dict()).items() if key not in PATHS_OF_DATA
    }
    digests = [one["digest"] for one in data_facts(dataset)]
    settings["data"] = [digests, [part.share for part in members_of(dataset)]]
    settings |= {"flatout": import_module("flatout").__version__, "torch": torch.__version__}
    found: list[JsonObject] = [{}] * ranks.world_size
    torch.distributed.all_gather_object(found, settings)
    for rank, others in enumerate(found):
        if others != found[0]:
            keys = sorted(found[0].keys() | others.keys())
            differ = [key for key in keys if found[0].get(key) != others.get(key)]
            text = "; ".join(
                "the tokens of the dataset"
                if key == "data"
                else f"{key} is {found[0].get(key)} on rank 0 and {others.get(key)} on rank {rank}"
                for key in differ
            )
            raise ConfigError(
                f"The processes of this run were started with different settings: {text}.",
                fix="Start all of them with the same command, dataset and environment.",
            )


def agree_on_plan(request: RunRequest) -> RunPlan:
    """Return rank 0's plan on every rank: clocks and measurements differ between ranks.

    Raises: on rank 0, as `plan_run`; on the others, UsageError when planning failed,
            which the command line shows later than rank 0's error.
    """
    if request.ranks.world_size == 1:
        return plan_run(request)
    box: list[RunPlan | None] = [None]
    known = _digests_together(request.folder, request.ranks)
    try:
        if request.ranks.rank == 0:
            box[0] = plan_run(request, known)
    finally:
        # even if rank 0 failed: the others would wait forever
        torch.distributed.broadcast_object_list(box, src=0)
    if box[0] is None:
        time.sleep(LATER_S)
        raise UsageError("Rank 0 could not start the run.", fix="See the message of rank 0.")
    return box[0]


def _digests_together(folder: Path, ranks: Ranks) -> dict[Path, str]:
    """Read the newest checkpoint of a run, each rank its own files, and return their SHA-256."""
    newest: list[Path | None] = [None]
    if ranks.rank == 0 and (steps := {*catalog.steps(folder)} - RunLog(folder).rejected):
        newest[0] = catalog.checkpoint_path(folder, max(steps))
    torch.distributed.broadcast_object_list(newest, src=0)
    found: list[dict[Path, str]] = [{}] * ranks.world_size
    own = catalog.digests_of(newest[0], ranks.rank, ranks.world_size) if newest[0] else {}
    torch.distributed.all_gather_object(found, own)
    return {path: sha for each in found for path, sha in each.items()}


def plan_run(request: RunRequest, known: Mapping[Path, str] | None = None) -> RunPlan:
    """Return the plan for the run in the locked run directory, or for a new run.

    `known` is the SHA-256 of files of its checkpoints that have been read already.

    Raises: CheckpointError, DataError when a file cannot be read; ConfigError when the request
            contradicts the stored configuration; UntrustedCode when the stored configuration names
            code that the request does not.
    """
    folder, dataset = request.folder, request.dataset
    require_run_directory(folder)
    restored = _restore_lost(request)
    try:
        start = _start(request, known)
    except catalog.NoneComplete:
        if restored or not _restore_lost(request, are_damaged=True):
            raise
        start = _start(request, known)
    if start.stored is not None:
        require_tokenizer(folder, dataset, start.checkpoint)
        plan = _plan_stored(request, start, start.stored)
    else:
        if start.checkpoint is not None:
            require_tokenizer(run_of(start.checkpoint) or folder, dataset, start.checkpoint)
        plan = _plan_new(request, start)
    patience = start.summary is None and plan.config.train.patience
    if patience and not with_validation(members_of(dataset)):
        raise DataError(
            "train.patience needs a validation loss, but there is no validation text.",
            fix="Set train.patience=0.",
        )
    if start.message is not None:
        request.progress.say(start.message)
    if prompt := plan.config.train.sample_prompt:
        try:
            dataset.tokenizer.encode(prompt)
        except DataError as error:
            what = f"train.sample_prompt={prompt!r}: {error.what}"
            raise DataError(what, fix=error.fix) from error
    return plan


def _restore_lost(request: RunRequest, *, are_damaged: bool = False) -> bool:
    """Restore the run from its remote copy if that is needed and possible, and return whether."""
    with writing_run(request.folder):
        return restore_lost(
            request.folder,
            request.config,
            resume=request.resume,
            trust_code=request.trust_code,
            are_damaged=are_damaged,
            progress=request.progress,
        )


def _start(request: RunRequest, known: Mapping[Path, str] | None) -> Start:
    """Return where the run starts, after what killed processes left has been removed."""
    folder, config, progress = request.folder, request.config, request.progress
    resume = resume_path(request.resume)
    with writing_run(folder):
        for name in [] if resume == "never" else catalog.remove_leftovers(folder):
            progress.say(f"Removed {name}, left by a save that was killed.")
    return find_start(
        folder,
        config,
        resume,
        steps_of=lambda stored: steps_stated(
            stored, config.train, request.dataset, padded_steps(stored, request.dataset)
        ),
        trust_code=request.trust_code,
        known=known,
        progress=progress,
    )


def _plan_new(request: RunRequest, start: Start) -> RunPlan:
    """Return the plan for a new run, from step 0 or from another run's checkpoint."""
    dataset, ranks, checkpoint = request.dataset, request.ranks, start.checkpoint
    with request.progress.task("Resolving the configuration"):
        config, decisions = resolve(
            request.config.with_values({"train.device": request.device}),
            machine=request.machine,
            dataset=dataset,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            cache=request.cache,
        )
    if checkpoint is not None and config.train.init_from is not None:
        raise ConfigError(
            "--resume and train.init_from exclude each other: one takes a run's whole state, "
            "the other only its weights.",
            fix="Use one of the two.",
        )
    if checkpoint is None:
        require_weights(config.lora, config.train.init_from)
    require_steps_left(request.folder, config, checkpoint)
    ops = parts_of(config).ops()
    config = resolve_init_from(config, dataset, ops, progress=request.progress)
    config = _with_fewer_rows(request, config).with_values(located(config.data))
    chooses_rows = request.config.batch.chooses_rows
    return RunPlan(start, config, decisions, config, request.config, chooses_rows)


def _with_fewer_rows(request: RunRequest, config: RunConfig) -> RunConfig:
    """Return a new run's configuration with the fewer rows of an earlier start, if there are any.

    That start had the same request, ran out of memory, and ended before its first checkpoint.
    """
    known, requested = layout.read_config(request.folder), layout.read_requested(request.folder)
    if known is None or requested != request.config or not request.config.batch.chooses_rows:
        return config
    chosen, rows = config.batch.rows_per_device, known.batch.rows_per_device
    if not isinstance(chosen, int) or not isinstance(rows, int) or rows >= chosen:
        return config
    per_step = chosen * (config.batch.accumulate or 1)
    if per_step % rows:  # from a different number of processes
        return config
    return config.with_values({"batch.rows_per_device": rows, "batch.accumulate": per_step // rows})


def _plan_stored(request: RunRequest, start: Start, config: RunConfig) -> RunPlan:
    """Return the plan for a stored run: it resumes, possibly with a new length, or is finished."""
    folder, checkpoint = request.folder, start.checkpoint
    remember(folder, request.config.references())
    known, requested = layout.read_config(folder), layout.read_requested(folder)
    stored = config if start.requested or (known and known.data != config.data) else None
    config = with_evaluations(config, request.dataset)
    if checkpoint is not None and is_own(checkpoint, folder):
        require_same_data(folder, dataset_of(request, config), checkpoint)
    if start.summary is None:
        trained_on, here = config.train.device, request.device
        if here.partition(":")[0] != trained_on.partition(":")[0]:
            request.progress.say(
                f"This run started on {trained_on} and resumes on {here}: "
                "losses will differ in the last bits."
            )
        config = config.with_values({"train.device": here})
        config = for_world_size(config, request.ranks.world_size)
    decisions = stored_decisions(config, request.machine)
    is_auto = (requested or config).batch.chooses_rows and request.config.batch.chooses_rows
    return RunPlan(start, config, decisions, stored, start.requested, is_auto)


def dataset_of(request: RunRequest, config: RunConfig) -> AnyDataset:
    """Return the dataset of a planned run. A mix is read in the order of the stored config."""
    if config.data.model_dump_json() == request.config.data.model_dump_json():
        return request.dataset
    return open_dataset(config)


def require_run_directory(folder: Path) -> None:
    """Check that `folder` is empty, or contains a run or the files of a killed first start.

    Raises: CheckpointError when it contains other files, or a link to missing checkpoints.
    """
    checkpoints = folder / catalog.CHECKPOINTS
    if checkpoints.is_symlink() and not checkpoints.exists():
        raise CheckpointError(
            f"{checkpoints} is a link to {checkpoints.readlink()}, which does not exist.",
            fix="Mount that disk, or create the directory to start over.",
        )
    for name in layout.WRITTEN:
        for unfinished in folder.glob(f"{name}.*{PART}"):
            unfinished.unlink()
    found = sorted(path.name for path in folder.iterdir() if path.name != layout.LOCK)
    started = {"base", catalog.CHECKPOINTS} | ({layout.EVENTS} if RunLog(folder).origin else set())
    others = [name for name in found if name not in started]
    if others and layout.CONFIG not in found:
        raise CheckpointError(
            f"{folder} is not a run directory. It contains {shortened(others)}.",
            fix="Choose a new directory with --run-dir DIR.",
        )
