"""`flatout generate`: samples streamed and returned."""

import json
import math
import shutil
import signal
import subprocess
import sys

import pytest

from flatout.cli import main as cli
from flatout.cli.commands.generate import generate
from flatout.data.store.shards import Dataset
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.inference.generate import Sampling, sample
from flatout.inference.load import load_run
from flatout.training.run_dir.layout import read_config, write_config
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow


def test_samples_start_with_the_prompt_and_differ(tiny_run):
    samples = generate(str(tiny_run), "It was", num_samples=2, max_tokens=20).samples
    assert len(samples) == 2
    assert all(sample.startswith("It was") for sample in samples)
    assert samples[0] != samples[1]
    first, second, third = (
        generate(str(tiny_run), seed=seed, max_tokens=20).samples for seed in (3, 3, 4)
    )
    assert first == second != third


def test_without_a_prompt_the_model_of_a_single_document_continues_validation_text(
    tiny_run, tiny_config, tmp_path
):
    """It has seen nothing after an end-of-text token. One of many documents starts a new one."""
    data = Dataset.open(read_config(tiny_run).data.path)
    start = data.tokenizer.decode(data.split("val").read_tokens(0, 16).tolist())
    (trained,) = (e["text"] for e in RunLog(tiny_run).events if e["event"] == "sample")
    assert trained.startswith(start)
    assert generate(str(tiny_run), max_tokens=4).samples[0].startswith(start)
    assert generate(str(tiny_run), "the", max_tokens=4).samples[0].startswith("the")
    moved = shutil.copytree(tiny_run, tmp_path / "moved")
    config = read_config(tiny_run).with_values({"data.path": str(tmp_path / "gone")})
    write_config(moved, config)
    assert len(generate(str(moved), max_tokens=4).samples[0]) <= 4
    assert Dataset.open(tiny_config().data.path).opening == ""


def test_streamed_and_returned_text_are_equal(tiny_run):
    pieces = []
    result = generate(str(tiny_run), "It", max_tokens=20, write=pieces.append)
    assert "".join(pieces) == result.samples[0] + "\n"
    assert len(pieces) > 5
    assert result.summary() == ""


def test_an_interrupt_leaves_the_cursor_at_the_start_of_a_line(tiny_run):
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(str(tiny_run), "It", max_tokens=20, write=write)
    assert pieces[4:] == ["\n"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_samples": 0}, ConfigError),
        ({"temperature": -1.0}, ConfigError),
        ({"temperature": math.nan}, ConfigError),
        ({"top_k": 0}, ConfigError),
        ({"top_p": 0.0}, ConfigError),
        ({"top_p": 1.5}, ConfigError),
        ({"max_tokens": 0}, ConfigError),
        ({"seed": 2**62}, ConfigError),
        ({"stop": [""]}, ConfigError),
        ({"checkpoint": "99"}, CheckpointError),
        ({"prompt": "ü"}, DataError),
    ],
    ids=str,
)
def test_wrong_options_are_rejected(tiny_run, options, error):
    with pytest.raises(error):
        generate(str(tiny_run), **options)


@pytest.fixture
def typed(capsys):
    """Run a `flatout generate` command: its exit code, output, result and messages."""

    def run(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["generate", *map(str, words), "--json"])
        out, err = capsys.readouterr()
        (line,) = out.splitlines()
        return stopped.value.code, json.loads(line), err

    return run


def text_of(answer):
    code, result, err = answer
    assert code == 0
    (text,) = result["samples"]
    assert text in err, "streamed"
    return text


def test_command_line(tiny_run, typed):
    assert text_of(typed(tiny_run, "--prompt", "It", "--max-tokens", 9)).startswith("It")
    code, result, err = typed(tiny_run, "--num-samples", 3, "--max-tokens", 20)
    assert code == 0
    assert len(set(result["samples"])) == 3
    assert [line for line in err.splitlines() if line.startswith("--- sample")] == [
        f"--- sample {number} ---" for number in (1, 2, 3)
    ]


def test_the_newest_run_is_the_default(tiny_run, typed, monkeypatch):
    monkeypatch.chdir(tiny_run.parents[1])
    words = ("--prompt", "It", "--max-tokens", 9)
    assert text_of(typed(*words)) == text_of(typed(tiny_run, *words))


def test_top_k_of_one_is_temperature_zero_and_a_stop_may_span_tokens(tiny_run, typed):
    words = (tiny_run, "--max-tokens", 50)
    greedy = text_of(typed(*words, "--temperature", 0))
    assert greedy == text_of(typed(*words, "--top-k", 1, "--seed", 3, "--temperature", 1.5))
    assert greedy == text_of(typed(*words, "--top-p", 1e-9, "--seed", 4))
    text = text_of(typed(*words, "--prompt", "It", "--seed", 1))
    stop = text[10:14]
    stopped = text_of(typed(*words, "--prompt", "It", "--seed", 1, "--stop", "no", "--stop", stop))
    assert stopped == text[: text.index(stop, 2)]


def test_short_and_long_texts_have_the_requested_length(tiny_run, typed):
    """One token, more than the model's 32 positions, and a prompt longer than that."""

    def text(prompt, tokens):
        words = ("--prompt", prompt, "--max-tokens", tokens, "--temperature", 0)
        return text_of(typed(tiny_run, *words))

    assert len(text("It", 1)) == 3
    assert len(text("It", 100)) == 102
    long = "It was a dark and stormy night; the rain fell in torrents. " * 2
    found = text(long, 20)
    assert len(found) == len(long) + 20
    assert found[len(long) :] == text(long[-32:], 20)[32:]


def test_a_prompt_of_unknown_characters_is_rejected_before_anything_is_shown(tiny_run, typed):
    code, result, err = typed(tiny_run, "--prompt", "It \u00fcber")
    assert code == 2
    assert "U+00FC" in result["error"]
    assert "Remove it" in result["fix"]
    assert "It \u00fcber" not in err


def test_the_checkpoint_can_be_chosen(fox_run, typed):
    folder = fox_run[0] / "runs" / "fox"
    texts = {}
    for name in ("1", "2", "3", "best", "last"):
        loaded = load_run(folder, name, device="cpu")
        words = ("--checkpoint", name, "--max-tokens", 30, "--prompt", "The")
        texts[name] = text_of(typed(folder, *words))
        sampling = Sampling(max_tokens=30)
        pieces = sample(loaded.model, loaded.tokenizer, "The", sampling, max_context=32)
        assert texts[name] == "The" + "".join(pieces)
    assert texts["last"] == texts["3"]
    assert len(set(texts.values())) > 1
    code, result, _ = typed(folder, "--checkpoint", 7)
    assert code == 2
    assert "1, 2, 3" in result["fix"]


def test_ctrl_c_interrupts_a_streamed_text(tiny_run):
    words = f"-m flatout generate {tiny_run} --prompt It --temperature 0 --max-tokens 1000000000"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words.split()], **pipes) as writing:
        shown = writing.stdout.read(100)
        writing.send_signal(signal.SIGINT)
        rest, err = writing.communicate(timeout=60)
    assert writing.returncode == 130
    assert (shown + rest).startswith("It")
    assert rest.endswith("\n")
    assert "Traceback" not in err
    assert "Interrupted" in err
