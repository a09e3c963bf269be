"""The gradient of ops/heads.py by the kernel of ops/head_kernels.py, one launch each for queries,
keys and values.

Letters: B rows, T tokens, H query heads, G key and value heads, N = H + G, C head size, E = (H + 2
         G) C; P programs along B T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.ops import head_kernels as kernels

ELEMENTS = 2_048
"""Components of a tile: 16 for each of the 128 threads of a program."""
TILES = 16
"""Tiles a program, one after another: what they add to the gain's gradient is written once."""


@torch.library.custom_op("flatout::heads_gradient", mutates_args=())
def gradient(
    grad_q_BHTC: Tensor,
    grad_k_BGTC: Tensor,
    grad_v_BGTC: Tensor,
    product_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the product and of the gains, an op of its own, which a compiled
    model calls as it is.

    Shapes:  grad_q_BHTC (B, H, T, C); grad_k_BGTC, grad_v_BGTC (B, G, T, C), in any layout;
             product_BTE (B, T, E); gain_NC (N, C); tables (T, C).
    Returns: (grad_BTE in the product's dtype, grad_gain_NC in fp32, of no rows without a gain).
    Cost:    reads the three gradients, and with a gain the queries' and keys' part of the product;
             writes the packed gradient; nothing else is as long as the text.
    """
    product_BTE = product_BTE.contiguous()
    grad_BTE = torch.empty_like(product_BTE)
    gains, first = [], 0
    with torch.cuda.device_of(product_BTE):  # type: ignore[no-untyped-call]
        for grad_BHTC, is_turned in (
            (grad_q_BHTC, True),
            (grad_k_BGTC, True),
            (grad_v_BGTC, False),
        ):
            tables = (cos_TC, sin_TC) if is_turned else (None, None)
            gains.append(
                _launch(
                    grad_BHTC,
                    product_BTE,
                    gain_NC if is_turned else None,
                    *tables,
                    grad_BTE,
                    first,
                    eps,
                )
            )
            first += grad_BHTC.shape[1]
    return grad_BTE, torch.cat(gains[:2])


@gradient.register_fake
def _shapes(
    grad_q_BHTC: Tensor,
    grad_k_BGTC: Tensor,
    grad_v_BGTC: Tensor,
    product_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    num_turned = 0 if gain_NC is None else gain_NC.shape[0]
    return product_BTE.new_empty(product_BTE.shape), product_BTE.new_empty(
        num_turned, grad_q_BHTC.shape[3], dtype=torch.float32
    )


def _launch(
    grad_BHTC: Tensor,
    product_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    grad_BTE: Tensor,
    first: int,
    eps: float,
) -> Tensor:
    """Write the gradient of some heads, the product's from `first` on, and return that of their
    gains (H, C), or of none (0, C).

    A tensor that the kernel does not look at is stood in for.
    """
    grad_BHTC = grad_BHTC if grad_BHTC.stride(3) == 1 else grad_BHTC.contiguous()
    rows, heads, tokens, size = grad_BHTC.shape
    half = 1 << ((size + 1) // 2 - 1).bit_length()
    tile = max(ELEMENTS // (2 * half), 1)
    programs = -(-rows * tokens // (tile * TILES))
    partial_PHC = grad_BHTC.new_empty(
        programs, heads if gain_NC is not None else 0, size, dtype=torch.float32
    )
    kernels.gradient[(programs, heads)](
        grad_BHTC,
        product_BTE,
        grad_BHTC if gain_NC is None else gain_NC.contiguous(),
        grad_BHTC if cos_TC is None else cos_TC.contiguous(),
        grad_BHTC if sin_TC is None else sin_TC.contiguous(),
        grad_BTE,
        partial_PHC,
        rows * tokens, tokens, grad_BHTC.stride(0), grad_BHTC.stride(2), grad_BHTC.stride(1), first, product_BTE.shape[2],
        SIZE=size, HALF=half, EPS=eps, NORMALISED=gain_NC is not None, TURNED=cos_TC is not None, ROWS=tile, TILES=TILES, num_warps=4,
    )  # fmt: skip
    return partial_PHC.sum(dim=0)
