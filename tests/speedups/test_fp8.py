"""fp8 replaces large matmuls, lets a model learn, and rejects machines that cannot run it.

Without a GPU the rounding is emulated.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flatout.assembly import speedup
from flatout.assembly.choices import assemble, speedup_named
from flatout.config.schema import load_config
from flatout.errors import MissingPackage
from flatout.hardware.machine import Gpu, Machine
from flatout.ops import linear
from flatout.speedups import fp8
from flatout.training.checkpoint import read_write, savers
from flatout.training.step import train_step

LARGE = 4_096
"""Weights of the smallest matmul replaced in tests: those of the tiny models' MLPs."""


def machine(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("NVIDIA Test", 80.0, capability, "1"),), "3.11")


@pytest.fixture
def narrow(monkeypatch):
    """The module of fp8 matmuls, which takes small ones too."""
    pytest.importorskip("torchao")
    from flatout.speedups.fp8 import linear

    monkeypatch.setattr(linear, "FEWEST_WEIGHTS", LARGE)
    return linear


def losses(run, count=20):
    found = []
    for _ in range(count):
        found.append(float(train_step(run, next(run.loader)).loss))
        run.step += 1
    return found


@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_large_products_of_the_blocks_are_replaced_and_the_model_learns(
    kind, narrow, build_run, tiny_config, tmp_path, monkeypatch
):
    options = {"train__steps": 20, "train__precision": "auto", "optim__lr": 2e-3}
    config = tiny_config(model__kind=kind, **options, speedups="bf16")
    plain, fast = build_run(config, tmp_path / "plain"), build_run(config, tmp_path / "fast")
    fast.core.set_ops(replace(fast.core.ops, linear=narrow.fp8))
    taken, multiply = set(), narrow.matmul_with_hp_or_float8_args
    narrowed = SimpleNamespace(
        apply=lambda *args: taken.add(args[1].shape[::-1]) or multiply.apply(*args)
    )
    monkeypatch.setattr(narrow, "matmul_with_hp_or_float8_args", narrowed)
    before, after = losses(plain), losses(fast)
    matrices = {p.shape for n, p in fast.core.named_parameters() if "blocks" in n and p.dim() == 2}
    assert taken == {shape for shape in matrices if shape.numel() >= LARGE}
    assert taken < matrices
    assert after != before
    assert after[-1] < after[0] - 0.1
    assert after == pytest.approx(before, rel=2e-2)
    read_write.load(plain, savers.save(fast))


def test_a_bad_step_leaves_no_trace(narrow, build_run, tiny_config, tmp_path):
    """Scales come from the numbers at hand: no history of them remembers a NaN or an infinity."""
    config = tiny_config(train__precision="auto", speedups="bf16")
    run, twin = (build_run(config, tmp_path / name) for name in "ab")
    for each in (run, twin):
        each.core.set_ops(replace(each.core.ops, linear=narrow.fp8))
        losses(each, 2)
    next(twin.loader)
    spoil = lambda _, inputs: (inputs[0] * torch.nan, *inputs[1:])  # noqa: E731
    with run.core.blocks[0].register_forward_pre_hook(spoil):
        result = train_step(run, next(run.loader))
    assert result.loss.isnan()
    assert int(run.guard.skipped) == 1
    assert losses(run, 3) == losses(twin, 3)
    assert all(map(torch.equal, run.core.parameters(), twin.core.parameters()))


GATED = {"model.d_model": 1024, "model.d_ff": 2560, "model.activation": "swiglu"}
SMALL = "The largest matmul of a block has 2.4 million weights. fp8 pays off from 4.2"


@pytest.mark.parametrize(
    ("name", "capability", "settings", "reason"),
    [
        ("fp8", (8, 0), {}, "fp8 needs compute capability 8.9. The NVIDIA Test has 8.0. Use bf16"),
        (
            "fp8",
            (9, 0),
            {"train.device": "cpu"},
            "8.9 or higher, but this run uses a CPU. Use bf16",
        ),
        (
            "fp8",
            (9, 0),
            {"model.d_model": 768},
            f"{SMALL} (model.d_model=1024, with the default model.d_ff).",
        ),
        ("fp8", (9, 0), {"model.d_model": 1024, "model.d_ff": 1024}, "has 3.1 million weights"),
        ("fp8", (9, 0), GATED, None),
        ("fp8", (9, 0), GATED | {"model.activation": "relu2"}, "has 3.1 million weights"),
        ("fp8", (8, 9), {"model.d_model": 1024}, None),
        ("fp8", (9, 0), {"model.d_model": 768, "model.d_ff": 8_192}, None),
        ("fp8", (9, 0), {}, None),
        (
            "bf16",
            (7, 5),
            {},
            "8.0. The NVIDIA Test has 7.5. Use fp16 instead: train.precision=fp16.",
        ),
        ("bf16", (8, 0), {}, None),
    ],
)
def test_why_not(name, capability, settings, reason, monkeypatch):
    monkeypatch.setattr(speedup, "find_spec", lambda _: "there")
    config = load_config().with_values({"train.device": "cuda"} | settings)
    found = speedup_named(name).why_not(machine(capability), config)
    assert found is None if reason is None else reason in found


def test_missing_torchao_is_reported_with_its_install_line(monkeypatch):
    monkeypatch.setattr(speedup, "find_spec", lambda _: None)
    config = load_config().with_values({"train.device": "cuda"})
    assert 'pip install "flatout[fp8]"' in fp8.SPEEDUP.why_not(machine((9, 0)), config)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.delitem(sys.modules, "flatout.speedups.fp8.linear", raising=False)
    with pytest.raises(MissingPackage, match="torchao") as raised:
        assemble(["fp8"])
    assert 'pip install "flatout[fp8]"' in str(raised.value)


def with_gradients(function, shape, width_in, width_out, dtype, *, bias):
    generator = torch.Generator().manual_seed(width_out)
    sizes = ((*shape, width_in), (width_out, width_in), (width_out,))
    drawn = [torch.randn(*size, generator=generator) for size in sizes[: 3 if bias else 2]]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in drawn]
    out = function(*leaves)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_fp8_is_close_to_bf16_forward_and_backward(narrow, monkeypatch, bias):
    """e4m3 has three bits of mantissa, e5m2 two: a few percent of a product of random numbers."""
    monkeypatch.setattr(narrow, "FEWEST_WEIGHTS", 0)
    case = ((4, 16), 64, 48)
    wanted = with_gradients(linear.reference, *case, torch.bfloat16, bias=bias)
    found = with_gradients(narrow.fp8, *case, torch.bfloat16, bias=bias)
    for got, want in zip(found[:3], wanted[:3], strict=True):
        assert got.dtype == torch.bfloat16
        assert 5e-3 * want.norm() < (got - want).norm() < 0.1 * want.norm()
    for got, want in zip(found[3:], wanted[3:], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sizes_and_dtypes_that_the_hardware_cannot_multiply_fall_back(narrow, monkeypatch, dtype):
    monkeypatch.setattr(narrow, "FEWEST_WEIGHTS", 0)
    functions = linear.reference, narrow.fp8
    for case in (((5,), 64, 48), ((16,), 60, 48), ((16,), 64, 40), ((0,), 64, 48)):
        wanted, found = (with_gradients(each, *case, dtype, bias=True) for each in functions)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_multiplies_as_emulated(narrow, monkeypatch, compiled):
    monkeypatch.setattr(narrow, "FEWEST_WEIGHTS", 0)
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs an NVIDIA GPU that multiplies fp8")
    function = torch.compile(narrow.fp8) if compiled else narrow.fp8
    results = []
    for device, multiply in (("cuda", function), ("cuda", linear.reference), ("cpu", narrow.fp8)):
        generator = torch.Generator().manual_seed(1)
        hidden, weight, grad = (
            torch.randn(size, generator=generator).to(device, torch.bfloat16)
            for size in ((64, 128), (256, 128), (64, 256))
        )
        hidden.requires_grad_(), weight.requires_grad_()
        out = multiply(hidden, weight)
        out.backward(grad)
        tensors = (out.detach(), hidden.grad, weight.grad)
        results.append([tensor.float().cpu() for tensor in tensors])
    for native, exact, emulated in zip(*results, strict=True):
        assert (native - emulated).norm() < 1e-2 * exact.norm()
        assert 1e-3 * exact.norm() < (native - exact).norm() < 0.1 * exact.norm()
