"""The closing lines of a run."""

import json
import tracemalloc

import pytest

from flatout.measure.runlog import RunLog
from flatout.terminal import closing
from flatout.terminal.closing import _points

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


def test_closing_shows_the_figures(tmp_path):
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
        "2.0 M tokens in 1 min 58 s, 0.90 GiB peak",
        "loss over steps (o validation)",
        "  | text 500",
    ):
        assert part in text
    assert "text 250" not in text
    assert "in all" not in text


def test_closing_of_a_resumed_run_shows_the_total_time(tmp_path):
    text = closing(
        SUMMARY
        | {"run": str(tmp_path), "resumed_from": "step-250", "mfu": 0.4, "mfu_of": "data sheet"}
    )
    assert "1 min 58 s (3 min 20 s in total)" in text
    assert "40.0% of the peak (data sheet)" in text


def lines_of(summary, tmp_path, width=120):
    return closing(
        SUMMARY | {"run": str(tmp_path)} | summary, encoding="utf-8", width=width
    ).splitlines()


@pytest.mark.parametrize("best_step", [None, 500])
def test_the_best_loss_is_shown_only_for_another_step(tmp_path, best_step):
    assert not any("best " in line for line in lines_of({"best_step": best_step}, tmp_path))
    assert not any("best " in line for line in lines_of({"best_val_loss": None}, tmp_path))


@pytest.mark.parametrize(
    ("number", "said"), [(0, None), (1, "the updates of 1 bad step:"), (3, "of 3 bad steps:")]
)
def test_skipped_steps_are_shown_if_there_are_any(tmp_path, number, said):
    lines = [line for line in lines_of({"skipped_steps": number}, tmp_path) if "Skipped" in line]
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)


def test_one_step_and_little_memory_are_worded_as_such(tmp_path):
    lines = lines_of({"steps": 1, "best_step": 1, "peak_gib": 0.004}, tmp_path)
    assert "Trained    1 step, 2.0 M tokens in 1 min 58 s, 4.1 MiB peak" in lines


def test_unknown_appears_once_in_a_reason(tmp_path):
    assert "MFU        unknown: no data sheet" in lines_of(
        {"mfu_of": "unknown: no data sheet"}, tmp_path
    )
    assert "MFU        unknown: no peak rate is known for this device" in lines_of(
        {"mfu_of": None}, tmp_path
    )


def test_the_total_rate_of_a_compiled_run_mentions_compiling(tmp_path):
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
def test_closing_fits_a_screen_of_24_lines_and_ends_with_the_figures(
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


def test_a_log_contains_the_whole_sample(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"event": "sample", "step": 500, "text": "a\n" * 60}) + "\n"
    )
    assert lines_of({}, tmp_path).count("  | a") == 60


def test_a_summary_is_shown_even_if_the_figures_cannot_be_read(tmp_path):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).mkdir()  # cannot be read as a file
    text = closing(SUMMARY | {"run": str(tmp_path)}, encoding="ascii", width=120)
    assert text.startswith("Run ")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (118.4, "2 min 10 s (10% too high), 19.1 K tokens/s (10% too low), 0.90 GiB (0% too low)"),
        (3.0, "0.90 GiB (0% too low)"),
    ],
)
def test_a_run_of_seconds_compares_only_its_memory_with_the_prediction(tmp_path, seconds, shown):
    predicted = {"wall_s": 130.24, "tokens_per_s": 19_110.6, "peak_gib": 0.9}
    lines = lines_of({"predicted": predicted, "wall_s": seconds}, tmp_path)
    assert [line for line in lines if line.startswith("Predicted")] == [f"Predicted  {shown}"]


def test_a_run_without_a_prediction_compares_nothing(tmp_path):
    assert not any(line.startswith("Predicted") for line in lines_of({}, tmp_path))


def test_the_curve_of_a_long_run_does_not_keep_its_records(tmp_path):
    record = {f"perf/figure_{number}": number / 7 for number in range(20)}
    lines = (
        json.dumps({"step": step, "train/loss": 1 / step, **record}) for step in range(1, 10_001)
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tracemalloc.start()
    try:
        losses, validation = _points(RunLog(tmp_path), "train/loss", "val/loss")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert losses[1] == (2, 0.5)
    assert len(losses) == 10_000
    assert not validation
    assert peak < 300 * len(losses), "two numbers, a pair and its place in the list"
