"""What is uploaded, in which order, and what happens when that fails."""

import hashlib
from pathlib import Path
from threading import Event

import pytest

from flatout.errors import CheckpointError
from flatout.progress import SILENT
from flatout.training.upload import uploader as module
from flatout.training.upload.remote import RemoteCopy
from flatout.training.upload.uploader import GivenUp, Uploader

FILES = {"index.json", "manifest.json", "model.safetensors", "state.json"}


def puts(store):
    return [Path(line).name for line in store.asked if line.startswith("put ")]


@pytest.fixture
def stalled(store, monkeypatch):
    """An event that lets the store take model.safetensors, and one that it has been asked to."""
    put_file, release, asked = type(store).put_file, Event(), Event()

    def put(self, lpath, rpath, **options):
        if rpath.endswith("model.safetensors"):
            asked.set()
            assert release.wait(60), "nothing released the store"
        put_file(self, lpath, rpath, **options)

    monkeypatch.setattr(type(store), "put_file", put)
    yield release, asked
    release.set()


def test_a_checkpoint_is_sent_with_the_files_of_the_run_and_its_manifest_last(run, store, uploaded):
    path = run.checkpoint(5)
    events = run.send()
    assert uploaded(5) == FILES
    for name in FILES:
        assert store.cat(f"{run.there(5)}/{name}") == (path / name).read_bytes()
    order = puts(store)
    assert order[0] == "config.yaml"
    assert order.index("manifest.json") > max(map(order.index, FILES - {"manifest.json"}))
    assert order.index("manifest.json") > order.index("metrics.jsonl") > order.index("config.yaml")
    ((kind, fields),) = events
    assert (kind, fields["step"]) == ("upload", 5)
    assert fields["bytes"] == sum((path / name).stat().st_size for name in FILES) - len(
        (path / "manifest.json").read_bytes()
    )
    assert [one.name for one in path.parent.iterdir()] == ["step-5"]


def test_the_newest_checkpoint_goes_first_and_none_goes_twice(run, store):
    for step in (1, 2, 3):
        run.checkpoint(step)
    run.send()
    assert run.of_kind("upload") == [3, 2, 1]
    store.asked.clear()
    assert run.send() == []
    assert not {"model.safetensors", "manifest.json"} & {*puts(store)}


def test_an_upload_that_was_interrupted_is_continued(run, store, refusing, uploaded):
    run.checkpoint(5, optimizer=b"moments")
    refusing("manifest.json")
    run.send()
    assert run.of_kind("upload") == []
    assert run.of_kind("upload_pending", "steps") == [[5]]
    assert uploaded(5) == {*FILES, "optimizer.safetensors"} - {"manifest.json"}
    store.asked.clear()
    refusing(None)
    run.send()
    assert run.of_kind("upload") == [5]
    assert "manifest.json" in puts(store)
    assert not {"model.safetensors", "optimizer.safetensors"} & {*puts(store)}
    assert uploaded(5) == {*FILES, "optimizer.safetensors"}


def test_half_a_checkpoint_that_is_gone_here_is_removed_there(run, refusing, uploaded):
    run.checkpoint(5)
    refusing("manifest.json")
    run.send()
    assert uploaded(5)
    run.delete(5)
    run.checkpoint(6)
    refusing(None)
    run.send()
    assert (uploaded(5), uploaded(6)) == (set(), FILES)


def test_what_is_deleted_here_is_deleted_there_once_a_newer_one_is_complete(run, uploaded):
    for step in (1, 2):
        run.checkpoint(step)
    run.send()
    run.delete(1)
    run.checkpoint(3)
    run.send()
    assert (uploaded(1), uploaded(2), uploaded(3)) == (set(), FILES, FILES)
    run.delete(2)
    assert run.send() == []
    assert (uploaded(2), uploaded(3)) == (set(), FILES)


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"keep": 1}, {3}),
        ({"keep": 2}, {2, 3}),
        ({"keep": 1, "keep_every": 2}, {2, 3}),
        ({"keep": "all"}, {1, 2, 3}),
    ],
)
def test_the_remote_copy_keeps_what_the_configuration_keeps(run, uploaded, config, left):
    """After a restore, older checkpoints are there only."""
    for step in (1, 2, 3):
        run.checkpoint(step)
        run.send(keep="all")
    run.delete(1)
    run.delete(2)
    run.send(**config)
    assert {step for step in (1, 2, 3) if uploaded(step)} == left


def test_other_files_there_are_left_alone(run, store):
    store.pipe_file("/bucket/runs/run/step-5/thesis.txt", b"my only copy")
    run.checkpoint(5)
    run.send()
    run.checkpoint(6)
    run.delete(5)
    run.send()
    assert store.cat("/bucket/runs/run/step-5/thesis.txt") == b"my only copy"


def test_the_last_checkpoint_there_stays_when_all_here_are_gone(run, uploaded):
    run.checkpoint(1)
    run.send()
    run.delete(1)
    run.send()
    assert uploaded(1) == FILES


def test_a_checkpoint_deleted_during_its_upload_is_sent_to_its_end(run, stalled, store, uploaded):
    release, asked = stalled
    run.checkpoint(1)
    uploader = run.started()
    assert asked.wait(60)
    run.checkpoint(2)
    run.delete(1)
    release.set()
    uploader.close(SILENT)
    assert run.of_kind("upload") == [1, 2]
    assert store.cat(f"{run.there(2)}/model.safetensors") == b"weights of 2"
    assert uploaded(1) == set(), "it was deleted here, and a newer one is there"


def test_a_checkpoint_deleted_before_its_turn_is_omitted(run, stalled, uploaded):
    release, asked = stalled
    run.checkpoint(1)
    uploader = run.started()
    assert asked.wait(60)
    for step in (2, 3):
        run.checkpoint(step)
        uploader.on_event({"event": "save", "step": step})
    run.delete(2)
    release.set()
    uploader.close(SILENT)
    assert run.of_kind("upload") == [1, 3]
    assert uploaded(2) == set()


def test_a_file_system_without_hard_links_is_read_in_place(run, monkeypatch, uploaded):
    def refuse(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(module.os, "link", refuse)
    run.checkpoint(5)
    run.send()
    assert uploaded(5) == FILES


def test_a_failure_is_reported_once_and_the_upload_is_tried_again(
    run, refusing, monkeypatch, uploaded
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.0)
    attempts, tried_often = [], Event()
    failed = Uploader._failed

    def count(self, error):
        attempts.append(error)
        if len(attempts) == 3:
            tried_often.set()
        failed(self, error)

    monkeypatch.setattr(Uploader, "_failed", count)
    refusing("model.safetensors")
    run.checkpoint(5)
    uploader = run.started()
    assert tried_often.wait(60)
    refusing(None)
    uploader.close(SILENT)
    ((reason,),) = [run.of_kind("upload_failed", "reason")]
    assert "not today" in reason
    assert run.of_kind("upload") == [5]
    assert uploaded(5) == FILES


def test_a_run_in_a_hurry_waits_no_longer_than_its_grace_period(
    run, stalled, monkeypatch, uploaded
):
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    release, asked = stalled
    run.checkpoint(5)
    uploader = run.started()
    assert asked.wait(60)
    uploader.close(SILENT, lambda: 1.0)
    assert run.of_kind("upload_pending", "reason") == ["there was too little time"]
    release.set()
    uploader._thread.join(60)
    assert "manifest.json" not in uploaded(5), "after the end of the run, nothing is published"


def test_a_server_that_takes_nothing_holds_a_finished_run_for_a_bounded_time(
    run, stalled, monkeypatch
):
    monkeypatch.setattr(module, "STALL_S", 0.0)
    _, asked = stalled
    run.checkpoint(5)
    uploader = run.started()
    assert asked.wait(60)
    uploader.close(SILENT)
    assert run.of_kind("upload_pending", "steps") == [[5]]


def test_a_remote_copy_of_another_run_is_rejected(run, store, tmp_path):
    run.checkpoint(5)
    run.send()
    (run.path / "events.jsonl").write_text('{"event": "start"}\n')
    with pytest.raises(CheckpointError, match="runs/run contains the checkpoints of another run"):
        run.started()


def test_compressed_files_have_another_name_and_the_same_manifest(run, store, uploaded):
    path = run.checkpoint(5, model=b"a" * 100_000)
    run.send(compress="zstd")
    assert uploaded(5) == {
        "index.json.zst",
        "manifest.json",
        "model.safetensors.zst",
        "state.json.zst",
    }
    assert store.size(f"{run.there(5)}/model.safetensors.zst") < 1_000
    manifest = store.cat(f"{run.there(5)}/manifest.json")
    assert manifest == (path / "manifest.json").read_bytes()
    assert [one.name for one in path.parent.iterdir()] == ["step-5"]


def test_files_of_the_run_are_sent_as_they_are_at_its_end(run, store):
    run.checkpoint(1)
    uploader = run.started()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    uploader.close(SILENT)
    assert store.cat("/bucket/runs/run/metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'


def test_a_file_that_arrives_damaged_is_sent_again(run, store, monkeypatch, uploaded):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(
        type(store), "tags", lambda content: {"ETag": hashlib.md5(content).hexdigest()}
    )
    put_file, damaged = type(store).put_file, []

    def damaging(self, lpath, rpath, **options):
        put_file(self, lpath, rpath, **options)
        if rpath.endswith("model.safetensors") and not damaged:
            damaged.append(rpath)
            self.pipe_file(rpath, b"weights of 4")

    monkeypatch.setattr(type(store), "put_file", damaging)
    run.checkpoint(5)
    uploader = run.started()
    while not any((uploader._there or {}).values()):
        uploader._thread.join(0.01)
    uploader.close(SILENT)
    assert damaged
    assert "differs from the file that was sent" in run.of_kind("upload_failed", "reason")[0]
    assert store.cat(f"{run.there(5)}/model.safetensors") == b"weights of 5"


def test_what_a_kill_left_in_the_remote_copy_is_deleted_at_the_next_start(
    run, uploaded, monkeypatch
):
    def kill(*_):
        raise GivenUp("killed", fix="")

    for step in (1, 2):
        run.checkpoint(step)
    run.send()
    run.checkpoint(3)
    run.delete(2)
    with monkeypatch.context() as patched:
        patched.setattr(Uploader, "_send_checkpoint", kill)
        run.send()
    assert "manifest.json" in uploaded(2), "it stays until a newer one is complete"
    with monkeypatch.context() as patched:
        patched.setattr(RemoteCopy, "delete", kill)
        run.send()
    assert "manifest.json" in uploaded(2) & uploaded(3)
    run.send()
    assert uploaded(2) == set()
    assert "manifest.json" in uploaded(1) & uploaded(3)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_step_that_is_saved_again_replaces_its_earlier_copy(
    run, store, refusing, uploaded, interrupted
):
    """Files of the same size in a store without checksums: only the manifest shows the change."""
    run.checkpoint(5, optimizer=b"only here")
    first = run.there(5)
    refusing("manifest.json" if interrupted else None)
    run.send()
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    refusing(None)
    run.send()
    assert not store.exists(first)
    assert uploaded(5) == FILES
    assert store.cat(f"{run.there(5)}/model.safetensors") == b"WEIGHTS OF 5"


@pytest.mark.parametrize("ends_at", ["model.safetensors", "state.json", "manifest.json"])
def test_a_checkpoint_stays_until_the_next_one_of_its_step_is_complete(
    run, store, refusing, uploaded, ends_at
):
    run.checkpoint(5)
    run.send()
    first = run.there(5)
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    refusing(ends_at)
    run.send()
    assert {path.rpartition("/")[2] for path in store.find(first)} == FILES
    assert store.cat(f"{first}/model.safetensors") == b"weights of 5"
    refusing(None)
    run.send()
    assert not store.exists(first)
    assert uploaded(5) == FILES


def test_names_are_in_the_order_of_their_steps_and_others_are_omitted(run, store):
    names = [
        "step-9-00000000",
        "step-10-00000000",
        "step-011-00000000",
        "step-9",
        "step-9-0000000g",
    ]
    for name in names:
        store.pipe_file(f"/bucket/runs/run/{name}/manifest.json", b"{}")
    assert RemoteCopy(run.url).names() == ["step-10-00000000", "step-9-00000000"]


@pytest.mark.parametrize("damage", ["unreadable", "damaged", "missing"])
def test_a_manifest_that_cannot_be_read_back_is_sent_again(
    run, store, uploaded, monkeypatch, damage
):
    run.checkpoint(4)
    run.checkpoint(5)
    run.send()
    path, cat_file = f"{run.there(5)}/manifest.json", type(store).cat_file

    def deny(self, asked, **options):
        if asked.endswith(path) and self.store[path] is before:
            raise PermissionError("not yours")
        return cat_file(self, asked, **options)

    if damage == "missing":
        store.rm_file(path)
    elif damage == "damaged":
        store.pipe_file(path, b"!" * store.size(path))
    before = store.store.get(path)
    if damage == "unreadable":
        monkeypatch.setattr(type(store), "cat_file", deny)
    run.send()
    assert run.of_kind("upload") == [5]
    assert RemoteCopy(run.url).manifest(path.split("/")[-2])
    assert (uploaded(4), uploaded(5)) == (FILES, FILES)


def test_a_file_there_of_another_size_is_sent_again(run, store, uploaded):
    path = run.checkpoint(5)
    run.send()
    there = f"{run.there(5)}/model.safetensors"
    store.pipe_file(there, b"cut")
    run.send()
    assert run.of_kind("upload") == [5]
    assert store.cat(there) == (path / "model.safetensors").read_bytes()


def test_what_a_lost_directory_sent_in_part_is_deleted(run, store, uploaded):
    store.pipe_file("/bucket/runs/run/step-7-00000000/model.safetensors", b"half")
    run.checkpoint(5)
    run.send()
    assert (uploaded(5), uploaded(7)) == (FILES, set())
