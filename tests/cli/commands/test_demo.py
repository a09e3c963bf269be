"""`flatout demo`: on a small text, on a finished run, and its choice of text and recipe."""

import itertools
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.cli.commands import demo as module
from flatout.cli.commands.demo import demo, fitted
from flatout.config.schema import load_config
from flatout.errors import DataError, Stopped
from flatout.progress import SILENT
from flatout.storage.json_io import LineReader
from flatout.training.metrics.observers import Quiet
from flatout.training.run_dir.layout import read_config
from flatout.training.run_dir.runlog import RunLog

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


@pytest.mark.quick_cases("unicode")
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
    shown = ("3 steps", "tokens/s steady", "MFU", "Loss")
    for part in (*shown, f"flatout report '{result.run}'"):
        assert part in summary
    start = next(iter(LineReader(Path(result.run) / "events.jsonl").read()))
    assert (start["event"], start["device_reason"] != "requested") == ("start", True)
    progress = recorded()
    again = demo(quick / "my book.txt", minutes=0.001, progress=progress)
    assert (again.run, again.val_loss) == (result.run, result.val_loss)
    assert again.summary() == summary
    assert any(
        "is finished" in line and "Delete it to train again for 0.001 minutes." in line
        for line in progress.lines
    )


@pytest.fixture
def started(quick, monkeypatch):
    """Return a function that returns the run, the recipe and the options of a demo."""
    seen = {}

    class Started(Exception):
        pass

    def load(recipe, words):
        raise Started(recipe, words[1].removeprefix("name="))

    monkeypatch.setattr(module, "load_config", load)
    monkeypatch.setattr(module, "prepare", lambda *sources, **options: seen.update(options))

    def start(file=None, device="cpu"):
        monkeypatch.setattr(module, "pick_device", lambda *_: (device, ""))
        with pytest.raises(Started) as raised:
            demo(file)
        return *raised.value.args, seen["tokenizer"]

    return start


def test_the_recipe_depends_on_the_device_and_the_length_of_the_text(started, quick, monkeypatch):
    assert started() == ("demo", "demo", "train:4096")
    assert started(device="cuda") == ("demo-gpu", "demo", "train:4096")
    file = quick / "a.txt"
    file.write_text("a text " * 100)
    recipe, first, tokenizer = started(file, device="cuda")
    assert (recipe, tokenizer) == ("demo-char", "char")
    file.write_text("another text " * 100)
    assert started(file)[1] != first, "a changed text has a run of its own"
    monkeypatch.setattr(module, "LARGE_TEXT", 100)
    recipe, _, tokenizer = started(file, device="cuda")
    assert (recipe, tokenizer) == ("demo-gpu", "train:4096")


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


def fit(recipe, tokens, monkeypatch, *, step_s=1e-6, minutes=2.0):
    monkeypatch.setattr(module, "seconds_per_step", lambda config: step_s)
    return fitted(load_config(recipe), data_of(tokens), "cpu", minutes, SILENT)


@pytest.mark.parametrize("tokens", [16, 100, 1000, 10_000, 10_000_000])
def test_sequences_fit_the_text(tokens, monkeypatch):
    config = fit("demo-char", tokens, monkeypatch)
    assert config.data.seq_len < tokens
    assert config.batch.tokens_per_step % config.data.seq_len == 0
    assert (config.data.seq_len == 128) == (tokens >= 1024)
    with pytest.raises(DataError, match="3 training tokens"):
        fit("demo-char", 3, monkeypatch)


def test_length_fits_the_time_and_the_text(monkeypatch):
    long = fit("demo", 10**9, monkeypatch, step_s=0.5).train
    assert long.steps * 0.5 == pytest.approx(0.85 * 120, abs=0.5)
    assert module.EVALUATIONS - 1 <= long.steps / long.eval_every <= module.EVALUATIONS
    assert fit("demo", 40_960, monkeypatch).train.steps == module.MAX_EPOCHS * 20
    short = fit("demo", 100, monkeypatch, step_s=100.0, minutes=0.01)
    assert short.train.steps == module.MIN_STEPS


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
    (run,) = Path("runs").iterdir()
    assert RunLog(run).summary is None
    monkeypatch.setattr(module, "seconds_per_step", lambda config: 1.0)
    progress = recorded()
    demo(quick / "a.txt", minutes=7, progress=progress)
    assert f"Resuming {run}. Delete it to train for 7 minutes." in progress.lines
    assert read_config(run).train.steps == RunLog(run).summary["steps"] == 3
    assert RunLog(run).summary["resumed_from"].endswith("step-2")


@pytest.mark.parametrize(("passed_s", "steps"), [(1.0, 4), (0.01, 21)], ids=["slow", "fast"])
def test_a_step_is_timed_after_the_warm_up(monkeypatch, passed_s, steps):
    """A slow machine times fewer steps: these three seconds, or as many steps."""
    clock = SimpleNamespace(monotonic=itertools.count(0, passed_s).__next__)
    monkeypatch.setattr(module, "time", clock)
    seen = []

    def train(config, *, observers, **_):
        for step in range(1, 100):
            seen.append(step)
            observers[0].on_tick(step, 100)

    monkeypatch.setattr(module, "train", train)
    assert module.seconds_per_step(load_config("demo")) == pytest.approx(passed_s)
    assert seen[-1] == module.WARM_UP + steps


@pytest.mark.thorough
def test_timing_leaves_no_files(quick):
    (quick / "a.txt").write_text("a text of some length. " * 100)
    result = demo(quick / "a.txt", minutes=0.001)
    assert [path.name for path in (quick / "runs").iterdir()] == [Path(result.run).name]
    assert [event["event"] for event in LineReader(Path(result.run) / "events.jsonl").read()][
        :1
    ] == ["start"]


@pytest.mark.parametrize(
    ("content", "message", "fix"),
    [
        (None, "There is no file", "Check the path"),
        (b"", "contains no documents", "with text in it"),
        (b"x", "1 character cannot be split", ""),
        (b"caf\xe9", "byte 0xe9 at offset 3", "`iconv -f CP1252"),
        (bytes(range(256)), "byte 0x80 at offset 128", "`flatout import`"),
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
