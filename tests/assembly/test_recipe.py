"""Slots are filled at most once, transforms have a fixed order, tolerances are checked."""

from __future__ import annotations

import pytest

from flatout.assembly.recipe import (
    SLOTS,
    TRANSFORMS,
    ImmediateReadback,
    Lazy,
    MicroBatchPlan,
    Recipe,
    Speedup,
    Tolerance,
    gpu_below,
    rows_people_write,
    uses_gpu,
)
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
TURING = Machine("a CPU", 2, 8.0, (Gpu("a T4", 16.0, (7, 5), "1"),), "3.11")


def speedup(name: str, *slots: str) -> Speedup:
    return Speedup(
        name=name, saves="nothing", tolerance=Tolerance.exact(), fills=dict.fromkeys(slots, name)
    )


@pytest.mark.parametrize(
    ("seq_len", "rows_per_rank", "fitting", "rows"),
    [
        (64, 64, 99, 8),
        (1_024, 24, 99, 12),
        (8_192, 128, 99, 8),
        (32_768, 16, 99, 4),
        (131_073, 4, 99, 1),
        (1_024, 7, 99, 7),
        (1_024, 512, 3, 2),
        (1_024, 512, 0, 1),
    ],
)
def test_the_plain_micro_batch_is_what_people_write_and_fits(seq_len, rows_per_rank, fitting, rows):
    plan = MicroBatchPlan(seq_len, rows_per_rank, "cpu", lambda rows: rows <= fitting, lambda: 0)
    assert rows_people_write(plan) == rows


def stored(recipe: Recipe) -> dict[str, object]:
    """Return the value of every slot, without importing lazy ones."""
    return {slot: vars(recipe)[slot.removeprefix("ops.")] for slot in SLOTS}


def test_every_lazy_part_of_the_baseline_exists():
    assert not Recipe().filled_by
    assert not Recipe().transforms()
    for slot, value in stored(Recipe()).items():
        assert not isinstance(value, Lazy) or callable(getattr(Recipe(), slot.removeprefix("ops.")))


def test_a_speedup_replaces_its_slots_and_no_other():
    recipe = Recipe().with_speedup(speedup("a", "matmul", "ops.scan"))
    plain = stored(Recipe())
    assert recipe.matmul == recipe.scan == "a"
    assert {slot for slot, value in stored(recipe).items() if value != plain[slot]} == {
        "matmul",
        "ops.scan",
    }
    assert Recipe().matmul == "highest"


def test_two_speedups_that_fill_one_slot_are_rejected_by_name():
    with pytest.raises(ConfigError, match="'a' and 'b' both fill the slot 'matmul'"):
        Recipe().with_speedup(speedup("a", "matmul")).with_speedup(speedup("b", "loader", "matmul"))
    with pytest.raises(ConfigError, match="'nowhere', which is not a slot"):
        speedup("a", "nowhere")


def test_transforms_have_one_order_however_they_were_added():
    recipe = Recipe()
    for slot in reversed(TRANSFORMS):
        recipe = recipe.with_speedup(speedup(slot, slot))
    assert recipe.transforms() == list(TRANSFORMS)


def test_exact_and_rounding_tolerances_are_checked_step_by_step():
    tenth = Tolerance.rounding(rtol=0.1)
    for tolerance, losses, expected, holds in (
        (Tolerance.exact(), [1.0, 2.0], [1.0, 2.0], True),
        (Tolerance.exact(), [1.0, 2.0000001], [1.0, 2.0], False),
        (tenth, [1.05], [1.0], True),
        (tenth, [1.2], [1.0], False),
        (tenth, [float("nan")], [1.0], False),
        (tenth, [1.0], [1.0, 1.0], False),
    ):
        assert tolerance.holds(losses, expected) is holds


def test_the_device_of_a_run_is_known_without_torch():
    assert not uses_gpu(CPU, load_config())
    assert uses_gpu(TURING, load_config())
    assert not uses_gpu(TURING, load_config(None, ["train.device=cpu"]))
    too_old = "bfloat16 needs compute capability 8.0. The a T4 has 7.5."
    assert gpu_below(TURING, (8, 0), "bfloat16") == too_old
    assert gpu_below(TURING, (7, 0), "float16") is None


def test_plain_readback_reads_every_step_and_keeps_those_due():
    readback = ImmediateReadback()
    readback.push(1, {"loss": 3.0}, due=False)
    readback.push(2, {"loss": 2.0}, due=True)
    assert readback.ready() == [(2, {"loss": 2.0})]
    assert readback.ready(flush=True) == []
