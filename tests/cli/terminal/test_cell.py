"""A notebook cell: one block of output, updated in place."""

import io
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from flatout.cli.terminal import RunReport, Terminal


class Notebook:
    """A stand-in for IPython: the current text of each block of output, in order."""

    def __init__(self):
        self.execution_count = 1
        self.blocks = []

    def display(self, bundle, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        at = len(self.blocks)
        self.blocks.append(bundle["text/plain"])

        def update(bundle, *, raw):
            assert raw
            self.blocks[at] = bundle["text/plain"]

        return SimpleNamespace(update=update)


@pytest.fixture
def notebook(monkeypatch):
    notebook = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: notebook))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=notebook.display))
    return notebook


def cell():
    return Terminal(Console(file=io.StringIO(), width=100, force_jupyter=True))


def report_of(last_step):
    report = RunReport(cell())
    facts = {"steps_per_epoch": 4.0, "tokens_per_step": 64}
    report.on_start(SimpleNamespace(step=0, last_step=last_step, **facts))
    return report


def wait_for(text, notebook):
    """Wait until the last block contains a text. The test's time limit ends the wait."""
    while text not in "".join(notebook.blocks[-1:]):
        time.sleep(0.01)


def test_lines_and_the_bar_are_one_block(notebook):
    terminal = cell()
    terminal.say("Training 1.2 M parameters")
    with terminal.task("Training", total=10) as task:
        task.advance(4)
        wait_for("40%", notebook)
        terminal.say("Saved step-4")
        (shown,) = notebook.blocks
    lines = shown.splitlines()
    said = ["Training 1.2 M parameters", "Saved step-4"]
    assert lines[:2] == said
    assert "Training" in lines[2]
    assert "━" in lines[2]
    assert notebook.blocks == ["\n".join(said)], "the bar is gone"
    notebook.execution_count += 1
    terminal.say("another cell")
    assert notebook.blocks[1:] == ["another cell"]


def test_a_run_in_a_cell_ends_with_its_result(notebook):
    report = report_of(2)
    for step in (1, 2):
        report.on_tick(step, 2)
    figures = {"wall_s": 3.0, "train_loss": 2.5, "val_loss": 2.0}
    report.on_end({"run": "runs/a", "steps": 2, "tokens": 128, **figures})
    assert notebook.blocks == [
        "Trained: 2 steps, 128 tokens in 3.0 s\n"
        "Loss: training 2.5000, validation 2.0000 (perplexity 7.4)"
    ]


def test_a_run_in_a_cell_has_its_panel_until_it_ends(notebook):
    report = report_of(4)
    report.on_tick(2, 4)
    report.on_record({"step": 2, "train/loss": 3.25, "mem/peak_gib": 1.5})
    wait_for("saved", notebook)
    (shown,) = notebook.blocks
    panel = ["  loss    3.250", "  memory  1.50 GiB peak", "  saved   nothing yet"]
    assert shown.splitlines()[1:] == panel
    report.on_event({"event": "stop"})
    assert notebook.blocks == [""]
