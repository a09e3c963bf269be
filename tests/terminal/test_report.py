"""The progress of a run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from flatout.config.schema import load_config
from flatout.terminal import RunReport, Terminal


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def terminal():
    terminal = Terminal(Console(file=io.StringIO(), width=100), clock=Clock())
    yield terminal
    terminal.close()


def text_of(terminal):
    return terminal.console.file.getvalue()


CONFIG = load_config(
    None,
    [
        "batch.rows_per_device=4",
        "batch.accumulate=2",
        "optim.kind=adamw",
        "train.precision=bf16",
    ],
)


def run_at(step, last_step=10, steps_per_epoch=16.0):
    return SimpleNamespace(
        step=step,
        last_step=last_step,
        steps_per_epoch=steps_per_epoch,
        tokens_per_step=2048,
        config=load_config(
            None,
            [
                "batch.rows_per_device=4",
                "batch.accumulate=2",
                "optim.kind=adamw",
                "train.precision=bf16",
            ],
        ),
        mesh=SimpleNamespace(world_size=1),
    )


def window(step, steps_per_s, **more):
    return {
        "step": step,
        "perf/steps_per_s": steps_per_s,
        "perf/tokens_per_s": 2048 * steps_per_s,
        **more,
    }


def follow(report, steps, last, records=()):
    by_step = {record["step"]: record for record in records}
    for step in steps:
        report.on_tick(step, last)
        if step in by_step:
            report.on_record(by_step[step])


def test_the_line_shows_step_loss_rate_mfu_and_time_left(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(
        report,
        range(1, 6),
        10,
        [window(2, 1.0), window(4, 29.9, **{"train/loss": 3.14159, "perf/mfu": 0.123})],
    )
    task = terminal._open[0]
    assert task.facts() == ["50%", "5/10 · loss 3.142 · 61.2 K tokens/s · MFU 12.3% · 0.2 s left"]
    report.on_end({})
    assert terminal._open == []


def test_rate_and_time_left_agree_and_exclude_compilation(terminal):
    """A first step that compiles for five minutes and an evaluation of a minute do not count."""
    report = RunReport(terminal)
    report.on_start(run_at(0, last_step=400))
    terminal.clock.now += 300
    report.on_tick(1, 400)
    assert terminal._open[0].text == "1/400"
    for step in range(2, 12):
        terminal.clock.now += 2
        report.on_tick(step, 400)
    assert terminal._open[0].text == "11/400 · 1,024 tokens/s · 12 min 58 s left"
    report.on_record(window(10, 0.03, **{"perf/mfu": 0.001}))
    terminal.clock.now += 60
    for step in range(12, 21):
        terminal.clock.now += 2
        report.on_tick(step, 400)
    assert "MFU" not in terminal._open[0].text, "the first record includes the warm-up"
    report.on_record(window(20, 0.5, **{"perf/mfu": 0.2}))
    report.on_tick(21, 400)
    assert terminal._open[0].facts() == [
        "5%",
        "21/400 · 1,024 tokens/s · MFU 20.0% · 12 min 38 s left",
    ]


def test_the_rate_follows_recent_steps(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0, last_step=1000))
    for step in range(10, 110, 10):
        report.on_record(window(step, 10.0 if step <= 50 else 5.0))
    report.on_tick(100, 1000)
    assert terminal._open[0].text == "100/1,000 · 10.2 K tokens/s · 3 min 00 s left"


def test_the_line_is_shown_before_the_first_step_and_removed_after_a_stop(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(3))
    assert terminal._open[0].text == "3/10"
    report.on_event({"event": "stop"})
    assert terminal._open == []
    report.on_end({})


def test_a_resumed_run_counts_from_its_step(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(8))
    follow(report, [9], 10)
    assert terminal._open[0].facts()[0] == "90%"


DECISIONS = [
    ("compile", False, "short run"),
    ("bf16", True, "it is faster here"),
    ("selective-checkpointing", False, "not installed"),
]


def decide(report):
    report.on_event(
        {
            "event": "start",
            "parameters": 1,
            "device": "cpu",
            "device_reason": "requested",
            "machine": "a CPU",
        }
    )
    for name, on, reason in DECISIONS:
        report.on_event({"event": "speedup", "name": name, "on": on, "reason": reason})
    report.on_start(run_at(0))


def test_a_run_starts_with_one_line_about_its_speedups(terminal):
    report = RunReport(terminal)
    decide(report)
    report.on_event({"event": "speedup", "name": "bf16", "on": False, "reason": "already reported"})
    report.on_end({})
    assert text_of(terminal).splitlines()[1:] == [
        "bf16, eager, adamw; 4 rows x 2 micro-batches of 256 tokens = 2,048 per step; 1 of 3 "
        "speedups on (--verbose shows each)"
    ]


def test_a_verbose_run_shows_each_in_columns_that_fit_the_longest_name(terminal):
    decide(RunReport(terminal, verbose=True))
    _, *lines = text_of(terminal).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["off", "compile"],
        ["on", "bf16"],
        ["off", "selective-checkpointing"],
    ]
    assert (
        len({line.index(reason) for line, (_, _, reason) in zip(lines, DECISIONS, strict=True)})
        == 1
    )


def test_unknown_mfu_is_left_out(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(report, [1, 2], 10, [window(1, 10.0), window(2, 10.0)])
    report.on_tick(3, 10)
    assert "tokens/s" in terminal._open[0].text
    assert "MFU" not in terminal._open[0].text


def test_evaluations_and_epochs_print_a_line_each(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(
        report,
        [10, 20],
        40,
        [
            {"step": 10, "train/loss": 4.0, "train/epoch": 0.6},
            {"step": 20, "train/loss": 2.0, "train/epoch": 1.2},
        ],
    )
    report.on_record({"step": 20, "val/loss": 2.5})
    assert (
        text_of(terminal)
        == "Epoch 1 done at step 20: mean training loss 3.0000\nStep 20: validation loss 2.5000\n"
    )


def test_quick_epochs_share_a_line(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(10, last_step=200, steps_per_epoch=10.0))
    for step in range(20, 200, 10):
        report.on_record(
            {"step": step, "train/loss": 1.0, "train/epoch": step / 10, "wall_s": step / 10}
        )
    assert [line.split(" done")[0] for line in text_of(terminal).splitlines()] == [
        "Epoch 2",
        "Epochs 3 to 7",
        "Epochs 8 to 12",
        "Epochs 13 to 17",
    ]


def test_events_print_lines(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(1, 2)
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "sample", "step": 1, "text": "def f():\x1b[2J\n    pass\n"})
    report.on_event({"event": "evaluation", "loss": 2.33564, "tokens": 111_540})
    report.on_event({"event": "difference", "text": "shown elsewhere"})
    report.on_tick(2, 2)
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    text = text_of(terminal)
    assert text.count("Saved runs/a/checkpoints/step-1") == 1
    assert "  | def f():\ufffd[2J\n  |     pass\n" in text
    assert "Whole validation split: loss 2.3356 on 111,540 tokens\n" in text
    assert "shown elsewhere" not in text
    assert "the last one" not in text


def test_recompilation_is_reported_once_and_graph_breaks_with_their_reason(terminal):
    report = RunReport(terminal)
    compiled = {
        "event": "compiled",
        "graph_breaks": 0,
        "cuda_graphs_skipped": 0,
        "first_break": None,
    }
    again = {
        "event": "recompiled",
        "step": 12,
        "compile_s": 31.2,
        "reasons": ["size mismatch at index 1"],
    }
    report.on_event(compiled)
    assert text_of(terminal) == ""
    report.on_event(compiled | {"graph_breaks": 2, "first_break": "a loop at scan.py:3"})
    report.on_event(again)
    report.on_event(again | {"step": 13})
    assert " ".join(text_of(terminal).split()) == (
        "Compiled in pieces: 2 breaks, 0 without CUDA graphs: a loop at scan.py:3 "
        "Recompiled at step 12, 31 s: size mismatch at index 1. Further recompilations are only "
        "counted."
    )


def test_the_last_sample_of_a_run_that_ends_early_belongs_to_the_closing_lines_too(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(2, 9)
    report.on_event({"event": "early_stop", "reason": "enough"})
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    assert "the last one" not in text_of(terminal)


def test_an_interactive_terminal_wraps_lines_at_spaces():
    terminal = Terminal(
        Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    )
    terminal.say("Training 1.2 M parameters on cpu (torch sees no GPU): AMD EPYC, 2 cores")
    terminal.say("  off  compile          short runs do not pay back the minutes")
    assert text_of(terminal).splitlines() == [
        "Training 1.2 M parameters on cpu (torch",
        "  sees no GPU): AMD EPYC, 2 cores",
        "  off  compile          short runs do",
        "       not pay back the minutes",
    ]


def panel_of(width, height=25):
    """What a terminal of a size shows of a run that has reached step 5."""
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    terminal = Terminal(console, clock=Clock())
    report = RunReport(terminal)
    report.on_start(run_at(0))
    records = [window(2, 1.0), window(4, 29.9, **{"train/loss": 3.14159, "perf/mfu": 0.123})]
    follow(report, range(1, 6), 10, records)
    terminal.clock.now += 1
    paper = Console(file=io.StringIO(), width=width)
    paper.print(terminal.lines())
    terminal.close()
    return paper.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_a_terminal_shows_a_panel_below_the_bar(width):
    bar, *lines = panel_of(width)
    assert [line.split()[0] for line in lines] == ["loss", "speed", "saved"]
    assert "5/10 · 0.2 s left" in bar
    assert "tokens/s" not in bar
    assert lines[1] == "  speed   61.2 K tokens/s · MFU 12.3%"
    assert max(map(len, [bar, *lines])) <= width


def test_a_terminal_of_few_lines_or_columns_has_one_line():
    (low,) = panel_of(80, height=6)
    (narrow,) = panel_of(30)
    assert "5/10 · loss 3.142" in low
    assert "5/10" in narrow


def test_requested_epochs_come_with_the_start(terminal):
    report = RunReport(terminal)
    start = {"event": "resume", "step": 8, "last_step": 32, "from_checkpoint": "a", "epochs": 2.0}
    report.on_event(start)
    report.on_start(run_at(8, last_step=32))
    report.on_record({"step": 16, "train/loss": 2.0, "train/epoch": 1.0, "wall_s": 61.0})
    assert text_of(terminal).splitlines()[-1] == (
        "Epoch 1 of 2 done at step 16: mean training loss 2.0000, 1 min 01 s"
    )
