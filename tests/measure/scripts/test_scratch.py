"""Trials run in a copy of the user's directory, and nothing of the original changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.errors import ConfigError
from flatout.measure.scripts import scratch
from flatout.measure.scripts.scratch import Scratch, project_of


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "home" / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (tmp_path / "home" / "data").mkdir()
    for name in ("train.py", "sub/model.py", ".git/HEAD", "../data/text.txt"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("sub/model.py")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_copy_reads_like_the_original(project):
    with Scratch(project) as copy:
        git = {".git/HEAD": b".git/HEAD"}
        assert contents(copy.path) | git == contents(project)
        assert (copy.path / ".git" / "HEAD").exists()
        assert (copy.path / ".." / "data" / "text.txt").read_text() == "../data/text.txt"
        root = copy.path
    assert not root.exists()


def test_the_whole_repository_is_copied_if_it_is_small(project, monkeypatch, tmp_path):
    assert project_of(project / "sub") == project
    monkeypatch.setenv("PYTHONPATH", f"{project}{os.pathsep}{project}/sub")
    with Scratch(project_of(project / "sub")) as copy:
        assert copy.of(project / "sub") == copy.path / "sub"
        assert copy.environment() == {"PYTHONPATH": f"{copy.path}{os.pathsep}{copy.path}/sub"}
    (project / ".git" / "objects").write_bytes(bytes(1000))
    monkeypatch.setattr(scratch, "PROJECT_BYTES", 100)
    assert project_of(project / "sub") == project
    (project / "data.bin").write_bytes(bytes(1000))
    assert project_of(project / "sub") == project / "sub"
    assert project_of(Path("/")) == Path("/")


def test_what_a_trial_writes_is_undone(project):
    before = contents(project)
    with Scratch(project) as copy:
        (copy.path / "train.py").write_text("changed")
        (copy.path / "sub" / "model.py").unlink()
        (copy.path / "out").mkdir()
        (copy.path / "out" / "ckpt.pt").write_text("weights")
        os.replace(copy.path / "out" / "ckpt.pt", copy.path / "link")
        (copy.path / "sub").rename(copy.path / "moved")
        copy.reset()
        assert not (copy.path / "out").exists(), "a run directory that is in the way of the next"
        assert (copy.path / "sub").is_dir()
        assert contents(copy.path) | {".git/HEAD": b".git/HEAD"} == before
        copy.reset()
    assert contents(project) == before


def test_a_large_file_is_a_link_which_survives_a_trial(project, monkeypatch):
    monkeypatch.setattr(scratch, "LARGE_BYTES", 100)
    (project / "tokens.bin").write_bytes(b"x" * 101)
    with Scratch(project) as copy:
        assert (copy.path / "tokens.bin").is_symlink()
        os.remove(copy.path / "tokens.bin")
        copy.reset()
        assert (copy.path / "tokens.bin").read_bytes() == b"x" * 101
        assert (copy.path / "tokens.bin").is_symlink()
    assert (project / "tokens.bin").exists()


def test_too_many_files_are_rejected(project, monkeypatch):
    monkeypatch.setattr(scratch, "MOST_FILES", 1)
    with pytest.raises(ConfigError, match="too many files"), Scratch(project):
        pass


def test_absolute_arguments_lead_into_the_copy(project):
    with Scratch(project) as copy:
        assert copy.inside(f"--config={project}/c.yaml") == f"--config={copy.path}/c.yaml"
        assert copy.inside(f"{project}2/c.yaml") == f"{project}2/c.yaml"
        assert copy.inside("--lr=3") == "--lr=3"
        assert copy.original(f"at {copy.path}/train.py:3") == f"at {project}/train.py:3"
