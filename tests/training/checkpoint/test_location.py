"""checkpoint.dir: a directory of checkpoints belongs to one run."""

import shutil

import pytest
from stand_in import build

from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError
from flatout.training.checkpoint import catalog, savers
from flatout.training.run_dir.layout import write_config
from flatout.training.run_dir.resume import resume_from


def test_checkpoints_are_saved_in_checkpoint_dir(tmp_path):
    run = build(tmp_path / "run")
    run.folder.mkdir()
    (run.folder / "config.yaml").write_text(f"checkpoint:\n  dir: {tmp_path / 'big'}\n")
    assert savers.save(run) == tmp_path / "big" / "run" / "step-0"
    assert catalog.latest(run.folder) == tmp_path / "big" / "run" / "step-0"


def with_dir(folder, directory, **kwargs):
    run = build(folder, **kwargs)
    write_config(folder, RunConfig().with_values({"checkpoint.dir": str(directory)}))
    return run


def test_runs_of_the_same_name_cannot_share_checkpoint_dir(tmp_path):
    path = savers.save(with_dir(tmp_path / "a" / "run", tmp_path / "big"))
    with pytest.raises(
        CheckpointError,
        match=r"big/run contains .* of another run, .*/a/run, not those of .*/b/run",
    ):
        with_dir(tmp_path / "b" / "run", tmp_path / "big")
    assert list((tmp_path / "b" / "run").iterdir()) == []
    run = build(tmp_path / "b" / "run", seed=1)
    (run.folder / "config.yaml").write_text(f"checkpoint:\n  dir: {tmp_path / 'big'}\n")
    with pytest.raises(CheckpointError, match="of another run"):
        savers.save(run)
    with pytest.raises(CheckpointError, match="of another run"):
        resume_from(run.folder)
    assert catalog.verify(path) == []


def test_a_run_with_checkpoint_dir_can_be_moved_and_does_not_start_over_without_its_disk(
    tmp_path,
):
    path = savers.save(with_dir(tmp_path / "a" / "run", tmp_path / "big"))
    shutil.move(tmp_path / "a", tmp_path / "c")
    assert resume_from(tmp_path / "c" / "run") == path
    (tmp_path / "big").rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"are missing from .*big/run"):
        resume_from(tmp_path / "c" / "run")
