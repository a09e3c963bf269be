"""Every speedup gets a decision and a reason from the request, the machine and the defaults."""

import re

import pytest

from flatout.assembly.choices import (
    Decision,
    adding,
    all_speedups,
    assemble,
    parse_request,
    removing,
    select,
    stored_decisions,
)
from flatout.assembly.measured import speedups_on
from flatout.assembly.resolve import resolve
from flatout.config.registry import RECIPES, SPEEDUPS
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, HardwareError
from flatout.hardware.machine import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
NARROW = Machine("a CPU", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")
TURING = Machine("a CPU", 2, 8.0, (Gpu("Tesla T4", 16.0, (7, 5), "1"),), "3.11")


def on(request: str, machine: Machine = CPU, *more: str, **facts: object) -> set[str]:
    config = load_config(None, [f"speedups={request}", *more])
    return {decision.name for decision in select(config, machine, **facts) if decision.on}


def decided(machine: Machine, *words: str, **facts: object) -> dict[str, Decision]:
    return {each.name: each for each in select(load_config(None, words), machine, **facts)}


def test_every_entry_is_a_speedup_with_a_decision_and_a_reason():
    decisions = select(load_config(), CPU)
    assert sorted(d.name for d in decisions) == SPEEDUPS.names()
    assert sorted(each.name for each in all_speedups()) == SPEEDUPS.names()
    assert all(d.reason for d in decisions)


def test_the_request_is_followed():
    auto = on("auto")
    assert "fused-adamw" in auto
    assert on("none") == set()
    assert on("prefetch,fused-adamw") == {"prefetch", "fused-adamw"}
    assert on("auto,-fused-adamw,+bf16") == (auto - {"fused-adamw"}) | {"bf16"}
    assert on("-fused-adamw") == auto - {"fused-adamw"}
    assert "micro-batch" in auto
    assert "micro-batch" not in on("auto", CPU, "batch.rows_per_device=4")


def test_a_speedup_that_cannot_run_is_off_under_auto_and_rejected_when_named():
    off = decided(CPU)["tf32"]
    assert not off.on
    assert "uses a CPU" in off.reason
    with pytest.raises(HardwareError, match=r"'tf32' cannot be used.*uses a CPU"):
        on("tf32")


def test_flex_attention_is_on_with_a_document_mask_or_an_attention_window():
    packed = "data.document_mask=true"
    for machine, words, way in (
        (HOPPER, [], "fused"),
        (HOPPER, [packed], "flex"),
        (HOPPER, ["model.window=64"], "flex"),
        (HOPPER, ["model.window=256", "data.seq_len=256"], "fused"),
        (TURING, [packed], "fused"),
    ):
        found = on("auto", machine, *words, device="cuda")
        assert found & {"flex-attention", "fused-attention"} == {f"{way}-attention"}
    assert "flex-attention" not in on("auto", CPU, packed)
    with pytest.raises(HardwareError, match=r"needs compute capability 8\.0"):
        on("flex-attention", TURING, packed, device="cuda")


def test_long_runs_compile_and_short_ones_do_not():
    assert "compile" in on("auto", HOPPER, device="cuda", minutes=600.0)
    short = decided(HOPPER, device="cuda", minutes=0.3)["compile"]
    assert not short.on
    assert "0.3 minutes" in short.reason
    assert "compile" in on("auto", NARROW, minutes=600.0)
    assert "compile" not in on("auto", NARROW, minutes=0.9)


def test_what_gains_only_beside_another_speedup_is_off_without_it():
    without = decided(CPU, minutes=600.0)["compile"]
    assert (without.on, "without bf16-products" in without.reason) == (False, True)
    assert "compile" in on("auto,+compile", CPU, minutes=600.0)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("auto", {"bf16-products"}),
        ("auto,-bf16-products", {"onednn"}),
        ("auto,-bf16-products,-onednn", set()),
        ("auto,+bf16", {"bf16", "onednn"}),
    ],
)
def test_a_speedup_that_yields_comes_back_when_its_rival_is_off(request_, expected):
    ways = {"bf16", "bf16-products", "onednn"}
    assert on(request_, NARROW, "optim.kind=muon") & ways == expected


def test_a_named_speedup_takes_the_place_of_one_that_auto_chose():
    found = decided(HOPPER, "speedups=auto,+fp16", device="cuda")
    assert found["fp16"].on
    assert not found["bf16"].on
    assert "fp16" in found["bf16"].reason


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        ("tf32", "speedups=none"),
        ("auto,+tf32", "speedups=auto"),
        ("+tf32", "speedups=auto"),
        ("prefetch,tf32", "speedups=prefetch"),
    ],
)
def test_the_fix_omits_the_speedup_that_cannot_run(request_, fix):
    with pytest.raises(HardwareError, match="'tf32' cannot be used") as refused:
        on(request_)
    assert refused.value.fix == f"Remove it: {fix}."


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a user's speedup that needs bf16."""
    (tmp_path / "my_own.py").write_text(
        "from flatout.assembly.speedup import Speedup, Tolerance\n"
        "def apply(parts):\n    parts.gc = None\n"
        'FAST = Speedup("fast", apply, "time", Tolerance.exact(), needs=("bf16",))\n'
        "class Model: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_own:FAST"


@pytest.mark.parametrize(
    ("machine", "request_", "precision", "why", "fix", "without"),
    [
        (HOPPER, "auto,+OWN,+fp16", "auto", "fp16, which was named, takes",
         "Set speedups=auto,+OWN,+bf16, or", "auto,+fp16"),
        (HOPPER, "auto,+OWN", "fp16", "train.precision=fp16", "Set train.precision=bf16, or",
         "auto"),
        (HOPPER, "auto,+OWN,-bf16", "auto", "excluded",
         "Set speedups=auto,+OWN,+bf16, or", "auto,-bf16"),
        (HOPPER, "OWN", "auto", "not among speedups", "Set speedups=OWN,bf16, or", "none"),
        (NARROW, "auto,+OWN", "auto", "autocast also casts",
         "Set speedups=auto,+OWN,+bf16, or", "auto"),
        (NARROW, "OWN,bf16-products", "bf16", "bf16-products, which was",
         "Set speedups=OWN,bf16, or", "bf16-products"),
        (TURING, "auto,+OWN", "auto", "bfloat16 needs compute", "", "auto"),
    ],
)  # fmt: skip
def test_a_needed_speedup_that_is_off_is_reported_with_a_working_fix(
    machine, request_, precision, why, fix, without, own
):
    request, device = request_.replace("OWN", own), "cuda" if machine.gpus else "cpu"
    with pytest.raises(ConfigError, match=f"needs 'bf16', which is off: .*{why}") as refused:
        on(request, machine, f"train.precision={precision}", device=device)
    leave = f"emove {own}: speedups={without}."
    assert refused.value.fix == (f"{fix.replace('OWN', own)} r{leave}" if fix else f"R{leave}")
    other = f"train.precision={'auto' if 'train.precision' in fix else precision}"
    for way in re.findall(r"speedups=([^ ]+?)(?:[,.:] |\.?$)", refused.value.fix):
        assemble(on(way, machine, other, device=device))


@pytest.mark.parametrize("recipe", [name for name in RECIPES.names() if name.startswith("demo")])
def test_a_demo_compiles_nothing(recipe):
    for machine, device in ((CPU, "cpu"), (HOPPER, "cuda")):
        decisions = select(load_config(recipe), machine, device=device, minutes=600.0)
        assert not [d.name for d in decisions if d.on and SPEEDUPS.get(d.name).compiles]


def test_stored_decisions_are_not_made_again():
    rows = "batch.rows_per_device=64"
    stored = load_config(None, [rows, "batch.accumulate=1", "speedups=[tf32]"])
    found = {d.name: d for d in stored_decisions(stored, CPU)}
    assert {name for name, decision in found.items() if decision.on} == {"tf32"}
    assert found["tf32"].reason.startswith("as when the run started, but now: TF32 needs")
    assert found["micro-batch"].reason == f"{rows} is set."


@pytest.mark.parametrize("speedups", ["auto", "micro-batch", "auto,-micro-batch", "none"])
def test_a_resumed_run_has_the_speedups_of_its_start(speedups, tiny_set):
    """But the one that chose the rows, which are stored."""
    asked = [f"speedups={speedups}", f"data.path={tiny_set}", "data.seq_len=16"]
    requested = load_config(None, [*asked, "train.device=cpu"])
    resolved, chosen = resolve(requested, machine=CPU, dataset=Dataset.open(tiny_set), world_size=1)
    assert speedups_on(stored_decisions(resolved, CPU)) == speedups_on(chosen)


def test_a_users_speedup_is_named_by_its_reference(own):
    assert on(f"bf16,{own}") == {"bf16", own}
    assert assemble(on(f"auto,+bf16,+{own}")).gc is None
    stored = stored_decisions(load_config(None, [f"speedups=[{own}]"]), CPU)
    assert {d.name for d in stored if d.on} == {own}
    own_model = on("fused-attention,fused-heads", CPU, "model.kind=my_own:Model")
    assert "fused-attention" in own_model, "it does not say which ops it calls"


def test_a_speedup_for_ops_that_the_model_does_not_call_is_off():
    found = decided(CPU, "model.kind=eigenstate")
    assert "'eigenstate' makes no use of attention" in found["fused-attention"].reason
    found = decided(HOPPER, device="cuda")
    assert "'transformer' makes no use of scan" in found["triton-scan"].reason
    words = r"'fused-heads' cannot be used: .*makes no use of heads"
    with pytest.raises(HardwareError, match=words):
        on("auto,+fused-heads", CPU, "model.kind=eigenstate")


def test_a_gpu_without_bfloat16_uses_fp16():
    assert on("auto", TURING, device="cuda") & {"bf16", "fp16"} == {"fp16"}
    assert on("auto", HOPPER, device="cuda") & {"bf16", "fp16"} == {"bf16"}
    with pytest.raises(HardwareError, match=r"bfloat16 needs compute capability 8\.0"):
        on("bf16", TURING, device="cuda")


def test_train_precision_names_its_speedup():
    assert "bf16" in on("auto", CPU, "train.precision=bf16")
    assert "bf16" in on("none", CPU, "train.precision=bf16")
    assert "bf16" not in on("auto", HOPPER, "train.precision=fp32", device="cuda")
    assert on("auto", HOPPER, "train.precision=fp16", device="cuda") & {"bf16", "fp16"} == {"fp16"}


def test_a_cpu_with_bfloat16_uses_it_for_products_only():
    ways = {"bf16", "bf16-products", "onednn"}
    assert on("auto", NARROW) & ways == {"bf16-products"}
    assert on("auto", NARROW, "train.precision=bf16") & ways == {"bf16-products"}
    assert on("auto", NARROW, "train.precision=fp32") & ways == on("auto", CPU) & ways == {"onednn"}
    assert on("auto,+onednn", NARROW) & ways == {"onednn"}
    assert on("none", NARROW, "train.precision=bf16") == {"bf16-products"}
    assert on("bf16", NARROW, "train.precision=bf16") == {"bf16"}
    with pytest.raises(HardwareError, match="AVX512-BF16"):
        on("bf16-products", CPU)
    with pytest.raises(HardwareError, match="uses a GPU"):
        on("bf16-products", HOPPER)


def test_a_precision_is_never_provided_by_a_speedup_that_is_omitted():
    found = on("auto,-bf16-products", NARROW, "train.precision=bf16")
    assert found & {"bf16", "bf16-products"} == {"bf16"}
    for request, machine in (("auto,-bf16", HOPPER), ("auto,-bf16,-bf16-products", NARROW)):
        device = "cuda" if machine.gpus else "cpu"
        with pytest.raises(ConfigError, match="speedups excludes") as refused:
            on(request, machine, "train.precision=bf16", device=device)
        assert "Set train.precision=auto, or speedups=auto" in refused.value.fix
    with pytest.raises(HardwareError, match=r"bfloat16 needs compute capability 8\.0"):
        on("auto,-bf16-products", TURING, "train.precision=bf16", device="cuda")


def test_a_stated_precision_conflicts_with_a_named_speedup_for_its_part():
    with pytest.raises(ConfigError, match=r"both set 'cross_entropy'") as refused:
        on("auto,+chunked-ce", NARROW, "train.precision=bf16")
    assert "speedups=auto" in refused.value.fix
    assert "train.precision=auto" in refused.value.fix


def test_a_precision_is_provided_by_the_one_that_a_named_speedup_needs(own):
    found = on(f"auto,+{own}", NARROW, "train.precision=bf16")
    assert found & {"bf16", "bf16-products", own} == {"bf16", own}


def test_a_request_is_parsed_and_edited():
    assert all(parse_request(each).auto for each in ("auto", "auto,-compile", "+compile", "-bf16"))
    assert not parse_request("bf16,compile").auto
    assert not parse_request("none").named
    assert parse_request("fused_adamw").named == ("fused-adamw",)
    assert parse_request("auto,-fused_adamw").dropped == ("fused-adamw",)
    for request, names, added in (
        ("auto,-fused_adamw,-bf16", ["fused-adamw", "compile"], "auto,-bf16,+fused-adamw,+compile"),
        (("bf16",), ["compile"], "bf16,compile"),
        ("none", ["compile"], "compile"),
        ("-fused-adamw", ["fused-adamw"], "+fused-adamw"),
    ):
        assert adding(request, names) == added
    for request, rest in (("auto,+bf16,-compile", "auto,-compile"), ("+bf16", "auto")):
        assert removing("bf16", request) == rest
    assert removing("bf16", "bf16") == "none"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("auto,-fusedadamw", "Did you mean 'fused-adamw'"),
        ("none,bf16", "none and for others"),
        ("compile,-compile", "'compile' and excludes it"),
        ("auto,-fused_adamw,+fused-adamw", "'fused-adamw' and excludes it"),
    ],
)
def test_an_invalid_request_is_rejected(request_, message):
    with pytest.raises(ConfigError, match=message):
        parse_request(request_)
