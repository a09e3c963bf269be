"""The Triton kernel for the gradient of heads; test_heads.py tests `packed` without it.

Letters: as in ops/heads.py.
"""

from functools import partial

import pytest
import torch
from test_heads import CASES, random_inputs, with_gradients

from flatout.errors import MissingPackage
from flatout.ops import heads

triton = pytest.importorskip("triton", reason="the package triton is not installed")

from flatout.ops import head_kernels, head_passes  # noqa: E402

pytestmark = pytest.mark.slow

MORE = CASES | {
    "heads of 96": {"counts": (2, 1), "head_dim": 96, "tokens": 23},
    "heads of 128, more than one program": {"counts": (1, 1), "head_dim": 128, "tokens": 150},
    "queries and keys of other numbers": {
        "counts": (5, 1),
        "head_dim": 12,
        "tokens": 33,
        "rows": 3,
    },
}


@pytest.mark.parametrize(
    ("case", "eps"), [*((case, heads.EPS) for case in MORE), ("grouped, odd", 0.5)]
)
def test_gradients_match_the_reference(case, eps, interpreted, poisoned_memory):
    tensors, counts = random_inputs(**MORE[case], dtype=torch.float64), MORE[case]["counts"]
    expected = with_gradients(partial(heads.reference, eps=eps), tensors, counts)
    actual = with_gradients(
        partial(heads.packed, eps=eps),
        tuple(None if tensor is None else tensor.float() for tensor in tensors),
        counts,
    )
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-5 * max(float(want.abs().max()), 1)
        )


def test_a_program_sums_over_several_tiles(interpreted, poisoned_memory, monkeypatch):
    monkeypatch.setattr(head_passes, "ELEMENTS", 32)
    monkeypatch.setattr(head_passes, "TILES", 3)
    tensors = random_inputs(counts=(2, 1), head_dim=8, tokens=41)
    expected = with_gradients(heads.reference, tensors, (2, 1))
    for got, want in zip(with_gradients(heads.packed, tensors, (2, 1)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_narrow_dtypes_are_rounded_once(interpreted, poisoned_memory):
    """The gradient stays fp32 throughout, so it is more exact than the reference.

    The test uses fp16: the interpreter truncates to bf16 where a GPU rounds.
    """
    tensors = random_inputs(counts=(4, 2), head_dim=16, tokens=30, dtype=torch.float16)
    exact = with_gradients(heads.reference, tuple(tensor.double() for tensor in tensors), (4, 2))
    plain, actual = (
        with_gradients(function, tensors, (4, 2)) for function in (heads.reference, heads.packed)
    )
    for got, rounded, want in zip(actual[3:], plain[3:], exact[3:], strict=True):
        assert got.dtype == torch.float16
        assert (got.double() - want).square().mean() <= (rounded.double() - want).square().mean()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "last stride 2"])
def test_gradients_in_any_layout_are_accepted(layout, interpreted, poisoned_memory):
    product, gain, cos, sin = random_inputs(counts=(2, 2), head_dim=8, tokens=9)
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2, 9, 8)
    make = {
        "transposed": lambda: torch.randn(2, 9, 2, 8, generator=generator).transpose(1, 2),
        "expanded": lambda: torch.randn(1, 1, 1, 8, generator=generator).expand(shape),
        "last stride 2": lambda: torch.randn(2, 2, 9, 16, generator=generator)[..., ::2],
    }[layout]
    grads = [make() for _ in range(3)]
    actual = head_passes.gradient(*grads, product, gain, cos, sin, heads.EPS)
    leaves = [leaf.requires_grad_() for leaf in (product, gain)]
    expected = torch.autograd.grad(heads.reference(*leaves, cos, sin, counts=(2, 2)), leaves, grads)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["grouped, odd", "normalised alone", "turned alone"])
def test_it_compiles_as_one_op_without_a_graph_break(case, interpreted):
    torch._dynamo.reset()  # otherwise other shapes recompile with dynamic sizes
    tensors, counts = random_inputs(**CASES[case]), CASES[case]["counts"]
    compiled = torch.compile(heads.packed, fullgraph=True)
    for actual, expected in zip(
        with_gradients(compiled, tensors, counts),
        with_gradients(heads.reference, tensors, counts),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [(True, True), (True, False), (False, True), (False, False)],
    ids=["both", "norm", "turn", "values"],
)
@pytest.mark.parametrize("size", [64, 96, 128])
def test_the_kernel_compiles_for_a_gpu(size, options):
    """It compiles to the binary for an H100 or H200, without spilling registers."""
    kernel = head_kernels.gradient
    half = 1 << ((size + 1) // 2 - 1).bit_length()
    constants = {
        "SIZE": size,
        "HALF": half,
        "EPS": 1e-5,
        "NORMALISED": options[0],
        "TURNED": options[1],
    }
    constants |= {"ROWS": head_passes.ELEMENTS // (2 * half), "TILES": head_passes.TILES}
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("grad_out", "product", "grad_product"), "*bf16") | dict.fromkeys(
        ("gain", "cos", "sin", "grad_gain"), "*fp32"
    )
    source = triton.compiler.ASTSource(
        kernel, {key: types[key] for key in kernel.arg_names}, constants
    )
    compiled = triton.compile(
        source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    assert compiled.asm["cubin"]
    assert ".local" not in compiled.asm["ptx"]


def test_missing_triton_names_the_install_command(without_triton):
    with pytest.raises(MissingPackage, match="pip install triton"):
        heads.packed(*random_inputs(counts=(1, 1), head_dim=2, tokens=3), counts=(1, 1))
