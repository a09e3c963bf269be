"""`auto` turns on activation checkpointing when nothing fits a GPU without it."""

from dataclasses import replace

import pytest

from flatout.assembly import resolve as module
from flatout.assembly.choices import Decision, assemble, memory_savers
from flatout.assembly.memory import estimate, workload_of
from flatout.assembly.resolve import resolve
from flatout.config.schema import load_config
from flatout.hardware.machine import machine_named

MACHINE = machine_named("RTX 4090")


@pytest.fixture
def on(monkeypatch):
    """Return which of the two are on for a GPU of so many GiB, and the reason."""

    def decided(gib, *words):
        monkeypatch.setattr(module, "memory_bytes", lambda *_: int(gib * 2**30))
        config = load_config("gpt2-124m", ["train.steps=10", *words])
        _, decisions = resolve(config, machine=MACHINE, dataset=None, world_size=1)
        return {
            each.name: each.reason
            for each in decisions
            if each.on and each.name in memory_savers("cuda")
        }

    return decided


ROWS = ["batch.rows_per_device=64", "batch.accumulate=1", "batch.tokens_per_step=65536"]


def test_it_is_added_only_when_the_stated_rows_do_not_fit_and_the_selective_one_first(on):
    assert on(40, *ROWS) == {}
    assert [*on(24, *ROWS)] == ["selective-checkpointing"]
    assert [*on(12, *ROWS)] == ["checkpointing"]
    assert on(4, *ROWS) == {}, "where neither is enough"
    assert on(24, *ROWS)["selective-checkpointing"].startswith("without it, 64 rows of 1,024 ")
    decision = Decision("selective-checkpointing", True, "requested")
    added = replace(decision, reason=on(24, *ROWS)["selective-checkpointing"])
    (note,) = module.checkpointing_notes([decision, added])
    assert note.startswith("`auto` turns on selective-checkpointing: without it, 64 rows")


def test_it_is_added_when_not_even_one_row_fits(on):
    long = ["data.seq_len=16384", "model.max_seq_len=16384", "model.positions=rotary"]
    assert on(24, *long) == {}
    assert [*on(14, *long)] == ["selective-checkpointing"]
    assert on(1, *long) == {}, "where neither is enough"


@pytest.mark.parametrize("speedups", ["none", "bf16", "auto,-checkpointing"])
def test_only_auto_adds_it(on, speedups):
    assert on(12, *ROWS, f"speedups={speedups}") == {}


def test_one_that_is_named_stays_the_only_one(on):
    assert on(12, *ROWS, "speedups=auto,+selective-checkpointing") == {
        "selective-checkpointing": "requested"
    }


def test_a_scan_planned_for_a_gpu_is_traced_as_its_kernel():
    """The chunks of a CPU take minutes to trace, and memory in fp64."""
    words = ["model.num_layers=2", "model.d_model=64", "batch.rows_per_device=2"]
    config = load_config("eigenstate-small-32k", words)
    config, _ = resolve(config, machine=MACHINE, dataset=None, world_size=1)
    found = estimate(workload_of(config), 2, 2)
    assert found.operations < 1000
    with_both = [
        estimate(workload_of(config, assemble([*config.speedups, name])), 2)
        for name in memory_savers("cuda")
    ]
    assert found.activations > with_both[0].activations > with_both[1].activations
