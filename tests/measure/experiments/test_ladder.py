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

    def selected(config, **_):
        return config, select(config, machine, device=device, minutes=minutes)

    config = load_config(None, [*overrides, f"train.device={device}"])
    decisions = selected(config)[1]
    resolved = resolving.Resolved(config, decisions, machine, None)
    off = [decision.name for decision in decisions if not decision.on]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "resolve", selected)
        additions = {name: resolving.adding_one(name, config, resolved) for name in off}
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
    on = {decision.name for decision in decisions if decision.on}
    assert below.speedups == [each.name for each in all_speedups() if each.name in on]


def test_each_speedup_is_left_out_of_the_full_set():
    ladder = ladder_of(HOPPER, device="cuda")
    full, left_out = full_set(ladder), named(ladder, "left-out")
    assert [rung.speedup for rung in left_out] == list(full.speedups)
    for rung in left_out:
        assert rung.against == full.name
        assert set(full.speedups) - set(rung.speedups) == {rung.speedup}


def test_a_speedup_that_is_off_is_added_and_replaces_others_in_its_slots():
    put_in = {rung.speedup: rung for rung in named(ladder_of(HOPPER, device="cuda"), "put-in")}
    fp16 = put_in["fp16"]
    assert {"fp16", "tf32"} <= set(fp16.speedups)
    assert "bf16" not in fp16.speedups
    assert fp16.replaced == ["bf16"]
    assert fp16.name == "all, with fp16 for bf16"
    for name, rung in put_in.items():
        assert rung.replaced or rung.name.startswith(f"all and {name}")
    onednn = next(rung for rung in named(ladder_of(NARROW), "put-in") if rung.speedup == "onednn")
    assert onednn.replaced == ["bf16-products", "compile"]
    assert "fused-attention" in onednn.speedups, "its other slots are filled again"
    assert onednn.name == "all, with onednn and fused-attention for bf16-products and compile"


@pytest.mark.parametrize("overrides", [[], ["optim.kind=muon"], ["speedups=auto,-prefetch"]])
def test_an_added_speedup_gives_the_set_of_naming_it_and_its_needs(overrides):
    put_in = named(ladder_of(NARROW, *overrides), "put-in")
    assert put_in
    request = load_config(None, overrides).speedups
    for rung in put_in:
        words = adding(request, resolving.with_needs(rung.speedup))
        config = load_config(None, [*overrides, f"speedups={words}"])
        decisions = select(config, NARROW, device="cpu", minutes=60.0)
        assert set(rung.speedups) == {each.name for each in decisions if each.on}, rung.name


def test_every_speedup_has_a_rung_or_a_reason():
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        about = {rung.speedup for rung in ladder_of(machine, device=device)}
        assert about - {None} == {speedup.name for speedup in all_speedups()}
    assert reasons_of(ladder_of(CPU))["tf32"].startswith("cannot run here, because: TF32")
    reasons = reasons_of(ladder_of(CPU, "batch.rows_per_device=4", "batch.accumulate=2"))
    assert "batch.rows_per_device=4 is set" in reasons["micro-batch"]


def test_the_request_decides_the_full_set():
    reasons = reasons_of(ladder_of(CPU, "speedups=auto,-compile,-prefetch"))
    assert reasons.keys() >= {"compile", "prefetch"}
    assert "left out by speedups" in reasons["compile"]
    for request, rungs in (
        ("pretokenised,micro-batch", ["+ pretokenised", "+ micro-batch"]),
        ("none", []),
    ):
        rungs = [BASELINE, *rungs, *(name.replace("+", "all but") for name in rungs)]
        ladder = ladder_of(CPU, f"speedups={request}")
        assert [rung.name for rung in ladder if rung.kind != "absent"] == rungs


def test_the_length_of_the_recipe_decides_which_speedups_are_on():
    short = ladder_of(HOPPER, device="cuda", minutes=0.5)
    assert "compile" not in full_set(short).speedups
    assert "compile" in {rung.speedup for rung in named(short, "put-in")}
    long = ladder_of(HOPPER, device="cuda", minutes=60.0)
    assert "compile" in next(rung for rung in long if rung.name == "all but tf32").speedups


def test_a_speedup_follows_its_needs_and_is_left_out_with_them():
    names = ["prefetch", "bf16", "compile", "fp8"]
    assert in_order(["prefetch", "fp8", "bf16", "compile"]) == names
    assert needing({"compile"}, names) == {"compile", "fp8"}
    assert needing({"fp8"}, names) == {"fp8"}


def test_the_name_of_a_rung_shows_additions_and_replacements():
    assert added_to_full("a", ["a", "b"], ["b"], "+ b").name == "all and a"
    assert added_to_full("a", ["a", "c"], ["b"], "+ b").name == "all, with a and c for b"
    assert added_to_full("a", ["a", "b", "need"], ["b"], "+ b").name == "all and a and need"


def test_the_promise_between_two_sets_is_that_of_what_differs():
    both = Promise.rounding(rtol=2e-2 + 1e-4)
    assert promise_between(["prefetch"], []) == promise_between([], []) == Promise.exact()
    assert promise_between(["bf16", "prefetch"], ["bf16"]) == Promise.exact()
    assert promise_between(["bf16", "prefetch"], ["onednn", "prefetch"]) == both
    assert promise_between(["bf16", "fused-adamw"], ["bf16"]) == both
