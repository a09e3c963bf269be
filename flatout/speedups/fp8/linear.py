"""`flatout.ops.linear` with factors of 8 bits, through torchao."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flatout.assembly.speedup import load_package
from flatout.ops import product_dtype
from flatout.ops.linear import with_matmul
from flatout.speedups.fp8 import FEWEST_WEIGHTS

float8 = load_package("torchao.float8", "fp8")  # the compiler cannot trace it
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # noqa: E402
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig  # noqa: E402

MULTIPLE = 16
"""The hardware multiplies fp8 in tiles of this many rows, inputs and outputs."""
NATIVE, EMULATED = (float8.Float8LinearConfig(emulate=each) for each in (False, True))
# There is nothing to convert, but the call also patches Triton's stores of fp8.
float8.convert_to_float8_training(torch.nn.Identity(), config=NATIVE)
NATIVE_GEMMS, EMULATED_GEMMS = (
    LinearMMConfig(
        *(
            ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim)
            for gemm in (
                config.gemm_config_output,
                config.gemm_config_grad_input,
                config.gemm_config_grad_weight,
            )
        )
    )
    for config in (NATIVE, EMULATED)
)


def _matmul(hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    dtype = product_dtype(hidden, weight_OI)
    sizes = (hidden.numel() // max(hidden.shape[-1], 1), *weight_OI.shape)
    fits = all(size and size % MULTIPLE == 0 for size in sizes)
    if dtype != torch.bfloat16 or not fits or weight_OI.numel() < FEWEST_WEIGHTS:
        return functional.linear(hidden, weight_OI, bias_O)
    config, gemms = (NATIVE, NATIVE_GEMMS) if hidden.is_cuda else (EMULATED, EMULATED_GEMMS)
    product: Tensor = matmul_with_hp_or_float8_args.apply(
        hidden.to(dtype), weight_OI.to(dtype).t(), gemms, config
    )
    return product if bias_O is None else product + bias_O.to(dtype)


fp8 = with_matmul(_matmul)
"""`reference` with its factors rounded to 8 bits where the weights are many, forward and backward.

Activations and weight are e4m3, gradients e5m2, the product bfloat16. Each factor has one scale,
from its own largest component (torchao's tensorwise recipe), which takes three passes over it that
a compiler fuses. Sizes that the hardware cannot multiply and dtypes other than bfloat16 fall back
to `reference`. Without a GPU, the result is emulated.
"""
