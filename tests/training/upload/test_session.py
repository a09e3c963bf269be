"""A run that uploads its checkpoints loses its directory, and continues bit for bit."""

import shutil

import pytest

from flatout.errors import CheckpointError, ConfigError, DataError, Stopped
from flatout.progress import SILENT
from flatout.storage.whole import name_of
from flatout.training.checkpoint import catalog
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.run_dir.runlog import RunLog
from flatout.training.upload.remote import RemoteCopy, step_at
from flatout.training.upload.uploader import GRACE_S, sending

pytestmark = pytest.mark.slow
URL = "faulty://bucket/runs"


def complete(url=f"{URL}/run"):
    """Return the steps of the complete checkpoints at a URL."""
    store = RemoteCopy(url)
    return [step_at(name) for name in store.names() if store.manifest(name)]


def test_a_run_whose_machine_is_lost_continues_bit_for_bit(
    tiny_config, tmp_path, store, stop_at, messages, events
):
    config = tiny_config(checkpoint__upload=URL, checkpoint__every_steps=2)
    whole = run_training(tiny_config(), tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)], progress=messages)
    assert 3 in [event["step"] for event in events(tmp_path / "run", "upload")]
    shutil.rmtree(tmp_path / "run")
    summary = run_training(config, tmp_path / "run", progress=messages)
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert summary["resumed_from"].endswith("step-3")
    assert len([e for e in events(tmp_path / "run", "restore") if e["step"] == 3]) == 1
    assert any("Restored" in line and "step 3, saved" in line for line in messages.lines)

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = run_training(config, tmp_path / "run", progress=messages)
    assert again["weights_sha256"] == whole["weights_sha256"], "a finished run is restored too"
    assert catalog.steps(tmp_path / "run")[-1] == 6


def test_a_damaged_checkpoint_comes_back_from_the_remote_copy(
    tiny_config, tmp_path, store, messages
):
    config = tiny_config(train__steps=2, checkpoint__upload=URL, checkpoint__keep=1)
    whole = run_training(config, tmp_path / "run")
    (weights,) = (tmp_path / "run" / "checkpoints").glob("step-2/model-*")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"No checkpoint of .* is complete"):
        run_training(config.with_values({"checkpoint.upload": "none"}), tmp_path / "run")
    assert read_exit_code(tmp_path / "run") == 2
    again = run_training(config, tmp_path / "run", progress=messages)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert read_exit_code(tmp_path / "run") == 0
    assert (
        f"{tmp_path}/run has no usable checkpoint: restoring it from {URL}/run." in messages.lines
    )


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "killed"])
def test_lost_records_in_the_remote_copy_are_named_once(
    tiny_config, tmp_path, store, messages, is_finished
):
    config = tiny_config(train__steps=4, checkpoint__upload=URL)
    run_training(config, tmp_path / "run")
    there = "/bucket/runs/run/metrics.jsonl"
    store.pipe_file(there, b"".join(store.cat(there).splitlines(keepends=True)[1:]))
    if not is_finished:
        journal = "/bucket/runs/run/events.jsonl"
        lines = store.cat(journal).splitlines(keepends=True)
        store.pipe_file(journal, b"".join(line for line in lines if b'"end"' not in line))
    shutil.rmtree(tmp_path / "run")
    run_training(config, tmp_path / "run", progress=messages)
    (line,) = [line for line in messages.lines if "metrics.jsonl" in line]
    assert "bytes since the checkpoint of step 4 was saved" in line


def test_a_rejected_start_keeps_the_results_and_records_its_exit_code(tiny_config, tmp_path, store):
    config = tiny_config(train__steps=2, schedule__kind="constant")
    run_training(config, tmp_path / "run")
    before = RunLog(tmp_path / "run").summary
    assert RunLog(tmp_path / "run").state == "finished"
    store.pipe_file(f"/bucket/runs/run/{name_of('step-1', b'theirs')}/manifest.json", b"theirs")
    store.pipe_file("/bucket/runs/run/events.jsonl", b"theirs")
    longer = config.with_values({"train.steps": 4, "checkpoint.upload": URL})
    with pytest.raises(CheckpointError, match="checkpoints of another run"):
        run_training(longer, tmp_path / "run")
    assert RunLog(tmp_path / "run").summary == before
    assert (read_exit_code(tmp_path / "run"), RunLog(tmp_path / "run").state) == (2, "finished")


def test_a_second_ctrl_c_does_not_wait_for_uploads():
    waited = []

    class Slow:
        def start(self, report):
            """Start nothing."""

        def close(self, progress, since_stop_s, advanced):
            waited.append(since_stop_s())

    def quit_while_sending():
        with sending(Slow(), print, SILENT, lambda: 0.5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quit_while_sending()
    assert waited[0] > GRACE_S


def test_a_finished_run_sends_the_rest_when_it_is_started_again(
    tiny_config, tmp_path, store, monkeypatch, messages
):
    config = tiny_config(checkpoint__upload=URL)
    put_file = type(store).put_file

    def refuse(self, lpath, rpath, **options):
        if "step-" in rpath:
            raise PermissionError("full")
        put_file(self, lpath, rpath, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "put_file", refuse)
        summary = run_training(config, tmp_path / "run")
    assert complete() == []
    assert run_training(config, tmp_path / "run", progress=messages)["run"] == summary["run"]
    assert 6 in complete()
    assert b'"event": "end"' in store.cat("/bucket/runs/run/events.jsonl")


def test_settings_that_contradict_the_remote_copy_are_rejected(tiny_config, tmp_path, store):
    config = tiny_config(checkpoint__upload=URL)
    run_training(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        run_training(config.with_values({"optim.lr": 0.5}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_the_same_settings_on_other_data_is_rejected(
    tiny_config, write_tiny, tmp_path, store
):
    config = tiny_config(checkpoint__upload=URL)
    run_training(config, tmp_path / "one" / "run")
    other = str(write_tiny(tmp_path / "other", num_documents=90))
    with pytest.raises(CheckpointError, match=r"The training tokens of .* have changed"):
        run_training(config.with_values({"data.path": other}), tmp_path / "two" / "run")

    moved = str(write_tiny(tmp_path / "moved"))
    summary = run_training(config.with_values({"data.path": moved}), tmp_path / "two" / "run")
    assert summary["run"] == str(tmp_path / "two" / "run"), "not the path on the other machine"


def test_a_server_that_does_not_answer_stops_a_new_run_but_not_a_resumed_one(
    tiny_config, tmp_path, store, monkeypatch, messages, stop_at
):
    config = tiny_config(checkpoint__upload=URL)

    def unreachable(self, *_, **__):
        raise OSError("no route")

    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "cat_file", unreachable)
        patched.setattr(type(store), "ls", unreachable)
        patched.setattr(type(store), "put_file", unreachable)
        with pytest.raises(DataError, match="no route"):
            run_training(config, tmp_path / "new")
        run_training(config, tmp_path / "run", progress=messages)
    assert any("Checkpoints are sent when it answers" in line for line in messages.lines)
    run_training(config, tmp_path / "run")
    assert 6 in complete()


def test_a_remote_copy_inside_the_directories_of_the_run_is_rejected(tiny_config, tmp_path):
    for backup in (tmp_path, tmp_path / "run" / "checkpoints"):
        config = tiny_config(checkpoint__upload=f"file://{backup}")
        with pytest.raises(ConfigError, match=r"contains the run itself.*directory elsewhere"):
            run_training(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    run_training(
        config.with_values({"checkpoint.upload": f"file://{tmp_path}/m"}), tmp_path / "run"
    )
    assert 6 in complete(f"file://{tmp_path}/m/run")
