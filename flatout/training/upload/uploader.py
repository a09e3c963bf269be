"""Uploads the checkpoints of a run in a thread, while training continues.

The thread sends the newest checkpoint that the remote copy lacks, until it lacks none. So an
interrupted upload, also one of an earlier process, is continued. What waits is in the run
directory: a checkpoint that is deleted here before its turn is omitted. Only rank 0 has a thread.
All ranks write to one file system.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from flatout.config.sections import CheckpointConfig
from flatout.errors import CheckpointError, DataError, FlatoutError, on_one_line, without_secrets
from flatout.progress import SILENT, Progress
from flatout.storage.files import entry_of
from flatout.storage.json_io import JsonObject
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.parallel import Advance, transfer_all
from flatout.storage.remote.reading import Description
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run_dir.layout import LOGGER_STATES, SUMMARY, append_event
from flatout.training.upload.remote import (
    COMPRESSED,
    CONFIGURATION,
    LOGGER_FILE,
    RUN_FILES,
    Record,
    RemoteCopy,
    name_of,
    read_record,
    step_at,
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
        self._record = read_record(run_folder, url)
        """None until it is known that the URL is free, or this run's."""
        self._is_known = False
        """Whether the record is what the URL has."""
        self._news: SimpleQueue[tuple[str, JsonObject]] = SimpleQueue()
        self._reason: str | None = None
        """Why the last attempt failed."""
        self._wake, self._closing, self._given_up = Event(), Event(), Event()
        self._moved_s = 0.0
        self._report: Report
        self._thread = Thread(target=self._work, name="flatout-upload", daemon=True)

    def claim(self) -> None:
        """Check that the URL can be written and has no checkpoints of a different run.

        Raises: CheckpointError when it has, or remote.json is damaged; DataError.
        """
        if self._record is None:
            if any(map(self._store.manifest, self._store.names())):
                raise CheckpointError(
                    f"{self.url} contains the checkpoints of another run.",
                    fix="Choose a run directory with a different name with --run-dir DIR, or set "
                    "a different checkpoint.upload.",
                )
            self._keep({})
        self._send_run_files(CONFIGURATION)

    def start(self, report: Report) -> None:
        """Start the thread. `report` is called in this one."""
        self._report = report
        self._thread.start()

    def on_event(self, event: JsonObject) -> None:
        """Send a checkpoint that was just completed."""
        if event["event"] == "save":
            self._wake.set()

    def on_tick(self, step: int, last_step: int) -> None:
        """Report what was sent, or failed, since the last call."""
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
        unsent = sorted(step_at(name) for name in self._local() if not self._sent.get(name))
        if unsent:
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
            except Exception as error:  # training continues without uploads, whatever happens
                self._failed(error)
                failed = True
            if is_last:
                return
            self._wake.wait(pause_s if failed else None)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if failed else FIRST_PAUSE_S

    def _failed(self, error: Exception) -> None:
        """Report a failure, unless it is the same as before."""
        self._is_known = False  # an unfinished request may have changed what is there
        what = error.what if isinstance(error, FlatoutError) else str(error) or type(error).__name__
        reason = on_one_line(without_secrets(what)).rstrip(".")[:300]
        if reason != self._reason:
            self._news.put(("upload_failed", {"url": self.url, "reason": reason}))
        self._reason = reason

    def _send_all(self, *, with_run_files: bool) -> None:
        if self._record is None:
            self.claim()
        if not self._is_known:
            self._compare()
        self._prune()
        while (step := self._next_step()) is not None:
            with _pinned(catalog.checkpoint_path(self._run_folder, step)) as (source, work):
                if source is not None:
                    self._send_checkpoint(step, source, work)
            self._prune()
        if with_run_files:  # the summary, which marks a finished run, follows its checkpoints
            self._send_run_files(RUN_FILES)

    def _compare(self) -> None:
        """Record what is there of the checkpoints here, of what was sent, and of killed uploads."""
        local, found = self._local(), dict[str, bool]()
        for name in self._store.names():
            try:
                is_whole = self._store.manifest(name) is not None
            except Unreachable:
                raise
            except DataError:  # what cannot be read back is sent again
                is_whole = name not in local
            if name in local or name in self._sent or not is_whole:
                found[name] = is_whole
        self._keep(found)
        self._is_known = True

    def _next_step(self) -> int | None:
        """Return the newest step here that is not uploaded."""
        self._require_time()
        return max(
            (step_at(name) for name in self._local() if not self._sent.get(name)), default=None
        )

    def _send_checkpoint(self, step: int, source: Path, work: Path) -> None:
        """Send a checkpoint: its files, those of the run, and its manifest last."""
        began_s, manifest = time.monotonic(), source / catalog.MANIFEST
        name = name_of(step, manifest.read_bytes())
        self._keep(self._sent | {name: False})
        remote, sizes = self._store.folder(name), list[int]()
        sent = remote.files()
        jobs = [
            partial(self._send_file, remote, path, work, sent, sizes)
            for path in sorted(source.iterdir())
            if path.name != catalog.MANIFEST
        ]
        transfer_all(f"Sending step {step}", jobs, 0, SILENT)
        self._send_run_files([file for file in RUN_FILES if file != SUMMARY])
        self._require_time()
        remote.send(manifest, entry_of(manifest))
        if self._store.manifest(name) is None:  # a store without checksums altered it
            remote.remove(catalog.MANIFEST)
            raise remote.altered(catalog.MANIFEST)
        self._keep(self._sent | {name: True})
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
        """Send files of the run directory. Copies are sent: metrics and events grow meanwhile."""
        loggers = self._run_folder / LOGGER_STATES
        states = sorted(loggers.iterdir()) if loggers.is_dir() else []
        ids = [path.name for path in states if LOGGER_FILE.fullmatch(path.name)]
        with tempfile.TemporaryDirectory(prefix="flatout-") as work:
            for name in (*names, *(f"{LOGGER_STATES}/{own}" for own in ids)):
                if (self._run_folder / name).is_file():
                    copy = Path(shutil.copyfile(self._run_folder / name, Path(work) / "copy"))
                    entry = entry_of(copy).model_copy(update={"name": name})
                    self._store.top.send(copy, entry)
                    self._moved_s = time.monotonic()

    def _require_time(self) -> None:
        """Check that the run still waits: after its end, nothing may be sent or written."""
        if self._given_up.is_set():
            raise GivenUp(
                f"The run ended before {self.url} was complete.",
                fix="Start it again: the rest is sent.",
            )

    def _prune(self) -> None:
        """Delete there what was sent from here and deleted here, once the newest is complete."""
        local = self._local()
        if not local or not self._sent.get(max(local, key=step_at)):
            return
        for name in self._sent.keys() - local:
            self._store.delete(name)
        self._keep({name: is_whole for name, is_whole in self._sent.items() if name in local})

    def _local(self) -> set[str]:
        """Return the names that the run directory's checkpoints have in the remote copy."""
        found = set()
        for step in catalog.steps(self._run_folder):
            with suppress(FileNotFoundError):  # deleted meanwhile
                path = catalog.checkpoint_path(self._run_folder, step) / catalog.MANIFEST
                found.add(name_of(step, path.read_bytes()))
        return found

    @property
    def _sent(self) -> dict[str, bool]:
        return self._record.sent if self._record else {}

    def _keep(self, sent: dict[str, bool]) -> None:
        """Store what is there, by name."""
        if self._record is None or sent != self._record.sent:
            self._record = Record(url=self._store.url, sent=sent)
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
