"""Uploads the checkpoints of a run in a thread, while training continues.

The thread sends the newest checkpoint that the remote copy lacks, until it lacks none. So an
interrupted upload, also one of an earlier process, is continued. What waits is in the run
directory: a checkpoint that is deleted here before its turn is omitted. Only rank 0 has a thread.
All ranks write to one file system.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from flatout.config.sections import CheckpointConfig
from flatout.errors import CheckpointError, FlatoutError, in_shell, on_one_line, without_secrets
from flatout.progress import SILENT, Progress
from flatout.storage.files import FileEntry, entry_of
from flatout.storage.json_io import JsonObject
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import CLAIM, Claim, RemoteFolder, push
from flatout.storage.remote.parallel import Advance, transfer_all
from flatout.storage.remote.reading import Description
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run_dir.layout import LOGGER_STATES, SUMMARY, append_event
from flatout.training.upload.remote import (
    COMPRESSED,
    LOGGER_FILE,
    RUN_FILES,
    Record,
    RemoteCopy,
    Sender,
    Uploaded,
    next_folder,
    read_record,
    upload_url,
    write_record,
)

GRACE_S = 25.0
"""When a run that was asked to stop, or failed, no longer waits for its uploads: schedulers kill a
process 30 seconds after the signal, or later."""
STALL_S = 240.0
"""A finished run waits for its uploads until nothing has been sent for this long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0
"""Pauses after failed attempts. Each is twice as long as the one before."""
POLL_S = 0.05
Report = Callable[..., object]
"""Receives the kind of an event, and its fields."""


class TakenOver(CheckpointError):
    """The run was restored elsewhere, and continues there."""


class GivenUp(CheckpointError):
    """The run ended before everything was sent."""


class Uploader(Quiet):
    """An observer that uploads every saved checkpoint of a run directory to `url`.

    `claim` comes first, then `start`, and `close` at the end.
    """

    def __init__(self, run_folder: Path, url: str, *, compress: bool = False) -> None:
        self.url = without_secrets(url)
        """The URL, for messages."""
        self._run_folder = run_folder
        self._store = RemoteCopy(url)
        self._compress = compress
        self._record = Record(id="", url=url)
        """Its id is empty until the URL is claimed."""
        self._there: dict[int, Uploaded] = {}
        """The complete checkpoints in the remote copy by step."""
        self._is_there_known = False
        self._sent_files: dict[str, FileEntry] = {}
        """The files of the run directory that this process has sent, by name."""
        self._saved: SimpleQueue[int] = SimpleQueue()
        self._waiting: set[int] = set()
        """Steps that this process has saved, and not sent."""
        self._news: SimpleQueue[tuple[str, JsonObject]] = SimpleQueue()
        self._reason: str | None = None
        """Why the last attempt failed."""
        self._is_over = False
        """Whether another run directory sends there now."""
        self._wake, self._closing, self._given_up = Event(), Event(), Event()
        self._moved_s = 0.0
        self._report: Report
        self._thread = Thread(target=self._work, name="flatout-upload", daemon=True)

    def claim(self) -> None:
        """Check that the URL belongs to this run directory, or take it when it is empty.

        Raises: CheckpointError when it contains the checkpoints of another run or other files, or
                when this run was restored elsewhere; DataError when it cannot be written.
        """
        sender, record = self._store.sender(), read_record(self._run_folder, self._store.url)
        if sender is None and self._store.top.files():
            raise CheckpointError(
                f"{self.url} is not empty and is not the remote copy of a run.",
                fix="Set a different checkpoint.upload, or remove what is there.",
            )
        if record is None:
            if sender is not None and self._store.complete():
                raise CheckpointError(
                    f"{self.url} contains the checkpoints of another run, {sender.run} on "
                    f"{sender.host}.",
                    fix="Choose a run directory with a different name with --run-dir DIR, or set "
                    "a different checkpoint.upload.",
                )
            replaces = sender.id if sender else None
            record = Record(id=secrets.token_hex(16), url=self._store.url, replaces=replaces)
        elif sender is not None and sender.id not in (record.id, record.replaces):
            raise self._taken_over(sender)
        write_record(self._run_folder, record)
        if sender is None or sender.id != record.id:
            own = str(self._run_folder.absolute())
            self._store.write_sender(Sender(id=record.id, run=own, host=socket.gethostname()))
        self._record = record

    def start(self, report: Report) -> None:
        """Start the thread. `report` is called in this one."""
        self._report = report
        self._thread.start()

    def on_event(self, event: JsonObject) -> None:
        """Send a checkpoint that was just completed."""
        if event["event"] == "save":
            self._saved.put(event["step"])
            self._wake.set()

    def on_tick(self, step: int, last_step: int) -> None:
        """Report what was sent, dropped or failed since the last call."""
        while not self._news.empty():
            kind, fields = self._news.get()
            self._report(kind, **fields)

    def close(
        self,
        progress: Progress,
        since_stop_s: Callable[[], float | None] = lambda: None,
        advanced: Callable[[], object] = lambda: None,
    ) -> None:
        """Send the rest, and wait for it while it advances.

        `since_stop_s` returns how long ago the run was asked to stop, or None: after GRACE_S,
        nothing is waited for. `advanced` is called when something was sent. What is not sent is
        reported: the next start of the run sends it.
        """
        seen_s = self._moved_s = time.monotonic()
        self._closing.set()
        self._wake.set()
        with progress.task(f"Sending checkpoints to {self.url}"):
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if self._moved_s != seen_s:
                    seen_s = self._moved_s
                    advanced()
                if time.monotonic() - self._moved_s > STALL_S or (since_stop_s() or 0.0) > GRACE_S:
                    break
            self._given_up.set()
        self.on_tick(0, 0)
        unsent = [step for step in self._local() if step not in self._record.sent]
        if unsent and not self._is_over:
            reason = self._reason or "there was too little time"
            self._report("upload_pending", steps=unsent, url=self.url, reason=reason)

    def _work(self) -> None:
        """Send until there is nothing left to send after `close`."""
        pause_s = FIRST_PAUSE_S
        while True:
            self._wake.clear()  # before `_closing` is read, so that no call of `close` is missed
            is_last = self._closing.is_set()
            failed = False
            try:
                self._send_all(with_run_files=is_last)
                self._reason = None
            except GivenUp:
                return
            except TakenOver as error:
                self._is_over = True
                self._failed(error)
                return
            except Exception as error:  # training continues without uploads, whatever happens
                self._failed(error)
                failed = True
            if is_last:
                return
            self._wake.wait(pause_s if failed else None)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if failed else FIRST_PAUSE_S

    def _failed(self, error: Exception) -> None:
        """Report a failure, unless it is the same as before."""
        self._is_there_known = False  # an unfinished request may have changed it
        what = error.what if isinstance(error, FlatoutError) else str(error) or type(error).__name__
        reason = on_one_line(without_secrets(what)).rstrip(".")[:300]
        if reason != self._reason:
            fields = {"url": self.url, "reason": reason}
            fields |= {"fix": error.fix} if isinstance(error, TakenOver) else {}
            self._news.put(("upload_failed", fields))
        self._reason = reason

    def _send_all(self, *, with_run_files: bool) -> None:
        if not self._record.id:
            self.claim()
        if not self._is_there_known:
            self._there, self._is_there_known = self._store.complete(), True
            for last in self._there.keys() & set(self._record.sending):  # after a kill
                self._store.folder(self._there[last].folder).remove(CLAIM)
            self._remove_leftovers()
            newest = max(self._local(), default=None)
            if newest is not None and newest not in self._lacking():
                self._prune(newest)  # a kill may have come between upload and this
        while (step := self._next_step()) is not None:
            with _pinned(catalog.checkpoint_path(self._run_folder, step)) as (source, work):
                if source is not None:
                    self._send_checkpoint(step, source, work)
                    self._prune(step)
                    self._remove_leftovers()
        if with_run_files:
            self._send_run_files(RUN_FILES)

    def _remove_leftovers(self) -> None:
        """Delete interrupted uploads that nothing continues, and what another has replaced."""
        self._require_own()
        kept, unsent = {stored.folder for stored in self._there.values()}, self._lacking()
        for name, step in self._store.folders().items():
            if step not in unsent and name not in kept:
                self._store.delete(name)

    def _next_step(self) -> int | None:
        """Return the newest step that is not uploaded; report those deleted before their turn."""
        self._require_time()
        while not self._saved.empty():
            self._waiting.add(self._saved.get())
        local = self._local()
        for step in sorted(self._waiting - local.keys()):
            self._news.put(("upload_dropped", {"step": step, "url": self.url}))
        lacking = self._lacking()
        self._waiting &= lacking
        self._remember(local.keys() - lacking, lacking=lacking)
        return max(lacking, default=None)

    def _send_checkpoint(self, step: int, source: Path, work: Path) -> None:
        """Send a checkpoint: what describes it first, then its files, its manifest last."""
        began_s = time.monotonic()
        self._require_own()  # before anything there is replaced
        manifest = (source / catalog.MANIFEST).read_bytes()
        names = sorted(path.name for path in source.iterdir() if path.name != catalog.MANIFEST)
        claim, found = Claim(manifest=hashlib.sha256(manifest).hexdigest()), None
        # A complete one with other content stays until this one is complete.
        earlier = self._there[step].folder if step in self._there else None
        folder = next_folder(step, earlier)
        for name in [name for name, its in self._store.folders().items() if its == step]:
            if self._store.read(f"{name}/{CLAIM}") == claim.text().encode():
                folder, found = name, claim
            elif name != earlier:  # another interrupted upload
                self._store.delete(name)
        remote = self._store.folder(folder)
        sizes: list[int] = []
        with push(remote, manifest, claim, found) as sent:
            jobs = [
                partial(self._send_file, remote, source / name, work, sent, sizes) for name in names
            ]
            transfer_all(f"Sending step {step}", jobs, 0, SILENT)
            self._send_run_files([name for name in RUN_FILES if name != SUMMARY])
            self._require_time()
            self._write_record(sending=[step])
        self._there[step] = Uploaded(folder, manifest)
        self._waiting.discard(step)
        self._remember([step])
        seconds = round(time.monotonic() - began_s, 3)
        fields = {"step": step, "url": self.url, "bytes": sum(sizes), "seconds": seconds}
        self._news.put(("upload", fields))

    def _send_file(
        self,
        remote: RemoteFolder,
        path: Path,
        work: Path,
        sent: dict[str, Description],
        sizes: list[int],
        advance: Advance,
    ) -> None:
        def moved(num_bytes: int) -> None:
            self._moved_s = time.monotonic()
            self._require_time()
            advance(num_bytes)

        packed = path
        if self._compress:
            import zstandard

            packed = work / f"{path.name}{COMPRESSED}"
            with path.open("rb") as source, packed.open("wb") as target:
                size = path.stat().st_size
                zstandard.ZstdCompressor().copy_stream(source, target, size=size)
        entry = entry_of(packed)
        remote.send(packed, entry, sent.get(packed.name), moved)
        sizes.append(entry.size_bytes)
        if packed != path:
            packed.unlink()

    def _send_run_files(self, names: Iterable[str]) -> None:
        """Send the files of the run directory that have changed.

        The summary, which marks the run as finished, comes after the last checkpoint. Copies
        are sent: metrics and events grow meanwhile.
        """
        self._require_own()
        loggers = self._run_folder / LOGGER_STATES
        states = sorted(loggers.iterdir()) if loggers.is_dir() else []
        ids = [path.name for path in states if LOGGER_FILE.fullmatch(path.name)]
        with tempfile.TemporaryDirectory(prefix="flatout-") as work:
            for name in (*names, *(f"{LOGGER_STATES}/{own}" for own in ids)):
                if (self._run_folder / name).is_file():
                    copy = Path(shutil.copyfile(self._run_folder / name, Path(work) / "copy"))
                    entry = entry_of(copy).model_copy(update={"name": name})
                    if self._sent_files.get(name) != entry:
                        self._store.top.send(copy, entry)
                        self._sent_files[name] = entry
                        self._moved_s = time.monotonic()

    def _require_time(self) -> None:
        """Check that the run still waits: after its end, nothing may be sent or written."""
        if self._given_up.is_set():
            raise GivenUp(
                f"The run ended before {self.url} was complete.",
                fix="Start it again: the rest is sent.",
            )

    def _require_own(self) -> None:
        """Check that the run was not restored elsewhere meanwhile."""
        sender = self._store.sender()
        if sender is not None and sender.id != self._record.id:
            raise self._taken_over(sender)

    def _taken_over(self, sender: Sender) -> TakenOver:
        return TakenOver(
            f"The run was restored from {self.url} and continues as {sender.run} on {sender.host}.",
            fix=f"Continue it there. Or set checkpoint.upload=none to continue "
            f"{in_shell(self._run_folder)} without uploads.",
        )

    def _prune(self, newest: int) -> None:
        """Delete the uploaded checkpoints that were sent from here and deleted here."""
        local = self._local()
        if not local:
            return
        self._require_own()
        for step in sorted(self._there.keys() & set(self._record.sent) - local.keys() - {newest}):
            self._store.delete(self._there.pop(step).folder)
        self._remember([])

    def _local(self) -> dict[int, bytes]:
        """Return the manifests of the run directory's checkpoints by step."""
        found = {}
        for step in catalog.steps(self._run_folder):
            with suppress(FileNotFoundError):  # deleted meanwhile
                path = catalog.checkpoint_path(self._run_folder, step) / catalog.MANIFEST
                found[step] = path.read_bytes()
        return found

    def _lacking(self) -> set[int]:
        """Return the steps here that the remote copy lacks, or has with other content."""
        there = {step: stored.manifest for step, stored in self._there.items()}
        return {step for step, manifest in self._local().items() if there.get(step) != manifest}

    def _remember(self, steps: Iterable[int], *, lacking: Iterable[int] = ()) -> None:
        """Store that the remote copy has `steps`, and not `lacking`."""
        known = {*self._record.sent, *self._record.sending, *steps}
        sent = sorted((known & self._there.keys()) - {*lacking})
        if sent != self._record.sent:
            self._write_record(sent=sent)

    def _write_record(self, **fields: list[int]) -> None:
        """Store the record with other values of some fields."""
        self._record = self._record.model_copy(update=fields)
        write_record(self._run_folder, self._record)


@contextmanager
def _pinned(checkpoint: Path) -> Iterator[tuple[Path | None, Path]]:
    """Yield a directory with a checkpoint's files, and one for temporary files.

    The former has hard links, so that deleting the checkpoint does not end its upload. Where the
    file system has none, it is the checkpoint itself. It is None when the checkpoint is gone.
    """
    work = checkpoint.with_name(f"{checkpoint.name}.tmp-upload-{secrets.token_hex(4)}")
    links = work / "files"
    links.mkdir(parents=True)
    try:
        source: Path | None = links
        try:
            for path in checkpoint.iterdir():
                os.link(path, links / path.name)
        except FileNotFoundError:
            source = None
        except OSError:
            source = checkpoint
        yield source, work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def claimed(
    run_folder: Path, config: CheckpointConfig, is_resumed: bool, progress: Progress
) -> Uploader | None:
    """Return the uploader of a run that is about to train; None when it uploads nothing.

    Raises: as `Uploader.claim`; but a resumed run starts when the server does not answer.
    """
    url = upload_url(config.upload, run_folder)
    if url is None:
        return None
    uploader = Uploader(run_folder, url, compress=config.compress is not None)
    try:
        uploader.claim()
    except Unreachable as error:
        if not is_resumed:
            raise
        progress.say(f"{error.what} Checkpoints are sent when it answers.")
    return uploader


@contextmanager
def sending(
    uploader: Uploader | None,
    report: Report,
    progress: Progress,
    since_stop_s: Callable[[], float | None] = lambda: None,
    advanced: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Send checkpoints in the background inside the block, and the rest at its end.

    `since_stop_s` and `advanced` are those of `Uploader.close`. A run that fails has as little time
    as one that was asked to stop. One that a second Ctrl+C ends has none.
    """
    if uploader is None:
        yield
        return
    uploader.start(report)
    try:
        yield
    except KeyboardInterrupt:  # a second Ctrl+C waits for nothing
        uploader.close(progress, lambda: math.inf, advanced)
        raise
    except BaseException:
        failed_s = time.monotonic()
        uploader.close(progress, lambda: since_stop_s() or time.monotonic() - failed_s, advanced)
        raise
    uploader.close(progress, since_stop_s, advanced)


def send_rest(run_folder: Path, config: CheckpointConfig, progress: Progress) -> None:
    """Send what the remote copy of a finished run lacks. A failure is reported, not raised."""
    try:
        uploader = claimed(run_folder, config, True, progress)
    except FlatoutError as error:
        progress.say(str(error))
        return
    with sending(uploader, partial(append_event, run_folder), progress):
        pass
