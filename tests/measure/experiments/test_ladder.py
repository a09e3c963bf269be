"""The sets that are measured and what they are compared with, on imaginary machines."""

from __future__ import annotations

import pytest

from flatout.assembly.recipe import Promise
from flatout.assembly.selection import adding, all_speedups, select
from flatout.config.schema import load_config
from flatout.hardware import Gpu, Machine
from flatout.measure.experiments import resolving
from flatout.measure.experiments.losses import promise_between
from flatout.measure.experiments.points import (
    BASELINE,
    added_to_full,
    full_set,
    in_order,
    make_ladder,
    needing,
)

CPU = Machine("cpu", 2, 8.0, (), "3.11")
NARROW = Machine("cpu", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("cpu", 16, 64.0, (Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0), "580"),), "3.11")


def ladder_of(machine, *overrides, device="cpu", minutes=60.0):
    """The ladder for a machine and a device, resolved as training would."""
    config = load_config(None, [*overrides, f"train.device={device}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            resolving,
            "resolve",
            lambda config, **_: (config, select(config, machine, device=device, minutes=minutes)),
        )
        decisions = select(config, machine, device=device, minutes=minutes)
        resolved = resolving.Resolved(config, decisions, machine, None)
        additions = {
            d.name: resolving.adding_one(d.name, config, resolved) for d in decisions if not d.on
        }
    return make_ladder(config, decisions, additions)


def reasons_of(ladder):
    return {rung.speedup: rung.reason for rung in named(ladder, "absent")}


def named(ladder, kind):
    return [rung for rung in ladder if rung.kind == kind]


def test_the_ladder_adds_one_speedup_at_a_time_up_to_the_full_set():
    ladder = ladder_of(CPU)
    below = ladder[0]
    assert (below.name, below.speedups) == (BASELINE, [])
    for rung in named(ladder, "added"):
        assert rung.against == below.name
        assert set(rung.speedups) - set(below.speedups) == {rung.speedup}
        below = rung
    assert below == full_set(ladder)
    decisions = select(load_config(None), CPU, device="cpu", minutes=60.0)
    assert set(below.speedups) == {decision.name for decision in decisions if decision.on}
    order = [speedup.name for speedup in all_speedups()]
    assert sorted(below.speedups, key=order.index) == list(below.speedups)


def test_each_speedup_is_left_out_of_the_full_set():
    ladder = ladder_of(HOPPER, device="cuda")
    full = full_set(ladder).speedups
    left_out = named(ladder, "left-out")
    assert [rung.speedup for rung in left_out] == list(full)
    assert all(
        rung.against == full_set(ladder).name and set(full) - set(rung.speedups) == {rung.speedup}
        for rung in left_out
    )


def test_a_speedup_that_is_off_is_added_and_replaces_others_in_its_slots():
    ladder = ladder_of(HOPPER, device="cuda")
    fp16 = next(rung for rung in named(ladder, "put-in") if rung.speedup == "fp16")
    assert "fp16" in fp16.speedups
    assert "bf16" not in fp16.speedups
    assert "tf32" in fp16.speedups
    assert fp16.replaced == ["bf16"]
    assert fp16.name == "all, with fp16 for bf16"
    assert all(
        rung.name.startswith(f"all and {rung.speedup}")
        for rung in named(ladder, "put-in")
        if not rung.replaced
    )


def test_an_added_speedup_gives_the_set_of_naming_it_and_its_needs():
    for overrides in ([], ["optim.kind=muon"], ["speedups=auto,-prefetch"]):
        ladder = ladder_of(NARROW, *overrides)
        assert named(ladder, "put-in")
        for rung in named(ladder, "put-in"):
            own = next(
                (word for word in overrides if word.startswith("speedups=")), "speedups=auto"
            )
            config = load_config(
                None,
                [
                    *overrides,
                    "speedups="
                    + adding(own.removeprefix("speedups="), resolving.with_needs(rung.speedup)),
                ],
            )
            assert set(rung.speedups) == {
                d.name for d in select(config, NARROW, device="cpu", minutes=60.0) if d.on
            }, rung.name


def test_other_slots_of_a_replaced_speedup_are_filled_again():
    rung = next(rung for rung in named(ladder_of(NARROW), "put-in") if rung.speedup == "onednn")
    assert rung.replaced == ["bf16-products"]
    assert "fused-attention" in rung.speedups
    assert rung.name == "all, with onednn and fused-attention for bf16-products"


def test_a_speedup_that_cannot_run_has_a_reason():
    reasons = reasons_of(ladder_of(CPU))
    assert reasons["tf32"].startswith("cannot run here, because: TF32")
    reasons = reasons_of(ladder_of(CPU, "batch.rows_per_device=4", "batch.accumulate=2"))
    assert "batch.rows_per_device=4 is set" in reasons["micro-batch"]


def test_every_speedup_has_a_rung_or_a_reason():
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        ladder = ladder_of(machine, device=device)
        about = {rung.speedup for rung in ladder}
        assert about - {None} == {speedup.name for speedup in all_speedups()}


def test_the_request_decides_the_full_set():
    ladder = ladder_of(CPU, "speedups=auto,-compile,-prefetch")
    reasons = reasons_of(ladder)
    assert reasons.keys() >= {"compile", "prefetch"}
    assert "left out by speedups" in reasons["compile"]
    listed = ladder_of(CPU, "speedups=pretokenised,micro-batch")
    assert [rung.name for rung in listed if rung.kind != "absent"] == [
        BASELINE,
        "+ pretokenised",
        "+ micro-batch",
        "all but pretokenised",
        "all but micro-batch",
    ]
    none = ladder_of(CPU, "speedups=none")
    assert [rung.name for rung in none if rung.kind != "absent"] == [BASELINE]


def test_the_length_of_the_recipe_decides_which_speedups_are_on():
    short = ladder_of(HOPPER, device="cuda", minutes=0.5)
    assert "compile" not in full_set(short).speedups
    assert "compile" in {rung.speedup for rung in named(short, "put-in")}
    long = ladder_of(HOPPER, device="cuda", minutes=60.0)
    assert "compile" in next(rung for rung in long if rung.name == "all but tf32").speedups


def test_a_speedup_follows_its_needs_and_is_left_out_with_them():
    assert in_order(["prefetch", "fp8", "bf16", "compile"]) == [
        "prefetch",
        "bf16",
        "compile",
        "fp8",
    ]
    names = ["prefetch", "bf16", "compile", "fp8"]
    assert needing({"compile"}, names) == {"compile", "fp8"}
    assert needing({"fp8"}, names) == {"fp8"}


def test_the_name_of_a_rung_shows_additions_and_replacements():
    assert added_to_full("a", ["a", "b"], ["b"], "+ b").name == "all and a"
    assert added_to_full("a", ["a", "c"], ["b"], "+ b").name == "all, with a and c for b"
    assert added_to_full("a", ["a", "b", "need"], ["b"], "+ b").name == "all and a and need"


def test_the_loosest_of_several_promises_holds():
    assert promise_between(["prefetch"], []) == Promise.exact()
    assert promise_between(["bf16", "prefetch"], ["onednn", "prefetch"]) == Promise.rounding(
        rtol=2e-2 + 1e-4
    )
    assert promise_between([], []).kind == "exact"
    assert promise_between(["bf16", "fused-adamw"], ["bf16"]) == Promise.rounding(rtol=1e-4 + 2e-2)
    assert promise_between(["bf16", "prefetch"], ["bf16"]) == Promise.exact()
