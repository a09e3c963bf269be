"""A run as it goes, and its closing lines."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from flatout.terminal import RunReport, Terminal, closing


@pytest.fixture
def terminal():
    terminal = Terminal(Console(file=io.StringIO(), width=100))
    yield terminal
    terminal.close()


def text_of(terminal):
    return terminal.console.file.getvalue()


def run_at(step, last_step=10, steps_per_epoch=16.0):
    return SimpleNamespace(step=step, last_step=last_step, steps_per_epoch=steps_per_epoch)


def follow(report, steps, last, records=()):
    by_step = {record["step"]: record for record in records}
    for step in steps:
        report.on_tick(step, last)
        if step in by_step:
            report.on_record(by_step[step])


def test_the_line_shows_step_loss_rate_and_mfu(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(report, range(1, 6), 10, [{"step": 4, "train/loss": 3.14159, "perf/tokens_per_s": 61_234.0, "perf/mfu": 0.123}])
    task = terminal._open[0]
    assert task.facts()[:2] == ["50%", "5/10 · loss 3.142 · 61.2 K tokens/s · MFU 12.3%"]
    report.on_end({})
    assert terminal._open == []


def test_the_line_is_there_before_the_first_step_and_gone_after_a_stop(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(3))
    assert terminal._open[0].text == "3/10"
    report.on_event({"event": "stop"})
    assert terminal._open == []
    report.on_end({})


def test_a_resumed_run_counts_from_where_it_was(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(8))
    follow(report, [9], 10)
    assert terminal._open[0].share == 0.5


def test_unknown_mfu_is_left_out(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(report, [1, 2], 10, [{"step": 1, "train/loss": 3.0, "perf/tokens_per_s": 10.0}])
    assert "MFU" not in terminal._open[0].text


def test_evaluations_and_epochs_leave_a_line_each(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    follow(report, [10, 20], 40, [{"step": 10, "train/loss": 4.0, "train/epoch": 0.6}, {"step": 20, "train/loss": 2.0, "train/epoch": 1.2}])
    report.on_record({"step": 20, "val/loss": 2.5})
    assert text_of(terminal) == "Epoch 1 done at step 20: mean training loss 3.0000\nStep 20: validation loss 2.5000\n"


def test_quick_epochs_share_a_line(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(10, last_step=200, steps_per_epoch=10.0))
    for step in range(20, 200, 10):
        report.on_record({"step": step, "train/loss": 1.0, "train/epoch": step / 10, "wall_s": step / 10})
    assert [line.split(" done")[0] for line in text_of(terminal).splitlines()] == ["Epoch 2", "Epochs 3 to 7", "Epochs 8 to 12", "Epochs 13 to 17"]


def test_events_leave_lines(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(1, 2)
    report.on_event({"event": "speedup", "name": "compile", "on": False, "reason": "short run"})
    report.on_event({"event": "speedup", "name": "compile", "on": False, "reason": "said by the compiler's caller"})
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "sample", "step": 1, "text": "def f():\x1b[2J\n    pass\n"})
    report.on_event({"event": "evaluation", "loss": 2.33564, "tokens": 111_540})
    report.on_event({"event": "difference", "text": "said elsewhere"})
    report.on_tick(2, 2)
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    said = text_of(terminal)
    assert said.split("\n")[0].split(maxsplit=2) == ["off", "compile", "short run"]
    assert said.count("Saved runs/a/checkpoints/step-1") == 1
    assert "  | def f():\ufffd[2J\n  |     pass\n" in said
    assert "Whole validation split: loss 2.3356 on 111,540 tokens\n" in said
    assert "said elsewhere" not in said
    assert "the last one" not in said


def test_a_recompilation_is_said_once_and_breaks_with_their_reason(terminal):
    report = RunReport(terminal)
    compiled = {"event": "compiled", "graph_breaks": 0, "cuda_graphs_skipped": 0, "first_break": None}
    again = {"event": "recompiled", "step": 12, "compile_s": 31.2, "reasons": ["size mismatch at index 1"]}
    report.on_event(compiled)
    assert text_of(terminal) == ""
    report.on_event(compiled | {"graph_breaks": 2, "first_break": "a loop at scan.py:3"})
    report.on_event(again)
    report.on_event(again | {"step": 13})
    assert " ".join(text_of(terminal).split()) == (
        "Compiled in pieces: 2 breaks, 0 without CUDA graphs: a loop at scan.py:3 "
        "Compiled again at step 12, 31 s: size mismatch at index 1. Further times are only counted."
    )


def test_the_last_sample_of_a_run_that_ends_early_belongs_to_the_closing_lines_too(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(2, 9)
    report.on_event({"event": "early_stop", "reason": "enough"})
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    assert "the last one" not in text_of(terminal)


SUMMARY = {
    "steps": 500,
    "tokens": 2_048_000,
    "train_loss": 3.1,
    "val_loss": 3.25,
    "best_val_loss": 3.2,
    "best_step": 400,
    "bits_per_byte": 1.234,
    "tokens_per_s": 21_234.0,
    "wall_tokens_per_s": 17_000.0,
    "mfu": None,
    "mfu_of": "unknown GPU",
    "peak_gib": 0.9,
    "wall_s": 118.4,
    "elapsed_s": 200.0,
    "resumed_from": None,
}


def test_closing_tells_what_was_measured(tmp_path):
    records = [{"step": s, "train/loss": 8 - s / 100} for s in range(0, 500, 10)] + [{"step": 500, "val/loss": 3.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    events = [{"event": "sample", "step": s, "text": f"text {s}"} for s in (250, 500)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    text = closing(SUMMARY | {"run": str(tmp_path)}, encoding="ascii", width=120)
    for part in (
        str(tmp_path),
        "500 steps, 2.0 M tokens",
        "training 3.1000, validation 3.2500 (perplexity 25.8), best in the run 3.2000 at step 400",
        "21.2 K tokens/s steady, 17.0 K tokens/s with evaluation and saving",
        "MFU        unknown GPU",
        "1 min 58 s",
        "loss over steps (o validation)",
        "  | text 500",
    ):
        assert part in text
    assert "text 250" not in text
    assert "all resumes" not in text


def test_closing_of_a_resumed_run_tells_the_whole_time(tmp_path):
    text = closing(SUMMARY | {"run": str(tmp_path), "resumed_from": "step-250", "mfu": 0.4, "mfu_of": "data sheet"})
    assert "1 min 58 s, 3 min 20 s over all resumes" in text
    assert "40.0% of the peak (data sheet)" in text


def lines_of(summary, tmp_path, width=120):
    return closing(SUMMARY | {"run": str(tmp_path)} | summary, encoding="utf-8", width=width).splitlines()


@pytest.mark.parametrize("best_step", [None, 500])
def test_the_best_loss_is_told_only_of_another_step(tmp_path, best_step):
    assert not any("best " in line for line in lines_of({"best_step": best_step}, tmp_path))
    assert not any("best " in line for line in lines_of({"best_val_loss": None}, tmp_path))


def test_a_reason_that_says_unknown_says_it_once(tmp_path):
    assert "MFU        unknown: no data sheet" in lines_of({"mfu_of": "unknown: no data sheet"}, tmp_path)
    assert "MFU        unknown: no peak rate is known for this device" in lines_of({"mfu_of": None}, tmp_path)


def test_the_whole_rate_of_a_compiled_run_says_so(tmp_path):
    assert any(line.endswith("17.0 K tokens/s with evaluation, saving and compiling") for line in lines_of({"compile_s": 31.0}, tmp_path))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_closing_fits_the_terminal_and_cuts_no_word(tmp_path, width):
    records = [{"step": s, "train/loss": 8 - s / 100} for s in range(0, 500, 10)] + [{"step": 500, "val/loss": 3.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = lines_of({"run": str(tmp_path)}, tmp_path, width)
    assert all(len(line) <= width for line in lines if str(tmp_path) not in line)
    words = " ".join(lines).split()
    assert set(" ".join(lines_of({}, tmp_path)[:6]).split()) <= set(words)
    (loss,) = (number for number, line in enumerate(lines) if line.startswith("Loss "))
    assert lines[loss + 1].startswith(" " * 11) or width > 100


def test_a_persons_terminal_breaks_lines_at_spaces():
    terminal = Terminal(Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None))
    terminal.say("Training 1.2 M parameters on cpu (torch sees no GPU): AMD EPYC, 2 cores")
    terminal.say("  off  compile          short runs do not pay back the minutes")
    assert text_of(terminal).splitlines() == [
        "Training 1.2 M parameters on cpu (torch",
        "  sees no GPU): AMD EPYC, 2 cores",
        "  off  compile          short runs do",
        "       not pay back the minutes",
    ]
