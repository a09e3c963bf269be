"""Two processes have the losses of one, with DDP and with fully_shard, however they start."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist
import yaml
from warm import run_ranks

from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.training.checkpoint import catalog
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(ragged_set, tiny, tmp_path_factory):
    """Return the recipe of 8 steps on data with a loss mask, in micro-batches of 2 rows."""
    folder = tmp_path_factory.mktemp("several")
    document = {}
    for key, value in {
        **tiny,
        "data.path": str(ragged_set),
        "train.steps": 8,
        "batch.rows_per_device": 2,
        "train.eval_every": 4,
    }.items():
        section, _, last = key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[last] = value
    path = folder / "several.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def launch(recipe, folder, *overrides, count=2):
    words = ["-m", "flatout", "train", recipe, *overrides, "--run-dir", folder, "--json"]
    return run_ranks(words, count)


def under_torchrun(recipe, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "flatout", "train", str(recipe), "--run-dir", str(folder), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240
    )


def several(recipe, folder, *overrides, launch=launch, **options):
    """Train in two processes, and return the result."""
    done = launch(recipe, folder, *overrides, **options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == 1, "only rank 0 prints"
    return json.loads(lines[0])


@pytest.mark.parametrize("overrides", [(), ("parallel.shard=2",)], ids=["ddp", "fully-shard"])
def test_two_processes_have_the_losses_of_one(recipe, tmp_path, overrides, losses):
    one = run_training(load_config(recipe), tmp_path / "one")
    two = several(recipe, tmp_path / "two", *overrides)
    assert two["steps"] == one["steps"] == 8
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "two", "train/grad_norm") == pytest.approx(
        losses(tmp_path / "one", "train/grad_norm"), rel=1e-4
    )
    assert losses(tmp_path / "two", "val/loss") == pytest.approx(
        losses(tmp_path / "one", "val/loss"), rel=1e-5
    )


EIGENSTATE = ("model.kind=eigenstate", "model.num_eigenstates=8")
SHARED_ROWS = {
    "ddp": (2, ("parallel.context=2",)),
    "fully-shard": (4, ("parallel.shard=4", "parallel.context=2")),
    "hsdp": (4, ("parallel.shard=2", "parallel.context=2", "parallel.reshard=false")),
    "alone": (4, ("parallel.shard=4", "parallel.context=4", "data.document_mask=true")),
}


LLAMA = ("model.activation=swiglu", "model.num_kv_heads=2", "model.bias=true")
MUON = ("optim.kind=muon", "data.document_mask=true")
SHARED_LAYERS = {
    "alone": (2, (*LLAMA, "optim.kind=muon"), ("parallel.tensor=2",)),
    "hsdp": (4, (*LLAMA, *MUON), ("parallel.tensor=2", "parallel.replicate=2")),
    "fully-shard": (4, EIGENSTATE, ("parallel.tensor=2", "parallel.shard=2")),
}
STAGES = ("model.tied_head=false", "model.num_layers=4")
PIPELINES = {
    "pipeline": (2, (*STAGES, "optim.kind=muon"), ("parallel.pipeline=2",)),
    "interleaved": (
        4,
        (*STAGES, *EIGENSTATE, "optim.lr=0.002"),  # at 0.01 shards alone differ by 3e-5
        ("parallel.pipeline=2", "parallel.pipeline_schedule=interleaved", "parallel.shard=2"),
    ),
    "pipeline-tensor": (
        4,
        (*STAGES, *LLAMA, *MUON),
        ("parallel.pipeline=2", "parallel.tensor=2"),
    ),
}


@pytest.mark.quick_cases("ddp-transformer", "fully-shard-eigenstate")
@pytest.mark.parametrize("model", [(), EIGENSTATE], ids=["transformer", "eigenstate"])
@pytest.mark.parametrize("mesh", SHARED_ROWS)
def test_processes_that_share_rows_have_the_losses_of_one(recipe, tmp_path, mesh, model, losses):
    count, overrides = SHARED_ROWS[mesh]
    masks = [each for each in overrides if each.startswith("data.")]
    run_training(load_config(recipe, [*model, *masks]), tmp_path / "one")
    several(recipe, tmp_path / "several", *model, *overrides, count=count)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert losses(tmp_path / "several", name) == pytest.approx(
            losses(tmp_path / "one", name), rel=1e-4
        ), name


@pytest.mark.quick_cases("pipeline")
@pytest.mark.parametrize("mesh", SHARED_LAYERS | PIPELINES)
def test_processes_that_share_the_model_have_the_losses_of_one_and_continue_each_other(
    recipe, tmp_path, mesh, losses
):
    count, keys, parallel = (SHARED_LAYERS | PIPELINES)[mesh]
    keys = ("model.vocab_size=260", *keys, "checkpoint.every_steps=4", "checkpoint.keep=9")
    config, folders = load_config(recipe, keys), [tmp_path / name for name in "abcd"]
    run_training(config, folders[0])
    several(recipe, folders[1], *keys, *parallel, count=count)
    checkpoints = [str(each / "checkpoints" / "step-4") for each in folders[:2]]
    run_training(config, folders[2], resume=checkpoints[1])
    several(recipe, folders[3], *keys, *parallel, "--resume", checkpoints[0], count=count)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        expected = losses(folders[0], name)
        for folder in folders[1:]:
            found = losses(folder, name)
            assert found == pytest.approx(expected[-len(found) :], rel=1e-4), (name, folder)


def test_a_pipeline_of_narrow_hidden_states_has_the_validation_loss_of_one(
    recipe, tmp_path, losses
):
    keys = (*STAGES, "train.precision=auto", "speedups=bf16-products", "model.bias=false")
    run_training(load_config(recipe, keys), tmp_path / "one")
    several(recipe, tmp_path / "two", *keys, "parallel.pipeline=2")
    for name in ("train/loss", "val/loss"):
        expected = losses(tmp_path / "one", name)
        assert losses(tmp_path / "two", name) == pytest.approx(expected, rel=1e-3), name


@pytest.mark.thorough
def test_a_pipeline_that_resumes_has_the_weights_of_one_that_did_not_stop(recipe, tmp_path):
    keys = (*STAGES, "model.dropout=0.1", "optim.kind=muon", "parallel.pipeline=2")
    keys = (*keys, "checkpoint.every_steps=4", "checkpoint.keep=9")
    whole = several(recipe, tmp_path / "whole", *keys)
    middle = str(tmp_path / "whole" / "checkpoints" / "step-4")
    resumed = several(recipe, tmp_path / "resumed", *keys, "--resume", middle)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.thorough
def test_a_run_that_shares_rows_resumes_without(recipe, tmp_path, losses):
    run_training(load_config(recipe), tmp_path / "whole")
    shared = ("parallel.shard=2", "parallel.context=2", "checkpoint.every_steps=4")
    several(recipe, tmp_path / "run", *shared, "checkpoint.keep=9")
    resumed = run_training(
        load_config(recipe),
        tmp_path / "one",
        resume=str(tmp_path / "run" / "checkpoints" / "step-4"),
    )
    assert resumed["steps"] == 8
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "whole")[4:], rel=1e-5)


def test_two_processes_agree_on_a_mix_init_from_and_early_stop(
    recipe, tiny_set, ragged_set, tmp_path, losses
):
    """Covers everything that ranks must agree on, with sharded weights."""
    run_training(load_config(recipe, ["train.steps=2"]), tmp_path / "source")
    mix = f"data.mix={{{tiny_set}: 1, {ragged_set}: 1}}"
    overrides = [
        mix,
        f"train.init_from={tmp_path / 'source'}",
        "train.eval_every=1",
        "train.patience=1",
        "optim.lr=0.3",
        "schedule.warmup=0",
    ]
    one = run_training(load_config(recipe, overrides), tmp_path / "one")
    two = several(recipe, tmp_path / "two", *overrides, "parallel.shard=2")
    assert one["stopped_early"]
    assert (two["steps"], two["best_step"], two["stopped_early"]) == (
        one["steps"],
        one["best_step"],
        True,
    )
    for name in ("train/loss", "val/loss", "val/loss/tiny", "val/loss/ragged"):
        assert losses(tmp_path / "two", name) == pytest.approx(
            losses(tmp_path / "one", name), rel=1e-4
        ), name


@pytest.mark.thorough
def test_a_run_of_two_processes_resumes_on_one(recipe, tmp_path, events, losses):
    run_training(load_config(recipe), tmp_path / "whole")
    several(
        recipe,
        tmp_path / "run",
        "parallel.shard=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep=9",
        "speedups=auto,-compile,+async-checkpoints",
    )
    resumed = run_training(
        load_config(recipe),
        tmp_path / "one",
        resume=str(tmp_path / "run" / "checkpoints" / "step-4"),
    )
    assert resumed["steps"] == 8
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "whole")[4:], rel=1e-5)


@pytest.mark.quick_cases("adamw-fully-shard")
@pytest.mark.parametrize("mesh", [("parallel.shard=2",), ()], ids=["fully-shard", "hsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_in_host_memory_resumes_with_and_without(recipe, tmp_path, losses, mesh, optimizer):
    kind, offload = f"optim.kind={optimizer}", "parallel.offload=cpu"
    run_training(load_config(recipe, [kind]), tmp_path / "whole")
    saves = ("checkpoint.every_steps=4", "checkpoint.keep=9")
    several(recipe, tmp_path / "run", kind, *mesh, offload, *saves)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert losses(tmp_path / "run", name) == pytest.approx(
            losses(tmp_path / "whole", name), rel=1e-4
        ), name
    for name, overrides in {"alone": [offload], "without": []}.items():
        resumed = run_training(
            load_config(recipe, [kind, *overrides]),
            tmp_path / name,
            resume=str(tmp_path / "run" / "checkpoints" / "step-4"),
        )
        assert resumed["steps"] == 8
        assert not dist.is_initialized()
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole")[4:], rel=1e-4)


def test_a_run_of_two_resumes_on_one(recipe, tmp_path, losses):
    """One process then has all micro-batches and no gradients to synchronise."""
    run_training(load_config(recipe), tmp_path / "whole")
    named = "speedups=auto,-compile"
    several(recipe, tmp_path / "run", named, "checkpoint.every_steps=4", "checkpoint.keep=9")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-8")
    resumed = run_training(load_config(recipe, [named]), tmp_path / "run")
    assert (resumed["steps"], resumed["resumed_from"]) == (
        8,
        str(tmp_path / "run" / "checkpoints" / "step-4"),
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def own_launch(recipe, folder, *overrides):
    """Start a run with `train.devices=2`."""
    command = [sys.executable, "-m", "flatout", "train", str(recipe), "train.devices=2"]
    return subprocess.Popen(
        [*command, *overrides, "--run-dir", str(folder), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def endless(recipe, tmp_path, request):
    """Start an endless run of two processes, and return it, its directory and both processes."""
    folder, overrides = tmp_path / "endless", getattr(request, "param", ())
    launcher = own_launch(
        recipe, folder, "train.steps=1000000", "train.eval_every=0", "log.every=1", *overrides
    )
    ranks = []
    try:
        records = folder / "metrics.jsonl"
        while launcher.poll() is None and not (records.exists() and records.stat().st_size):
            time.sleep(0.05)
        ranks = sorted(
            psutil.Process(launcher.pid).children(), key=lambda one: one.environ()["RANK"]
        )
        yield launcher, folder, ranks
    finally:
        for process in (launcher, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


@pytest.mark.parametrize(
    "other", [launch, pytest.param(under_torchrun, marks=pytest.mark.thorough)]
)
def test_train_devices_starts_the_processes(recipe, tmp_path, events, losses, other):
    launcher = own_launch(recipe, tmp_path / "own")
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.strip()]
    two = json.loads(line)
    theirs = several(recipe, tmp_path / "other", launch=other)
    assert two["weights_sha256"] == theirs["weights_sha256"]
    assert losses(tmp_path / "own") == losses(tmp_path / "other")
    (start,) = events(tmp_path / "own", "start")
    assert start["world_size"] == 2


PIPELINE = (*STAGES, "parallel.pipeline=2")


@pytest.mark.parametrize(
    ("endless", "number"),
    [
        ((), signal.SIGINT),
        pytest.param((), signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param(PIPELINE, signal.SIGTERM, marks=pytest.mark.faults),
    ],
    indirect=["endless"],
    ids=["INT", "TERM", "pipeline"],
)
def test_a_signal_to_the_launcher_saves_and_stops_the_run(endless, number):
    launcher, folder, ranks = endless
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 75, err
    assert json.loads(out.splitlines()[-1])["exit_code"] == 75
    assert not any(map(psutil.pid_exists, [rank.pid for rank in ranks]))
    assert catalog.latest(folder) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("endless", [(), PIPELINE], indirect=True, ids=["ddp", "pipeline"])
def test_a_killed_rank_ends_the_run_and_is_named(endless):
    launcher, _, ranks = endless
    ranks[1].kill()
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 1, err
    assert "Rank 1 was killed by SIGKILL" in err
    assert "Rank 1" in json.loads(out.splitlines()[-1])["error"]
    assert not any(map(psutil.pid_exists, [rank.pid for rank in ranks]))


@pytest.mark.faults
def test_a_killed_launcher_lets_the_run_save_and_stop(endless):
    launcher, folder, ranks = endless
    launcher.kill()
    launcher.wait()
    psutil.wait_procs(ranks, timeout=120)
    assert catalog.latest(folder) is not None
    assert read_exit_code(folder) == 75
    assert "The launcher, process" in launcher.stderr.read()


def test_a_setting_that_is_rejected_is_reported_once(recipe, tmp_path):
    launcher = own_launch(recipe, tmp_path / "run", "batch.tokens_per_step=100")
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 2
    assert err.count("batch.tokens_per_step=100 does not fit") == 1
    assert json.loads(out)["exit_code"] == 2


def test_sizes_that_do_not_divide_are_rejected_before_a_process_starts(recipe, tmp_path):
    """Each process would load torch first."""
    from flatout.cli.commands.train import processes

    words = ["train.devices=2", "train.device=cpu"]
    with pytest.raises(ConfigError, match=r"parallel\.shard=3 does not fit 2 processes"):
        processes(str(recipe), [*words, "parallel.shard=3"])
    with pytest.raises(ConfigError, match=r"batch\.tokens_per_step=100 does not fit"):
        processes(str(recipe), [*words, "batch.tokens_per_step=100"])
    assert processes(str(recipe), words, run=tmp_path / "new") == 2
    run_training(load_config(str(recipe)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"A step of 8 sequences cannot be divided among 3"):
        processes(str(recipe), ["train.devices=3", "train.device=cpu"], run=tmp_path / "run")


@pytest.mark.faults
def test_ranks_with_different_settings_are_rejected(recipe, tmp_path):
    """Each rank gets the same message, and nothing is written."""
    code = "import os; words = ['optim.lr=0.5'] if os.environ['RANK'] == '1' else []\n"
    code += "from flatout.__main__ import main; import sys; sys.argv += words; main()"
    script = tmp_path / "start.py"
    script.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "train", str(recipe), "--run-dir", "run"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert "optim.lr is 0.01 on rank 0 and 0.5 on rank 1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_start_ends_on_every_rank(recipe, tmp_path):
    done = launch(recipe, tmp_path / "run", "optim.kind=adam")
    assert done.returncode == 2
    assert "There is no optimizer named 'adam'" in done.stderr
