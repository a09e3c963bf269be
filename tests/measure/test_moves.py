"""The moves of a recipe: what a bench measures, what tune can reach, and what both leave alone."""

from dataclasses import replace

import pytest

from flatout.assembly.choices import adding, all_speedups, select
from flatout.assembly.speedup import Tolerance
from flatout.cli.commands.tune import parse_only
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, Machine
from flatout.measure import resolving
from flatout.measure.moves import (
    ROWS,
    Setting,
    SpeedupMove,
    ablation,
    in_order,
    memory_obstacle,
    needing,
    rows_to_try,
    tolerance_between,
)
from flatout.measure.resolving import choose, resolve_here
from flatout.measure.results import PARTS
from flatout.measure.tune import moves_of

pytestmark = pytest.mark.slow


@pytest.fixture
def tuned(tiny_config):
    """Return a function that finds the moves of a tiny recipe, of which `most` rows fit, and four
    times as many with checkpointing; and what it leaves out.
    """

    def make(*, only=PARTS, statistical=False, most=1000, **changes):
        config = tiny_config(**({"batch__rows_per_device": "auto", "speedups": "auto"} | changes))
        resolved = replace(resolve_here(config), additions=choose(config)[2])

        def obstacle(setting):
            limit = most * (4 if "checkpointing" in setting.on else 1)
            return None if setting.rows <= limit else "too large"

        return moves_of(config, resolved, only, obstacle, statistical=statistical)

    return make


def names(moves):
    return [move.name for move in moves]


def test_the_rows_to_try_contain_the_start_and_double():
    assert rows_to_try(4, 16) == [1, 2, 4, 8, 16]
    assert rows_to_try(12, 12) == [1, 3, 6, 12]
    assert rows_to_try(1, 7) == [1, 7]


def test_only_rejects_unknown_words():
    assert parse_only(None) == PARTS
    assert parse_only("batch, compile") == ("batch", "compile")
    with pytest.raises(ConfigError, match="bacth"):
        parse_only("bacth")


def test_tune_leaves_out_what_is_on_and_adds_what_is_off(tuned):
    moves, left = tuned()
    assert {"- fused-adamw", "+ checkpointing"} <= set(names(moves))
    assert not any("micro-batch" in name for name in names(moves))
    reasons = {each.name: each.reason for each in left}
    assert "a trial does not time saves" in reasons["async-checkpoints"]
    assert "cannot be added" in reasons["cuda-graphs"]
    assert "--statistical" in reasons["length-buckets"]
    assert any("length-buckets" in name for name in names(tuned(statistical=True)[0]))
    stated, _ = tuned(speedups="auto,-fused-adamw,+checkpointing")
    assert not any("fused-adamw" in name for name in names(stated))
    assert not any(name.endswith(" checkpointing") for name in names(stated))
    assert tuned(speedups=["prefetch", "fused-adamw"], only=["speedups"])[0] == []
    assert names(tuned(only=["fused-adamw"])[0]) == ["- fused-adamw"]


CHECKPOINTING = SpeedupMove(
    "+ checkpointing", frozenset({"checkpointing"}), part="checkpointing", speedup="checkpointing"
)
START = Setting().but({ROWS: 4})


def test_a_move_takes_the_place_of_its_rival_and_needs_its_needs():
    setting = Setting(frozenset({"selective-checkpointing", "prefetch"}))
    assert CHECKPOINTING.apply(setting).on == {"checkpointing", "prefetch"}
    assert SpeedupMove("+ x", frozenset({"length-buckets"})).apply(Setting()) is None
    other = Setting(frozenset({"prefetch"})).but({ROWS: 2})
    start = replace(START, on=frozenset({"fused-adamw"}))
    assert other.beyond(start) == f"{ROWS}=2, + prefetch, - fused-adamw"
    assert start.beyond(start) == ""


def test_the_rows_that_fit_are_tried_the_nearest_first(tuned):
    step = {"batch__tokens_per_step": 64 * 16, "batch__rows_per_device": 4}
    moves, _ = tuned(only=["batch"], **step)
    assert names(moves) == [f"{ROWS}={rows}" for rows in (2, 8, 1, 16, 32, 64)]
    assert names(tuned(only=["batch"], most=8, **step)[0]) == [f"{ROWS}={n}" for n in (2, 8, 1)]


def test_checkpointing_is_tried_with_the_rows_that_then_fit(tuned):
    step = {"batch__tokens_per_step": 64 * 16, "batch__rows_per_device": 4}
    only = ["batch", "checkpointing"]
    found = {move.name: move for move in tuned(only=only, most=4, **step)[0]}
    grown = found[f"+ checkpointing, {ROWS}=16"]
    assert grown.values == {ROWS: 16}
    assert grown.speedup is None, "its gain is not that of checkpointing alone"
    assert found["+ checkpointing"] == CHECKPOINTING
    assert not any(", " in name for name in names(tuned(only=only, **step)[0]))


def test_the_estimate_decides_what_cannot_fit(tiny_config):
    resolved = resolve_here(tiny_config())
    setting = Setting().but({ROWS: 8})
    assert memory_obstacle(resolved)(setting) is None
    both = replace(setting, on=frozenset({"checkpointing", "selective-checkpointing"}))
    assert "both set" in memory_obstacle(resolved)(both)
    small = replace(resolved.machine, memory_gib=1e-4, gpus=(Gpu("A GPU", 1e-4, (9, 0), "1"),))
    assert "GiB by estimate" in memory_obstacle(replace(resolved, machine=small))(setting)
    on_gpu = resolved.config.with_values({"train.device": "cuda:0"})
    found = memory_obstacle(replace(resolved, machine=small, config=on_gpu))(setting)
    assert "the GPU has 0.0 GiB" in found


@pytest.mark.parametrize(
    ("one", "other", "tolerance"),
    [
        ("", "", Tolerance.exact()),
        ("prefetch", "", Tolerance.exact()),
        ("bf16,prefetch", "bf16", Tolerance.exact()),
        ("bf16,prefetch", "onednn,prefetch", Tolerance.rounding(rtol=2e-2 + 1e-4)),
        ("bf16,fused-adamw", "bf16", Tolerance.rounding(rtol=2e-2 + 1e-4)),
        ("checkpointing,onednn", "onednn", Tolerance.exact()),
        # other code is compiled, which fuses in another way
        ("checkpointing,compile", "compile", Tolerance.rounding(rtol=1e-3 + 1e-3)),
        ("prefetch,compile", "compile", Tolerance.exact()),
    ],
)
def test_the_tolerance_between_two_sets_is_that_of_what_differs(one, other, tolerance):
    settings = [Setting(frozenset(each.split(",")) - {""}) for each in (one, other)]
    assert tolerance_between(*settings) == tolerance
    rows = tolerance_between(Setting().but({ROWS: 2}), Setting().but({ROWS: 4}))
    assert (rows.kind, rows.rtol) == ("rounding", 1e-4)


CPU = Machine("cpu", 2, 8.0, (), "3.11")
NARROW = Machine("cpu", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("cpu", 16, 64.0, (Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0), "580"),), "3.11")


def ladder_on(machine, *overrides, device="cpu", minutes=60.0):
    """The points of an ablation on a machine, resolved as training would, by kind."""

    def selected(config, **_):
        return config, select(config, machine, device=device, minutes=minutes)

    config = load_config(None, [*overrides, f"train.device={device}"])
    decisions = selected(config)[1]
    resolved = resolving.Resolved(config, decisions, machine, None)
    off = [decision.name for decision in decisions if not decision.on]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "resolve", selected)
        additions = {name: resolving.adding_one(name, config, resolved) for name in off}
    found = {"absent": []}
    for point in ablation(config, replace(resolved, additions=additions)):
        found.setdefault(point.kind, []).append(point)
    return found


def test_the_ablation_adds_one_speedup_at_a_time_and_leaves_each_out_of_the_full_set():
    found = ladder_on(HOPPER, device="cuda")
    below = found["baseline"][0].after
    assert below == Setting()
    for point in found["added"]:
        assert point.before == below
        assert point.after.on - below.on == {point.speedup}
        below = point.after
    decisions = select(
        load_config(None, ["train.device=cuda"]), HOPPER, device="cuda", minutes=60.0
    )
    assert below.on == {decision.name for decision in decisions if decision.on}
    assert [point.speedup for point in found["leave-one-out"]] == in_order(below.on)
    for point in found["leave-one-out"]:
        assert point.before == below
        assert point.speedup in below.on - point.after.on
    short = ladder_on(HOPPER, device="cuda", minutes=0.5)
    assert "compile" not in short["added"][-1].after.on
    assert "compile" in {point.speedup for point in short["add-one"]}


def test_a_speedup_that_is_off_is_added_and_replaces_others_in_its_slots():
    added = {point.speedup: point for point in ladder_on(HOPPER, device="cuda")["add-one"]}
    assert {"fp16", "tf32"} <= added["fp16"].after.on
    assert "bf16" not in added["fp16"].after.on
    assert added["fp16"].name == "+ fp16, - bf16"
    narrow = {point.speedup: point for point in ladder_on(NARROW)["add-one"]}
    assert "fused-attention" in narrow["onednn"].after.on, "its other slots are filled again"
    assert narrow["onednn"].name == "+ onednn, + fused-attention, - bf16-products, - compile"


@pytest.mark.parametrize("overrides", [[], ["optim.kind=muon"], ["speedups=auto,-prefetch"]])
def test_an_added_speedup_gives_the_set_of_naming_it_and_its_needs(overrides):
    request = load_config(None, overrides).speedups
    for point in ladder_on(NARROW, *overrides)["add-one"]:
        words = adding(request, resolving.with_needs(point.speedup))
        config = load_config(None, [*overrides, f"speedups={words}"])
        decisions = select(config, NARROW, device="cpu", minutes=60.0)
        assert point.after.on == {each.name for each in decisions if each.on}, point.name


def test_every_speedup_is_measured_or_has_a_reason():
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        found = ladder_on(machine, device=device)
        known = {point.speedup for points in found.values() for point in points} - {None}
        assert known == {each.name for each in all_speedups()}
    reasons = {each.name: each.why_not for each in ladder_on(CPU)["absent"]}
    assert reasons["tf32"].startswith("cannot be added: TF32")
    dropped = ladder_on(CPU, "speedups=auto,-compile,-prefetch")["absent"]
    reasons = {each.name: each.why_not for each in dropped}
    assert reasons.keys() >= {"compile", "prefetch"}
    assert "excluded by speedups" in reasons["compile"]
    stated = ladder_on(CPU, "speedups=pretokenised,micro-batch")
    assert [point.name for point in stated["added"]] == ["+ pretokenised", "+ micro-batch"]
    assert (stated["absent"], "add-one" in stated) == ([], False)
    assert ladder_on(CPU, "speedups=none").keys() == {"baseline", "absent"}


def test_a_speedup_follows_its_needs_and_is_left_out_with_them():
    names = ["prefetch", "bf16", "compile", "fp8"]
    assert in_order(["prefetch", "fp8", "bf16", "compile"]) == names
    assert needing({"compile"}, names) == {"compile", "fp8"}
    assert needing({"fp8"}, names) == {"fp8"}
