"""A step that is saved again with other content, as after the final evaluation."""

import pytest

from flatout.training.upload.remote import RemoteCopy

FILES = {"index.json", "manifest.json", "model.safetensors", "state.json"}


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_checkpoint_that_replaces_one_of_the_same_step_replaces_it_there(
    run, store, refusing, uploaded, interrupted
):
    """Files of the same size in a store without checksums: only the manifest shows the change."""
    run.checkpoint(5, optimizer=b"only here")
    refusing("step-5/manifest.json" if interrupted else None)
    run.send()
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    refusing(None)
    run.send()
    folder = "step-5" if interrupted else "step-5.1"
    assert {path.partition("/")[0] for path in uploaded() if path.startswith("step-")} == {folder}
    assert uploaded(folder) == FILES
    assert store.cat(f"/bucket/runs/run/{folder}/model.safetensors") == b"WEIGHTS OF 5"


@pytest.mark.parametrize("ends_at", ["model.safetensors", "state.json", "manifest.json"])
def test_a_checkpoint_stays_until_what_replaces_it_is_complete(
    run, store, refusing, uploaded, ends_at
):
    run.checkpoint(5)
    run.send()
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    refusing(ends_at)
    run.send()
    stored = RemoteCopy(run.url).complete()[5]
    assert stored.folder == "step-5"
    assert uploaded(5) == FILES
    assert store.cat("/bucket/runs/run/step-5/model.safetensors") == b"weights of 5"
    refusing(None)
    run.send()
    assert (uploaded(5), uploaded("step-5.1")) == (set(), FILES)
    run.delete(5)
    run.checkpoint(5, model=b"Weights of 5")
    run.send()
    assert (uploaded("step-5.1"), uploaded("step-5.2")) == (set(), FILES)


def test_the_summary_is_sent_after_the_last_checkpoint(run, refusing, uploaded):
    """A run that is restored with both a summary and an earlier copy of its last step is finished,
    and would keep that copy.
    """
    run.checkpoint(5)
    run.send()
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    (run.path / "summary.json").write_text("{}")
    refusing("manifest.json")
    run.send()
    assert "summary.json" not in uploaded()
    refusing(None)
    run.send()
    assert "summary.json" in uploaded()


def test_of_two_complete_copies_of_a_step_the_last_counts_and_the_first_is_deleted(
    run, store, uploaded, monkeypatch
):
    """A kill comes before the first is deleted."""
    run.checkpoint(5)
    run.send()
    run.delete(5)
    run.checkpoint(5, model=b"WEIGHTS OF 5")
    with monkeypatch.context() as patched:
        patched.setattr(RemoteCopy, "delete", lambda *_: None)
        run.send()
    assert uploaded(5) == uploaded("step-5.1") == FILES
    assert RemoteCopy(run.url).complete()[5].folder == "step-5.1"
    run.checkpoint(6)
    run.send()
    assert (uploaded(5), uploaded("step-5.1"), uploaded(6)) == (set(), FILES, FILES)


def test_steps_ascend_by_number_and_other_names_are_omitted(run, store):
    for name in ("step-10", "step-9.10", "step-9.9", "step-9", "step-9.0", "step-09", "step-9.x"):
        store.pipe_file(f"/bucket/runs/run/{name}/manifest.json", name.encode())
    found = RemoteCopy(run.url)
    assert [*found.folders()] == ["step-9", "step-9.9", "step-9.10", "step-10"]
    assert {step: one.folder for step, one in found.complete().items()} == {
        9: "step-9.10",
        10: "step-10",
    }
