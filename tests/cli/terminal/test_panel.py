"""The panel of a run: a few calm lines below the line of its steps."""

import io
from types import SimpleNamespace

import pytest
from clock import Clock
from rich.console import Console

from flatout.cli.terminal import RunReport, Terminal


class Paper(io.StringIO):
    """A file with an encoding."""

    encoding = "utf-8"


def report(encoding="utf-8", width=100, height=25):
    paper = Paper()
    paper.encoding = encoding
    options = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}
    console = Console(file=paper, width=width, height=height, **options)
    return RunReport(Terminal(console, clock=Clock()))


GPU = {
    "perf/mfu": 0.321,
    "perf/step_ms": 100.0,
    "perf/data_wait_ms": 0.4,
    "mem/allocated_gib": 12.0,
    "mem/peak_gib": 31.25,
    "mem/reserved_gib": 33.5,
    "gpu/util_pct": 97.0,
    "gpu/power_w": 412.3,
}


def filled(**options):
    found = report(**options)
    for i in range(100):
        found.on_record({"step": 10 * (i + 1), "train/loss": 4 - 0.02 * i, **GPU})
    found.on_record({"step": 1000, "val/loss": 2.2})
    return found


def texts(panel):
    paper = Console(file=io.StringIO(), width=panel.terminal.console.width)
    shown = panel.panel()
    if shown is None:
        return []
    paper.print(shown)
    return [line.rstrip() for line in paper.file.getvalue().splitlines()]


def test_all_that_is_known_is_shown():
    loss, *others = texts(filled(width=120))
    assert loss.startswith("  loss    ██▇▇▇▆▆▅▅▅▄▄")
    assert loss.endswith("▁ · validation 2.200")
    assert others == [
        "  device  MFU 32.1% · 12.00 GiB · 31.25 GiB peak · 33.50 GiB held · GPU 97% · 412 W · "
        "data wait 0.4%"
    ]


def test_the_bars_span_the_run_also_a_long_one():
    panel = report()
    for step in range(1, 41):
        panel.on_record({"step": step, "train/loss": 4.0 if step <= 20 else 2.0})
    assert texts(panel)[0] == f"  loss  {10 * '█'}{10 * '▁'}"
    panel = report()
    for step in range(1, 5001):
        panel.on_record({"step": step, "train/loss": step / 1000})
    assert texts(panel)[0] == "  loss  ▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██"


def test_what_a_run_lacks_is_omitted():
    assert texts(report()) == [], "no loss yet"
    assert texts(filled(width=39)) == [], "a sliver"
    short = report("ascii")
    for step in (1, 2):
        short.on_record({"step": step, "train/loss": 2.0})
    assert texts(short) == [""], "without bars"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_line_fits_and_no_word_is_lost(width):
    lines = texts(filled(width=width))
    assert max(map(len, lines)) <= width
    assert {"0.4%", "2.200"} <= {*" ".join(lines).split()}


@pytest.mark.parametrize(("height", "has_panel"), [(11, False), (12, True)])
def test_a_low_terminal_has_the_line_only(height, has_panel):
    shown = report(height=height)
    run = SimpleNamespace(step=0, last_step=9, steps_per_epoch=4.0, tokens_per_step=64)
    shown.on_start(run)
    for step in (1, 2):
        shown.on_record({"step": step, "train/loss": 2.0})
    shown.on_tick(1, 9)
    shown.terminal.clock.now = 1.0
    paper = Console(file=io.StringIO(), width=100)
    paper.print(shown.terminal.lines.get_renderable())
    shown.terminal.close()
    text = paper.file.getvalue()
    assert "1/9 · loss 2.000" in text
    assert ("▁▁" in text) == has_panel
