"""The measured run of `diagnose`, in a process of its own: preflight, then timed steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from flatout.assembly.run import Run
from flatout.measure.child import Answer
from flatout.measure.diagnose.failure import failure_of, hanging
from flatout.measure.diagnose.preflight import Prepared, prepare
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.diagnose.windows import RunWindows, evidence_of
from flatout.measure.experiments.trial import QUIET
from flatout.measure.steps.evidence import Evidence
from flatout.measure.steps.machine import gpu_facts
from flatout.training.loop import fit
from flatout.training.metrics.log import Log
from flatout.training.metrics.observers import Observer
from flatout.training.out_of_memory import explained
from flatout.training.session import Session
from flatout.training.warmup import warm_up

LONG_RUN_STEPS = 10_000_000
"""The measured run is extended to this length, so that it cannot end before its windows do."""


def collect(request: str, answer: Answer) -> None:
    """Answer with what is known before the first step, and then with what the steps show.

    A failure is evidence too: whatever happens, there is a last answer that says so. A run that
    hangs ends the process.
    """
    spec = MeasureSpec.model_validate_json(request)
    prepared = prepare(spec)
    answer(prepared.evidence)
    if prepared.resolved is None:
        return
    done = threading.Event()
    watchdog = threading.Thread(
        target=_report_hang, args=(spec, prepared, answer, done, threading.get_ident()), daemon=True
    )
    watchdog.start()
    try:
        found = measured(spec, prepared)
    finally:
        done.set()
    answer(found)


def measured(spec: MeasureSpec, prepared: Prepared, callbacks: Sequence[Observer] = ()) -> Evidence:
    """Return the evidence of a measured run; an error of the run is part of it."""
    resolved = prepared.resolved
    assert resolved is not None
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    config = resolved.config.with_values(
        QUIET | {"train.steps": LONG_RUN_STEPS, "schedule.warmup": prepared.warmup_steps}
    )
    run: Run | None = None
    losses: list[tuple[int, dict[str, float]]] = []
    before = prepared.evidence.model_copy(update={"source": "measured run"})
    try:
        run = resolved.build(config, Path(spec.folder))
        keep_figures(run, losses)
        with explained(run), Log(run, callbacks) as log:
            log.start()
            warm_up(run, log)
            windows = RunWindows(run, log, spec)
            try:
                fit(Session(run, log, windows.requested))
            finally:
                windows.close()
            gpu = gpu_facts(resolved.machine, config.train.device)
            log.write_pending()
            last = min(windows.last_own_step or run.step, resolved.config.train.steps or run.step)
            own = [(step, read) for step, read in losses if step <= last]
            before = before.model_copy(
                update={
                    "gpu": gpu or before.gpu,
                    "losses": tuple((step, read["train/loss"]) for step, read in own),
                    "grad_norms": tuple((step, read["train/grad_norm"]) for step, read in own),
                }
            )
            return evidence_of(before, run, log, windows, resolved.config)
    except Exception as error:  # whatever the run raises is evidence
        step = run.step if run is not None else 0
        failure = failure_of(error, step, losses)
        return before.model_copy(update={"failure": failure})
    finally:
        if run is not None:
            run.feed.close()


def keep_figures(run: Run, kept: list[tuple[int, dict[str, float]]]) -> None:
    """Add what the run reads back, (step, figures), to `kept`."""
    ready = run.readback.ready

    def read(*, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        found = ready(flush=flush)
        kept.extend(found)
        return found

    run.readback.ready = read  # type: ignore[method-assign]


def _report_hang(
    spec: MeasureSpec, prepared: Prepared, answer: Answer, done: threading.Event, thread: int
) -> None:
    """End the process with evidence of a hang, if the run is not done in time."""
    start_s = time.monotonic()
    if done.wait(spec.limit_s):
        return
    found = prepared.evidence.model_copy(
        update={
            "source": "measured run",
            "failure": hanging(thread, time.monotonic() - start_s),
        }
    )
    answer(found)
    os._exit(0)
