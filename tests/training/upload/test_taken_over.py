"""A run that was restored elsewhere: the first machine changes nothing in the remote copy."""

import pytest

from flatout.progress import SILENT
from flatout.training.upload.remote import RemoteCopy, Sender
from flatout.training.upload.uploader import Uploader


@pytest.mark.parametrize("saved", [True, False], ids=["a new step", "nothing new"])
def test_a_run_that_was_restored_elsewhere_changes_nothing_there(run, store, saved):
    for step in (4, 5):
        run.checkpoint(step)
    run.send()
    uploader = Uploader(run.path, run.url)
    uploader.claim()
    RemoteCopy(run.url).write_sender(Sender(id="other", run="/data/run", host="nodeB"))
    store.pipe_file("/bucket/runs/run/step-6/upload.json", b"theirs")
    store.pipe_file("/bucket/runs/run/metrics.jsonl", b"theirs")
    before = dict(store.store)
    (run.path / "metrics.jsonl").write_text("ours")
    run.delete(4)
    if saved:
        run.checkpoint(6)
    uploader.start(run.report)
    run.uploaders.append(uploader)
    uploader.close(SILENT)
    assert "nodeB" in run.of_kind("upload_failed", "reason")[0]
    assert "checkpoint.upload=none" in run.of_kind("upload_failed", "fix")[0]
    assert run.of_kind("upload_pending", "steps") == [], "the next start sends nothing either"
    assert store.store.keys() == before.keys()
    assert all(store.store[path] is before[path] for path in before)


@pytest.mark.parametrize(
    "step", ["_send_checkpoint", "_prune", "_remove_leftovers", "_send_run_files"]
)
def test_every_change_there_asks_first_whose_it_is(run, step, monkeypatch, store):
    """The run is restored elsewhere just before one of the operations."""
    run.checkpoint(4)
    run.send()
    run.delete(4)
    run.checkpoint(5)
    (run.path / "metrics.jsonl").write_text("more")
    operation = getattr(Uploader, step)

    def restored_before(self, *words):
        RemoteCopy(run.url).write_sender(Sender(id="other", run="/data/run", host="nodeB"))
        there = dict(store.store)
        try:
            return operation(self, *words)
        finally:
            assert {path: id(file) for path, file in store.store.items()} == {
                path: id(file) for path, file in there.items()
            }

    monkeypatch.setattr(Uploader, step, restored_before)
    run.send()
    assert "nodeB" in run.of_kind("upload_failed", "reason")[0]
