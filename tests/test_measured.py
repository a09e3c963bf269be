"""What bench found on a GPU is kept in a file of that GPU, and asked for once where there is none."""

from __future__ import annotations

import json

import pytest

from flatout.hardware import Gpu, Machine
from flatout.measured import FORMAT_VERSION, MINUTES, Gain, advice, gpu_name, keep, read

H200 = "NVIDIA H200"
GAIN = Gain(
    gain=1.125,
    low=1.05,
    high=1.2,
    where="in the full set",
    recipe="gpt2-124m",
    date="2026-11-22T08:00:00",
    commit="abc1234",
    torch="2.11.0",
)


def test_gains_are_added_and_the_newer_one_counts(tmp_path):
    keep(H200, {"bf16": GAIN, "compile": GAIN}, tmp_path)
    keep(H200, {"bf16": GAIN.model_copy(update={"gain": 1.5})}, tmp_path)
    assert {name: gain.gain for name, gain in read(H200, tmp_path).speedups.items()} == {
        "bf16": 1.5,
        "compile": 1.125,
    }
    assert read("NVIDIA H200 NVL", tmp_path) is None


def test_a_gain_is_one_line():
    assert (
        GAIN.describe()
        == "x1.12 (1.05 to 1.20), in the full set of gpt2-124m, 2026-11-22, commit abc1234"
    )
    assert (
        GAIN.model_copy(update={"low": None, "commit": None}).describe()
        == "x1.12 (too few repeats to be sure), in the full set of gpt2-124m, 2026-11-22"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"gpu": 1}',
        '{"gpu": "another"}',
        json.dumps({"gpu": H200, "format_version": FORMAT_VERSION + 1}),
    ],
)
def test_a_file_that_cannot_be_read_is_none(tmp_path, text):
    path = keep(H200, {"bf16": GAIN}, tmp_path)
    path.write_text(text)
    assert read(H200, tmp_path) is None


def test_the_advice_is_given_once_a_gpu(tmp_path):
    line = advice(H200, "gpt2-124m", tmp_path)
    assert line.startswith(
        f"No speedup has been measured on this GPU ({H200}); `flatout bench gpt2-124m --minutes {MINUTES}`"
    )
    assert "\n" not in line
    assert advice(H200, "gpt2-124m", tmp_path) is None
    assert advice("NVIDIA L4", "RECIPE", tmp_path) is not None


def test_no_advice_where_something_was_measured(tmp_path):
    keep(H200, {"bf16": GAIN}, tmp_path)
    assert advice(H200, "gpt2-124m", tmp_path) is None


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_memory_of_it(tmp_path):
    (tmp_path / "measured").write_text("a file")
    assert advice(H200, "gpt2-124m", tmp_path) == advice(H200, "gpt2-124m", tmp_path)
    with pytest.raises(OSError, match="measured"):
        keep(H200, {}, tmp_path)


def test_the_gpu_of_a_device():
    machine = Machine(
        "a CPU",
        2,
        8.0,
        tuple(Gpu(name, 141.0, (9, 0), "1") for name in (H200, "NVIDIA L4")),
        "3.11",
    )
    assert [
        gpu_name(machine, device) for device in ("cpu", "cuda", "cuda:0", "cuda:1", "cuda:2")
    ] == [None, H200, H200, "NVIDIA L4", None]
