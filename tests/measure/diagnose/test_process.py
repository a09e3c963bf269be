"""Whatever happens to the process of a measured run, there is evidence of it."""

from __future__ import annotations

import sys

import pytest

from flatout.errors import DataError, RunFailed
from flatout.measure import child
from flatout.measure.child import Told
from flatout.measure.diagnose.diagnose import measure_apart
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.steps.evidence import Evidence
from flatout.storage.files import Unfinished

SPEC = MeasureSpec(config={}, folder="absent")
PREFLIGHT = Evidence(source="preflight").model_dump_json()


def measured(program):
    line = f"import os, signal, sys; print({PREFLIGHT!r}, flush=True); sys.stderr.write('Oh. ');"
    return measure_apart(
        SPEC, command=[sys.executable, "-c", f"{line} sys.stderr.flush(); {program}"]
    )


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "the usual cause is too little memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "error", "killed by SIGSEGV: Oh"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "error", "killed by SIGTERM: Oh"),
        ("sys.exit(3)", "error", "exit code 3: Oh"),
        ("os.close(1); import time; time.sleep(60)", "error", "gave no result: Oh"),
    ],
)
def test_the_end_of_the_process_is_evidence(monkeypatch, program, kind, message):
    monkeypatch.setattr(child, "KILL_TIMEOUT_S", 1.0)
    failure = measured(program).failure
    assert failure.kind == kind
    assert message in failure.message


def test_a_process_that_measured_nothing_is_an_error():
    def dies(program):
        measure_apart(SPEC, command=[sys.executable, "-c", program])

    with pytest.raises(RunFailed, match="Nothing could be measured"):
        dies("")
    line = Told.of(Unfinished("It is not finished.", fix="Finish it.")).model_dump_json()
    with pytest.raises(DataError, match="not finished"):
        dies(f"print({line!r})")
