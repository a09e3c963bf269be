"""A run whose directory or checkpoints are gone comes back from its remote copy."""

import json
import shutil
import tracemalloc

import pytest
import zstandard

from flatout.config.schema import load_config
from flatout.errors import CheckpointError, ConfigError, DataError, UntrustedCode
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog
from flatout.training.upload.restore import restore_lost

URL = "faulty://bucket/runs"
INFO = {"step": 2, "tokens": 9, "elapsed_s": 1.0, "saved_at": 1.7e9, "config_digest": "ab"}
INFO |= {"host": "a", "world_size": 1, "flatout": "1", "torch": "2", "python": "3"}
STATE = json.dumps({"values": {"best": {"step": 1}}}).encode()


@pytest.fixture
def lost(run):
    """A run with two uploaded checkpoints, the first of which is the best. Nothing is here."""
    for step in (1, 2):
        run.checkpoint(step, state=STATE, info=INFO)
    (run.path / "tokenizer.json").write_text("{}")
    run.send()
    run.names = {step: run.there(step) for step in (1, 2)}
    shutil.rmtree(run.path)
    run.path.mkdir()
    return run


@pytest.fixture
def restore(run, messages):
    def restored(*overrides, path=run.path, **options):
        config = load_config(None, [f"checkpoint.upload={URL}", *overrides])
        restore_lost(path, config, progress=messages, **options)
        return catalog.steps(path)

    return restored


def test_the_newest_and_the_best_checkpoint_and_the_files_of_the_run_come_back(
    lost, restore, messages
):
    assert restore() == [1, 2]
    assert catalog.latest(lost.path).name == "step-2"
    assert layout.read_config(lost.path).checkpoint.upload == URL
    names = {path.name for path in lost.path.iterdir()}
    assert {"metrics.jsonl", "tokenizer.json"} <= names
    assert [event["event"] for event in RunLog(lost.path).events] == ["start", "restore"]
    assert messages.lines[-1] == (
        f"Restored {lost.path} from {URL}/run: step 2, saved 2023-11-14 22:13:20 UTC on a."
    )
    assert {path.name for path in (lost.path / "checkpoints").iterdir()} == {"step-1", "step-2"}


def test_the_newest_names_are_looked_at_first(lost, restore, store):
    store.asked.clear()
    restore(resume="auto")
    manifests = [path.split("/")[-2] for path in store.asked if path.endswith("manifest.json")]
    newest, best = (lost.names[step].rpartition("/")[2] for step in (2, 1))
    assert manifests == [newest] * manifests.count(newest) + [best]


def test_a_store_without_a_complete_checkpoint_is_named_before_the_run_starts_over(
    run, restore, store, messages
):
    for name in ("step-2-00000000/model.safetensors", "step-3-00000000/manifest.json"):
        store.pipe_file(f"/bucket/runs/run/{name}", b"half")
    assert restore() == []
    assert messages.lines == [
        f"{URL}/run has 2 checkpoints, but no complete one: the run starts over."
    ]
    run.checkpoint(1)
    run.send()
    assert run.of_kind("upload") == [1]


def test_a_restored_run_continues_its_remote_copy(lost, restore, uploaded):
    restore()
    lost.checkpoint(3, state=STATE)
    lost.send()
    assert lost.of_kind("upload") == [3]
    lost.delete(2)
    lost.checkpoint(4, state=STATE)
    lost.send()
    assert uploaded(2) == set()
    assert "manifest.json" in uploaded(1), "the best one"


def test_a_run_that_has_a_checkpoint_is_left_alone(run, restore, store):
    run.checkpoint(1)
    run.send()
    store.asked.clear()
    restore()
    assert store.asked == []


def test_an_empty_remote_copy_restores_nothing(run, restore):
    assert restore() == []


def test_compressed_checkpoints_come_back(run, restore):
    path = run.checkpoint(1, state=STATE, model=b"a" * 100_000)
    run.send(compress="zstd")
    shutil.rmtree(run.path)
    run.path.mkdir()
    assert restore() == [1]
    assert catalog.verify(path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda store, name: store.pipe_file(name, store.cat(name)[:-1] + b"!"),
        lambda store, name: store.pipe_file(name, store.cat(name)[:-3]),
        lambda store, name: store.rm_file(name),
    ],
    ids=["changed", "cut short", "missing"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_an_older_one_comes_back(
    lost, restore, store, messages, damage, name
):
    damage(store, f"{lost.names[2]}/{name}")
    assert restore() == [1]
    (line,) = [line for line in messages.lines if "cannot be used" in line]
    assert f"{lost.names[2].rpartition('/')[2]} at {URL}/run" in line
    assert name in line
    assert {path.name for path in (lost.path / "checkpoints").iterdir()} == {"step-1"}


def test_a_compressed_file_may_not_be_larger_than_its_manifest_says(run, restore, store, messages):
    run.checkpoint(1, state=STATE)
    run.checkpoint(2, state=STATE)
    run.send(compress="zstd")
    there = run.there(2)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    for name in ("model.safetensors", "state.json"):
        store.pipe_file(f"{there}/{name}.zst", bomb)
    shutil.rmtree(run.path)
    run.path.mkdir()
    tracemalloc.start()
    try:
        assert restore() == [1]
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    (line,) = [line for line in messages.lines if "cannot be used" in line]
    assert "it has more than the " in line


def test_a_remote_copy_without_a_complete_checkpoint_is_an_error(lost, restore, store):
    for step in (1, 2):
        store.rm_file(f"{lost.names[step]}/model.safetensors")
    with pytest.raises(CheckpointError, match=r"No checkpoint at .* is complete.*upload=none"):
        restore()
    assert restore("checkpoint.upload=none") == []


def test_a_server_that_fails_is_an_error_and_the_next_start_continues(
    lost, restore, store, monkeypatch
):
    cat_file = type(store).cat_file

    def fail(self, path, **options):
        if path.endswith(f"{lost.names[2]}/index.json"):
            raise OSError("away")
        return cat_file(self, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "cat_file", fail)
        with pytest.raises(DataError, match="away"):
            restore()
    kept = lost.path / "checkpoints" / "step-2.pull"
    (kept / "model.safetensors").write_bytes(b"weights of 2")
    (kept / "index.json.1234.part").write_bytes(b"half")
    store.asked.clear()
    assert restore() == [1, 2]
    assert not [line for line in store.asked if f"{lost.names[2]}/model" in line], (
        "it was here already"
    )


def test_the_uploaded_configuration_replaces_that_of_a_run_without_checkpoints(lost, restore):
    """Otherwise the checkpoints would continue with settings that they were not trained with."""
    layout.write_config(lost.path, load_config(None, [f"checkpoint.upload={URL}", "optim.lr=1"]))
    restore()
    assert layout.read_config(lost.path).optim.lr != 1


def test_another_run_of_that_name_is_rejected_before_anything_is_written(
    lost, restore, store, tmp_path
):
    before = dict(store.store)
    elsewhere = tmp_path / "project" / "run"
    elsewhere.mkdir(parents=True)
    with pytest.raises(ConfigError) as raised:
        restore("optim.lr=0.5", path=elsewhere)
    what, fix = raised.value.what, raised.value.fix
    assert what.startswith(
        f"{URL}/run contains a run with different settings, saved 2023-11-14 22:13:20 UTC on a: "
    )
    assert "optim.lr: " in what
    assert "--run-dir DIR" in fix
    assert "a different checkpoint.upload" in fix
    assert list(elsewhere.iterdir()) == []
    assert store.store == before
    restore("log.every=3", path=elsewhere)


def test_a_damaged_configuration_in_the_remote_copy_is_named(lost, restore, store):
    path = "/bucket/runs/run/config.yaml"
    store.pipe_file(path, b"- a\n")
    with pytest.raises(CheckpointError, match=rf"^{URL}/run/config\.yaml.*upload=none"):
        restore("train.seed=5")
    assert list(lost.path.iterdir()) == []


def test_code_that_the_remote_copy_names_must_be_trusted(run, restore):
    layout.write_config(run.path, load_config(None, ["log.observers=[elsewhere:Model]"]))
    run.checkpoint(1, state=STATE)
    run.send()
    other = run.path.parent / "other" / "run"
    other.mkdir(parents=True)
    with pytest.raises(UntrustedCode, match="elsewhere:Model"):
        restore(path=other)
    assert catalog.steps(other) == []
