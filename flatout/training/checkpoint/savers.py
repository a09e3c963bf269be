"""Saves a run's state in a thread, while training continues on a copy of it, or waits.

A save has stages: a snapshot in the loop, a write on every rank, a merge on rank 0. All
ranks agree between stages, in the loop. A kill at any moment leaves earlier checkpoints untouched.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.assembly.run import Saved
from flatout.distributed.mesh import Mesh
from flatout.progress import SILENT, Progress
from flatout.storage.files import sync, write_whole
from flatout.storage.json_io import JsonObject, read_json
from flatout.storage.whole import MANIFEST, beside, entry_of, publish
from flatout.training.agreement import WRITING, Vote, together
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint import tensors as slices
from flatout.training.checkpoint.catalog import INFO, Entry, prune
from flatout.training.checkpoint.host_copy import Files, HostCopy, bytes_of
from flatout.training.checkpoint.state import STATE, join_values, optimizer_value
from flatout.training.checkpoint.weights import cuts_of, weights_and_aliases

if TYPE_CHECKING:
    from flatout.assembly.run import Run

Job = Future[None]
"""A stage that has been started. `result` waits for its end, and raises its error."""


def in_background() -> Saver:
    """Return a saver that copies the state in the loop and writes it in a thread.

    Memory: one copy of this rank's share of the state, on the host, from the first save to
            the end of the run. If the host has no room for it, the loop writes the state.
    """
    return Saver(HostCopy())


def save(
    run: Run,
    *,
    environment: JsonObject | None = None,
    info: JsonObject | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Write the run's state as `step-N` in the loop, keep all others, and return its path.

    Raises: as `Saver.save`.
    """
    Saver().save(run, environment=environment or {}, keep=None, info=info, progress=progress)
    return catalog.checkpoint_path(run.folder, run.step)


@dataclass
class _Pending:
    """A checkpoint that is being saved."""

    step: int
    path: Path
    """Path of the checkpoint once it is complete."""
    temporary: Path
    mesh: Mesh
    began_s: float
    blocked_s: float = 0.0
    is_abandoned: bool = False
    remaining: list[Callable[[], object]] = field(default_factory=list)
    """The stages that have not been started."""
    job: Job = field(default_factory=Job)
    """The stage that has been started last."""

    def start(self) -> None:
        """Start the next stage in a thread.

        A process that exits does not wait for it: a half-written checkpoint does not count.
        """
        job, work = Job(), self.remaining.pop(0)

        def do() -> None:
            try:
                work()
                job.set_result(None)
            except BaseException as error:  # raised by `result`, where all ranks learn of it
                job.set_exception(error)

        self.job = job
        Thread(target=do, name="checkpoint", daemon=True).start()

    def remove(self) -> None:
        """Delete what has been written."""
        if self.mesh.is_main:
            shutil.rmtree(self.temporary, ignore_errors=True)


class Saver:
    """Writes one checkpoint at a time. Without a `copy` of the state, `save` waits for it.

    Every rank calls every method, at the same points.
    """

    def __init__(self, copy: HostCopy | None = None) -> None:
        self.newest_step: int | None = None
        """The last step that this process started to save."""
        self._copy = copy
        self._pending: _Pending | None = None
        self._vote: Vote | None = None
        self._saved: list[Saved] = []

    def save(
        self,
        run: Run,
        *,
        environment: JsonObject,
        keep: int | None,
        keep_every: int | None = None,
        info: JsonObject | None = None,
        progress: Progress = SILENT,
    ) -> None:
        """Write the state as `step-N`, or start to, and then delete what `prune` does not keep.

        `environment` (`hardware.fingerprint()`) is stored, so that `load` can report changes, and
        `info` for lists of checkpoints. Checkpoints of later steps are deleted.

        Raises: on every rank, also for the previous save: RunFailed when a file cannot be written;
                CheckpointError when the state contains something that a checkpoint cannot store.
        """
        self.wait(progress)
        began_s, mesh, copy = time.perf_counter(), run.mesh, self._copy
        best_step = run.best_step  # as of this checkpoint: a later best is not on disk yet
        path = catalog.checkpoint_path(run.folder, run.step)
        name = mesh.broadcast_object(beside(path).name)
        pending = _Pending(run.step, path, path.with_name(name), mesh, began_s)

        def make() -> None:
            catalog.make_folder(path.parent)
            pending.temporary.mkdir()

        def taken() -> Snapshot:
            snapshot = take(run, environment, info)
            if copy is None:
                return snapshot
            if copy.has_room(bytes_of(snapshot.tensors), run):
                copies = copy.of(snapshot.tensors, snapshot.buffers, mesh.device)
                return replace(snapshot, tensors=copies, is_copied=True)
            progress.say(
                "The host has no memory for a copy of the state: "
                "the loop waits until it is written."
            )
            return snapshot

        def write() -> None:
            if copy is not None:
                copy.wait()
            write_share(snapshot, pending.temporary)

        def merge() -> None:
            if pending.is_abandoned:
                pending.remove()
            elif mesh.is_main:
                complete(snapshot, pending.temporary, path, run.folder)
                prune(run.folder, keep, best_step, keep_every)

        def write_and_merge() -> None:
            write()
            merge()

        try:
            together(mesh, make if mesh.is_main else lambda: None, WRITING)
            snapshot = together(mesh, taken, WRITING)
        except BaseException:
            pending.remove()
            raise
        pending.remaining = [write_and_merge] if mesh.world_size == 1 else [write, merge]
        pending.start()
        self._pending, self.newest_step = pending, run.step
        pending.blocked_s = time.perf_counter() - began_s
        if not snapshot.is_copied:
            self.wait(progress)

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints completed since the last call. Called after every step.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._pending is not None and self._all_ready(self._pending):
            self._advance(self._pending)
        saved, self._saved = self._saved, []
        return saved

    def wait(self, progress: Progress = SILENT) -> None:
        """Wait until the checkpoint that is being written, if any, is complete.

        Raises: as `save`: what went wrong in the thread.
        """
        if self._pending is None:
            return
        with progress.task(f"Saving step {self._pending.step}"):
            while self._pending is not None:
                self._advance(self._pending)

    def before_update(self) -> None:
        """Make the optimizer's step wait, on the GPU, until the weights have been copied."""
        if self._pending is not None and self._copy is not None:
            self._copy.before_update()

    def close(self, progress: Progress = SILENT) -> None:
        """Wait for the checkpoint being written, without asking other ranks.

        A failure here is reported, not raised.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.job.result()
        except Exception as error:  # the error that ends the run matters more
            progress.say(f"Step {pending.step} could not be saved: {error}")
        else:
            if not pending.remaining:
                self._record(pending)

    def abandon(self) -> None:
        """Let a thread that still writes remove the files instead of completing the checkpoint.

        Returns at once. If the process ends first, the run's next start removes them. Earlier
        checkpoints are not affected.
        """
        if self._pending is not None:
            self._pending.is_abandoned = True
            self._pending = None

    def _all_ready(self, pending: _Pending) -> bool:
        """Return whether every rank has finished its stage. With several ranks, one step late."""
        if pending.mesh.world_size == 1:
            return pending.job.done()
        before, self._vote = self._vote, Vote(pending.mesh, pending.job.done())
        return before is not None and before.count() == pending.mesh.world_size

    def _advance(self, pending: _Pending) -> None:
        """Wait for the current stage on all ranks, then start the next or record the checkpoint."""
        began_s = time.perf_counter()
        self._vote = None
        try:
            together(pending.mesh, pending.job.result, WRITING)
        except BaseException as error:
            if pending.job.done():
                pending.remove()
            # else an interrupt leaves the thread running: the run's next start cleans up
            if isinstance(error, Exception):
                self._pending = self.newest_step = None
            raise
        if pending.remaining:
            pending.start()
        else:
            self._pending = None
        pending.blocked_s += time.perf_counter() - began_s
        if self._pending is None:
            self._record(pending)

    def _record(self, pending: _Pending) -> None:
        seconds = time.perf_counter() - pending.began_s
        self._saved.append(Saved(pending.step, pending.path, seconds, pending.blocked_s))


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a run's state at one step. Writing it does not read the run."""

    rank: int
    world_size: int
    tensors: Files
    """For each file, this rank's parts of the tensors that it writes."""
    buffers: frozenset[str]
    """Names of the tensors that are not parameters: a forward pass may change them."""
    entries: Mapping[str, Entry]
    """Index entries of the tensors."""
    documents: dict[str, JsonObject]
    """The JSON files on rank 0, whose index.json lacks the tensors. In a pipeline, `optimizer` has
    the values of another part, on its first rank.
    """
    is_copied: bool = False
    """Whether the tensors are copies, so that the run may change meanwhile."""


def take(run: Run, environment: JsonObject, info: JsonObject | None = None) -> Snapshot:
    """Return this rank's share of the current state. Its tensors share the run's memory.

    Raises: CheckpointError when the state contains something that a checkpoint cannot store.
    """
    rank, world_size = run.mesh.rank, run.mesh.world_size
    per_part = world_size // run.mesh.pipeline  # ranks that have the same tensors
    tensors: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, Entry] = {}
    buffers: set[str] = set()
    for item in STATE:
        mine = slices.owned(item.tensors(run), rank=rank % per_part, world_size=per_part)
        if mine:
            cuts = cuts_of(run.core, mine)
            file = f"{item.prefix.rstrip('/')}-{rank:05d}.safetensors"
            tensors[file] = {own: part for _, own, _, part in slices.pieces(mine, cuts)}
            entries |= slices.entries(file, mine, cuts)
            buffers |= {
                name
                for name, tensor in mine.items()
                if item.name == "weights" and not isinstance(tensor, nn.Parameter)
            }
    documents: dict[str, JsonObject] = {}
    if run.mesh.is_main:
        base = {"base": run.base} if run.base else {}
        documents[catalog.INDEX] = {"aliases": weights_and_aliases(run.core)[1], **base}
        documents[catalog.STATE] = {
            "step": run.step,
            "world_size": world_size,
            "environment": environment,
            "values": {item.name: item.read(run) for item in STATE if item.used(run)},
        }
        if info is not None:
            documents[INFO] = info
    elif rank % per_part == 0:
        documents["optimizer"] = optimizer_value(run)
    return Snapshot(rank, world_size, tensors, frozenset(buffers), entries, documents)


def write_share(snapshot: Snapshot, temporary: Path) -> None:
    """Write this rank's slices, and a description of them for rank 0."""
    files: JsonObject = {}
    for name, tensors in snapshot.tensors.items():
        path = temporary / name
        slices.write(path, tensors)
        sync(path)
        files[name] = entry_of(path).model_dump()
    entries = {name: entry.model_dump() for name, entry in snapshot.entries.items()}
    value = snapshot.documents.get("optimizer")
    share = {"tensors": entries, "files": files, "optimizer": value}
    write_whole(_share(temporary, snapshot.rank), json.dumps(share))


def complete(snapshot: Snapshot, temporary: Path, final: Path, run_folder: Path) -> None:
    """Merge the shares of all ranks into the checkpoint `final`. Rank 0 only.

    Call it after every rank has written its share.
    """
    paths = [_share(temporary, rank) for rank in range(snapshot.world_size)]
    shares = [read_json(path) for path in paths]
    tensors = slices.merge(
        {name: Entry.model_validate(entry) for name, entry in share["tensors"].items()}
        for share in shares
    )
    index = {"tensors": {name: entry.model_dump() for name, entry in tensors.items()}}
    value = snapshot.documents[catalog.STATE]["values"]["optimizer"]
    join_values(value, [share["optimizer"] for share in shares if share["optimizer"]])
    for path in paths:
        path.unlink()
    files = {name: of_file for share in shares for name, of_file in share["files"].items()}
    for name, document in snapshot.documents.items():
        document = index | document if name == catalog.INDEX else document
        write_whole(temporary / name, json.dumps(document))
        files[name] = entry_of(temporary / name).model_dump()
    step = snapshot.documents[catalog.STATE]["step"]
    manifest = {
        "kind": "checkpoint",
        "format_version": catalog.FORMAT_VERSION,
        "step": step,
        "files": [*files.values()],
    }
    write_whole(temporary / MANIFEST, json.dumps(manifest))
    sync_logs(run_folder)
    publish(temporary, final)
    catalog.delete_later(run_folder, step)


def sync_logs(run_folder: Path) -> None:
    """Sync the lines that a run has logged, which nothing else does while it trains.

    So no power loss leaves a checkpoint without the records up to its step. A disk that fails is
    ignored: logs never stop a run.
    """
    with suppress(OSError):
        for path in run_folder.glob("*.jsonl"):
            if path.is_file():
                sync(path)
        sync(run_folder)


def _share(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank:05d}.json"
