"""Every speedup gets a decision and a reason from the request, the machine and the defaults."""

from __future__ import annotations

import re

import pytest

from flatout.assembly.resolve import resolve
from flatout.assembly.selection import all_speedups, assemble, select, stored_decisions
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import Gpu, Machine
from flatout.registry import RECIPES, SPEEDUPS

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
NARROW = Machine("a CPU", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")
TURING = Machine("a CPU", 2, 8.0, (Gpu("Tesla T4", 16.0, (7, 5), "1"),), "3.11")


def on(request: str, machine: Machine = CPU, *more: str, **facts: object) -> set[str]:
    config = load_config(None, [f"speedups={request}", *more])
    return {decision.name for decision in select(config, machine, **facts) if decision.on}


def test_every_entry_is_a_speedup_with_a_decision_and_a_reason():
    decisions = select(load_config(), CPU)
    assert (
        sorted(d.name for d in decisions)
        == SPEEDUPS.names()
        == sorted(s.name for s in all_speedups())
    )
    assert all(d.reason for d in decisions)


def test_none_is_the_baseline():
    assert on("none") == set()


def test_a_list_is_exactly_that_list():
    assert on("prefetch,fused-adamw") == {"prefetch", "fused-adamw"}


@pytest.mark.parametrize("machine", [CPU, HOPPER], ids=["cpu", "gpu"])
def test_attention_kernels_are_refused_where_scores_are_capped(machine):
    """No kernel limits the scores, so attention is the plain one."""
    kernels = {"fused-attention", "flex-attention"}
    assert kernels & on("auto", machine, "data.document_mask=true")
    capped = load_config(None, ["data.document_mask=true", "model.attention_softcap=30"])
    decisions = {decision.name: decision for decision in select(capped, machine)}
    for name in kernels:
        assert not decisions[name].on
        assert "model.attention_softcap" in decisions[name].reason


def test_edits_change_only_the_speedups_that_they_name():
    auto = on("auto")
    assert "fused-adamw" in auto
    assert on("auto,-fused-adamw,+bf16") == (auto - {"fused-adamw"}) | {"bf16"}
    assert on("-fused-adamw") == auto - {"fused-adamw"}


def test_a_speedup_that_cannot_run_is_off_under_auto_and_refused_when_named():
    off = next(d for d in select(load_config(), CPU) if d.name == "tf32")
    assert not off.on
    assert "uses a CPU" in off.reason
    with pytest.raises(HardwareError, match=r"'tf32' cannot be used.*uses a CPU"):
        on("tf32")


def test_flex_attention_is_on_with_a_document_mask_or_an_attention_window():
    ways = {"flex-attention", "fused-attention"}
    packed, windowed = "data.document_mask=true", "model.window=64"
    assert on("auto", HOPPER, device="cuda") & ways == {"fused-attention"}
    assert on("auto", HOPPER, packed, device="cuda") & ways == {"flex-attention"}
    assert on("auto", HOPPER, windowed, device="cuda") & ways == {"flex-attention"}
    assert on("auto", HOPPER, "model.window=256", "data.seq_len=256", device="cuda") & ways == {
        "fused-attention"
    }
    assert on("auto", TURING, packed, device="cuda") & ways == {"fused-attention"}
    assert "flex-attention" not in on("auto", CPU, packed)
    with pytest.raises(HardwareError, match=r"needs compute capability 8\.0"):
        on("flex-attention", TURING, packed, device="cuda")


def test_long_runs_compile_and_short_ones_do_not():
    assert "compile" in on("auto", HOPPER, device="cuda", minutes=600.0)
    assert "compile" not in on("auto", HOPPER, device="cuda", minutes=0.3)
    reason = next(
        d.reason
        for d in select(load_config(), HOPPER, device="cuda", minutes=0.3)
        if d.name == "compile"
    )
    assert "0.3 minutes" in reason
    assert "compile" not in on("auto", CPU, minutes=600.0)


def test_a_speedup_that_yields_comes_back_when_its_rival_is_off():
    ways = {"bf16", "bf16-products", "onednn", "batched-muon"}
    assert on("auto", NARROW, "optim.kind=muon") & ways == {"bf16-products"}
    assert on("auto,-bf16-products", NARROW, "optim.kind=muon") & ways == {"onednn"}
    assert on("auto,-bf16-products,-onednn", NARROW, "optim.kind=muon") & ways == {"batched-muon"}
    assert on("auto,+bf16", NARROW, "optim.kind=muon") & ways == {"bf16", "onednn"}
    assert on("auto,+batched-muon", NARROW, "optim.kind=muon") & ways == {"batched-muon"}


def test_a_named_speedup_takes_its_slot_from_one_that_auto_chose():
    decisions = {
        d.name: d for d in select(load_config(None, ["speedups=auto,+fp16"]), HOPPER, device="cuda")
    }
    assert decisions["fp16"].on
    assert not decisions["bf16"].on
    assert "fp16" in decisions["bf16"].reason


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        ("bf16,fp16", "speedups=fp16 or speedups=bf16."),
        (
            "auto,+bf16,-compile,+fp16",
            "speedups=auto,-compile,+fp16 or speedups=auto,+bf16,-compile.",
        ),
        ("bf16,+fp16", "speedups=+fp16 or speedups=auto,bf16."),
        ("+bf16,+fp16", "speedups=+fp16 or speedups=+bf16."),
    ],
)
def test_two_named_speedups_for_one_slot_are_refused_with_a_fix_for_each(request_, fix):
    with pytest.raises(ConfigError, match="both fill the slot 'precision'") as refused:
        on(request_, HOPPER, device="cuda")
    (first, _, second) = (
        refused.value.fix.removeprefix("Leave out one of the two: ")
        .removesuffix(".")
        .partition(" or ")
    )
    assert {first, second} == set(fix.removesuffix(".").split(" or "))
    for way in (first, second):
        assert len(on(way.removeprefix("speedups="), HOPPER, device="cuda") & {"bf16", "fp16"}) == 1


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        ("tf32", "speedups=none"),
        ("auto,+tf32", "speedups=auto"),
        ("+tf32", "speedups=auto"),
        ("prefetch,tf32", "speedups=prefetch"),
    ],
)
def test_the_fix_leaves_out_the_speedup_that_cannot_run(request_, fix):
    with pytest.raises(HardwareError, match="'tf32' cannot be used") as refused:
        on(request_)
    assert refused.value.fix == f"Leave it out: {fix}."


@pytest.mark.parametrize(
    ("machine", "request_", "precision", "why", "fix"),
    [
        (
            HOPPER,
            "auto,+bf16-gathers,+fp16",
            "auto",
            "fp16, which was named, takes",
            "Replace fp16 with bf16: speedups=auto,+bf16-gathers,+bf16, "
            "or leave bf16-gathers out: speedups=auto,+fp16.",
        ),
        (
            HOPPER,
            "auto,+bf16-gathers",
            "fp16",
            "train.precision=fp16",
            "Set train.precision=bf16, or leave bf16-gathers out: speedups=auto.",
        ),
        (
            HOPPER,
            "auto,+cuda-graphs,-compile",
            "auto",
            "left out",
            "Add compile: speedups=auto,+cuda-graphs,+compile, "
            "or leave cuda-graphs out: speedups=auto,-compile.",
        ),
        (
            HOPPER,
            "auto,+cuda-graphs",
            "auto",
            "the run's duration is unknown",
            "Add compile: speedups=auto,+cuda-graphs,+compile, "
            "or leave cuda-graphs out: speedups=auto.",
        ),
        (
            HOPPER,
            "bf16-gathers",
            "auto",
            "not among speedups",
            "Add bf16: speedups=bf16-gathers,bf16, or leave bf16-gathers out: speedups=none.",
        ),
        (
            NARROW,
            "auto,+bf16-gathers",
            "auto",
            "autocast also casts",
            "Add bf16: speedups=auto,+bf16-gathers,+bf16, "
            "or leave bf16-gathers out: speedups=auto.",
        ),
        (
            NARROW,
            "bf16-gathers,bf16-products",
            "bf16",
            "bf16-products, which was",
            "Replace bf16-products with bf16: speedups=bf16-gathers,bf16, "
            "or leave bf16-gathers out: speedups=bf16-products.",
        ),
        (
            TURING,
            "auto,+bf16-gathers",
            "auto",
            "bfloat16 needs compute",
            "Leave bf16-gathers out: speedups=auto.",
        ),
    ],
)
def test_a_needed_speedup_that_is_off_is_reported_with_a_working_fix(
    machine, request_, precision, why, fix
):
    device = "cuda" if machine.gpus else "cpu"
    shard = f"parallel.shard={2 if 'bf16-gathers' in request_ else 1}"
    with pytest.raises(ConfigError, match=f"needs '[a-z0-9]+', which is off: .*{why}") as refused:
        on(request_, machine, shard, f"train.precision={precision}", device=device)
    assert refused.value.fix == fix
    for way in re.findall(r"speedups=([^ ]+?)(?:[,.:] |\.?$)", fix):
        other = (
            f"train.precision={precision}"
            if "train.precision" not in fix
            else "train.precision=auto"
        )
        config = load_config(None, [f"speedups={way}", shard, other])
        decisions = select(config, machine, device=device)
        assemble(d.name for d in decisions if d.on)


@pytest.mark.parametrize("recipe", [name for name in RECIPES.names() if name.startswith("demo")])
def test_a_demo_compiles_nothing(recipe):
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        decisions = select(load_config(recipe), machine, device=device, minutes=600.0)
        assert not [d.name for d in decisions if d.on and SPEEDUPS.get(d.name).compiles]


def test_two_stored_speedups_for_one_slot_are_refused():
    with pytest.raises(ConfigError, match="both fill the slot 'precision'"):
        assemble(["bf16", "fp16"])


def test_a_stated_micro_batch_is_not_chosen_by_auto():
    assert "micro-batch" not in on("auto", CPU, "batch.rows_per_device=4")
    assert "micro-batch" in on("auto", CPU)


def test_stored_decisions_are_not_made_again():
    config = load_config(None, ["speedups=[tf32,micro-batch]", "batch.rows_per_device=4"])
    assert {d.name for d in stored_decisions(config, CPU) if d.on} == {"tf32", "micro-batch"}


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ([], "the micro-batch was chosen when the run started (batch.rows_per_device=64)"),
        (["batch.rows_per_device=64"], "batch.rows_per_device=64 is set."),
    ],
)
def test_stored_decisions_distinguish_a_stated_micro_batch_from_a_chosen_one(stated, reason):
    stored = load_config(
        None, ["batch.rows_per_device=64", "batch.accumulate=1", "speedups=[tf32]"]
    )
    decisions = {
        d.name: d for d in stored_decisions(stored, CPU, requested=load_config(None, stated))
    }
    assert decisions["micro-batch"].reason == reason


@pytest.mark.parametrize("speedups", ["auto", "micro-batch", "auto,-micro-batch", "none"])
def test_a_resumed_run_has_the_speedups_of_its_start(speedups, tiny_set):
    asked = [f"speedups={speedups}", f"data.path={tiny_set}", "data.seq_len=16"]
    requested = load_config(None, [*asked, "train.device=cpu"])
    resolved, chosen = resolve(requested, machine=CPU, dataset=Dataset.open(tiny_set), world_size=1)
    again = stored_decisions(resolved, CPU, requested=requested)
    assert [(d.name, d.on) for d in again] == [(d.name, d.on) for d in chosen]


def test_a_users_speedup_is_named_by_its_reference(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(
        "from flatout.assembly.recipe import Promise, Speedup\n"
        'FAST = Speedup(name="fast", saves="time", promise=Promise.exact(), '
        'fills={"matmul": "high"})\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert on("my_own:FAST") == {"my_own:FAST"}
    decisions = select(load_config(None, ["speedups=auto,+my_own:FAST"]), CPU)
    assert assemble(d.name for d in decisions if d.on).matmul == "high"
    assert {
        d.name for d in stored_decisions(load_config(None, ["speedups=[my_own:FAST]"]), CPU) if d.on
    } == {"my_own:FAST"}


def test_a_speedup_for_ops_that_the_model_does_not_call_is_off():
    reasons = {d.name: d for d in select(load_config(None, ["model.kind=eigenstate"]), CPU)}
    assert "'eigenstate' makes no use of ops.attention" in reasons["fused-attention"].reason
    assert reasons["fast-scan"].on
    assert "'transformer' makes no use of ops.scan" in next(
        d.reason for d in select(load_config(), CPU) if d.name == "fast-scan"
    )
    with pytest.raises(
        HardwareError, match=r"'fused-heads' cannot be used: .*makes no use of ops\.heads"
    ):
        on("auto,+fused-heads", CPU, "model.kind=eigenstate")


def test_a_custom_model_without_uses_may_use_every_op(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text("class Mine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "fused-attention" in on("fused-attention,fast-scan", CPU, "model.kind=own_model:Mine")
