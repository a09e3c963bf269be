"""Opens and closes the mirror of a run around its training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flatout.config.sections import CheckpointConfig
from flatout.errors import FlatoutError
from flatout.progress import Progress
from flatout.training.mirror.remote import mirror_url
from flatout.training.mirror.uploader import Report, Uploader
from flatout.training.run_dir.layout import append_event
from flatout.transfer.connection import Unreachable


def claimed(
    run_folder: Path, config: CheckpointConfig, is_resumed: bool, progress: Progress
) -> Uploader | None:
    """Return the uploader of a run that is about to train; None when it has no mirror.

    Raises: as `Uploader.claim`; but a resumed run starts when the server does not answer.
    """
    url = mirror_url(config.mirror, run_folder)
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
    as one that was asked to stop; one that a second Ctrl+C ends has none.
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
    """Send what the mirror of a finished run lacks; a failure is reported, not raised."""
    try:
        uploader = claimed(run_folder, config, True, progress)
    except FlatoutError as error:
        progress.say(str(error))
        return
    with sending(uploader, partial(append_event, run_folder), progress):
        pass
