"""`flatout launch` writes the files that start a run on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flatout.cli.commands.launch import launch
from flatout.errors import ConfigError, OutputInUse
from flatout.training.checkpoint import catalog

ROOT = Path(__file__).parents[3]
WORDS = ["parallel.shard=8", "data.path=data/my text"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
def test_shell_files_are_valid_and_start_every_rank(kind, tmp_path):
    found = launch(kind, "gpt2-124m", WORDS, nodes=2)
    text = (tmp_path / found.path).read_text()
    assert subprocess.run([shutil.which("bash"), "-n", found.path], check=False).returncode == 0
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert "train gpt2-124m parallel.shard=8 'data.path=data/my text'" in text
    assert found.start.split()[1] == found.path


def test_odd_names_are_quoted_and_directories_are_made(tmp_path):
    recipe = tmp_path / "My 'r' file.yaml"
    recipe.write_text("model: {vocab_size: 256}\n")
    found = launch("slurm", str(recipe), out="jobs here/a.sbatch")
    assert found.start == "sbatch 'jobs here/a.sbatch'"
    text = (tmp_path / found.path).read_text()
    assert "--job-name=my-r-file\n" in text
    assert subprocess.run([shutil.which("bash"), "-n", found.path], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["train.devices=4"], {}, "train.devices=4"),
        ([], {"image": "a: b #c"}, "--image"),
        ([], {"time": "later'; rm x"}, "--time"),
    ],
)
def test_options_that_the_file_cannot_contain_are_rejected(words, options, said):
    with pytest.raises(ConfigError, match=said):
        launch("kubernetes", "gpt2-124m", [*WORDS, *words], **options)


def test_kubernetes_gets_a_pod_per_machine_that_find_each_other(tmp_path):
    path = launch("kubernetes", "gpt2-124m", WORDS, nodes=2, gpus=4).path
    service, job = yaml.safe_load_all((tmp_path / path).read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "--rdzv-endpoint gpt2-124m-0.gpt2-124m:29500 -m flatout train" in container["args"][0]
    assert pod["subdomain"] == service["metadata"]["name"] == "gpt2-124m"


def test_skypilot_gets_its_machines_and_gpus(tmp_path):
    task = yaml.safe_load(
        (tmp_path / launch("skypilot", "gpt2-124m", WORDS, nodes=4, gpu="A100").path).read_text()
    )
    assert (task["num_nodes"], task["resources"]) == (4, {"accelerators": "A100:8"})
    assert "SKYPILOT_NODE_IPS" in task["run"]


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_accepts_the_file(version, tmp_path):
    validator = pytest.importorskip("kubernetes_validate")
    path = launch("kubernetes", "gpt2-124m", WORDS, nodes=2).path
    for document in yaml.safe_load_all((tmp_path / path).read_text()):
        assert validator.validate(document, version, strict=True) == version
    document["spec"]["completion"] = 2
    with pytest.raises(validator.ValidationError, match="completion"):
        validator.validate(document, version, strict=True)


def test_skypilot_accepts_the_file():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(launch("skypilot", "gpt2-124m", WORDS, nodes=4, gpu="A100").path)
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (4, {"A100": 8})


@pytest.mark.slow
def test_torchrun_executes_the_file(tiny, tiny_set, tmp_path):
    settings = tiny | {"data.path": tiny_set, "train.device": "cpu", "train.steps": 2}
    settings.pop("speedups", None)
    words = [f"{key}={str(value).lower()}" for key, value in settings.items()]
    path = launch("torchrun", "demo", [*words, "parallel.shard=2"], gpus=2).path
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", path],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun may continue this run with 2, 4, 8 processes." in done.stderr
    assert catalog.latest(tmp_path / "runs" / "demo").name == "step-2"


def test_a_run_continues_with_fewer_machines_if_its_steps_divide(tmp_path):
    found = launch("torchrun", "gpt2-124m", nodes=4, min_nodes=4)
    assert "--nnodes 4:4 --nproc-per-node 8" in (tmp_path / found.path).read_text()
    with pytest.raises(ConfigError, match="divided among 24 processes, if 3 of 4 machines are"):
        launch("slurm", "gpt2-124m", nodes=4, min_nodes=2)
    words = [f"batch.tokens_per_step={1024 * 96}", "batch.rows_per_device=1"]
    path = launch("slurm", "gpt2-124m", words, nodes=4, min_nodes=1).path
    assert "--nnodes 1:4" in (tmp_path / path).read_text()
    with pytest.raises(ConfigError, match=r"batch\.tokens_per_step=1000 does not fit"):
        launch("kubernetes", "gpt2-124m", ["batch.tokens_per_step=1000"])


def test_nothing_is_replaced_and_sizes_must_multiply():
    launch("slurm", "gpt2-124m", WORDS)
    with pytest.raises(OutputInUse):
        launch("slurm", "gpt2-124m", WORDS)
    with pytest.raises(ConfigError, match=r"parallel\.shard=3 does not fit 8 processes"):
        launch("slurm", "gpt2-124m", ["parallel.shard=3"])
    with pytest.raises(ConfigError, match=r"parallel\.context=3 does not divide"):
        launch("slurm", "gpt2-124m", ["parallel.shard=8", "parallel.context=3"])
