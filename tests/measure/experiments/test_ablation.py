"""The sets that are measured and what they are compared with, on imaginary machines."""

from __future__ import annotations

import pytest

from flatout.assembly.recipe import Tolerance
from flatout.assembly.selection import adding, all_speedups, select
from flatout.config.schema import load_config
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.experiments import resolving
from flatout.measure.experiments.losses import tolerance_between
from flatout.measure.experiments.points import (
    BASELINE,
    added_to_full,
    full_set,
    in_order,
    needing,
    plan_ablation,
)

CPU = Machine("cpu", 2, 8.0, (), "3.11")
NARROW = Machine("cpu", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("cpu", 16, 64.0, (Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0), "580"),), "3.11")


def ablation_of(machine, *overrides, device="cpu", minutes=60.0):
    """The ablation for a machine and a device, resolved as training would."""

    def selected(config, **_):
        return config, select(config, machine, device=device, minutes=minutes)

    config = load_config(None, [*overrides, f"train.device={device}"])
    decisions = selected(config)[1]
    resolved = resolving.Resolved(config, decisions, machine, None)
    off = [decision.name for decision in decisions if not decision.on]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "resolve", selected)
        additions = {name: resolving.adding_one(name, config, resolved) for name in off}
    return plan_ablation(config, decisions, additions)


def reasons_of(ablation):
    return {row.speedup: row.reason for row in named(ablation, "absent")}


def named(ablation, kind):
    return [row for row in ablation if row.kind == kind]


def test_the_ablation_adds_one_speedup_at_a_time_up_to_the_full_set():
    ablation = ablation_of(CPU)
    below = ablation[0]
    assert (below.name, below.speedups) == (BASELINE, [])
    for row in named(ablation, "added"):
        assert row.against == below.name
        assert set(row.speedups) - set(below.speedups) == {row.speedup}
        below = row
    assert below == full_set(ablation)
    decisions = select(load_config(None), CPU, device="cpu", minutes=60.0)
    on = {decision.name for decision in decisions if decision.on}
    assert below.speedups == [each.name for each in all_speedups() if each.name in on]


def test_each_speedup_is_omitted_of_the_full_set():
    ablation = ablation_of(HOPPER, device="cuda")
    full, left_out = full_set(ablation), named(ablation, "leave-one-out")
    assert [row.speedup for row in left_out] == list(full.speedups)
    for row in left_out:
        assert row.against == full.name
        assert set(full.speedups) - set(row.speedups) == {row.speedup}


def test_a_speedup_that_is_off_is_added_and_replaces_others_in_its_slots():
    added = {row.speedup: row for row in named(ablation_of(HOPPER, device="cuda"), "add-one")}
    fp16 = added["fp16"]
    assert {"fp16", "tf32"} <= set(fp16.speedups)
    assert "bf16" not in fp16.speedups
    assert fp16.replaced == ["bf16"]
    assert fp16.name == "all, with fp16 for bf16"
    for name, row in added.items():
        assert row.replaced or row.name.startswith(f"all and {name}")
    onednn = next(row for row in named(ablation_of(NARROW), "add-one") if row.speedup == "onednn")
    assert onednn.replaced == ["bf16-products", "compile"]
    assert "fused-attention" in onednn.speedups, "its other slots are filled again"
    assert onednn.name == "all, with onednn and fused-attention for bf16-products and compile"


@pytest.mark.parametrize("overrides", [[], ["optim.kind=muon"], ["speedups=auto,-prefetch"]])
def test_an_added_speedup_gives_the_set_of_naming_it_and_its_needs(overrides):
    added = named(ablation_of(NARROW, *overrides), "add-one")
    assert added
    request = load_config(None, overrides).speedups
    for row in added:
        words = adding(request, resolving.with_needs(row.speedup))
        config = load_config(None, [*overrides, f"speedups={words}"])
        decisions = select(config, NARROW, device="cpu", minutes=60.0)
        assert set(row.speedups) == {each.name for each in decisions if each.on}, row.name


def test_every_speedup_has_a_row_or_a_reason():
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        about = {row.speedup for row in ablation_of(machine, device=device)}
        assert about - {None} == {speedup.name for speedup in all_speedups()}
    assert reasons_of(ablation_of(CPU))["tf32"].startswith("cannot run here, because: TF32")
    reasons = reasons_of(ablation_of(CPU, "batch.rows_per_device=4", "batch.accumulate=2"))
    assert "batch.rows_per_device=4 is set" in reasons["micro-batch"]


def test_the_request_decides_the_full_set():
    reasons = reasons_of(ablation_of(CPU, "speedups=auto,-compile,-prefetch"))
    assert reasons.keys() >= {"compile", "prefetch"}
    assert "excluded by speedups" in reasons["compile"]
    for request, rows in (
        ("pretokenised,micro-batch", ["+ pretokenised", "+ micro-batch"]),
        ("none", []),
    ):
        rows = [BASELINE, *rows, *(name.replace("+", "all but") for name in rows)]
        ablation = ablation_of(CPU, f"speedups={request}")
        assert [row.name for row in ablation if row.kind != "absent"] == rows


def test_the_length_of_the_recipe_decides_which_speedups_are_on():
    short = ablation_of(HOPPER, device="cuda", minutes=0.5)
    assert "compile" not in full_set(short).speedups
    assert "compile" in {row.speedup for row in named(short, "add-one")}
    long = ablation_of(HOPPER, device="cuda", minutes=60.0)
    assert "compile" in next(row for row in long if row.name == "all but tf32").speedups


def test_a_speedup_follows_its_needs_and_is_omitted_with_them():
    names = ["prefetch", "bf16", "compile", "fp8"]
    assert in_order(["prefetch", "fp8", "bf16", "compile"]) == names
    assert needing({"compile"}, names) == {"compile", "fp8"}
    assert needing({"fp8"}, names) == {"fp8"}


def test_the_name_of_a_row_shows_additions_and_replacements():
    assert added_to_full("a", ["a", "b"], ["b"], "+ b").name == "all and a"
    assert added_to_full("a", ["a", "c"], ["b"], "+ b").name == "all, with a and c for b"
    assert added_to_full("a", ["a", "b", "need"], ["b"], "+ b").name == "all and a and need"


def test_the_tolerance_between_two_sets_is_that_of_what_differs():
    both = Tolerance.rounding(rtol=2e-2 + 1e-4)
    assert tolerance_between(["prefetch"], []) == tolerance_between([], []) == Tolerance.exact()
    assert tolerance_between(["bf16", "prefetch"], ["bf16"]) == Tolerance.exact()
    assert tolerance_between(["bf16", "prefetch"], ["onednn", "prefetch"]) == both
    assert tolerance_between(["bf16", "fused-adamw"], ["bf16"]) == both
