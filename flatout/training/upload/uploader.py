"""Uploads the checkpoints of a run in a thread, while training continues.

The thread sends the newest checkpoint that the remote copy lacks, until it lacks none. So an
interrupted upload, also one of an earlier process, is continued. What waits is in the run
directory: a checkpoint that is deleted here before its turn is omitted. Only rank 0 has a thread.
All ranks write to one file system.
"""

from __future__ import annotations

import math
import os
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
from flatout.progress import Progress
from flatout.storage.files import PART
from flatout.storage.json_io import JsonObject
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.reading import open_remote
from flatout.storage.whole import MANIFEST, beside, name_of, push
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run_dir.layout import CONFIG, EVENTS, append_event
from flatout.training.upload.remote import (
    RUN_FILES,
    RemoteCopy,
    step_at,
    upload_url,
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
    """Keeps the remote copy of a run directory at `url` up to date.

    `send_all` does, and as an observer it does so in a thread after every save: `claim` comes
    first, then `start`, and `close` at the end.
    """

    def __init__(self, run_folder: Path, url: str, config: CheckpointConfig) -> None:
        self.url = without_secrets(url)
        """The URL, for messages."""
        self._run_folder = run_folder
        self._store = RemoteCopy(url)
        self._config = config
        self._there: dict[str, bool] | None = None
        """The checkpoints there by name, and whether each is complete. None when not known."""
        self._news: SimpleQueue[tuple[str, JsonObject]] = SimpleQueue()
        self._reason: str | None = None
        """Why the last attempt failed."""
        self._wake, self._closing, self._given_up = Event(), Event(), Event()
        self._moved_s = 0.0
        self._report: Report
        self._thread = Thread(target=self._work, name="flatout-upload", daemon=True)

    def claim(self) -> dict[str, bool]:
        """Return the checkpoints there by name, and whether each is complete.

        Checked is that the URL can be written and has no checkpoints of a different run: both
        journals of one run begin with the same line.
        Raises: CheckpointError when it has; DataError.
        """
        there = {name: self._is_whole(name) for name in self._store.names()}
        journal = self._run_folder / EVENTS
        if any(there.values()) and journal.exists():
            first = b""
            try:
                with open_remote(f"{self._store.url}/{EVENTS}") as file:
                    first = file.readline()
            except Unreachable:
                raise
            except DataError:  # missing, or not readable: the next checkpoint brings it again
                pass
            if not journal.read_bytes().startswith(first):
                raise CheckpointError(
                    f"{self.url} contains the checkpoints of another run.",
                    fix="Choose a run directory with a different name with --run-dir DIR, or set "
                    "a different checkpoint.upload.",
                )
        self._send_run_files([CONFIG])
        self._there = there
        return there

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
        there = self._there or {}
        unsent = sorted(step for name, step in self._local().items() if not there.get(name))
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
                self.send_all(with_run_files=is_last)
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
        self._there = None  # an unfinished request may have changed what is there
        what = error.what if isinstance(error, FlatoutError) else str(error) or type(error).__name__
        reason = on_one_line(without_secrets(what)).rstrip(".")[:300]
        if reason != self._reason:
            self._news.put(("upload_failed", {"url": self.url, "reason": reason}))
        self._reason = reason

    def send_all(self, *, with_run_files: bool) -> int:
        """Send what the remote copy lacks, the newest checkpoint first, and return the bytes.

        What the configuration does not keep is deleted there.

        Raises: as `push` and `claim`; GivenUp.
        """
        there = self.claim() if self._there is None else self._there
        num_bytes = 0
        self._prune(there)
        while unsent := [step for name, step in self._local().items() if not there.get(name)]:
            self._moved()
            num_bytes += self._send_checkpoint(max(unsent), there)
            self._prune(there)
        if with_run_files:
            self._send_run_files(RUN_FILES)
        return num_bytes

    def _is_whole(self, name: str) -> bool:
        step = self._local().get(name)
        try:
            if self._store.manifest(name) is None:
                return False
        except Unreachable:
            raise
        except DataError:  # what cannot be read back is sent again
            return step is None
        if step is None or self._config.compress:
            return True
        there = RemoteFolder(f"{self._store.url}/{name}").files()
        listed = catalog.read_manifest(catalog.checkpoint_path(self._run_folder, step)).files
        return all(there.get(one.name, {}).get("size") == one.size_bytes for one in listed)

    def _send_checkpoint(self, step: int, there: dict[str, bool]) -> int:
        """Send a checkpoint: its files, those of the run, and its manifest last."""
        began_s = time.monotonic()
        with _pinned(catalog.checkpoint_path(self._run_folder, step)) as (source, work):
            if source is None:
                return 0
            name = name_of(f"step-{step}", (source / MANIFEST).read_bytes())
            there[name] = False
            num_bytes = push(
                source,
                f"{self._store.url}/{name}",
                [path.name for path in source.iterdir() if path.name != MANIFEST],
                packed_in=work if self._config.compress else None,
                before_manifest=partial(self._send_run_files, RUN_FILES),
                moved=self._moved,
            )
        there[name] = True
        seconds = round(time.monotonic() - began_s, 3)
        fields = {"step": step, "url": self.url, "bytes": num_bytes, "seconds": seconds}
        self._news.put(("upload", fields))
        return num_bytes

    def _moved(self, _num_bytes: int = 0) -> None:
        """Note that the store answers. After the run's end, nothing may be sent any more.

        Raises: GivenUp.
        """
        self._moved_s = time.monotonic()
        if self._given_up.is_set():
            raise GivenUp(
                f"The run ended before {self.url} was complete.",
                fix="Start it again: the rest is sent.",
            )

    def _send_run_files(self, names: Iterable[str]) -> None:
        """Send files of the run directory. Copies are sent: metrics and events grow meanwhile."""
        with tempfile.TemporaryDirectory(prefix="flatout-") as work:
            for name in names:
                if (self._run_folder / name).is_file():
                    copy = Path(shutil.copyfile(self._run_folder / name, Path(work) / "copy"))
                    self._store.top.send(copy, name)
        self._moved()

    def _prune(self, there: dict[str, bool]) -> None:
        """Delete there what the configuration does not keep, once the newest here is complete.

        Also what killed uploads left, and earlier copies of the steps that are here.
        """
        local = self._local()
        newest = max(local, key=lambda name: local[name], default="")
        if not there.get(newest):
            return
        best, sent = None, {step for name, step in local.items() if there.get(name)}
        with suppress(CheckpointError):
            best = catalog.best_step_of(catalog.checkpoint_path(self._run_folder, local[newest]))
        kept = catalog.kept(
            {step_at(name) for name in there if there[name]},
            catalog.newest_to_keep(self._config),
            best,
            self._config.keep_every,
        )
        for name in there.keys() - local.keys():
            if not there[name] or step_at(name) in sent or step_at(name) not in kept:
                self._store.delete(name)
                del there[name]

    def _local(self) -> dict[str, int]:
        """Return the steps of the run directory's checkpoints by their names in the remote copy."""
        found = {}
        for step in catalog.steps(self._run_folder):
            with suppress(FileNotFoundError):  # deleted meanwhile
                path = catalog.checkpoint_path(self._run_folder, step)
                found[name_of(path.name, (path / MANIFEST).read_bytes())] = step
        return found


@contextmanager
def _pinned(checkpoint: Path) -> Iterator[tuple[Path | None, Path]]:
    """Yield a directory with a checkpoint's files, and one for temporary files.

    The former has hard links, so that deleting the checkpoint does not end its upload. Where the
    file system has none, it is the checkpoint itself. It is None when the checkpoint is gone.
    """
    work = beside(checkpoint, f"{PART}-upload")
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
    uploader = Uploader(run_folder, url, config)
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
    except BaseException as error:
        failed_s = -math.inf if isinstance(error, KeyboardInterrupt) else time.monotonic()
        uploader.close(
            progress, lambda: max(since_stop_s() or 0.0, time.monotonic() - failed_s), advanced
        )
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
