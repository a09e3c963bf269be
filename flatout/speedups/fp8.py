"""Large matmuls of the blocks in 8 bits, with one scale per factor, through torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.assembly.recipe import (
    Off,
    Speedup,
    Tolerance,
    first_of,
    load_package,
    needs_gpu,
    needs_package,
)
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.distributed.mesh import Mesh
    from flatout.models.language_model import LanguageModel

FEWEST_WEIGHTS = 2**22
"""Number of weights of the smallest matmul computed in fp8: below, rounding the factors costs as
much as the matmul saves. With every layer of the blocks in fp8, a GPT-2 of width 768, whose
matmuls have up to 2.4 million weights, lost 6% on an H200. One of width 1,536, up to 9.4 million,
gained 6%.
"""
LARGEST_IN_WIDTHS = 4
"""The largest matmul of a block is that of the MLP, d_model x 4 d_model unless d_ff is set."""
MULTIPLE = 16
"""The hardware multiplies fp8 in tiles of this many rows, inputs and outputs."""


def to_fp8(model: LanguageModel, mesh: Mesh | None) -> LanguageModel:
    """Replace the matmul of each large layer of the blocks. Layers, names and weights stay.

    Embedding and head are not in the blocks.
    """
    from flatout.models.layers import Linear

    device = next(model.parameters()).device if mesh is None else mesh.device  # not the meta device
    product = fp8_linear(emulate=device.type != "cuda")
    for layer in model.blocks.modules():
        if isinstance(layer, Linear) and layer.weight.numel() >= FEWEST_WEIGHTS:
            layer.ops = replace(layer.ops, linear=product)
    return model


def fp8_linear(*, emulate: bool) -> Callable[..., Tensor]:
    """Return `linear.reference` with its factors rounded to 8 bits, forward and backward.

    Activations and weight are e4m3, gradients e5m2, the product bfloat16. Each factor has one
    scale, from its own largest component (torchao's tensorwise recipe), which takes three passes
    over it that a compiler fuses. Sizes that the hardware cannot multiply and dtypes other than
    bfloat16 fall back to `reference`. Without a GPU, `emulate` the result.

    Raises: MissingPackage with the install line.
    """
    float8 = load_package("torchao.float8", "fp8", extra="fp8")  # the compiler cannot trace it
    import torch
    from torch.nn import functional
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    from flatout.ops import product_dtype
    from flatout.ops.linear import with_matmul

    config = float8.Float8LinearConfig(emulate=emulate)
    # There is nothing to convert, but the call also patches Triton's stores of fp8.
    float8.convert_to_float8_training(torch.nn.Identity(), config=config)
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    settings = LinearMMConfig(
        *(
            ScaledMMConfig(emulate, gemm.use_fast_accum, False, config.pad_inner_dim)
            for gemm in gemms
        )
    )

    def multiplied(
        hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None, _stays_narrow: bool
    ) -> Tensor:
        dtype = product_dtype(hidden, weight_OI)
        sizes = (hidden.numel() // max(hidden.shape[-1], 1), *weight_OI.shape)
        if dtype != torch.bfloat16 or not all(size and size % MULTIPLE == 0 for size in sizes):
            return functional.linear(hidden, weight_OI, bias_O)
        product: Tensor = matmul_with_hp_or_float8_args.apply(
            hidden.to(dtype), weight_OI.to(dtype).t(), settings, config
        )
        return product if bias_O is None else product + bias_O.to(dtype)

    return with_matmul(multiplied)


def _too_small(_machine: Machine, config: RunConfig) -> str | None:
    own = config.model.own()
    width = own.get("d_model")
    if width is None:
        return None
    largest = width * max(own.get("d_ff") or 0, LARGEST_IN_WIDTHS * width)
    if largest >= FEWEST_WEIGHTS:
        return None
    return (
        f"The largest matmul of a block has {largest / 1e6:.1f} million weights. "
        f"fp8 pays off from {FEWEST_WEIGHTS / 1e6:.1f} (model.d_model=1024)."
    )


SPEEDUP = Speedup(
    name="fp8",
    fills={"low_precision": to_fp8},
    saves="time: matmuls in the blocks with at least 4 million weights run at up to twice the "
    "rate of bf16, and the others do not change",
    tolerance=Tolerance.statistical(),
    needs=("bf16", "compile"),
    why_not=first_of(
        needs_gpu("fp8", (8, 9), instead="bf16"), needs_package("torchao", extra="fp8"), _too_small
    ),
    rank=240,
    auto={"cuda": Off("use it for a model.d_model of 1,536 or more")},
)
