"""Whether a micro-batch fits, and what is advised when it does not."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.assembly import capacity
from flatout.assembly.capacity import Capacity, capacity_of, require_fitting, smallest_machine
from flatout.assembly.memory import estimate
from flatout.assembly.prediction import predict_memory
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.errors import HardwareError
from flatout.hardware import machine_named

GIB = 2**30


@pytest.fixture
def asked(build_run, tiny_config):
    """Return the arguments of `require_fitting` for 8 rows, without the capacity."""
    run = build_run(tiny_config(batch__rows_per_device=8))
    workload = workload_of(run.config, assemble(run.decisions))
    return run.config, workload, predict_memory(run.config, run.decisions, estimate(workload, 8))


def test_a_micro_batch_that_fits_is_not_mentioned(asked):
    assert require_fitting(*asked, Capacity(GIB, GIB, "machine")) is None


def test_a_micro_batch_that_cannot_fit_is_refused_with_rows_that_do(asked):
    config, workload, memory = asked
    whole = int(0.8 * memory.estimate.total)
    with pytest.raises(HardwareError, match="this machine has") as caught:
        require_fitting(config, workload, memory, Capacity(whole, whole, "machine"))
    advised = re.match(r"Set batch.rows_per_device=(\d) batch.accumulate=(\d)", caught.value.fix)
    rows, accumulate = map(int, advised.groups())
    assert rows * accumulate == 8
    assert estimate(workload, rows, accumulate).total <= 0.8 * whole


@pytest.mark.slow
def test_one_that_may_just_fit_is_warned_of_and_not_refused(asked):
    config, workload, memory = asked
    free = int(0.95 * memory.total)
    warning = require_fitting(config, workload, memory, Capacity(GIB, free, "machine"))
    assert "much slower if the system swaps" in warning


def test_if_no_row_fits_the_smallest_machine_is_named(asked):
    config, workload, memory = asked
    few = Capacity(1000, 1000, "GPU")
    with pytest.raises(HardwareError, match="Not even one sequence fits") as caught:
        require_fitting(config, workload, memory, few)
    assert smallest_machine(workload) in caught.value.fix


def test_the_smallest_machine_does_not_depend_on_the_shards_of_the_recipe(asked):
    _, workload, _ = asked
    large = replace(
        workload, model_config=workload.model_config.model_copy(update={"vocab_size": 2**27})
    )
    assert smallest_machine(large) == smallest_machine(replace(large, num_shards=64))


def test_the_smallest_machine_has_room_for_rows_that_accumulate(asked, monkeypatch):
    """The gradients of earlier micro-batches exist beside the activations of the next."""
    _, workload, _ = asked
    monkeypatch.setattr(capacity, "CUDA_CONTEXT", 0)
    needs = [estimate(workload, 1, accumulate).total for accumulate in (1, 2)]
    assert needs[0] < needs[1]
    gigabytes = iter((sum(needs) / 2e9 * capacity.CUDA_RESERVED, 1000.0))
    row = machine_named("1x h100").row
    rows = {
        name: row.model_copy(
            update={"name": name, "memory_gb": row.memory_gb.model_copy(update={"value": size})}
        )
        for name, size in zip(("tight", "roomy"), gigabytes, strict=True)
    }
    monkeypatch.setattr(capacity, "MACHINES", SimpleNamespace(names=lambda: list(rows)))
    monkeypatch.setattr(capacity, "row_named", rows.get)
    assert smallest_machine(workload) == "1x roomy"


def test_the_memory_of_a_machine_elsewhere_is_that_of_its_data_sheet():
    found = capacity_of(machine_named("2x RTX 4090"), "cuda", 2)
    assert found.whole == pytest.approx(24e9)


def test_the_ranks_of_a_cpu_share_its_memory():
    from flatout.hardware import probe

    one, two = (capacity_of(probe(), "cpu", count) for count in (1, 2))
    assert two.whole == pytest.approx(one.whole / 2, rel=0.01)
    assert one.free <= one.whole


def test_a_machine_without_a_gpu_has_no_capacity_for_one(monkeypatch):
    from flatout.hardware import Machine

    monkeypatch.setattr(capacity.torch.cuda, "is_available", lambda: False)
    assert capacity_of(Machine("a CPU", 2, 8.0, (), "3.11"), "cuda", 1) is None
