"""The panel of a run: a few calm lines, which fit every terminal."""

import io
import itertools

import pytest
from clock import Clock
from rich.console import Console

from flatout.cli.terminal import RunReport, Terminal
from flatout.cli.terminal import panel as module


class Paper(io.StringIO):
    """A file with an encoding."""

    encoding = "utf-8"


def report(encoding="utf-8"):
    paper = Paper()
    paper.encoding = encoding
    return RunReport(Terminal(Console(file=paper, width=100), clock=Clock()))


def record(step, loss, **more):
    return {"step": step, "train/loss": loss, **more}


GPU = {
    "perf/step_ms": 100.0,
    "perf/data_wait_ms": 0.4,
    "mem/allocated_gib": 12.0,
    "mem/peak_gib": 31.25,
    "mem/reserved_gib": 33.5,
    "gpu/util_pct": 97.0,
    "gpu/power_w": 412.3,
    "perf/steps_per_s": 30.0,
    "perf/tokens_per_s": 61_200.0,
    "perf/mfu": 0.341,
}


@pytest.fixture
def panel():
    panel = report()
    for i in range(100):
        panel.on_record(record(10 * (i + 1), 4 - 0.02 * i, **GPU))
    panel.on_record({"step": 1000, "val/loss": 2.2})
    panel.on_event({"event": "save", "step": 900, "path": "step-900"})
    panel.terminal.clock.now = 70.0
    return panel


def texts(panel, width=80):
    return [line.plain for line in panel.panel(width)]


def test_all_that_is_known_is_shown(panel):
    loss, *others = texts(panel)
    assert loss.startswith("  loss    2.020 ██▇▇▇▆▆▅▅▅▄▄")
    assert loss.endswith("▁ · validation 2.200 · -0.760 since step 510")
    assert others == [
        "  speed   61.2 K tokens/s · MFU 34.1% · data wait 0.4%",
        "  memory  12.00 GiB · 31.25 GiB peak · GPU 97% · 412 W · 33.50 GiB held",
        "  saved   step 900, 1 min ago",
    ]


def test_the_bars_span_the_run():
    panel = report()
    for step in range(1, 41):
        panel.on_record(record(step, 4.0 if step <= 20 else 2.0))
    loss, *_ = texts(panel)
    assert loss == f"  loss    2.000 {10 * '█'}{10 * '▁'} · +0.000 since step 21"


def test_numbers_that_a_run_lacks_are_omitted(panel):
    assert texts(report()) == texts(panel, 39) == [], "no loss yet, or a sliver"
    short = report("ascii")
    short.on_record(record(1, 2.0))
    assert texts(short) == ["  loss    2.000", "  saved   nothing yet"]
    for step in range(2, 20):
        short.on_record(record(step, 2.0))
    assert texts(short)[0] == "  loss    2.000 · +0.000 since step 10", "without bars"


@pytest.mark.parametrize("width", range(40, 121, 5))
def test_every_line_fits(panel, width):
    panel.on_event({"event": "alarm", "kind": "throughput", "text": "Throughput fell. " * 20})
    lines = texts(panel, width)
    assert len(lines) == 5
    assert max(map(len, lines)) <= width
    assert lines[-1].endswith("...")


def test_the_newest_alarm_is_shown_until_it_is_over_and_all_are_counted(panel):
    panel.on_event({"event": "alarm", "kind": "throughput", "text": "Throughput fell."})
    assert texts(panel)[-2:] == [
        "  saved   step 900, 1 min ago · 1 alarm",
        "  alarm   Throughput fell.",
    ]
    panel.on_event({"event": "alarm", "kind": "memory", "text": "Memory grows.\x1b[2J"})
    assert texts(panel)[-1] == "  alarm   Memory grows.\ufffd[2J"
    panel.on_event({"event": "alarm_over", "kind": "memory", "text": ""})
    assert texts(panel)[-1] == "  alarm   Throughput fell."
    panel.on_event({"event": "alarm_over", "kind": "throughput", "text": ""})
    assert texts(panel)[-1] == "  saved   step 900, 1 min ago · 2 alarms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "just now"), (42, "42 s ago"), (119, "1 min ago"), (7500, "2 h 05 min ago")],
)
def test_the_age_of_a_save_changes_calmly(panel, seconds, text):
    panel.terminal.clock.now = seconds
    assert texts(panel)[-1] == f"  saved   step 900, {text}"


def test_a_long_run_keeps_few_losses_and_its_last_one():
    panel = report()
    for step in range(1, 5001):
        panel.on_record(record(step, step / 1000))
    assert module.MAX_LOSSES / 2 <= len(panel._losses) < module.MAX_LOSSES
    assert texts(panel)[0].startswith("  loss    5.000 ▁▁▂▂▃▃▃▄▄▄▅▅")
    assert " · +1.8" in texts(panel)[0]
    steps = [step for step, _ in panel._losses]
    assert {b - a for a, b in itertools.pairwise(steps)} == {16}
