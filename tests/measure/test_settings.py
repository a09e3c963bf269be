"""The settings that tune can reach, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from flatout.assembly.recipe import Tolerance
from flatout.assembly.selection import adding, all_speedups, select
from flatout.cli.commands.tune import parse_only
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, Machine
from flatout.measure import resolving
from flatout.measure.resolving import choose, resolve_here
from flatout.measure.results import PARTS
from flatout.measure.settings import (
    Move,
    Setting,
    Space,
    flips,
    in_order,
    make_space,
    memory_obstacle,
    needing,
    rows_to_try,
    tolerance_between,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def space_of(tiny_config):
    """Return a function that makes the space of a tiny configuration."""

    def make(*, only=PARTS, statistical=False, **changes):
        config = tiny_config(**({"batch__rows_per_device": "auto", "speedups": "auto"} | changes))
        resolved = replace(resolve_here(config), additions=choose(config)[2])
        return make_space(config, resolved, only=only, statistical=statistical)

    return make


CHECKPOINTING = Move(
    "+ checkpointing", "checkpointing", adds=frozenset({"checkpointing"}), speedup="checkpointing"
)


def names(moves):
    return [move.name for move in moves]


def test_the_rows_to_try_contain_the_start_and_double():
    assert rows_to_try(4, 16) == (1, 2, 4, 8, 16)
    assert rows_to_try(12, 12) == (1, 3, 6, 12)
    assert rows_to_try(1, 7) == (1, 7)
    assert all(90 % rows == 0 for rows in rows_to_try(9, 90))


def test_only_rejects_unknown_words():
    assert parse_only(None) == PARTS
    assert parse_only("batch, compile") == ("batch", "compile")
    with pytest.raises(ConfigError, match="bacth"):
        parse_only("bacth")


def test_the_moves_leave_out_what_is_on_and_add_what_is_off(space_of):
    space = space_of()
    assert {"- fused-adamw", "+ checkpointing", "data.prefetch=2"} <= set(names(space.known))
    assert not any("micro-batch" in name for name in names(space.known))
    left = {each.name: each.reason for each in space.left}
    assert all(left.values())
    assert "a trial does not time saves" in left["async-checkpoints"]
    assert "cannot run here" in left["cuda-graphs"]
    assert "--statistical" in left["length-buckets"]
    assert any("length-buckets" in name for name in names(space_of(statistical=True).known))


def test_what_the_request_names_or_omits_stays(space_of):
    space = space_of(speedups="auto,-fused-adamw,+checkpointing")
    assert not any("fused-adamw" in name for name in names(space.known))
    assert not any(name.endswith(" checkpointing") for name in names(space.known))
    assert space_of(speedups=["prefetch", "fused-adamw"], only=["speedups"]).known == ()


def test_only_limits_the_moves(space_of):
    assert names(space_of(only=["fused-adamw"]).known) == ["- fused-adamw"]
    space = space_of(only=["batch"])
    assert space.known == ()
    assert names(space.moves(space.start)) == ["batch.rows_per_device=4"]


def test_an_added_speedup_takes_the_slot_of_its_rival_and_needs_its_needs():
    setting = Setting(4, 4, frozenset({"selective-checkpointing", "prefetch"}))
    assert CHECKPOINTING.apply(setting).speedups == {"checkpointing", "prefetch"}
    graphs = Move("+ cuda-graphs", "speedups", adds=frozenset({"cuda-graphs"}))
    assert graphs.apply(Setting(4, 4, frozenset())) is None


def limited_to(most):
    """Return a space: `most` rows fit, four times as many with checkpointing."""

    def obstacle(setting):
        limit = most * (4 if "checkpointing" in setting.speedups else 1)
        return None if setting.rows <= limit else "too large"

    start = Setting(4, 4, frozenset())
    return Space(start, ("batch",), (), (), (1, 2, 4, 8, 16, 32), obstacle)


def test_the_most_rows_that_fit_are_tried_as_well():
    start = Setting(4, 4, frozenset())
    shown = names(limited_to(16).moves(start))
    assert shown == [f"batch.rows_per_device={rows}" for rows in (8, 2, 16)]
    assert limited_to(0).most_rows(start) == 0
    assert limited_to(99).most_rows(start) == 32


def test_checkpointing_is_tried_with_the_rows_that_then_fit():
    start = Setting(4, 4, frozenset())
    space = replace(limited_to(4), known=(CHECKPOINTING,))
    grown = next(move for move in space.moves(start) if move.name.startswith("+ checkp"))
    assert (grown.name, grown.rows) == ("+ checkpointing, batch.rows_per_device=16", 16)
    assert grown.speedup is None, "its gain is not that of checkpointing alone"
    roomy = replace(limited_to(32), known=(CHECKPOINTING,))
    assert names(roomy.moves(start)).count("+ checkpointing") == 1
    assert not any(" checkpointing," in name for name in names(roomy.moves(start)))


def test_the_estimate_decides_what_cannot_fit(tiny_config):
    resolved = resolve_here(tiny_config())
    setting = Setting(8, 4, frozenset())
    assert memory_obstacle(resolved)(setting) is None
    both = Setting(4, 4, frozenset({"checkpointing", "selective-checkpointing"}))
    assert "both fill" in memory_obstacle(resolved)(both)
    gpu = Gpu("A GPU", 1e-4, (9, 0), "1")
    small = replace(resolved.machine, memory_gib=1e-4, gpus=(gpu,))
    assert "GiB by estimate" in memory_obstacle(replace(resolved, machine=small))(setting)
    on_gpu = resolved.config.with_values({"train.device": "cuda:0"})
    found = memory_obstacle(replace(resolved, machine=small, config=on_gpu))(setting)
    assert "the GPU has 0.0 GiB" in found


def test_settings_are_named_by_their_difference_from_auto():
    start = Setting(4, 4, frozenset({"prefetch", "fused-adamw"}))
    space = Space(start, (), (), (), (4,), lambda setting: None)
    assert space.name(start) == "auto"
    other = Setting(2, 8, frozenset({"prefetch", "checkpointing"}))
    assert space.name(other) == "rows 2, prefetch 8, + checkpointing, - fused-adamw"
    assert space.tolerance(start, start) == Tolerance.exact()
    fewer = space.tolerance(replace(start, rows=2), start)
    assert (fewer.kind, fewer.rtol) == ("rounding", 2e-4)


def test_the_tolerance_between_two_sets_is_that_of_what_differs():
    both = Tolerance.rounding(rtol=2e-2 + 1e-4)
    assert tolerance_between(["prefetch"], []) == tolerance_between([], []) == Tolerance.exact()
    assert tolerance_between(["bf16", "prefetch"], ["bf16"]) == Tolerance.exact()
    assert tolerance_between(["bf16", "prefetch"], ["onednn", "prefetch"]) == both
    assert tolerance_between(["bf16", "fused-adamw"], ["bf16"]) == both


CPU = Machine("cpu", 2, 8.0, (), "3.11")
NARROW = Machine("cpu", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("cpu", 16, 64.0, (Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0), "580"),), "3.11")


def flips_on(machine, *overrides, device="cpu", minutes=60.0):
    """The ablation for a machine and a device, resolved as training would, by kind."""

    def selected(config, **_):
        return config, select(config, machine, device=device, minutes=minutes)

    config = load_config(None, [*overrides, f"train.device={device}"])
    decisions = selected(config)[1]
    resolved = resolving.Resolved(config, decisions, machine, None)
    off = [decision.name for decision in decisions if not decision.on]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "resolve", selected)
        additions = {name: resolving.adding_one(name, config, resolved) for name in off}
    found = {}
    for flip in flips(config, replace(resolved, additions=additions)):
        found.setdefault(flip.kind, []).append(flip)
    return found


def test_the_ablation_adds_one_speedup_at_a_time_up_to_the_full_set():
    found = flips_on(CPU)
    below = found["baseline"][0]
    assert below.speedups == ()
    for flip in found["added"]:
        assert flip.against == below.name
        assert set(flip.speedups) - set(below.speedups) == {flip.speedup}
        below = flip
    decisions = select(load_config(None), CPU, device="cpu", minutes=60.0)
    on = {decision.name for decision in decisions if decision.on}
    assert list(below.speedups) == [each.name for each in all_speedups() if each.name in on]


def test_each_speedup_is_left_out_of_the_full_set():
    found = flips_on(HOPPER, device="cuda")
    full = found["added"][-1]
    assert [flip.speedup for flip in found["leave-one-out"]] == list(full.speedups)
    for flip in found["leave-one-out"]:
        assert flip.against == full.name
        assert flip.speedup in set(full.speedups) - set(flip.speedups)


def test_a_speedup_that_is_off_is_added_and_replaces_others_in_its_slots():
    added = {flip.speedup: flip for flip in flips_on(HOPPER, device="cuda")["add-one"]}
    assert {"fp16", "tf32"} <= set(added["fp16"].speedups)
    assert "bf16" not in added["fp16"].speedups
    assert added["fp16"].name == "all, with fp16 for bf16"
    onednn = next(f for f in flips_on(NARROW)["add-one"] if f.speedup == "onednn")
    assert "fused-attention" in onednn.speedups, "its other slots are filled again"
    assert onednn.name == "all, with onednn and fused-attention for bf16-products and compile"


@pytest.mark.parametrize("overrides", [[], ["optim.kind=muon"], ["speedups=auto,-prefetch"]])
def test_an_added_speedup_gives_the_set_of_naming_it_and_its_needs(overrides):
    added = flips_on(NARROW, *overrides)["add-one"]
    assert added
    request = load_config(None, overrides).speedups
    for flip in added:
        words = adding(request, resolving.with_needs(flip.speedup))
        config = load_config(None, [*overrides, f"speedups={words}"])
        decisions = select(config, NARROW, device="cpu", minutes=60.0)
        assert set(flip.speedups) == {each.name for each in decisions if each.on}, flip.name


def test_every_speedup_is_measured_or_has_a_reason():
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        every = [*chain.from_iterable(flips_on(machine, device=device).values())]
        assert {flip.speedup for flip in every} - {None} == {each.name for each in all_speedups()}
    reasons = {flip.speedup: flip.why_not for flip in flips_on(CPU)["absent"]}
    assert reasons["tf32"].startswith("cannot run here, because: TF32")
    dropped = flips_on(CPU, "speedups=auto,-compile,-prefetch")["absent"]
    reasons = {flip.speedup: flip.why_not for flip in dropped}
    assert reasons.keys() >= {"compile", "prefetch"}
    assert "excluded by speedups" in reasons["compile"]
    stated = flips_on(CPU, "speedups=pretokenised,micro-batch")
    assert [flip.name for flip in stated["added"]] == ["+ pretokenised", "+ micro-batch"]
    assert stated.keys() == {"baseline", "added", "leave-one-out"}
    assert flips_on(CPU, "speedups=none").keys() == {"baseline"}


def test_the_length_of_the_recipe_decides_which_speedups_are_on():
    short = flips_on(HOPPER, device="cuda", minutes=0.5)
    assert "compile" not in short["added"][-1].speedups
    assert "compile" in {flip.speedup for flip in short["add-one"]}
    assert "compile" in flips_on(HOPPER, device="cuda")["added"][-1].speedups


def test_a_speedup_follows_its_needs_and_is_left_out_with_them():
    names = ["prefetch", "bf16", "compile", "fp8"]
    assert in_order(["prefetch", "fp8", "bf16", "compile"]) == names
    assert needing({"compile"}, names) == {"compile", "fp8"}
    assert needing({"fp8"}, names) == {"fp8"}
