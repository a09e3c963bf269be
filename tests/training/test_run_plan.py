"""The plan for a run directory and a request: a new run, a resume, a summary or a rejection."""

import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from flatout.assembly import resolve as resolving
from flatout.assembly.choices import Gain
from flatout.assembly.measured import hardware_name, keep
from flatout.assembly.resolve import resolve
from flatout.data.store.manifest import read_manifest
from flatout.data.store.mix import open_data
from flatout.distributed.rendezvous import Ranks
from flatout.errors import CheckpointError, ConfigError, Stopped
from flatout.hardware.machine import probe
from flatout.inference.load import load_run
from flatout.training.checkpoint.merged import read_merged
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config
from flatout.training.run_plan import require_same_settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("steps", [2, 3])
def test_a_checkpoint_past_the_last_step_of_a_new_run_is_rejected(steps, tiny_config, tmp_path):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    config, other = tiny_config(train__steps=steps), tmp_path / "runs" / "second"
    message = f"step-3 is at step 3, and this run has {steps} steps"
    with pytest.raises(ConfigError, match=message) as refused:
        run_training(config, other, resume=str(tmp_path / "first"))
    assert "train.steps to more than 3" in refused.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_run_that_resumes_another_trains_at_its_own_rate(tiny_config, tmp_path, records):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    constant = {"schedule__kind": "constant", "schedule__warmup": 0}
    config = tiny_config(train__steps=6, optim__lr=1e-12, **constant)
    run_training(config, tmp_path / "second", resume=str(tmp_path / "first"))
    assert {r["train/lr"] for r in records(tmp_path / "second") if "train/lr" in r} == {1e-12}
    before = read_merged(tmp_path / "first/checkpoints/step-3")
    after = read_merged(tmp_path / "second/checkpoints/step-6")
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-10


def test_a_checkpoint_that_does_not_fit_leaves_no_run_directory(tiny_config, tmp_path):
    run_training(tiny_config(optim__kind="muon"), tmp_path / "first")
    config, other = tiny_config(train__steps=7), tmp_path / "runs" / "second"
    with pytest.raises(CheckpointError, match=r"train\.init_from") as refused:
        run_training(config, other, resume=str(tmp_path / "first"))
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_directory_with_other_files_is_rejected(tiny_config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not a run directory. It contains notes\.txt"):
        run_training(tiny_config(), tmp_path)
    assert not (tmp_path / "config.yaml").exists()


def test_a_run_resumes_on_moved_data(tiny_config, tiny_set, tmp_path, stop_at, events):
    whole = run_training(tiny_config(), tmp_path / "whole")
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(tiny_set, before)
    with pytest.raises(Stopped):
        run_training(tiny_config(data__path=str(before)), tmp_path / "run", observers=[stop_at(3)])
    before.rename(after)
    moved = run_training(tiny_config(data__path=str(after)), tmp_path / "run")
    assert moved["weights_sha256"] == whole["weights_sha256"]
    assert events(tmp_path / "run", "difference") == []
    assert load_run(tmp_path / "run").dataset.path == after
    assert run_training(tiny_config(data__path=str(after)), tmp_path / "run") == moved


@pytest.fixture
def stopped(tiny_config, tmp_path, write_tiny, stop_at):
    """A configuration with a dataset of its own, and a run of it that was stopped at step 3."""
    config = tiny_config(data__path=str(write_tiny(tmp_path / "data")))
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    return config, tmp_path / "run"


def test_changed_data_is_rejected_with_the_difference(stopped, tmp_path, write_tiny, events):
    config, folder = stopped
    shutil.rmtree(config.data.path)
    write_tiny(tmp_path / "data", num_documents=48)
    before = (folder / "config.yaml").read_bytes()
    message = r"training tokens of .* have changed since step-3.*documents 35 -> 42.*--run-dir DIR"
    with pytest.raises(CheckpointError, match=message):
        run_training(config, folder)
    other = write_tiny(tmp_path / "other", num_documents=32)
    with pytest.raises(CheckpointError, match=rf"{other} \(before: .*/data\): tokens"):
        run_training(config.with_values({"data.path": str(other)}), folder)
    assert (folder / "config.yaml").read_bytes() == before
    run_training(config, tmp_path / "new", resume=str(folder))
    assert [event["text"] for event in events(tmp_path / "new", "difference")] == [
        "The tokens of the dataset are not those that the checkpoint was trained on: the run "
        "continues on different text."
    ]


def test_other_data_for_a_finished_run_is_rejected(tiny_config, tmp_path, write_tiny):
    """Its results would be taken for those of the other data."""
    run_training(tiny_config(), tmp_path / "run")
    other = write_tiny(tmp_path / "other", num_documents=32)
    with pytest.raises(CheckpointError, match=rf"have changed since .*{other} \(before: "):
        run_training(tiny_config(data__path=str(other)), tmp_path / "run")


def test_other_validation_tokens_are_no_other_training(stopped, events):
    config, folder = stopped
    path = Path(config.data.path)
    manifest = read_manifest(path)
    (shard,) = manifest.shards
    val = shard.splits["val"].model_copy(update={"text_bytes": 1})
    other = shard.model_copy(update={"splits": {**shard.splits, "val": val}})
    changed = manifest.model_copy(update={"shards": (other,)})
    (path / "manifest.json").write_text(changed.sealed().model_dump_json())
    assert run_training(config, folder)["steps"] == 6
    assert events(folder, "difference") == []


def test_what_auto_chose_is_not_chosen_again(tiny_config, tmp_path, stop_at, events, monkeypatch):
    """What was measured in between would change the speedups, the rows and compilation."""
    cache, machine = tmp_path / "cache", probe()
    rows = {"batch__rows_per_device": "auto", "batch__tokens_per_step": 384}
    config = tiny_config(speedups="auto", train__steps=4, **rows)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", cache=cache, observers=[stop_at(2)])
    stored = read_config(tmp_path / "run")
    decided = {event["name"]: event["on"] for event in events(tmp_path / "run", "speedup")}
    assert decided["micro-batch"]
    assert not decided["compile"]
    monkeypatch.setattr(resolving, "expected_minutes", lambda *_: 600.0)
    flops = resolving.flops_per_token(config.with_values({"model.vocab_size": 257}))
    gains = {"micro-batch": gain(0.5, flops), "compile": gain(2, flops)}
    keep(hardware_name(machine, "cpu"), cache, gains)
    again, _ = resolve(
        config, machine=machine, dataset=open_data(config.data), world_size=1, cache=cache
    )
    assert "compile" in again.speedups
    assert (again.batch.rows_per_device, stored.batch.rows_per_device) == (12, 24)
    run_training(config, tmp_path / "run", cache=cache)
    assert read_config(tmp_path / "run") == stored
    both = events(tmp_path / "run", "speedup")
    resumed = {event["name"]: event["on"] for event in both[len(decided) :]}
    assert resumed == decided | {"micro-batch": False}, "the rows are stored"
    assert not events(tmp_path / "run", "compiled")


def gain(times, flops_per_token):
    """Return a gain that `bench` is sure of."""
    return Gain(
        gain=times,
        low=0.99 * times,
        high=1.01 * times,
        where="in the full set",
        recipe="tiny",
        date="2026-11-22T08:00:00",
        commit=None,
        torch=version("torch"),
        flops_per_token=flops_per_token,
    )


def test_more_shards_than_processes_are_rejected_with_the_command(tiny_config, tmp_path):
    message = r"parallel\.shard=2 does not fit 1 process.*train\.devices=2, .*--nproc-per-node 2"
    with pytest.raises(ConfigError, match=message):
        run_training(tiny_config(parallel__shard=2), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim__lr": 0.5}, "optim.lr is 0.01 on rank 0 and 0.5 on rank 1"),
        ({"train__seed": 9}, "train.seed is 0 on rank 0 and 9 on rank 1"),
        ({"data__path": "ragged"}, "the tokens of the dataset"),
        ({"data__path": "copy"}, None),
    ],
)
def test_processes_with_different_settings_are_rejected(
    tiny_config, tiny_set, ragged_set, tmp_path, monkeypatch, changes, named
):
    copy = shutil.copytree(tiny_set, tmp_path / "copy")
    paths = {"ragged": str(ragged_set), "copy": str(copy)}
    changes = {key: paths.get(value, value) for key, value in changes.items()}
    sent = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own: sent.append(own))
    configs = [tiny_config(), tiny_config(**changes)]
    for rank, config in enumerate(configs):
        require_same_settings(Ranks(rank, 2, rank, 2), config, open_data(config.data))
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda found, _: found.__setitem__(slice(None), sent),
    )
    check = partial(
        require_same_settings, Ranks(0, 2, 0, 2), configs[0], open_data(configs[0].data)
    )
    if named is None:
        check()
    else:
        with pytest.raises(ConfigError, match=f"different settings: {named}") as refused:
            check()
        assert "; " not in refused.value.what, "nothing else differs"
