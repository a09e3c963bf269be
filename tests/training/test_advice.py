"""Suggested commands quote paths and settings that a shell would split or execute."""

import json
import shlex

import pytest

from flatout.config.schema import load_config
from flatout.data.store.manifest import read_manifest
from flatout.errors import CheckpointError, DataError, RunFailed, UntrustedCode
from flatout.training import run as training
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import in_use
from flatout.training.run_dir.resume import config_to_resume

AWKWARD_NAME = "my runs/$(touch X) it's"


def words(advice, first):
    """Split the advice, from `first` on, as a shell does."""
    return shlex.split(advice[advice.index(first) :].replace("`", " "))


def config(*settings):
    return load_config(None, ["train.steps=2", "schedule.kind=cosine", *settings])


@pytest.fixture
def edited(tmp_path):
    """Return the path of the config.yaml of a run."""
    path = tmp_path / AWKWARD_NAME / "config.yaml"
    path.parent.mkdir(parents=True)
    return path


def test_commands_for_a_missing_dataset_quote_the_path(tmp_path):
    absent = tmp_path / AWKWARD_NAME
    with pytest.raises(DataError, match="There is no dataset directory") as refused:
        read_manifest(absent)
    found = words(refused.value.fix.rstrip("."), "flatout")
    assert found == ["flatout", "prepare", "SOURCE", "--out", str(absent)]
    absent.parent.mkdir()
    absent.write_text("some text")
    with pytest.raises(DataError, match="is a file") as refused:
        read_manifest(absent)
    found = words(refused.value.fix.partition("`, then")[0], "flatout")
    assert found == ["flatout", "prepare", str(absent), "--out", f"data/{absent.stem}"]


@pytest.mark.parametrize(
    "holder", ['{"pid": "1; touch X", "host": "here"}', '{"pid": [1], "host": "here"}', "[1]"]
)
def test_a_foreign_lock_gives_no_command(tmp_path, holder):
    (tmp_path / layout.LOCK).write_text(holder)
    error = in_use(tmp_path)
    assert isinstance(error, CheckpointError)
    assert "(kill it)" in error.fix


@pytest.mark.parametrize("key", ["model.kind", "optim.kind", "speedups"])
def test_code_named_in_an_edited_config_is_rejected_before_advice_repeats_it(
    edited, key, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(layout.catalog, "has_saved", lambda _: True)
    section, _, name = key.partition(".")
    document = config().to_dict()
    document[section] = (
        {**document[section], name: "runs.gift.weights:X"} if name else ["runs.gift.weights:X"]
    )
    sections = {"requested": config().to_dict(), "resolved": document}
    edited.write_text(f"{json.dumps(sections)}\n...\n")
    with pytest.raises(UntrustedCode) as refused:
        config_to_resume(edited.parent, config())
    assert "=runs.gift" not in refused.value.fix


def test_a_disk_that_rejects_to_delete_the_exit_code_is_named(tmp_path, monkeypatch):
    def refused(_folder):
        raise OSError(5, "Input/output error", str(tmp_path / "exit_code"))

    monkeypatch.setattr(layout, "clear_exit_code", refused)
    with (
        pytest.raises(RunFailed, match=r"Cannot write .*exit_code.*The disk failed"),
        training.recorded_exit_code(tmp_path),
    ):
        pass
