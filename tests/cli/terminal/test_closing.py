"""The closing lines of a run."""

import pytest

from flatout.cli.terminal import closing
from flatout.storage.json_io import append_line

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


def test_closing_shows_the_numbers(tmp_path):
    for step in (250, 500):
        event = {"event": "sample", "step": step, "text": f"text {step}"}
        append_line(tmp_path / "events.jsonl", event)
    text = closing(SUMMARY | {"run": str(tmp_path)}, width=120)
    for part in (
        str(tmp_path),
        "500 steps, 2.0 M tokens",
        "training 3.1000, validation 3.2500 (perplexity 25.8), best in the run 3.2000 at step 400",
        "21.2 K tokens/s steady, 17.0 K tokens/s with evaluation and saving",
        "MFU      unknown GPU",
        "2.0 M tokens in 1 min 58 s, 0.90 GiB peak",
        "  | text 500",
    ):
        assert part in text
    assert "text 250" not in text
    assert "in all" not in text


def lines_of(folder, width=120, **summary):
    return closing(SUMMARY | {"run": str(folder)} | summary, width=width).splitlines()


PREDICTED = {"wall_s": 130.24, "tokens_per_s": 19_110.6, "peak_gib": 0.9}


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({"resumed_from": "step-250"}, "1 min 58 s (3 min 20 s in total)"),
        ({"mfu": 0.4, "mfu_of": "data sheet"}, "40.0% of the peak (data sheet)"),
        ({"skipped_steps": 1}, "the updates of 1 bad step:"),
        ({"skipped_steps": 3}, "of 3 bad steps:"),
        ({"steps": 1, "peak_gib": 0.004}, "  1 step, 2.0 M tokens in 1 min 58 s, 4.1 MiB peak"),
        ({"mfu_of": "unknown: no data sheet"}, "MFU      unknown: no data sheet"),
        ({"mfu_of": None}, "MFU      unknown: no peak rate is known for this device"),
        ({"compile_s": 31.0}, "17.0 K tokens/s with evaluation, saving and compiling"),
        (
            {"predicted": PREDICTED},
            "Predicted  2 min 10 s (actual 1 min 58 s), 19.1 K tokens/s (actual 21.2 K tokens/s), ",
        ),
        ({"predicted": PREDICTED, "wall_s": 3.0}, "Predicted  0.90 GiB (actual 0.90 GiB)"),
    ],
)
def test_each_number_is_worded_as_it_is(tmp_path, summary, line):
    assert any(line in each for each in lines_of(tmp_path, **summary))


@pytest.mark.parametrize(
    ("summary", "word"),
    [
        ({"best_step": None}, "best "),
        ({"best_step": 500}, "best "),
        ({"best_val_loss": None}, "best "),
        ({"skipped_steps": 0}, "Skipped"),
        ({}, "Predicted"),
    ],
)
def test_what_says_nothing_is_omitted(tmp_path, summary, word):
    assert not any(word in each for each in lines_of(tmp_path, **summary))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_closing_fits_the_terminal_and_cuts_no_word(tmp_path, width):
    lines = lines_of(tmp_path, width)
    assert all(len(line) <= width for line in lines if str(tmp_path) not in line)
    words = " ".join(lines).split()
    assert set(" ".join(lines_of(tmp_path)[-5:]).split()) <= set(words)
    (loss,) = (number for number, line in enumerate(lines) if line.startswith("Loss "))
    assert lines[loss + 1].startswith(" " * 9)


NEXT_STEPS = "Try next:\n" + "\n".join(
    f"  thing {number}   flatout command runs/demo" for number in range(4)
)
LONG = {
    "resumed_from": "runs/demo/checkpoints/step-400",
    "mfu": 0.288,
    "mfu_of": "data sheet: NVIDIA H100 Tensor Core GPU, SXM, without sparsity",
}


@pytest.mark.parametrize("summary", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("height", [24, 40])
@pytest.mark.parametrize(
    ("text", "shown"),
    [("one line", 1), ("\n\ndef f(x):\n\n    return x\n" * 12, 5), ("word " * 200, 5)],
    ids=["short", "lines", "wide"],
)
def test_closing_fits_a_screen_with_lines_of_the_sample_and_ends_with_what_to_try(
    tmp_path, monkeypatch, text, shown, summary, height
):
    monkeypatch.chdir(tmp_path)
    append_line(tmp_path / "events.jsonl", {"event": "sample", "step": 500, "text": text})
    options = {"next_steps": NEXT_STEPS, "width": 80, "height": height}
    closed = closing(SUMMARY | summary | {"run": "."}, **options)
    lines = closed.splitlines()
    assert len(lines) <= height - 1, "the prompt needs one"
    assert all(len(line) <= 80 for line in lines)
    starts = ["A sample", "Run ", "Loss ", "Speed ", "Try next"]
    places = [
        next(number for number, line in enumerate(lines) if line.lstrip().startswith(words))
        for words in starts
    ]
    assert places == sorted(places)
    assert closed.endswith(NEXT_STEPS)
    sample = [line for line in lines if line.startswith("  |")]
    assert len(sample) >= shown
    assert sample[0].strip("| "), "an empty line says nothing"


def test_a_log_contains_the_whole_sample(tmp_path):
    append_line(tmp_path / "events.jsonl", {"event": "sample", "step": 500, "text": "a\n" * 60})
    assert lines_of(tmp_path).count("  | a") == 60


def test_a_summary_is_shown_even_if_the_numbers_cannot_be_read(tmp_path):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).mkdir()  # cannot be read as a file
    assert lines_of(tmp_path)[0].startswith("Run ")
