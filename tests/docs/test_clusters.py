"""The script for Slurm in docs/clusters.md: signal, save, requeue, resume, with a fake Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flatout.training.run_dir.layout import read_events, read_summary

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN = Path("runs/first")
SBATCH = r"""#!{python} -I
import os, re, signal, subprocess, sys, time
from pathlib import Path

script, limits = sys.argv[1:]
name = re.search(r"^#SBATCH --signal=B:(\w+)@", Path(script).read_text(), re.MULTILINE)[1]
progress, requeued = Path("runs/first/metrics.jsonl"), Path("requeued")

def size():
    return progress.stat().st_size if progress.exists() else 0

for start in range(9):
    requeued.unlink(missing_ok=True)
    before = size()
    job = subprocess.Popen(["bash", script], env={{**os.environ, "SLURM_JOB_ID": "17"}})
    if start < int(limits):
        while job.poll() is None and size() <= before:
            time.sleep(0.02)
        job.send_signal(getattr(signal, f"SIG{{name}}"))  # B: to the script alone
    code = job.wait()
    if not requeued.exists():
        sys.exit(code)
"""
SRUN = '#!/bin/sh\nexec "$@"\n'
SCONTROL = '#!/bin/sh\n[ "$*" = "requeue 17" ] && touch requeued && echo again >> restarts\n'
FLATOUT = '#!/bin/sh\nexec {python} -m flatout "$@"\n'

UNTIL_A_SIGNAL = """#!/bin/sh
mkdir -p runs/first
if [ -e restarts ]; then exit 0; fi
{answer}
echo step >> runs/first/metrics.jsonl
while :; do sleep 0.02; done
"""
SAVES = "trap 'echo 75 > runs/first/exit_code; exit 1' USR1"
FAILS = "trap 'echo 1 > runs/first/exit_code; exit 1' USR1"


def script() -> str:
    text = (ROOT / "docs" / "clusters.md").read_text()
    return re.search(r"^```sh\n(#!/bin/bash\n.*?)^```", text, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def submit(tmp_path):
    """Return a function that submits the script on a cluster with this `flatout`."""

    def sbatch(flatout, limits):
        programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(text.format(python=sys.executable) if "{" in text else text)
        (folder / "flatout").write_text(flatout)
        for path in folder.iterdir():
            path.chmod(0o755)
        (tmp_path / "job.sh").write_text(script())
        return subprocess.run(
            ["sbatch", "job.sh", str(limits)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return sbatch


def restarts(folder: Path) -> int:
    path = folder / "restarts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("answer", "code", "times"),
    [(SAVES, 0, 1), ("", 0, 1), (FAILS, 1, 0)],
    ids=["saves", "has not started", "fails"],
)
def test_a_run_that_the_signal_stopped_is_requeued(submit, tmp_path, answer, code, times):
    """A launcher may replace the exit code; the file in the run directory has the run's own."""
    done = submit(UNTIL_A_SIGNAL.format(answer=answer), 1)
    assert (done.returncode, restarts(tmp_path)) == (code, times), done.stderr


def test_a_run_that_fails_is_not_requeued_whatever_an_earlier_one_left(submit, tmp_path):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "exit_code").write_text("75\n")
    done = submit("#!/bin/sh\nexit 2\n", 0)
    assert (done.returncode, restarts(tmp_path)) == (2, 0), done.stderr


@pytest.mark.faults
def test_a_run_over_three_jobs_equals_an_uninterrupted_one(submit, tmp_path, tiny, tiny_set):
    document = {}
    for key, value in {
        **tiny,
        "data.path": str(tiny_set),
        "train.steps": 200,
        "train.eval_every": 10,
        "train.devices": 1,
    }.items():
        section, _, last = key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[last] = value
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(document))
    whole = subprocess.run(
        [sys.executable, "-m", "flatout", "train", "my.yaml", "--run-dir", "whole", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    done = submit(FLATOUT.format(python=sys.executable), 2)
    assert (done.returncode, restarts(tmp_path)) == (0, 2), done.stderr
    summary = read_summary(tmp_path / RUN)
    assert summary["weights_sha256"] == json.loads(whole.stdout)["weights_sha256"]
    stops = [event for event in read_events(tmp_path / RUN) if event["event"] == "stop"]
    assert [stop["cause"] for stop in stops] == ["SIGUSR1"] * 2
    assert all(0 <= stop["saved_after_s"] < 60 for stop in stops)
