"""Gains are stored per GPU and CPU, and the hint to measure them appears once per GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version

import pytest

from flatout.assembly.measured import (
    FORMAT_VERSION,
    MINUTES,
    Gain,
    advice,
    gains_here,
    gpu_name,
    hardware_name,
    keep,
    read,
)
from flatout.hardware import Gpu, Machine

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


def test_a_newer_gain_replaces_the_older_one(tmp_path):
    keep(H200, {"bf16": GAIN, "compile": GAIN}, tmp_path)
    keep(H200, {"bf16": GAIN.model_copy(update={"gain": 1.5})}, tmp_path)
    assert {name: gain.gain for name, gain in read(H200, tmp_path).speedups.items()} == {
        "bf16": 1.5,
        "compile": 1.125,
    }
    assert read("NVIDIA H200 NVL", tmp_path) is None


def test_a_gain_is_described_in_one_line():
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
def test_an_unreadable_file_counts_as_absent(tmp_path, text):
    path = keep(H200, {"bf16": GAIN}, tmp_path)
    path.write_text(text)
    assert read(H200, tmp_path) is None


def test_the_hint_is_given_once_per_gpu(tmp_path):
    line = advice(H200, "gpt2-124m", tmp_path)
    assert line.startswith(
        f"No speedup has been measured on this GPU ({H200}); "
        f"`flatout bench gpt2-124m --minutes {MINUTES}`"
    )
    assert "\n" not in line
    assert advice(H200, "gpt2-124m", tmp_path) is None
    assert advice("NVIDIA L4", "RECIPE", tmp_path) is not None


def test_there_is_no_hint_after_a_measurement(tmp_path):
    keep(H200, {"bf16": GAIN}, tmp_path)
    assert advice(H200, "gpt2-124m", tmp_path) is None


def test_without_a_writable_cache_the_hint_is_repeated(tmp_path):
    (tmp_path / "measured").write_text("a file")
    assert advice(H200, "gpt2-124m", tmp_path) == advice(H200, "gpt2-124m", tmp_path)
    with pytest.raises(OSError, match="measured"):
        keep(H200, {}, tmp_path)


MACHINE = Machine(
    "AMD EPYC 7B13",
    2,
    8.0,
    tuple(Gpu(name, 141.0, (9, 0), "1") for name in (H200, "NVIDIA L4")),
    "3.11",
)


def test_a_device_has_its_hardware_name():
    devices = ("cpu", "cuda", "cuda:0", "cuda:1", "cuda:2")
    assert [gpu_name(MACHINE, d) for d in devices] == [None, H200, H200, "NVIDIA L4", None]
    assert [hardware_name(MACHINE, d) for d in devices] == [
        "AMD EPYC 7B13, 2 cores",
        H200,
        H200,
        "NVIDIA L4",
        None,
    ]


def test_only_gains_with_this_torch_and_hardware_count(tmp_path):
    here = GAIN.model_copy(update={"torch": version("torch").partition("+")[0] + "+cu130"})
    keep("AMD EPYC 7B13, 2 cores", {"bf16": here, "compile": GAIN}, tmp_path)
    assert gains_here(MACHINE, "cpu", tmp_path) == {"bf16": here}
    assert gains_here(replace(MACHINE, cores=4), "cpu", tmp_path) == {}
    assert gains_here(MACHINE, "cuda", tmp_path) == {}
    assert gains_here(MACHINE, "cpu", None) == {}


def test_the_key_on_disk_has_not_changed(tmp_path):
    path = keep(H200, {"bf16": GAIN}, tmp_path)
    assert list(json.loads(path.read_text())) == ["format_version", "gpu", "speedups"]


def test_an_interval_without_1_is_faster_or_slower():
    def judged(low, high):
        gain = GAIN.model_copy(update={"low": low, "high": high})
        return gain.is_faster, gain.is_slower

    assert judged(1.01, 1.2) == (True, False)
    assert judged(0.8, 0.99) == (False, True)
    assert judged(0.9, 1.1) == judged(None, None) == (False, False)
