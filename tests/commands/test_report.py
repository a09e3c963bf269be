"""`flatout report`: what it reads, where it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json

import pytest

from flatout import cli
from flatout.commands.report import FILE_NAME, report
from flatout.errors import CheckpointError, DataError, MissingPackage, OutputInUse
from flatout.measure.report.page import MARK


class Heard:
    """A progress that keeps what it is told."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def task(self, what, **_):
        from flatout.progress import SILENT

        return SILENT.task(what)


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(name, *, records=3, config="name: tiny\n"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if config is not None:
            (folder / "config.yaml").write_text(config)
        lines = [json.dumps({"step": s, "train/loss": 1.0}) + "\n" for s in range(records)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return make


@pytest.mark.slow
def test_one_run_is_reported_in_its_directory(make_run):
    folder = make_run("a")
    found = report("a")
    assert found.path == f"runs/a/{FILE_NAME}"
    text = (folder / FILE_NAME).read_text()
    assert text.startswith(MARK)
    assert found.bytes == len(text.encode())
    assert (found.records, found.runs, found.notes) == (3, ["runs/a"], [])
    assert found.path in found.summary()


def test_several_runs_are_reported_here_each_once(make_run, tmp_path):
    make_run("a")
    make_run("b")
    found = report(["a", "runs/b", "runs/a"])
    assert found.path == FILE_NAME
    assert found.runs == ["runs/a", "runs/b"]
    assert 'id="differences"' in (tmp_path / FILE_NAME).read_text()


def test_the_newest_run_by_default(make_run):
    make_run("only")
    assert report().runs == ["runs/only"]


def test_a_directory_of_another_training_loop(make_run):
    make_run("watched", config=None)
    assert report(["runs/watched"]).records == 3


def test_a_report_replaces_a_report_and_nothing_else(make_run, tmp_path):
    make_run("a")
    report(["a"])
    report(["a"])
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(OutputInUse):
        report(["a"], out="page.html")
    assert (tmp_path / "page.html").read_text() == "mine"


def test_out_may_be_a_directory(make_run, tmp_path):
    make_run("a")
    assert report(["a"], out=tmp_path).path == str(tmp_path / FILE_NAME)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runs": ["nowhere"]}, CheckpointError, "no run directory nowhere or runs/nowhere"),
        ({"runs": ["a"], "out": "no/such/file.html"}, DataError, "There is no directory"),
    ],
)
def test_mistakes_are_errors_with_a_fix(make_run, options, error, words):
    make_run("a")
    with pytest.raises(error) as caught:
        report(**options)
    assert words in str(caught.value)


def test_no_run_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        report()


def test_a_directory_that_cannot_be_written(make_run, monkeypatch):
    from flatout.commands import report as module

    make_run("a")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "write_whole", refused)
    with pytest.raises(DataError) as caught:
        report(["a"])
    assert "--out" in caught.value.fix


def test_without_bokeh_the_error_names_the_install_line(make_run, monkeypatch):
    make_run("a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        report(["a"])
    assert "flatout[report]" in caught.value.fix


def test_what_is_damaged_is_said(make_run):
    folder = make_run("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step"')
    heard = Heard()
    found = report(["a"], progress=heard)
    assert heard.lines == found.notes
    assert "a: The last line of metrics.jsonl (line 4) is incomplete" in found.notes[0]


def test_the_command_line(make_run, capsys):
    make_run("a")
    assert cli.execute(["report", "a", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["path"] == f"runs/a/{FILE_NAME}"
