"""Attaches to a training script inside its own process, as the request in a file asks.

What is found goes to a file, after which the script ends, or runs on unmeasured.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from flatout.measure.attach.apply import Models, apply, keep_linked
from flatout.measure.attach.follower import Follower
from flatout.measure.attach.guard import guarded, replace
from flatout.measure.attach.hooks import observing
from flatout.measure.attach.request import LAST, RANK, SEEN, SO_FAR, Request
from flatout.measure.attach.screening import Screening, Switches
from flatout.measure.attach.sites import Sites
from flatout.measure.attach.stages import Stages, fewest
from flatout.measure.attach.switches import switched
from flatout.measure.attach.timing import Steps, StepTimer, end_script, ranks, reply
from flatout.measure.attach.workers import Workers
from flatout.measure.scripts.changes import CHANGES
from flatout.storage.files import write_text

MIN_MEASURED = 5
"""Fewest ordinary steps of a measurement."""
PARENT_POLL_S = 1.0


class Attachment:
    """Follows the script of this process, and writes the answer."""

    def __init__(self, request: Request) -> None:
        self._request, self._process = request, os.getpid()
        self._last = Path(request.answer + LAST)
        self._sites = Sites()
        self._sites.install()
        self._loop = Follower(
            "script",
            at_exit=guarded(self.answer),
            after_step=self._after_step,
            is_enough=self._is_enough,
            recording=request.recording,
            sites=self._sites,
            is_trial=request.is_trial,
        )
        self._loop.workers = guarded(Workers)(Path(f"{request.answer}.{self._process}"))
        if request.screen:
            self._models = Models()
            self._loop.screening = Screening(
                self._switches, limit_s=request.screen_s, tell=guarded(self._tell)
            )
        self._known: dict[str, Any] = {}
        """What was found before changes were screened."""
        self._is_done = False
        replace(os, "_exit", partial(observing, lambda *_: self.answer()))
        atexit.register(guarded(self.answer))

    def answer(self, *, is_complete: bool = False) -> None:
        """Write what was measured, once. Only a process that takes steps writes, or that fails."""
        loop, error = self._loop, getattr(sys, "last_value", None)  # set when an error ends it
        if self._is_done or os.getpid() != self._process:
            return
        stages, found = loop.stages, dict[str, Any]()
        # what has started the ranks fails when one has failed, or is ended after their answers
        if stages is None and (error is None or Path(self._place).exists()):
            return
        self._is_done = True
        if stages is not None and self._request.recording is not None:
            found["recorded"] = guarded(stages.recorded)()
        elif stages is not None and loop.steps:
            if is_complete and not (self._request.to_the_end or self._request.screen):
                loop.try_model()
            if loop.run is not None and self._request.is_trial:
                found["once"] = guarded(loop.run.once)() or {}
            found |= self._found()
        elif error is None:
            return
        loop.end()
        reply(self._place, loop.steps, is_complete=is_complete, **found)

    @property
    def _place(self) -> str:
        """The file for the answer of this rank."""
        rank, _ = ranks()
        return self._request.answer + f"{RANK}{rank}" * (rank > 0)

    def _found(self) -> dict[str, Any]:
        """Return what was measured before changes were screened, and what they gain."""
        found, screening = self._known, self._loop.screening
        if not found:
            try:
                found["evidence"] = self._loop.evidence()
            except Exception as unexpected:
                found["problem"] = f"{type(unexpected).__name__}: {unexpected}"
            found["sites"] = guarded(self._sites.found)(self._loop.model) or ()
        if screening is not None:
            found |= {name: getattr(screening, name) for name in ("screened", "kept", "failed")}
        return found

    def _switches(self) -> Switches:
        """Return what turns each change on that can be screened."""
        evidence = self._found()["evidence"]
        script = self._loop.script(self._models.found, self._sites)
        return {
            name: partial(switched, name, script)
            for name in self._request.screen * (evidence.world_size == 1)
            if not CHANGES[name].is_of_start and CHANGES[name].why_not(evidence) is None
        }

    def _tell(self, note: str) -> None:
        """Write what was found so far: the script may not survive the next step."""
        reply(self._place + SO_FAR, self._loop.steps, note=note, **self._found())

    def _after_step(self, goes_on: bool) -> None:
        request, steps, last = self._request, self._loop.steps, self._last
        ends = int(last.read_text(encoding="ascii")) if last.exists() else request.steps
        if not goes_on or steps == ends:
            self.answer(is_complete=True)
        if self._is_done and not request.to_the_end:
            end_script(is_one_of_several=False)  # the others end, too

    def _is_enough(self, stages: Stages) -> bool:
        """Return whether the ordinary steps are enough for averages.

        Ranks end after the same step, whose number rank 0 writes: no other is two steps ahead.
        """
        done, request, loop = stages.ordinary, self._request, self._loop
        if request.to_the_end:
            if not loop.steps & (loop.steps - 1):  # a power of two
                self._tell("")
                self._known = {}
            return False
        is_enough = request.steps is None and done.seconds >= request.seconds
        is_enough &= done.steps >= fewest(MIN_MEASURED, done.steps, done.seconds)
        if is_enough and loop.world_size > 1 and not (loop.rank or self._last.exists()):
            write_text(self._last, str(loop.steps + 2))
        return is_enough and loop.world_size == 1


def attach(path: str) -> None:
    """Change and follow this process as the request in a file asks."""
    request = Request.model_validate_json(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):  # the command has ended
        Path(request.answer + SEEN).touch()
    if request.parent is not None:
        threading.Thread(target=_end_with, args=(request.parent,), daemon=True).start()
    if request.copy_of_user is not None:
        keep_linked(request.copy_of_user)
    if request.interrupt_after is not None:
        _interrupt_after(request.interrupt_after)
        return
    if request.timing is None and request.measures:
        Attachment(request)
        return
    failed = apply(request.changes)
    if request.timing is not None:
        StepTimer(request, failed)
    else:
        atexit.register(reply, request.answer, 0, failed=failed)


def _end_with(parent: int) -> None:
    """End this process, and everything in its session, when a process has ended."""
    while psutil.pid_exists(parent):
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _interrupt_after(steps: int) -> None:
    """Ask this process to stop after some of its steps.

    A process in the background may ignore SIGINT, so it is SIGTERM.
    """
    seen = count(1)
    Steps(lambda: os.kill(os.getpid(), signal.SIGTERM) if next(seen) == steps else None)
