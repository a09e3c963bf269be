"""`flatout generate`: samples streamed and returned."""

import json

import pytest

from flatout import cli
from flatout.commands.generate import generate
from flatout.errors import CheckpointError, ConfigError, DataError


def test_samples_begin_with_the_prompt_and_differ(tiny_run):
    samples = generate(str(tiny_run), "It was", num_samples=2, max_tokens=20).samples
    assert len(samples) == 2
    assert all(sample.startswith("It was") for sample in samples)
    assert samples[0] != samples[1]


def test_equal_seeds_write_equal_text(tiny_run):
    first, second, third = (generate(str(tiny_run), seed=seed, max_tokens=20).samples for seed in (3, 3, 4))
    assert first == second != third


def test_what_is_streamed_is_what_is_returned(tiny_run):
    pieces = []
    result = generate(str(tiny_run), "It", max_tokens=20, write=pieces.append)
    assert "".join(pieces) == result.samples[0] + "\n"
    assert len(pieces) > 5
    assert result.summary() == ""


def test_an_interrupt_leaves_the_cursor_at_the_beginning_of_a_line(tiny_run):
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(str(tiny_run), "It", max_tokens=20, write=write)
    assert pieces[4:] == ["\n"]


def test_options_reach_the_sampler(tiny_run):
    assert len(generate(str(tiny_run), temperature=0, max_tokens=5).samples[0]) <= 5
    greedy = {generate(str(tiny_run), top_k=1, max_tokens=10, seed=seed).samples[0] for seed in range(3)}
    assert len(greedy) == 1
    text = generate(str(tiny_run), max_tokens=30, seed=1).samples[0]
    assert generate(str(tiny_run), max_tokens=30, seed=1, stop=[text[10:12]]).samples[0] == text[: text.index(text[10:12])]


@pytest.mark.parametrize(
    ("options", "error"),
    [({"num_samples": 0}, ConfigError), ({"top_p": 2.0}, ConfigError), ({"checkpoint": "99"}, CheckpointError), ({"prompt": "ü"}, DataError)],
    ids=str,
)
def test_wrong_options(tiny_run, options, error):
    with pytest.raises(error):
        generate(str(tiny_run), **options)


def test_command_line(tiny_run, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", str(tiny_run), "--prompt", "It", "--max-tokens", "9", "--json"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 0
    (text,) = json.loads(out)["samples"]
    assert text in err
