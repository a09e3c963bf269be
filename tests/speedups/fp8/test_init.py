"""fp8 replaces large products, lets a model learn, and refuses machines that cannot run it.

Without a GPU the rounding is emulated.
"""

from __future__ import annotations

import sys

import pytest
import torch

from flatout.assembly import conditions
from flatout.assembly.selection import speedup_named
from flatout.config.schema import load_config
from flatout.errors import MissingPackage
from flatout.hardware import Gpu, Machine
from flatout.ops import linear
from flatout.speedups import fp8
from flatout.speedups.fp8 import product
from flatout.training.checkpoint import read_write
from flatout.training.step import train_step

LARGE = 4_096
"""Weights of the smallest product replaced in tests: those of the tiny models' MLPs."""


def machine(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("NVIDIA Test", 80.0, capability, "1"),), "3.11")


@pytest.fixture
def low(monkeypatch):
    """Replace small products too, on a CPU."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(product, "FEWEST_WEIGHTS", LARGE)
    return product.to_fp8


def losses(run, count=20):
    found = []
    for _ in range(count):
        found.append(float(train_step(run, next(run.feed)).loss))
        run.step += 1
    return found


@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_large_products_of_the_blocks_are_replaced_and_the_model_learns(
    kind, low, build_run, tiny_config, tmp_path
):
    config = tiny_config(
        model__kind=kind, train__steps=20, train__precision="auto", optim__lr=2e-3, speedups="bf16"
    )
    plain, fast = build_run(config, tmp_path / "plain"), build_run(config, tmp_path / "fast")
    names = list(fast.core.state_dict())
    low(fast.core, fast.mesh)
    assert list(fast.core.state_dict()) == names
    layers = {
        name: layer
        for name, layer in fast.core.named_modules()
        if hasattr(layer, "weight") and hasattr(layer, "ops")
    }
    taken = {name for name, layer in layers.items() if layer.ops.linear is product.fp8}
    assert taken == {
        name
        for name, layer in layers.items()
        if layer.weight.numel() >= LARGE and name.startswith("blocks.")
    }
    assert {name.rpartition(".")[2] for name in taken} >= {"up", "down"}
    assert len(taken) < len(layers)
    before, after = losses(plain), losses(fast)
    assert after != before
    assert after[-1] < after[0] - 0.1
    assert after == pytest.approx(before, rel=2e-2)
    read_write.load(plain, read_write.save(fast))


def test_a_bad_step_leaves_no_trace(low, build_run, tiny_config, tmp_path):
    """Scales come from the numbers at hand: no history of them remembers a NaN or an infinity."""
    config = tiny_config(train__precision="auto", speedups="bf16")
    run, twin = (build_run(config, tmp_path / name) for name in "ab")
    for each in (run, twin):
        low(each.core, each.mesh)
        losses(each, 2)
    next(twin.feed)
    with run.core.blocks[0].register_forward_pre_hook(
        lambda _, inputs: (inputs[0] * torch.nan, *inputs[1:])
    ):
        result = train_step(run, next(run.feed))
    assert result.loss.isnan()
    assert int(run.guard.skipped) == 1
    assert losses(run, 3) == losses(twin, 3)
    for one, other in zip(run.core.parameters(), twin.core.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("capability", "settings", "reason"),
    [
        (
            (8, 0),
            {},
            "fp8 needs compute capability 8.9; the NVIDIA Test has 8.0. Use bf16 instead.",
        ),
        (
            (9, 0),
            {"train.device": "cpu"},
            "fp8 needs an NVIDIA GPU of compute capability 8.9 or higher, and this run uses a CPU. "
            "Use bf16 instead.",
        ),
        (
            (9, 0),
            {"model.d_model": 768},
            "The largest matmul of a block has 2.4 million weights; "
            "fp8 pays off from 4.2 (model.d_model=1024).",
        ),
        ((8, 9), {"model.d_model": 1024}, None),
        ((9, 0), {"model.d_model": 768, "model.d_ff": 8_192}, None),
        ((9, 0), {}, None),
    ],
)
def test_why_not(capability, settings, reason, monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda _: "there")
    config = load_config().with_values({"train.device": "cuda"} | settings)
    assert fp8.SPEEDUP.why_not(machine(capability), config) == reason


def test_a_gpu_too_old_for_bf16_gets_a_fix():
    config = load_config().with_values({"train.device": "cuda"})
    reason = speedup_named("bf16").why_not(machine((7, 5)), config)
    assert reason == (
        "bfloat16 needs compute capability 8.0; the NVIDIA Test has 7.5. "
        "Use fp16 instead: train.precision=fp16."
    )
    assert speedup_named("bf16").why_not(machine((8, 0)), config) is None


def test_missing_torchao_is_reported_with_its_install_line(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda _: None)
    config = load_config().with_values({"train.device": "cuda"})
    assert 'pip install "flatout[fp8]"' in fp8.SPEEDUP.why_not(machine((9, 0)), config)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingPackage, match="torchao") as raised:
        product.load_fp8(emulate=True)
    assert 'pip install "flatout[fp8]"' in str(raised.value)


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_multiplies_as_emulated(compiled):
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs an NVIDIA GPU that multiplies fp8")
    product.load_fp8(emulate=False)
    function = torch.compile(product.fp8) if compiled else product.fp8
    generator = torch.Generator().manual_seed(1)
    results = []
    for device, multiply in (("cuda", function), ("cuda", linear.reference), ("cpu", product.fp8)):
        generator.manual_seed(1)
        hidden, weight, grad = (
            torch.randn(size, generator=generator).to(device, torch.bfloat16)
            for size in ((64, 128), (256, 128), (64, 256))
        )
        hidden.requires_grad_(), weight.requires_grad_()
        out = multiply(hidden, weight)
        out.backward(grad)
        results.append(
            [tensor.float().cpu() for tensor in (out.detach(), hidden.grad, weight.grad)]
        )
    for native, exact, emulated in zip(*results, strict=True):
        assert (native - emulated).norm() < 1e-2 * exact.norm()
        assert 1e-3 * exact.norm() < (native - exact).norm() < 0.1 * exact.norm()
