"""The files in docs/clusters: valid, and the one for Slurm through signal, save and requeue."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flatout.config.schema import nested
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.runlog import RunLog

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "clusters"
RUN = Path("runs/first")
SBATCH = r"""#!{python} -I
import os, re, signal, subprocess, sys, time
from pathlib import Path
from flatout.training.run_dir.runlog import RunLog

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
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo here; exit; fi
[ "$*" = "requeue 17" ] && touch requeued && echo again >> restarts
"""
TORCHRUN = '#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nshift\nexec "$@"\n'
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


def words_of(text: str) -> list[str]:
    """Return the command of torchrun in a file."""
    start = text[text.index("torchrun --nnodes") :].replace("\\\n", " ").split()
    return start[: start.index("runs/first") + 1 if "runs/first" in start else None]


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_every_file_starts_the_same_run_and_passes_the_signals_on(path):
    words = words_of(path.read_text())
    assert words[words.index("--signals-to-handle") + 1] == "SIGTERM,SIGINT,SIGUSR1"
    assert words[words.index("-m") : words.index("-m") + 4] == ["-m", "flatout", "train", "my.yaml"]
    assert words[1:5] == ["--nnodes", "2", "--nproc-per-node", "8"]


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_scripts_are_valid(name):
    done = subprocess.run([shutil.which("bash"), "-n", FILES / name], check=False)
    assert done.returncode == 0


def test_the_pods_of_kubernetes_find_each_other():
    service, job = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    pod, name = spec["template"]["spec"], service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert f"--rdzv-endpoint {name}-0.{name}:29500 -m flatout train" in container["args"][0]
    assert pod["subdomain"] == job["metadata"]["name"] == name


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_accepts_the_file(version):
    validator = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()):
        assert validator.validate(document, version, strict=True) == version
    document["spec"]["completion"] = 2
    with pytest.raises(validator.ValidationError, match="completion"):
        validator.validate(document, version, strict=True)


def test_skypilot_accepts_the_file():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(FILES / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 8})


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_executes_the_script(tiny, tiny_set, tmp_path):
    settings = tiny | {"data.path": str(tiny_set), "train.device": "cpu", "train.steps": 2}
    settings.pop("speedups", None)
    write_recipe(tmp_path, settings | {"parallel.shard": 2})
    text = (FILES / "torchrun.sh").read_text()
    text = text.replace("--nnodes 2 --nproc-per-node 8", "--nnodes 1 --nproc-per-node 2")
    (tmp_path / "torchrun.sh").write_text(text)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "torchrun.sh"],
        cwd=tmp_path,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun may continue this run with 2, 4, 8 processes." in done.stderr
    assert catalog.latest(tmp_path / RUN).name == "step-2"


def write_recipe(folder: Path, settings: dict[str, object]) -> None:
    (folder / "my.yaml").write_text(yaml.safe_dump(nested(settings)))


@pytest.fixture
def submit(tmp_path):
    """Return a function that submits the script on a cluster with this `flatout`."""

    def sbatch(flatout, limits):
        programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN}
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(text.format(python=sys.executable) if "{" in text else text)
        (folder / "flatout").write_text(flatout)
        for path in folder.iterdir():
            path.chmod(0o755)
        shutil.copy(FILES / "slurm.sbatch", tmp_path / "job.sh")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "times"),
    [(SAVES, 0, 1), ("", 0, 1), (FAILS, 1, 0)],
    ids=["saves", "has not started", "fails"],
)
def test_a_run_that_the_signal_stopped_is_requeued(submit, tmp_path, answer, code, times):
    """A launcher may replace the exit code; the file in the run directory has the run's own."""
    done = submit(UNTIL_A_SIGNAL.format(answer=answer), 1)
    assert (done.returncode, restarts(tmp_path)) == (code, times), done.stderr


@pytest.mark.slow
def test_a_run_that_fails_is_not_requeued_whatever_an_earlier_one_left(submit, tmp_path):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "exit_code").write_text("75\n")
    done = submit("#!/bin/sh\nexit 2\n", 0)
    assert (done.returncode, restarts(tmp_path)) == (2, 0), done.stderr


@pytest.mark.faults
def test_a_run_over_three_jobs_equals_an_uninterrupted_one(submit, tmp_path, tiny, tiny_set):
    settings = {"train.steps": 200, "train.eval_every": 10, "train.devices": 1}
    write_recipe(tmp_path, tiny | {"data.path": str(tiny_set)} | settings)
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
    summary = RunLog(tmp_path / RUN).summary
    assert summary["weights_sha256"] == json.loads(whole.stdout)["weights_sha256"]
    stops = [event for event in RunLog(tmp_path / RUN).events if event["event"] == "stop"]
    assert [stop["cause"] for stop in stops] == ["SIGUSR1"] * 2
    assert all(0 <= stop["saved_after_s"] < 60 for stop in stops)
