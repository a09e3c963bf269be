"""train.precision selects the speedup that provides it."""

from __future__ import annotations

import pytest

from flatout.assembly.selection import select
from flatout.config.schema import load_config
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import Gpu, Machine

CPU = Machine("a CPU", 2, 8.0, (), "3.11")
NARROW = Machine("a CPU", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True)
HOPPER = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")
TURING = Machine("a CPU", 2, 8.0, (Gpu("Tesla T4", 16.0, (7, 5), "1"),), "3.11")


def on(request: str, machine: Machine = CPU, *more: str, **facts: object) -> set[str]:
    config = load_config(None, [f"speedups={request}", *more])
    return {decision.name for decision in select(config, machine, **facts) if decision.on}


def test_a_gpu_without_bfloat16_uses_fp16():
    assert on("auto", TURING, device="cuda") & {"bf16", "fp16"} == {"fp16"}, (
        "float16 is the next best"
    )
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
    assert (
        on("auto", NARROW) & ways
        == on("auto", NARROW, "train.precision=bf16") & ways
        == {"bf16-products"}
    )
    assert on("auto", NARROW, "train.precision=fp32") & ways == on("auto", CPU) & ways == {"onednn"}
    assert on("auto,+onednn", NARROW) & ways == {"onednn"}
    assert on("none", NARROW, "train.precision=bf16") == {"bf16-products"}
    assert on("bf16", NARROW, "train.precision=bf16") == {"bf16"}
    with pytest.raises(HardwareError, match="AVX512-BF16"):
        on("bf16-products", CPU)
    with pytest.raises(HardwareError, match="uses a GPU"):
        on("bf16-products", HOPPER)


def test_train_precision_and_speedups_must_agree():
    with pytest.raises(ConfigError, match="contradict"):
        on("auto,+bf16", CPU, "train.precision=fp32")


def test_a_precision_is_never_provided_by_a_speedup_that_is_left_out():
    assert on("auto,-bf16-products", NARROW, "train.precision=bf16") & {
        "bf16",
        "bf16-products",
    } == {"bf16"}
    for request, machine in (("auto,-bf16", HOPPER), ("auto,-bf16,-bf16-products", NARROW)):
        device = "cuda" if machine.gpus else "cpu"
        with pytest.raises(ConfigError, match="speedups leaves out") as refused:
            on(request, machine, "train.precision=bf16", device=device)
        assert "Set train.precision=auto, or speedups=auto" in refused.value.fix
    with pytest.raises(HardwareError, match=r"bfloat16 needs compute capability 8\.0"):
        on("auto,-bf16-products", TURING, "train.precision=bf16", device="cuda")


def test_a_stated_precision_conflicts_with_a_named_speedup_for_its_slot():
    with pytest.raises(ConfigError, match=r"both fill the slot 'ops\.cross_entropy'") as refused:
        on("auto,+chunked-ce", NARROW, "train.precision=bf16")
    assert "speedups=auto" in refused.value.fix
    assert "train.precision=auto" in refused.value.fix


def test_a_precision_is_provided_by_the_one_that_a_named_speedup_needs():
    ways = {"bf16", "bf16-products", "bf16-gathers"}
    assert on("auto,+bf16-gathers", NARROW, "train.precision=bf16", "parallel.shard=2") & ways == {
        "bf16",
        "bf16-gathers",
    }
    assert on("auto", NARROW, "train.precision=bf16") & ways == {"bf16-products"}
