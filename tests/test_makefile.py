"""Makefile: the output of slow steps, and the environment that the demo and the tests share."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def step(log, *command, **environment):
    words = [ROOT / ".ci/step", log, "Installing", "bash", "-c", *command]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"} | environment,
        check=False,
    )


def test_a_step_writes_its_output_to_a_file_and_shows_its_duration(tmp_path):
    done = step(tmp_path / "logs/pip.log", "for i in {1..300}; do echo line $i; done")
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.splitlines()
    assert first == "Installing ..."
    assert last.startswith("Installing: ")
    assert len((tmp_path / "logs/pip.log").read_text().splitlines()) == 300


def test_a_failed_step_shows_the_end_of_its_output_and_the_path_of_the_log(tmp_path):
    log = tmp_path / "pip.log"
    done = step(log, "for i in {1..300}; do echo line $i; done; echo no such package >&2; exit 3")
    assert done.returncode == 3
    head, *lines = done.stderr.splitlines()
    assert head.startswith("Installing failed after ")
    assert lines[-2:] == ["no such package", f"The whole output is in {log}."]
    assert "line 300" in lines
    assert "line 1" not in lines


def test_a_quiet_step_fails_without_a_message(tmp_path):
    done = step(tmp_path / "pip.log", "echo no such build; exit 1", QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (1, "Installing ...\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_demo_and_the_tests_share_an_environment(tmp_path, target):
    """Neither target installs anything again when the other has made the environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def plan():
        return subprocess.run(
            ["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert 'venv ".venv/test"' in plan()
    assert ".venv/run" not in plan()
    (tmp_path / ".venv/test").mkdir(parents=True)
    (tmp_path / ".venv/test/.installed").touch()
    assert "pip" not in plan()


@pytest.mark.parametrize(("code", "made"), [(0, 0), (75, 0), (1, 2)])
def test_a_demo_that_was_stopped_and_saved_is_no_error_of_make(tmp_path, code, made):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    program = tmp_path / ".venv/test/bin/flatout"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho Stopped at step 3, and saved.\nexit {code}\n")
    program.chmod(0o755)
    (tmp_path / ".venv/test/.installed").touch()
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", ".venv/test/.installed", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (made, "Stopped at step 3, and saved.\n")
    assert ("Error" in done.stderr) == (made != 0)


def test_compare_needs_a_revision_and_runs_the_files_of_the_directory():
    def make(*words):
        return subprocess.run(
            ["make", "-o", ".venv/test/.installed", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    none = make("compare")
    assert none.returncode == 2
    assert "make compare AGAINST=main" in none.stderr
    plan = make("-n", "compare", "AGAINST=main").stdout
    assert '--against "main"' in plan
    assert "-m flatout train shakespeare-char" in plan, "a script would be of the installed package"
