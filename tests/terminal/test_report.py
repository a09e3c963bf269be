"""A run as it goes, and its closing lines."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from flatout.terminal import RunReport, Terminal, closing


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


def run_at(step, last_step=10, steps_per_epoch=16.0):
    return SimpleNamespace(
        step=step, last_step=last_step, steps_per_epoch=steps_per_epoch, tokens_per_step=2048
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


def test_the_line_shows_step_loss_rate_mfu_and_the_time_that_is_left(terminal):
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


def test_rate_and_time_left_are_one_estimate_and_know_nothing_of_compiling(terminal):
    """A first step that compiles for five minutes, an evaluation of a minute: neither is in the
    pace of the steps.
    """
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
    assert "MFU" not in terminal._open[0].text, "the first record holds the warm-up"
    report.on_record(window(20, 0.5, **{"perf/mfu": 0.2}))
    report.on_tick(21, 400)
    assert terminal._open[0].facts() == [
        "5%",
        "21/400 · 1,024 tokens/s · MFU 20.0% · 12 min 38 s left",
    ]


def test_the_pace_follows_what_the_machine_does_of_late(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0, last_step=1000))
    for step in range(10, 110, 10):
        report.on_record(window(step, 10.0 if step <= 50 else 5.0))
    report.on_tick(100, 1000)
    assert terminal._open[0].text == "100/1,000 · 10.2 K tokens/s · 3 min 00 s left"


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
    assert terminal._open[0].facts()[0] == "90%"


def test_a_resumed_run_says_at_which_step_of_how_many(terminal):
    RunReport(terminal).on_event(
        {
            "event": "resume",
            "step": 70,
            "last_step": 500,
            "from_checkpoint": "runs/a/checkpoints/step-70",
        }
    )
    assert text_of(terminal) == "Resuming at step 70 of 500 from runs/a/checkpoints/step-70\n"


DECISIONS = [
    ("compile", False, "short run"),
    ("bf16", True, "it is faster here"),
    ("adamw-8bit-bitsandbytes", False, "not installed"),
]


def decide(report):
    report.on_event(
        {
            "event": "start",
            "parameters": 1,
            "device": "cpu",
            "device_reason": "asked for",
            "machine": "a CPU",
        }
    )
    for name, on, reason in DECISIONS:
        report.on_event({"event": "speedup", "name": name, "on": on, "reason": reason})
    report.on_start(run_at(0))


def test_a_run_begins_with_one_line_about_its_speedups(terminal):
    report = RunReport(terminal)
    decide(report)
    report.on_event(
        {"event": "speedup", "name": "bf16", "on": False, "reason": "what changed it has said so"}
    )
    report.on_end({})
    assert text_of(terminal).splitlines()[1:] == [
        "1 of 3 optimisations on; `flatout list speedups` or --verbose shows each"
    ]


def test_a_verbose_run_shows_each_in_columns_that_fit_the_longest_name(terminal):
    decide(RunReport(terminal, verbose=True))
    _, *lines = text_of(terminal).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["off", "compile"],
        ["on", "bf16"],
        ["off", "adamw-8bit-bitsandbytes"],
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


def test_evaluations_and_epochs_leave_a_line_each(terminal):
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


def test_events_leave_lines(terminal):
    report = RunReport(terminal)
    report.on_start(run_at(0))
    report.on_tick(1, 2)
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "save", "path": "runs/a/checkpoints/step-1"})
    report.on_event({"event": "sample", "step": 1, "text": "def f():\x1b[2J\n    pass\n"})
    report.on_event({"event": "evaluation", "loss": 2.33564, "tokens": 111_540})
    report.on_event({"event": "difference", "text": "said elsewhere"})
    report.on_tick(2, 2)
    report.on_event({"event": "sample", "step": 2, "text": "the last one"})
    said = text_of(terminal)
    assert said.count("Saved runs/a/checkpoints/step-1") == 1
    assert "  | def f():\ufffd[2J\n  |     pass\n" in said
    assert "Whole validation split: loss 2.3356 on 111,540 tokens\n" in said
    assert "said elsewhere" not in said
    assert "the last one" not in said


def test_a_recompilation_is_said_once_and_breaks_with_their_reason(terminal):
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
    records = [{"step": s, "train/loss": 8 - s / 100} for s in range(0, 500, 10)] + [
        {"step": 500, "val/loss": 3.25}
    ]
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
        "2.0 M tokens in 1 min 58 s, 0.90 GiB at most",
        "loss over steps (o validation)",
        "  | text 500",
    ):
        assert part in text
    assert "text 250" not in text
    assert "in all" not in text


def test_closing_of_a_resumed_run_tells_the_whole_time(tmp_path):
    text = closing(
        SUMMARY
        | {"run": str(tmp_path), "resumed_from": "step-250", "mfu": 0.4, "mfu_of": "data sheet"}
    )
    assert "1 min 58 s (3 min 20 s in all)" in text
    assert "40.0% of the peak (data sheet)" in text


def lines_of(summary, tmp_path, width=120):
    return closing(
        SUMMARY | {"run": str(tmp_path)} | summary, encoding="utf-8", width=width
    ).splitlines()


@pytest.mark.parametrize("best_step", [None, 500])
def test_the_best_loss_is_told_only_of_another_step(tmp_path, best_step):
    assert not any("best " in line for line in lines_of({"best_step": best_step}, tmp_path))
    assert not any("best " in line for line in lines_of({"best_val_loss": None}, tmp_path))


def test_a_reason_that_says_unknown_says_it_once(tmp_path):
    assert "MFU        unknown: no data sheet" in lines_of(
        {"mfu_of": "unknown: no data sheet"}, tmp_path
    )
    assert "MFU        unknown: no peak rate is known for this device" in lines_of(
        {"mfu_of": None}, tmp_path
    )


def test_the_whole_rate_of_a_compiled_run_says_so(tmp_path):
    assert any(
        line.endswith("17.0 K tokens/s with evaluation, saving and compiling")
        for line in lines_of({"compile_s": 31.0}, tmp_path)
    )


@pytest.mark.parametrize("width", [40, 60, 80])
def test_closing_fits_the_terminal_and_cuts_no_word(tmp_path, width):
    records = [{"step": s, "train/loss": 8 - s / 100} for s in range(0, 500, 10)] + [
        {"step": 500, "val/loss": 3.25}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = lines_of({}, tmp_path, width)
    assert all(len(line) <= width for line in lines if str(tmp_path) not in line)
    words = " ".join(lines).split()
    assert set(" ".join(lines_of({}, tmp_path)[-5:]).split()) <= set(words)
    (loss,) = (number for number, line in enumerate(lines) if line.startswith("Loss "))
    assert lines[loss + 1].startswith(" " * 11) or width > 100


NEXT_STEPS = "Try next:\n" + "\n".join(
    f"  thing {number}   flatout command runs/demo" for number in range(4)
)
LONG = {
    "resumed_from": "runs/demo/checkpoints/step-400",
    "mfu": 0.288,
    "mfu_of": "data sheet: NVIDIA H100 Tensor Core GPU, SXM, without sparsity",
}


@pytest.mark.parametrize("summary", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "text",
    ["one line", "\n\ndef f(x):\n\n    return x\n" * 12, "word " * 200],
    ids=["short", "lines", "wide"],
)
def test_closing_fits_a_screen_of_24_lines_and_ends_with_what_was_measured(
    tmp_path, monkeypatch, text, summary
):
    monkeypatch.chdir(tmp_path)
    records = [{"step": s, "train/loss": 8 - s / 100} for s in range(0, 500, 10)] + [
        {"step": 500, "val/loss": 3.25}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"event": "sample", "step": 500, "text": text}) + "\n"
    )
    closed = closing(
        SUMMARY | summary | {"run": "."},
        next_steps=NEXT_STEPS,
        encoding="utf-8",
        width=80,
        height=24,
    )
    lines = closed.splitlines()
    assert len(lines) <= 23, "the prompt needs one"
    assert all(len(line) <= 80 for line in lines)
    sample, steps, axis, run, loss, speed = (
        next(number for number, line in enumerate(lines) if line.lstrip().startswith(words))
        for words in ("A sample", "Try next", "└", "Run ", "Loss ", "Speed ")
    )
    assert sample < steps < axis < run < loss < speed
    assert axis - steps >= 9, "the steps, an empty line, and three lines of the curve"
    assert lines[1].startswith("  | ")
    assert lines[1].strip("| "), "an empty line says nothing"


def test_a_log_has_the_whole_sample(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"event": "sample", "step": 500, "text": "a\n" * 60}) + "\n"
    )
    assert lines_of({}, tmp_path).count("  | a") == 60


def test_a_persons_terminal_breaks_lines_at_spaces():
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


def test_a_summary_is_shown_where_the_disk_does_not_read_the_figures(tmp_path):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).mkdir()  # cannot be read as a file
    text = closing(SUMMARY | {"run": str(tmp_path)}, encoding="ascii", width=120)
    assert text.startswith("Run ")
