"""`flatout demo`: on a small text, on a finished run, and its choice of text and recipe."""

import itertools
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.cli.commands import demo as module
from flatout.cli.commands.demo import demo, fit_text, subject_of, with_length
from flatout.config.schema import load_config
from flatout.errors import DataError, Stopped
from flatout.progress import SILENT
from flatout.storage.json_io import read_lines
from flatout.training.metrics.observers import Quiet
from flatout.training.run_dir.layout import read_config, read_summary

pytestmark = pytest.mark.slow


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "MIN_STEPS", 3)
    monkeypatch.setattr(module, "TIMED", 2)
    return tmp_path


def recorded():
    """Progress that records its lines."""
    lines = []
    return SimpleNamespace(lines=lines, say=lines.append, task=SILENT.task)


@pytest.mark.parametrize(
    "text",
    ["The cat sat on the mat. " * 150, "Zażółć gęślą jaźń 日本語 😀\n" * 100, "x" * 60],
    ids=["plain", "unicode", "tiny"],
)
def test_demo_runs_on_a_small_text_file(quick, text):
    (quick / "my book.txt").write_text(text, encoding="utf-8")
    result = demo(quick / "my book.txt", minutes=0.001)
    assert result.steps == 3
    assert result.val_loss is None or result.val_loss > 0
    assert result.tokens_per_s > 0
    summary = result.summary()
    shown = ("3 steps", "tokens/s steady", "MFU", "Loss", "Try next")
    for part in (*shown, f"flatout eval '{result.run}'"):
        assert part in summary
    start = next(iter(read_lines(Path(result.run) / "events.jsonl")))
    assert (start["event"], start["device_reason"] != "requested") == ("start", True)
    progress = recorded()
    again = demo(quick / "my book.txt", minutes=0.001, progress=progress)
    assert (again.run, again.val_loss) == (result.run, result.val_loss)
    assert again.summary() == summary
    assert any("is finished" in line for line in progress.lines)


def test_a_changed_text_starts_another_run(quick):
    file = quick / "a.txt"
    file.write_text("one text " * 100)
    first = subject_of(file, "cpu")
    file.write_text("another text " * 100)
    second = subject_of(file, "cpu")
    assert first.run != second.run
    assert first.data != second.data


def test_the_recipe_depends_on_the_device_and_the_length_of_the_text(quick, monkeypatch):
    assert subject_of(None, "cpu").recipe == "demo"
    assert subject_of(None, "cuda").recipe == "demo-gpu"
    assert subject_of(None, "cpu").source == "python_stdlib"
    file = quick / "a.txt"
    file.write_text("a text " * 100)
    assert subject_of(file, "cpu").tokenizer == "char"
    monkeypatch.setattr(module, "LARGE_TEXT", 100)
    assert subject_of(file, "cpu").tokenizer.startswith("train:")
    assert subject_of(file, "cuda").recipe == "demo-gpu"


@pytest.mark.parametrize("recipe", ["demo", "demo-char", "demo-gpu"])
def test_recipes_have_whole_sequences_and_no_length(recipe):
    config = load_config(recipe)
    assert config.batch.tokens_per_step % config.data.seq_len == 0
    assert config.train.steps is None


def data_of(num_tokens):
    """A dataset of so many tokens for training."""
    sizes = {"train": num_tokens, "val": 10_240}
    splits = {name: SimpleNamespace(num_tokens=size) for name, size in sizes.items()}
    return SimpleNamespace(path="data/x", split=splits.__getitem__)


@pytest.mark.parametrize("tokens", [16, 100, 1000, 10_000, 10_000_000])
def test_sequences_fit_the_text(tokens):
    config = fit_text(load_config("demo-char"), data_of(tokens))
    assert config.data.seq_len < tokens
    assert config.batch.tokens_per_step % config.data.seq_len == 0
    assert (config.data.seq_len == 128) == (tokens >= 1024)
    with pytest.raises(DataError, match="3 training tokens"):
        fit_text(load_config("demo-char"), data_of(3))


def test_length_fits_the_time_and_the_text():
    def fitted(tokens, **limits):
        return with_length(load_config("demo"), data_of(tokens), **limits).train

    long = fitted(10**9, step_s=0.5, minutes=2)
    evaluating_s = module.EVALUATIONS * module.FORWARD_SHARE * 0.5 * 10_240 / 2048
    assert long.steps * 0.5 + evaluating_s == pytest.approx(0.95 * 120, abs=0.5)
    assert module.EVALUATIONS - 1 <= long.steps / long.eval_every <= module.EVALUATIONS
    assert fitted(40_960, step_s=1e-6, minutes=2).steps == module.MAX_EPOCHS * 20
    assert fitted(100, step_s=100.0, minutes=0.01).steps == module.MIN_STEPS


class InterruptsAt(Quiet):
    """An observer that sends SIGINT at a step."""

    def __init__(self, step):
        self.step = step

    def on_tick(self, step, last_step):
        if step == self.step:
            signal.raise_signal(signal.SIGINT)


def test_a_stopped_demo_resumes_with_its_length(quick, monkeypatch):
    (quick / "a.txt").write_text("a text of some length. " * 100)
    with pytest.raises(Stopped):
        demo(quick / "a.txt", minutes=0.001, observers=[InterruptsAt(2)])
    run = subject_of(quick / "a.txt", "cpu").run
    assert read_summary(run) is None
    monkeypatch.setattr(module, "seconds_per_step", lambda config: 1.0)
    progress = recorded()
    demo(quick / "a.txt", minutes=0.001, progress=progress)
    assert f"Resuming {run}." in progress.lines
    assert read_config(run).train.steps == read_summary(run)["steps"] == 3
    assert read_summary(run)["resumed_from"].endswith("step-2")


@pytest.mark.parametrize(("passed_s", "steps"), [(1.0, 4), (0.01, 21)], ids=["slow", "fast"])
def test_a_step_is_timed_after_the_warm_up(monkeypatch, passed_s, steps):
    """A slow machine times fewer steps: these three seconds, or as many steps."""
    clock = SimpleNamespace(monotonic=itertools.count(0, passed_s).__next__)
    monkeypatch.setattr(module, "time", clock)
    timer, last = module.FirstSteps(), module.WARM_UP + steps - 1
    for step in range(1, last):
        timer.on_tick(step, 100)
    with pytest.raises(module.Timed):
        timer.on_tick(last, 100)
    assert timer.step_s == pytest.approx(passed_s)


def test_timing_leaves_no_files(quick):
    (quick / "a.txt").write_text("a text of some length. " * 100)
    result = demo(quick / "a.txt", minutes=0.001)
    assert [path.name for path in (quick / "runs").iterdir()] == [Path(result.run).name]
    assert [event["event"] for event in read_lines(Path(result.run) / "events.jsonl")][:1] == [
        "start"
    ]


@pytest.mark.parametrize(
    ("content", "message", "fix"),
    [
        (None, "There is no file", "Check the path"),
        (b"", "contains no documents", "with text in it"),
        (b"x", "1 character cannot be split", ""),
        (b"caf\xe9", "As CP1252, it reads", "`iconv -f CP1252"),
        (bytes(range(256)), "It looks like a binary file", "Name only text files"),
    ],
)
def test_unusable_files_are_rejected(quick, content, message, fix):
    if content is not None:
        (quick / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        demo(quick / "a.txt")
    assert fix in raised.value.fix
    assert ("--" in raised.value.fix) == raised.value.fix.startswith("With `flatout prepare`: ")


def test_paths_that_are_not_text_files_are_rejected(quick):
    for path, message in (
        (quick, "is not a file. `demo` takes one text file"),
        ("/dev/null", "/dev/null is not a file"),
        ("https://example.org/book.txt", "is a URL. Only a local path"),
    ):
        with pytest.raises(DataError, match=message):
            demo(Path(path))
    (quick / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="has no field 'text'") as raised:
        demo(quick / "a.jsonl")
    assert raised.value.fix.startswith("With `flatout prepare`: ")
