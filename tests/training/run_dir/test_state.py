"""The state of a run follows from the files of its directory; tests/commands/test_runs.py has the
table of all states.
"""

from __future__ import annotations

import pytest

from flatout.errors import CheckpointError
from flatout.training.run_dir.lock import hold_lock
from flatout.training.run_dir.state import run_state


def test_a_new_run(tmp_path):
    assert run_state(tmp_path) == "new"


def test_a_run_whose_lock_is_held_is_running(tmp_path):
    (tmp_path / "config.yaml").touch()
    with hold_lock(tmp_path):
        assert run_state(tmp_path) == "running"


def test_a_damaged_summary_is_an_error(tmp_path):
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(CheckpointError):
        run_state(tmp_path)
