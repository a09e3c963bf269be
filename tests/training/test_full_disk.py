"""A disk that refuses a run's small files ends it with a sentence; the marker of its end alone never does."""

from __future__ import annotations

import errno
import os

import pytest

from flatout.errors import RunFailed
from flatout.training import folder
from flatout.training.start import run_training


def refusing(error):
    def refuse(*_args, **_kwargs):
        raise OSError(error, os.strerror(error))

    return refuse


def test_a_finished_run_whose_exit_code_cannot_be_written_is_finished(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "write_text", lambda path, text: refusing(errno.ENOSPC)() if path.name == folder.EXIT_CODE else path.write_text(text))
    assert run_training(tiny_config(train__steps=2), tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize(("error", "fix"), [(errno.ENOSPC, "Free space"), (errno.EIO, "failed to read or write")], ids=["full", "broken"])
@pytest.mark.parametrize("name", ["append_line", "write_json"])
def test_a_disk_that_refuses_a_record_or_the_summary_is_named_and_the_same_command_completes_the_run(
    name, error, fix, tiny_config, tmp_path, monkeypatch
):
    config = tiny_config(train__steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(folder, name, refusing(error))
        with pytest.raises(RunFailed, match="Cannot write") as failed:
            run_training(config, tmp_path / "run")
    assert fix in failed.value.fix
    assert run_training(config, tmp_path / "run")["steps"] == 2
