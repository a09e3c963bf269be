"""Matrix products in 8 bits through torchao: a variant of `flatout.ops.linear`.

Letters: I width in, O width out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.assembly.conditions import load_package
from flatout.models.language_model import LanguageModel
from flatout.models.layers import Linear
from flatout.ops import product_dtype
from flatout.ops.linear import with_matmul
from flatout.parallel.mesh import Mesh
from flatout.speedups.fp8 import FEWEST_WEIGHTS

MULTIPLE = 16
"""The hardware multiplies fp8 in tiles of this many rows, inputs and outputs."""


def to_fp8(model: LanguageModel, mesh: Mesh | None) -> LanguageModel:
    """Replace the matmul of each large layer of the blocks; layers, names and weights stay.

    Embedding and head are not in the blocks.
    """
    device = next(model.parameters()).device if mesh is None else mesh.device  # not the meta device
    load_fp8(emulate=device.type != "cuda")
    for layer in model.blocks.modules():
        if isinstance(layer, Linear) and layer.weight.numel() >= FEWEST_WEIGHTS:
            layer.ops = replace(layer.ops, linear=fp8)
    return model


def _in_fp8(
    hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None, _stays_narrow: bool
) -> Tensor:
    dtype = product_dtype(hidden, weight_OI)
    sizes = (hidden.numel() // max(hidden.shape[-1], 1), *weight_OI.shape)
    if dtype != torch.bfloat16 or not all(size and size % MULTIPLE == 0 for size in sizes):
        return functional.linear(hidden, weight_OI, bias_O)
    product = fp8_product(hidden.to(dtype), weight_OI.to(dtype), emulate=not hidden.is_cuda)
    return product if bias_O is None else product + bias_O.to(dtype)


fp8 = with_matmul(_in_fp8)
"""`linear.reference` with its factors rounded to 8 bits, forward and backward; in bfloat16.

Activations and weight are e4m3, gradients e5m2. Each factor has one scale, from its own largest
component (torchao's tensorwise recipe), which takes three passes over it that a compiler fuses.
Sizes that the hardware cannot multiply and dtypes other than bfloat16 fall back to `reference`.
Without a GPU the result is emulated. Raises MissingPackage with the install line.
"""


def fp8_product(hidden: Tensor, weight_OI: Tensor, *, emulate: bool) -> Tensor:
    """Return torchao's product of bfloat16 factors, on fp8 units or emulated in bfloat16.

    Shapes:  hidden (..., I); weight_OI (O, I).
    Returns: (..., O), in bfloat16.
    Raises:  MissingPackage with the install line.
    """
    multiply, settings, config = _LOADED.get(emulate) or load_fp8(emulate=emulate)
    product: Tensor = multiply.apply(hidden, weight_OI.t(), settings, config)
    return product


_LOADED: dict[bool, tuple[Any, Any, Any]] = {}
"""Results of `load_fp8`, by `emulate`."""


def load_fp8(*, emulate: bool) -> tuple[Any, Any, Any]:
    """Load and return the function that torchao's Float8Linear calls, and its settings.

    Call it before anything is compiled: the compiler cannot trace it.
    Raises: MissingPackage with the install line.
    """
    float8 = load_package("torchao.float8", "fp8", extra="fp8")
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

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
    _LOADED[emulate] = matmul_with_hp_or_float8_args, settings, config
    return _LOADED[emulate]
