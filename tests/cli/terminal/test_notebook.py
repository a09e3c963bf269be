"""In a notebook a call shows its progress in the cell. Elsewhere it is silent."""

import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import flatout
from flatout.cli.terminal import RunReport, Terminal
from flatout.cli.terminal.panel import shown_in_cell
from flatout.progress import SILENT


def called(path, *, observers=(), progress=SILENT):
    """Return the arguments."""
    return path, observers, progress


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(Console, "is_jupyter", True, raising=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)


def test_a_call_in_a_cell_reports_to_it(notebook):
    path, (report,), progress = shown_in_cell(called)("a")
    assert path == "a"
    assert isinstance(report, RunReport)
    assert isinstance(progress, Terminal)
    assert progress.console.is_jupyter
    assert report.terminal is progress
    assert shown_in_cell(called).__doc__ == called.__doc__


def test_explicit_arguments_and_functions_without_progress_are_unchanged(notebook):
    assert shown_in_cell(called)("a", observers=(), progress=SILENT) == ("a", (), SILENT)
    assert shown_in_cell(len) is len
    assert shown_in_cell(flatout.FlatoutError) is flatout.FlatoutError


def test_outside_of_a_notebook_calls_are_silent(monkeypatch):
    assert shown_in_cell(called) is called
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert flatout.train is sys.modules["flatout.cli.commands.train"].train


def test_public_commands_report_to_the_cell(notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert flatout.train.__wrapped__ is sys.modules["flatout.cli.commands.train"].train
    assert flatout.list_entries is sys.modules["flatout.cli.commands.list"].list_entries
