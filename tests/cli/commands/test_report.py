"""`flatout report`: what it reads, where it writes, and what it rejects."""

import html
import importlib.util
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flatout.cli import main as cli
from flatout.cli.commands import report as module
from flatout.cli.commands.diagnose import diagnose
from flatout.cli.commands.report import FILE_NAME, report
from flatout.errors import CheckpointError, DataError, MissingPackage, OutputInUse
from flatout.measure.report.page import MARK
from flatout.progress import SILENT
from flatout.training.run_dir import layout


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(name, *, records=3, config="name: tiny"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if config is not None:
            (folder / "config.yaml").write_text(
                f"requested: {{{config}}}\nresolved: {{{config}}}\n...\n"
            )
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


def text_of(path):
    """The text of a page, without markup."""
    body = path.read_text().partition("<main>")[2].partition("<script")[0]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())


def test_a_record_with_the_compilation_changes_neither_the_report_nor_the_diagnosis(
    tmp_path, tiny_config
):
    config = tiny_config(train__steps=80)
    layout.write_config(tmp_path / "run", config, requested=config)
    times = {"perf/step_ms": 76.0, "perf/device_ms": 74.0, "perf/host_ms": 1.5}
    slow = {"perf/step_ms": 900.0, "perf/device_ms": 80.0, "perf/host_ms": 820.0}
    records = [
        {"step": step, "elapsed_s": 10.0 + 0.08 * step, "perf/data_wait_ms": 0.5}
        | (slow if step in (10, 50) else times)
        for step in range(10, 90, 10)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    (tmp_path / "run" / "events.jsonl").write_text('{"event": "start", "device": "cpu"}\n')
    found = diagnose(tmp_path / "run")
    assert found.step_s == pytest.approx(0.076)
    assert found.shares["compute"] == pytest.approx(74 / 76)
    report(tmp_path / "run", out=tmp_path / "page.html")
    shown = text_of(tmp_path / "page.html")
    assert "Time of a step, step 76 ms Time of a step, device 74 ms" in shown


def test_several_runs_are_reported_here_each_once(make_run, tmp_path):
    with pytest.raises(CheckpointError):
        report()
    make_run("a")
    assert report().runs == ["runs/a"], "the newest by default"
    assert report(["a"], out=tmp_path).path == str(tmp_path / FILE_NAME)
    make_run("b", config=None)
    assert report(["runs/b"]).records == 3, "of another training loop"
    found = report(["a", "runs/b", "runs/a"])
    assert found.path == FILE_NAME
    assert found.runs == ["runs/a", "runs/b"]
    assert 'id="differences"' in (tmp_path / FILE_NAME).read_text()


def test_an_option_may_name_the_home_directory_by_a_tilde(make_run, tmp_path, monkeypatch, capsys):
    make_run("a")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert cli.execute(["report", "a", "--out=~/page.html"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/home/page.html ")
    assert (tmp_path / "home" / "page.html").exists()


def test_a_report_replaces_a_report_and_nothing_else(make_run, tmp_path):
    make_run("a")
    report(["a"])
    report(["a"])
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(OutputInUse):
        report(["a"], out="page.html")
    assert (tmp_path / "page.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runs": ["nowhere"]}, CheckpointError, "no run directory nowhere or runs/nowhere"),
        ({"runs": ["a"], "out": "no/such/file.html"}, DataError, "Cannot write no/such/file.html"),
    ],
)
def test_mistakes_are_errors_with_a_fix(make_run, options, error, words):
    make_run("a")
    with pytest.raises(error) as caught:
        report(**options)
    assert words in str(caught.value)


def test_a_directory_that_cannot_be_written_or_a_missing_package_is_named(make_run, monkeypatch):
    make_run("a")
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(module, "write_whole", Mock(side_effect=refused))
    with pytest.raises(DataError) as caught:
        report(["a"])
    assert "that can be written" in caught.value.fix
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        report(["a"])
    assert "flatout[report]" in caught.value.fix


def test_what_is_damaged_is_said(make_run):
    folder = make_run("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step"')
    said = []
    found = report(["a"], progress=SimpleNamespace(say=said.append, task=SILENT.task))
    assert said == found.notes
    assert "a: The last line of metrics.jsonl (line 4) is incomplete" in found.notes[0]


def test_the_command_line(make_run, capsys):
    make_run("a")
    assert cli.execute(["report", "a", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["path"] == f"runs/a/{FILE_NAME}"
