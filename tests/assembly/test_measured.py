"""What was measured on this hardware is kept per device, and is told apart by what it ran."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from flatout.assembly import measured
from flatout.assembly.choices import Decision, Gain
from flatout.assembly.measured import (
    FORMAT_VERSION,
    MINUTES,
    advice,
    gains_here,
    hardware_name,
    keep,
    past_run,
    read,
    runs_here,
    speedups_on,
)
from flatout.assembly.resolve import tokens_to_score
from flatout.data.store.shards import Dataset
from flatout.hardware.machine import Gpu, Machine


def test_every_evaluation_is_counted(planned):
    whole = planned.dataset.split("val").num_tokens

    def scored(**values):
        keys = {f"train.{key}": value for key, value in values.items()}
        return tokens_to_score(planned.config.with_values(keys), planned.dataset)

    assert scored() == whole
    assert scored(eval_every=25) == 4 * whole
    assert scored(eval_every=25, eval_tokens=100) == 4 * 100 + whole
    assert tokens_to_score(planned.config, None) == 0


def test_what_chose_the_micro_batch_is_no_speedup_of_the_run():
    on = [Decision(name, True, "") for name in ("prefetch", "micro-batch")]
    assert speedups_on([*on, Decision("bf16", False, "")]) == ["prefetch"]


H200, CPU = "NVIDIA H200", "AMD EPYC 7B13, 2 cores"
GPUS = tuple(Gpu(name, 141.0, (9, 0), "1") for name in (H200, "NVIDIA L4"))
MACHINE = Machine("AMD EPYC 7B13", 2, 8.0, GPUS, "3.11")
GAIN = Gain(
    gain=1.125,
    low=1.05,
    high=1.2,
    where="in the full set",
    recipe="gpt2-124m",
    date="2026-11-22T08:00:00",
    commit="abc1234",
    torch="2.9.0",
    flops_per_token=1e6,
)


def test_a_device_has_its_hardware_name():
    devices = ("cpu", "cuda", "cuda:0", "cuda:1", "cuda:2")
    names = [hardware_name(MACHINE, device) for device in devices]
    assert names == [CPU, H200, H200, "NVIDIA L4", None]


def test_runs_and_gains_are_kept_per_hardware(tmp_path, past):
    keep(CPU, tmp_path, run=past())
    keep(CPU, tmp_path, {"bf16": GAIN, "compile": GAIN})
    keep(CPU, tmp_path, run=past(kind="another"))
    keep(CPU, tmp_path, {"bf16": GAIN.model_copy(update={"gain": 1.5, "flops_per_token": 2e6})})
    keep(H200, tmp_path, run=past())
    assert [run.kind for run in runs_here(MACHINE, "cpu", tmp_path)] == ["transformer", "another"]
    assert list(runs_here(MACHINE, "cuda", tmp_path)) == [past()]
    found = read(CPU, tmp_path).speedups
    gains = {name: gain.gain for name, gain in found.items()}
    assert gains == {"compile@1e+06": 1.125, "bf16@2e+06": 1.5}
    assert read("NVIDIA H200 NVL", tmp_path).speedups is None


def test_a_gpu_of_this_machine_has_the_name_that_torch_gives(monkeypatch):
    """CUDA_VISIBLE_DEVICES=1,0 swaps them, and the driver does not."""
    names = [gpu.name for gpu in GPUS[::-1]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: names[int(device.partition(":")[2] or 0)]
    )
    devices = ("cuda", "cuda:0", "cuda:1")
    assert [hardware_name(MACHINE, device) for device in devices] == [names[0], *names]
    assert hardware_name(replace(MACHINE, is_here=False), "cuda") == H200, "it is planned for"


def test_runs_that_end_together_are_both_kept(tmp_path, monkeypatch, past):
    write = measured.write_text

    def slowly(*arguments):
        time.sleep(0.2)
        write(*arguments)

    monkeypatch.setattr(measured, "write_text", slowly)
    runs = [past(rows_per_device=number) for number in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda run: keep(CPU, tmp_path, run=run), runs))
    kept = runs_here(MACHINE, "cpu", tmp_path)
    assert sorted(run.rows_per_device for run in kept) == [0, 1]


def test_only_the_latest_runs_are_kept(tmp_path, monkeypatch, past):
    monkeypatch.setattr(measured, "MOST_RUNS", 3)
    for number in range(5):
        keep(CPU, tmp_path, run=past(rows_per_device=number))
    kept = runs_here(MACHINE, "cpu", tmp_path)
    assert [run.rows_per_device for run in kept] == [2, 3, 4]


def test_an_unreadable_file_counts_as_absent(tmp_path, past):
    later = f'{{"hardware": "{H200}", "format_version": {FORMAT_VERSION + 1}}}'
    for text in ("", "[]", "{}", '{"hardware": 1}', '{"hardware": "another"}', later):
        keep(H200, tmp_path, {"bf16": GAIN}).write_text(text)
        assert read(H200, tmp_path).speedups is None
        assert not runs_here(MACHINE, "cuda", tmp_path)
        assert gains_here(MACHINE, "cuda", tmp_path) == {}
    keep("A GPU", tmp_path, run=past())
    assert not read("A-GPU", tmp_path).runs, "two names share a file"


def test_the_digest_covers_what_decides_the_arithmetic(planned):
    def digest(decisions=planned.decisions, world_size=1, **values):
        config = planned.config.with_values({k.replace("__", "."): v for k, v in values.items()})
        return past_run(config, decisions, world_size).digest

    fewer = [decision for decision in planned.decisions if decision.name != "prefetch"]
    values = [{"lora__rank": 4}, {"lora__rank": 8}, {"optim__kind": "muon"}, {"data__seq_len": 8}]
    meshes = [{"parallel__shard": 2}, {"parallel__tensor": 2}, {"parallel__offload": "cpu"}]
    changed = [{"decisions": fewer}, {"world_size": 2}, *values, *meshes]
    assert len({digest(), *(digest(**each) for each in changed)}) == 10
    assert digest(parallel__replicate=2, world_size=2) == digest(world_size=2)
    same = (digest(decisions=planned.decisions[::-1]), digest(batch__rows_per_device=8))
    assert set(same) == {digest()}


def test_the_digest_of_rows_of_documents_covers_their_length(planned, ragged_set, tiny_set):
    def past(dataset, *, by_tokens=False, on=True):
        values = {"batch.by_tokens": by_tokens}
        decisions = [
            replace(each, on=True) if each.name == "length-buckets" and on else each
            for each in planned.decisions
        ]
        opened = dataset and Dataset.open(dataset)
        return past_run(planned.config.with_values(values), decisions, dataset=opened)

    first, other, none = past(ragged_set), past(tiny_set), past(None)
    assert len({first.digest, other.digest, none.digest}) == 3
    assert past(ragged_set).digest == first.digest
    assert past(ragged_set, on=False).digest == past(tiny_set, on=False).digest
    by_tokens = past(ragged_set, by_tokens=True)
    assert by_tokens.digest != first.digest
    assert by_tokens.speedups == [*first.speedups, "batch.by_tokens"]


def test_the_hint_is_given_once_per_gpu(tmp_path, past):
    keep(H200, tmp_path, run=past())  # a run alone has measured no speedup
    line = advice(H200, "gpt2-124m", tmp_path)
    assert line.startswith(f"No speedup has been measured on this GPU ({H200}). ")
    assert f"`flatout bench gpt2-124m --minutes {MINUTES}`" in line
    assert "\n" not in line
    assert advice(H200, "gpt2-124m", tmp_path) is None
    assert advice("NVIDIA L4", "RECIPE", tmp_path) is not None
    keep("NVIDIA A10", tmp_path, {"bf16": GAIN})
    assert advice("NVIDIA A10", "gpt2-124m", tmp_path) is None
    (tmp_path / "file").write_text("")
    assert advice(H200, "x", tmp_path / "file") == advice(H200, "x", tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        keep(H200, tmp_path / "file", {})


def test_only_gains_with_this_torch_and_hardware_count(tmp_path):
    here = GAIN.model_copy(update={"torch": version("torch").partition("+")[0] + "+cu130"})
    keep(CPU, tmp_path, {"bf16": here, "compile": GAIN})
    assert gains_here(MACHINE, "cpu", tmp_path) == {"bf16": here}
    assert gains_here(replace(MACHINE, cores=4), "cpu", tmp_path) == {}
    assert gains_here(MACHINE, "cuda", tmp_path) == {}
    assert gains_here(MACHINE, "cpu", None) == {}


def test_a_gain_is_described_in_one_line():
    where = "in the full set of gpt2-124m, 2026-11-22"
    assert GAIN.describe() == f"x1.12 (1.05 to 1.20), {where}, commit abc1234"
    unsure = GAIN.model_copy(update={"low": None, "commit": None})
    assert unsure.describe() == f"x1.12 (too few repeats to be sure), {where}"
    for low, high, is_faster, is_slower in (
        (1.01, 1.2, True, False),
        (0.8, 0.99, False, True),
        (0.9, 1.1, False, False),
        (None, None, False, False),
    ):
        gain = GAIN.model_copy(update={"low": low, "high": high})
        assert (gain.is_faster, gain.is_slower) == (is_faster, is_slower)
