"""The formats of earlier, unreleased versions are answered with what to do.

The files in `files/` were written by commit 186dc16 (2026-11-20).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flatout
from flatout.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of the files, as the current directory."""
    copy = tmp_path / "files"
    shutil.copytree(FILES, copy)
    monkeypatch.chdir(copy)
    return copy


def test_the_dataset_is_answered_with_one_sentence(files):
    with pytest.raises(DataError, match=r"manifest\.json .*repare the dataset again"):
        flatout.Dataset.open(files / "data")


def test_the_run_is_answered_with_one_sentence(files):
    with pytest.raises(ConfigError, match=r"config\.yaml has no settings .* or an earlier version"):
        flatout.sample("run", prompt="the ", max_tokens=4, seed=0)
