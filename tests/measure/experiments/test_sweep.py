"""The values that a sweep measures. Each is a configuration that can be built."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from flatout.assembly.resolve import resolve
from flatout.cli.commands.bench import Sweep
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.points import SWEEPS, precisions, sweep_experiment
from flatout.measure.experiments.resolving import resolve_here


@pytest.fixture
def swept(tiny_config):
    """Return a sweep of the tiny run and the resolved config of each of its points."""

    def make(what, **changes):
        requested = tiny_config(**{"batch__rows_per_device": "auto", "speedups": "auto"} | changes)
        resolved = resolve_here(requested)
        experiment = sweep_experiment(what, requested, resolved)
        configs = {
            point.name: resolve(
                requested.with_values({**point.values, "train.device": "cpu"}),
                machine=resolved.machine,
                dataset=resolved.dataset,
                world_size=1,
            )[0]
            for point in experiment.points
        }
        return experiment, configs

    return make


@pytest.mark.slow
def test_batch_doubles_the_rows_of_the_same_step(swept):
    _, configs = swept("batch")
    batches = [(c.batch.rows_per_device, c.batch.accumulate) for c in configs.values()]
    assert batches == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert next(iter(configs)) == "1 row"
    assert {c.batch.tokens_per_step for c in configs.values()} == {128}
    _, configs = swept("batch", batch__tokens_per_step=16 * 12)
    assert [c.batch.rows_per_device for c in configs.values()] == [1, 2, 4, 12]


def test_seq_len_does_not_change_the_tokens_per_step_or_micro_batch(swept):
    _, configs = swept("seq_len", batch__rows_per_device=4)
    assert [c.data.seq_len for c in configs.values()] == [4, 8, 16, 32, 64]
    assert {c.batch.tokens_per_step for c in configs.values()} == {128}
    assert {c.batch.rows_per_device * c.data.seq_len for c in configs.values()} == {64}
    experiment, configs = swept("seq_len", batch__tokens_per_step=16 * 3, batch__rows_per_device=1)
    assert "48 tokens" not in configs
    assert "not a multiple" in reasons_of(experiment)["32 tokens"]


def reasons_of(experiment):
    return {row.name: row.reason for row in experiment.rows(Trials()) if row.kind == "absent"}


def test_a_length_that_one_dataset_of_a_mix_is_too_short_for_is_a_row(
    swept, tiny_set, write_tiny, tmp_path
):
    short = write_tiny(tmp_path / "short", num_documents=1)
    length = Dataset.open(short).split("train").num_tokens // 3
    mix = {"data__path": None, "data__mix": {str(tiny_set): 1, str(short): 1}}
    batch = {"batch__tokens_per_step": 4 * length, "batch__rows_per_device": 1}
    experiment, configs = swept("seq_len", **mix, **batch, data__seq_len=length)
    assert f"{length} tokens" in configs
    reason = reasons_of(experiment)[f"{4 * length} tokens"]
    assert reason.startswith("cannot run here, because: ")
    assert "short has" in reason


def test_precision_uses_the_resolved_device(tiny_config, monkeypatch):
    """On a machine with a GPU, `auto` may still choose the CPU."""
    requested = tiny_config(train__device="auto", train__precision="auto", speedups="auto")
    gpu = Machine(
        "a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11", cpu_multiplies_bf16=True
    )
    resolved = replace(resolve_here(requested.with_values({"train.device": "cpu"})), machine=gpu)
    names = [point.name for point in sweep_experiment("precision", requested, resolved).points]
    assert names == ["fp32", "bf16", "bf16-products", "fp16"]


@pytest.mark.slow
def test_precision_changes_nothing_else(swept, monkeypatch):
    monkeypatch.setattr(hardware, "_multiplies_bf16", lambda: True)
    _, configs = swept("precision")
    assert list(configs) == ["fp32", "bf16", "bf16-products", "fp16"]
    assert [c.train.precision for c in configs.values()] == ["fp32", "bf16", "bf16", "fp16"]
    assert "onednn" in configs["fp32"].speedups
    others = [
        set(c.speedups) - {*precisions(), "onednn", "fused-attention"} for c in configs.values()
    ]
    assert all(other == others[0] for other in others)


def test_accumulation_grows_the_step(swept):
    _, configs = swept("accumulation", batch__rows_per_device=2)
    assert list(configs)[:2] == ["1 micro-batch", "2 micro-batches"]
    assert [c.batch.accumulate for c in configs.values()] == [1, 2, 4, 8]
    assert [c.batch.tokens_per_step for c in configs.values()] == [32, 64, 128, 256]


def test_prefetch_is_swept_from_off_to_eight_steps(swept):
    _, configs = swept("prefetch")
    assert ["prefetch" in c.speedups for c in configs.values()] == [False, True, True, True, True]
    assert [c.data.prefetch for c in configs.values()][1:] == [1, 2, 4, 8]


def test_a_sweep_with_nothing_to_measure_is_rejected(tiny_config, monkeypatch):
    requested = tiny_config()
    monkeypatch.setitem(SWEEPS, "batch", lambda *_: {"1 rows": "no room."})
    with pytest.raises(ConfigError, match="nothing to measure"):
        sweep_experiment("batch", requested, resolve_here(requested))


def test_the_help_names_every_sweep():
    assert get_args(Sweep) == tuple(SWEEPS)
