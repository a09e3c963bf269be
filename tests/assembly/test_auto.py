"""`auto` follows each speedup's default, unless measurements on this hardware differ."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.assembly import choices, compiling, resolve
from flatout.assembly.choices import (
    Gain,
    all_speedups,
    assemble,
    decide,
    default_of,
    is_measured,
    select,
)
from flatout.assembly.compiling import compile_cost, mark_as_cached
from flatout.assembly.speedup import Off, On, Speedup, Tolerance
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.hardware.machine import CpuTimes, Gpu, Machine, usable_cores

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
NARROW = replace(CPU, cpu_multiplies_bf16=True)
HOPPER = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")


def gain(low: float | None, high: float | None, mean: float = 1.0) -> Gain:
    about = {"recipe": "gpt2-124m", "date": "2026-11-22T08:00:00", "torch": "2.13.0"}
    return Gain(gain=mean, low=low, high=high, where="added to the full set", commit=None, **about)


FASTER, SLOWER, UNCLEAR, UNSURE = gain(1.1, 1.2), gain(0.8, 0.9), gain(0.9, 1.1), gain(None, None)


def chosen(measured: dict[str, Gain], *more: str, machine=HOPPER, device="cuda", minutes=60.0):
    config = load_config(None, [*more])
    decisions = select(config, machine, device=device, minutes=minutes, measured=measured)
    assemble(decision.name for decision in decisions if decision.on)
    return {decision.name: decision for decision in decisions}


def speedup(default: On | Off | None, tolerance: Tolerance = Tolerance.exact()) -> Speedup:  # noqa: B008
    return Speedup(
        "new", lambda _: None, "time", tolerance, auto={"cpu": default} if default else {}
    )


def test_ranks_are_unique_and_every_speedup_that_is_off_has_a_reason():
    ranks = [speedup.rank for speedup in all_speedups()]
    assert ranks == sorted(set(ranks))
    for one in all_speedups():
        for default in one.auto.values():
            assert default.because or isinstance(default, On)
            assert default.from_minutes or not one.compiles, "compiling takes minutes"


def test_mps_has_the_speedups_that_are_on_everywhere():
    on = {one.name for one in all_speedups() if isinstance(default_of(one, "mps"), On)}
    assert {"pretokenised", "prefetch", "micro-batch", "fused-attention", "no-sync-logging"} <= on
    assert not on & {"compile", "bf16", "bf16-products", "onednn", "triton-scan"}
    measured = {is_measured(one, load_config(), CPU, "mps") for one in all_speedups()}
    assert True not in measured


def test_no_default_for_gpus_is_measured():
    found = {s.name: is_measured(s, load_config(), HOPPER, "cuda") for s in all_speedups()}
    for one in all_speedups():
        if "cuda" in one.auto:
            assert found[one.name] is False
    assert found["bf16-products"] is None
    assert is_measured(SPEEDUPS.get("prefetch"), load_config(), CPU, "cpu") is True
    assert is_measured(SPEEDUPS.get("async-checkpoints"), load_config(), CPU, "cpu") is False


@pytest.mark.parametrize(
    ("default", "measured", "on"),
    [
        (On(), None, True),
        (On(), SLOWER, False),
        (On(), UNCLEAR, True),
        (On(), UNSURE, True),
        (Off("no gain"), None, False),
        (Off("no gain"), FASTER, True),
        (Off("no gain"), UNCLEAR, False),
        (Off("no gain"), UNSURE, False),
        (None, None, False),
        (None, FASTER, True),
    ],
)
def test_a_gain_whose_interval_excludes_1_overrides_the_default(default, measured, on):
    assert decide(speedup(default), "cpu", None, measured).on is on


def test_the_reason_gives_the_date_and_the_recipe_of_the_measurement():
    where = "added to the full set of gpt2-124m, 2026-11-22"
    for default, minutes, measured, interval in (
        (Off("x"), None, FASTER, "1.10 to 1.20"),
        (On(), 1, SLOWER, "0.80 to 0.90"),
    ):
        reason = decide(speedup(default), "cpu", minutes, measured).reason
        assert reason == f"measured here: x1.00 ({interval}), {where}"


def test_a_measured_gain_does_not_turn_on_a_speedup_that_may_change_the_loss():
    assert not decide(speedup(Off("x"), Tolerance.statistical()), "cpu", None, FASTER).on
    assert not chosen({"fp8": FASTER, "length-buckets": FASTER})["fp8"].on


def test_a_measured_gain_still_needs_a_long_run_if_compiling_takes_minutes():
    default = Off("slow to compile", from_minutes=2)
    assert decide(speedup(default), "cpu", 3.0, FASTER).on
    assert not decide(speedup(default), "cpu", 1.0, FASTER).on
    unknown = decide(speedup(default), "cpu", None, FASTER)
    assert not unknown.on
    assert unknown.reason.startswith("pays off from 2 minutes, and the run's duration is unknown")


def test_code_that_was_compiled_before_pays_off_in_shorter_runs():
    compiling = SPEEDUPS.get("compile")
    for minutes, cost, on in ((0.5, 1.0, False), (0.5, 0.1, True), (0.05, 0.1, False)):
        found = decide(compiling, "cpu", minutes, compile_cost=cost)
        assert found.on is on
        assert ("compiled in an earlier run" in found.reason) is (cost < 1)
    assert not decide(speedup(On(from_minutes=3)), "cpu", 1, compile_cost=0.1).on
    assert not decide(compiling, "cpu", 5, SLOWER, compile_cost=0.1).on


@pytest.mark.parametrize(
    ("minutes", "others", "on", "least"),
    [(1.4, 0.3, True, None), (1.4, 1.5, False, 4), (4.5, 1.5, True, None), (9.0, 2.0, False, 10)],
)
def test_a_run_on_a_busy_machine_is_compiled_if_it_is_longer(
    minutes, others, on, least, tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CpuTimes, "others_until", lambda self, later: others)
    monkeypatch.setattr(compiling, "usable_cores", lambda: 2)
    cost = compile_cost(tiny_config(), minutes)
    found = decide(SPEEDUPS.get("compile"), "cpu", minutes, compile_cost=cost)
    assert found.on is on
    if not on:
        start = f"this run lasts about {minutes} minutes, and it pays off from {least} on a machine"
        assert found.reason.startswith(f"{start} as busy as this one: time: ")
    mark_as_cached(tiny_config())
    cost = compile_cost(tiny_config(), minutes)
    assert decide(SPEEDUPS.get("compile"), "cpu", minutes, compile_cost=cost).on
    random = {"lora__rank": 4, "lora__dropout": 0.1}
    mark_as_cached(tiny_config(**random))
    assert compile_cost(tiny_config(**random), minutes) == 1, "compiled code draws other numbers"


def test_a_new_run_takes_the_load_of_the_machine_into_account(
    tiny_config, tiny_set, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(resolve, "known_peak", lambda *_: SimpleNamespace(tflops=1.0))
    monkeypatch.setattr(resolve, "expected_minutes", lambda *_: 1.4)
    monkeypatch.setattr(CpuTimes, "others_until", lambda self, later: 0.9 * usable_cores())
    config = tiny_config(train__device="cpu", speedups="auto")
    facts = {"machine": replace(CPU, cpu_multiplies_bf16=True), "world_size": 1}
    dataset = Dataset.open(tiny_set)

    def reason(**more):
        _, decisions = resolve.resolve(config, dataset=dataset, **facts, **more)
        return next(one.reason for one in decisions if one.name == "compile")

    assert "pays off from 10 on a machine as busy as this one" in reason(cache=tmp_path)
    assert "busy" not in reason(), "without a cache it depends on nothing but the machine"


def test_a_run_finds_the_code_of_an_earlier_one(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compile_cost(tiny_config(), 0.5) == 1
    mark_as_cached(tiny_config(speedups="auto,+compile"))
    assert compile_cost(tiny_config(), 0.5) < 1
    assert compile_cost(tiny_config(model__d_model=24), 0.5) == 1
    assert compile_cost(tiny_config(data__seq_len=8, batch__tokens_per_step=32), 0.5) == 1
    assert compile_cost(tiny_config(train__deterministic=True), 0.5) == 1
    mark_as_cached(tiny_config(model__dropout=0.1))
    assert compile_cost(tiny_config(model__dropout=0.1), 0.5) == 1, (
        "compiled code draws other numbers"
    )


def test_a_cache_of_compiled_code_that_cannot_be_used_is_ignored(
    tiny_config, tmp_path, monkeypatch
):
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    mark_as_cached(tiny_config())
    assert compile_cost(tiny_config(), 0.5) == 1


def test_a_speedup_that_measured_faster_takes_the_place_of_the_default():
    found = chosen({"compile-blocks": FASTER})
    assert (found["compile-blocks"].on, found["compile"].on) == (True, False)
    found = chosen({"compile-blocks": FASTER}, "speedups=auto,+compile")
    assert (found["compile-blocks"].on, found["compile"].on) == (False, True), "it is named"
    found = chosen({"compile-blocks": FASTER, "onednn": FASTER}, "speedups=auto,-compile-blocks")
    assert found["compile-blocks"].reason == "excluded by speedups"
    assert "uses a GPU" in found["onednn"].reason
    both = {"checkpointing": gain(1.01, 1.2, 1.1), "selective-checkpointing": gain(1.1, 1.3, 1.2)}
    found = chosen(both)
    assert found["selective-checkpointing"].on, "the larger gain"
    assert found["checkpointing"].reason == (
        "selective-checkpointing, which measured faster here, takes its place"
    )


def test_what_a_speedup_sets_and_needs_still_applies():
    found = chosen({"bf16": SLOWER, "fp8": FASTER}, "speedups=auto")
    assert not found["bf16"].on
    assert found["fp16"].on, "it is on unless bf16 is"
    found = chosen({"onednn": FASTER}, machine=replace(CPU, cpu_multiplies_bf16=True), device="cpu")
    assert found["bf16-products"].on
    assert found["onednn"].reason == "bf16-products is on and replaces it"


def test_what_drops_out_leaves_its_part_to_others(monkeypatch):
    """A speedup that needs one that drops out later drops out, too, whatever its rank."""

    def rows(parts):
        parts.most_rows = len

    own = Speedup("own", rows, "time", Tolerance.exact(), ("compile",), auto={"cpu": On()}, rank=1)
    known = [own, *all_speedups()]
    monkeypatch.setattr(choices, "all_speedups", lambda _named=(): known)
    monkeypatch.setattr(choices, "default_of", lambda one, device: one.auto.get(device))
    found = {one.name: one for one in select(load_config(), CPU, device="cpu", minutes=60.0)}
    assert found["compile"].reason == "gains nothing without bf16-products, which is off"
    assert found["own"].reason == "needs compile, which is off"
    assert found["micro-batch"].on
    found = {one.name: one for one in select(load_config(), NARROW, device="cpu", minutes=60.0)}
    assert found["own"].on
    assert found["micro-batch"].reason == "own is on and replaces it"
