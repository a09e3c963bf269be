"""The progress of a run."""

import io
from types import SimpleNamespace

import pytest
from clock import Clock
from rich.console import Console

from flatout.cli.terminal import RunReport, Terminal
from flatout.cli.terminal.lines import facts
from flatout.config.schema import load_config


@pytest.fixture
def terminal():
    terminal = Terminal(Console(file=io.StringIO(), width=100), clock=Clock())
    yield terminal
    terminal.close()


def text_of(terminal):
    return terminal.console.file.getvalue()


def line_of(terminal):
    return facts(terminal.lines.tasks[0])


CONFIG = load_config(
    None,
    ["batch.rows_per_device=4", "batch.accumulate=2", "optim.kind=adamw", "train.precision=bf16"],
)


def run_at(step, last_step=10, steps_per_epoch=16.0):
    facts = {"steps_per_epoch": steps_per_epoch, "tokens_per_step": 2048, "config": CONFIG}
    facts |= {
        "mesh": SimpleNamespace(world_size=1, dp_size=1),
        "speedups": ["fused-adamw", "bf16"],
        "arithmetic": "bf16",
    }
    return SimpleNamespace(step=step, last_step=last_step, **facts)


def window(step, steps_per_s, **more):
    rates = {"perf/steps_per_s": steps_per_s, "perf/tokens_per_s": 2048 * steps_per_s}
    return {"step": step, **rates, **more}


def test_the_line_shows_step_loss_rate_and_time_left(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(8, last_step=20))
    assert line_of(terminal) == "40% · 8/20"
    for step, record in ((9, window(9, 1.0)), (10, window(10, 29.9, **{"train/loss": 3.14159}))):
        terminal.clock.now += 0.5
        report.on_tick(step, 20)
        report.on_record(record)
    report.on_tick(11, 20)
    assert line_of(terminal).startswith("55% · 11/20 · loss 3.142 · 61.2 K tokens/s · ")
    report.on_record({"step": 11, "train/epoch": 1.256, "perf/samples_per_s": 239.2})
    report.on_tick(12, 20)
    assert line_of(terminal).startswith(
        "60% · 12/20 · epoch 1.26 · loss 3.142 · 61.2 K tokens/s · 239 samples/s · "
    )
    assert line_of(terminal).endswith(" s left")
    report.on_event({"event": "stop"})
    assert terminal.lines.tasks == []
    report.on_tick(12, 20)
    report.on_end({})


def test_compilation_does_not_count_and_the_time_left_includes_evaluations(terminal):
    """The first step compiles for five minutes, and an evaluation takes one."""
    report = RunReport(terminal)
    report.on_start(run_at(0, last_step=400))
    terminal.clock.now += 300
    for step in range(1, 21):
        terminal.clock.now += 2 if step != 12 else 62
        report.on_tick(step, 400)
    assert line_of(terminal) == "5% · 20/400 · 0.2 steps/s · 32 min 40 s left"


DECISIONS = [
    ("compile", False, "short run"),
    ("bf16", True, "it is faster here"),
    ("selective-checkpointing", False, "not installed"),
]


MACHINE = {"device": "cpu", "device_reason": "requested", "machine": "a CPU"}


def decide(report):
    report.on_event({"event": "start", "parameters": 1, **MACHINE})
    for name, on, reason in DECISIONS:
        report.on_event({"event": "speedup", "name": name, "on": on, "reason": reason})
    report.on_start(run_at(0))


def test_a_run_starts_with_one_line_about_its_speedups(terminal):
    report = RunReport(terminal)
    decide(report)
    report.on_event({"event": "speedup", "name": "bf16", "on": False, "reason": "already reported"})
    report.on_end({})
    assert text_of(terminal).splitlines()[1:] == [
        "bf16 matmuls, eager, fused adamw; 4 rows x 2 micro-batches of 256 tokens = 2,048 per "
        "step; 1 of 3 speedups on (--verbose shows each)"
    ]


def test_a_run_by_tokens_starts_with_its_documents(terminal):
    run = run_at(0)
    run.config = run.config.with_values({"batch.by_tokens": True, "data.seq_len": 256})
    report = RunReport(terminal)
    report.on_event({"event": "start", "parameters": 1, **MACHINE})
    report.on_event({"event": "speedup", "name": "bf16", "on": True, "reason": "here"})
    report.on_start(run)
    assert "; 8 documents per step; " in text_of(terminal)


def test_a_verbose_run_shows_each_in_columns_that_fit_the_longest_name(terminal):
    decide(RunReport(terminal, verbose=True))
    _, *lines = text_of(terminal).splitlines()
    words = [["on" if on else "off", name] for name, on, _ in DECISIONS]
    assert [line.split()[:2] for line in lines] == words
    reasons = [reason for _, _, reason in DECISIONS]
    assert len({line.index(why) for line, why in zip(lines, reasons, strict=True)}) == 1


def test_evaluations_print_a_line_with_the_epoch(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0, last_step=32))
    report.on_record({"step": 20, "val/loss": 2.25})
    report.on_record({"step": 20, "train/loss": 2.0, "train/epoch": 1.25})
    report.on_record({"step": 30, "val/loss": 2.5})
    assert text_of(terminal).splitlines() == [
        "Step 20: validation loss 2.2500",
        "Step 30, epoch 1.2: validation loss 2.5000",
    ]


def test_events_print_lines(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(1, 9)
    for event in (
        *[{"event": "save", "path": "runs/a/checkpoints/step-1"}] * 2,
        {"event": "sample", "step": 1, "text": "def f():\x1b[2J\n    pass\n"},
        {"event": "evaluation", "loss": 2.33564, "tokens": 111_540},
        {"event": "difference", "text": "shown elsewhere"},
    ):
        report.on_event(event)
    text = text_of(terminal)
    assert text.count("Saved runs/a/checkpoints/step-1") == 1
    assert "  | def f():\ufffd[2J\n  |     pass\n" in text
    assert "Whole validation split: loss 2.3356 on 111,540 tokens\n" in text
    assert "shown elsewhere" not in text


@pytest.mark.parametrize("last_step", [2, 9])
def test_the_last_sample_of_a_run_belongs_to_the_closing_lines(terminal, last_step):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(2, last_step)
    if last_step == 9:
        report.on_event({"event": "early_stop", "reason": "enough"})
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    assert "the last one" not in text_of(terminal)


def test_recompilation_is_reported_once_and_graph_breaks_with_their_reason(terminal):
    report = RunReport(terminal)
    nothing = {"graph_breaks": 0, "cuda_graphs_skipped": 0, "first_break": None}
    report.on_event({"event": "compiled", **nothing})
    assert text_of(terminal) == ""
    broken = nothing | {"graph_breaks": 2, "first_break": "a loop at scan.py:3"}
    report.on_event({"event": "compiled", **broken})
    for step in (12, 13):
        again = {"step": step, "compile_s": 31.2, "reasons": ["size mismatch at index 1"]}
        report.on_event({"event": "recompiled", **again})
    assert " ".join(text_of(terminal).split()) == (
        "Compiled in pieces: 2 breaks, 0 without CUDA graphs: a loop at scan.py:3 "
        "Recompiled at step 12, 31 s: size mismatch at index 1. Further recompilations are only "
        "counted."
    )
