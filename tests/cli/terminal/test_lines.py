"""Progress: a live line on a terminal; elsewhere plain lines, at most one every five seconds."""

import io
import threading
import time
from unittest.mock import Mock

import pytest
from clock import Clock
from rich.console import Console

from flatout.cli.terminal import Terminal
from flatout.cli.terminal import lines as module
from flatout.cli.terminal.lines import facts


def plain(clock=time.monotonic):
    return Terminal(Console(file=io.StringIO(), width=100), clock=clock)


def live(width=80):
    options = {"force_terminal": True, "color_system": None}
    return Terminal(Console(file=io.StringIO(), width=width, **options))


def text_of(terminal):
    return terminal.console.file.getvalue()


def rendered(terminal):
    paper = Console(file=io.StringIO(), width=terminal.console.width)
    paper.print(terminal.lines.get_renderable())
    return paper.file.getvalue()


def line_of(terminal):
    return facts(terminal.lines.tasks[-1])


@pytest.fixture
def told(monkeypatch):
    """Return a function that lets a plain terminal tell what is due, after so many seconds."""
    monkeypatch.setattr(threading.Thread, "start", Mock())
    terminal = plain(Clock())

    def after(seconds):
        for _ in range(round(4 * seconds)):
            terminal.clock.now += 0.25
            terminal.tell()
        return text_of(terminal).splitlines()

    after.terminal = terminal
    return after


def test_a_log_has_the_share_the_rate_and_the_time_left_every_five_seconds(told):
    with told.terminal.task("Tokenising", total=12e6, unit="bytes") as task:
        for _ in range(20):
            told(0.5)
            task.advance(0.5e6)
        lines = told(0)
    assert lines == [
        "Tokenising: 12% · 1.0 MB/s · 11 s left",
        "Tokenising: 54% · 1.0 MB/s · 6.0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "lines"), [(7, ["2.0 s", "7.0 s"]), (40, ["2.0 s", "17 s", "32 s", "40 s"])]
)
def test_a_log_repeats_long_operations(told, seconds, lines):
    with told.terminal.task("Compiling"):
        told(seconds)
    assert told(0) == [f"Compiling: {each}" for each in lines]


def test_a_task_that_never_advances_is_still_shown(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PLAIN_S", 0.0)
    for shown in (plain(), live()):
        with shown.task("Loading torch"):
            while "Loading torch" not in text_of(shown):
                time.sleep(0.02)


def test_short_task_leaves_no_line_and_long_one_does():
    clock = Clock()
    terminal = plain(clock)
    with terminal.task("Blink"):
        clock.now += 0.5
    with terminal.task("Packing", total=40_000, unit="documents") as task, terminal.task("Inner"):
        clock.now += 4
        task.advance(40_000)
    assert text_of(terminal) == "Packing: 40.0 K documents in 4.0 s\n"


def test_failed_task_is_closed_without_a_line():
    clock = Clock()
    terminal = plain(clock)

    def divide():
        with terminal.task("Dividing"):
            clock.now += 9
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    terminal.tell()
    assert text_of(terminal) == ""


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_fit_their_terminal_and_no_word_is_cut(width):
    terminal = live(width)
    note = "1,234/10,000 · loss 3.214 · 61.2 K tokens/s · MFU 12.3% · 45 s left"
    with terminal.task("Training", total=10_000) as task, terminal.task("Evaluating", total=4):
        task.advance(1_234)
        task.note(note)
        while "Evaluating" not in (text := rendered(terminal)):
            time.sleep(0.02)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert {*note.split()} <= {*text.split()}
    assert "Training" in lines[0]
    assert ("━" in lines[0]) == (width == 120)
    assert len(lines) == {40: 4, 80: 3, 120: 2}[width]


def test_close_ends_every_line_and_every_thread():
    for terminal in (plain(), live()):
        before = set(threading.enumerate())
        context = terminal.task("Training", total=3)
        context.__enter__()
        (thread,) = set(threading.enumerate()) - before
        terminal.close()
        assert terminal.lines.tasks == []
        thread.join(timeout=3)
        assert not thread.is_alive()
        context.__exit__(None, None, None)


def test_a_thread_that_cannot_start_is_the_error_that_is_seen(monkeypatch):
    terminal = plain()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
    with pytest.raises(RuntimeError, match="no thread"), terminal.task("Training"):
        pass
    terminal.close()


def test_a_task_without_a_unit_shows_its_note_instead_of_the_time():
    clock = Clock()
    terminal = plain(clock)
    with terminal.task("Training", total=100, done=70) as task:
        clock.now += 3
        assert line_of(terminal) == "70% · 3.0 s"
        task.advance(10)
        task.note("80/100 · 5 s left")
        assert line_of(terminal) == "80% · 80/100 · 5 s left"


@pytest.mark.parametrize(
    ("environment", "has_widgets", "interactive"),
    [
        ({"TERM": "xterm"}, False, True),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1", "TERM": "xterm"}, False, True),
        (None, True, True),
        (None, False, False),
    ],
    ids=["terminal", "dumb", "no colour", "notebook", "notebook without ipywidgets"],
)
def test_what_cannot_redraw_a_line_gets_plain_lines(
    environment, has_widgets, interactive, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if has_widgets else None)
    options = {"force_terminal": True, "_environ": environment}
    console = Console(file=io.StringIO(), **options if environment else {"force_jupyter": True})
    assert Terminal(console).interactive == interactive


def test_alarms_losses_and_commands_stand_out():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    terminal = Terminal(console)
    for line in ("Alarm: [slow]", "Step 3: validation loss 1.25", "Run `flatout runs`."):
        terminal.say(line)
    assert text_of(terminal).splitlines() == [
        "\x1b[33mAlarm: [slow]\x1b[0m",
        "Step 3: validation \x1b[1mloss 1.25\x1b[0m",
        "Run \x1b[36m`flatout runs`\x1b[0m.",
    ]


def test_text_is_neither_markup_nor_control_characters_nor_a_secret():
    terminal = plain(Clock())
    with terminal.task("Reading HTTP://u:PASS@host/a\x1b[2J") as task:
        task.note("s3://u:PASS@host/b")
        terminal.say("[bold] data[0] :smile: https://token@host/c\x1b[2J\u202eb " + "x" * 200)
        (line,) = terminal.lines.tasks
    said = "[bold] data[0] :smile: https://host/c\ufffd[2J\ufffdb " + "x" * 200
    assert text_of(terminal) == said + "\n"
    assert line.description == "Reading HTTP://host/a\ufffd[2J"
    assert line.fields["note"] == "s3://host/b"
