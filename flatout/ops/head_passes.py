"""The gradient of ops/heads.py by the Triton kernel of ops/head_kernels.py.

Queries, keys and values take one launch each.

Letters: B rows, T tokens, H query heads, G key and value heads, N = H + G, C head size, E = (H + 2
         G) C; P programs along B T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.ops import triton_kernels

ELEMENTS = 2_048
"""Components per tile: 16 for each of the 128 threads of a program."""
TILES = 16
"""Tiles that a program processes in turn; it writes the gain's gradient once for all of them."""


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
    """Return the gradients of the product and of the gains; a custom op, which is not traced.

    Shapes:  grad_q_BHTC (B, H, T, C); grad_k_BGTC, grad_v_BGTC (B, G, T, C), in any layout;
             product_BTE (B, T, E); gain_NC (N, C); tables (T, C).
    Returns: (grad_BTE in the product's dtype, grad_gain_NC in fp32, empty without a gain).
    Cost:    reads the three gradients, and with a gain the query and key part of the product;
             writes the packed gradient; nothing else grows with the number of tokens.
    """
    product_BTE = product_BTE.contiguous()
    grad_BTE = torch.empty_like(product_BTE)
    gains, first_head = [], 0
    with torch.cuda.device_of(product_BTE):  # type: ignore[no-untyped-call]
        for grad_BHTC, factors in (
            (grad_q_BHTC, (gain_NC, cos_TC, sin_TC)),
            (grad_k_BGTC, (gain_NC, cos_TC, sin_TC)),
            (grad_v_BGTC, (None, None, None)),
        ):
            gains.append(_launch(grad_BHTC, product_BTE, *factors, grad_BTE, first_head, eps))
            first_head += grad_BHTC.shape[1]
    return grad_BTE, torch.cat(gains[:2])


@gradient.register_fake
def _shapes(
    grad_q_BHTC: Tensor,
    grad_k_BGTC: Tensor,
    grad_v_BGTC: Tensor,
    product_BTE: Tensor,
    gain_NC: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    num_gains = 0 if gain_NC is None else gain_NC.shape[0]
    return product_BTE.new_empty(product_BTE.shape), product_BTE.new_empty(
        num_gains, grad_q_BHTC.shape[3], dtype=torch.float32
    )


def _launch(
    grad_BHTC: Tensor,
    product_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    grad_BTE: Tensor,
    first_head: int,
    eps: float,
) -> Tensor:
    """Write the gradient of some heads of the product, and return the gradient of their gains.

    Returns: grad_gain_HC, empty without a gain.
    """
    grad_BHTC = grad_BHTC if grad_BHTC.stride(3) == 1 else grad_BHTC.contiguous()
    rows, heads, tokens, size = grad_BHTC.shape
    half = 1 << ((size + 1) // 2 - 1).bit_length()
    tile = max(ELEMENTS // (2 * half), 1)
    programs = -(-rows * tokens // (tile * TILES))
    partial_PHC = grad_BHTC.new_empty(
        programs, heads if gain_NC is not None else 0, size, dtype=torch.float32
    )
    is_normalised, is_rotated = gain_NC is not None, cos_TC is not None
    # The kernel does not read the tensors that stand in for None.
    factors = (
        grad_BHTC if given is None else given.contiguous() for given in (gain_NC, cos_TC, sin_TC)
    )
    triton_kernels.load("head_kernels").gradient[(programs, heads)](
        grad_BHTC, product_BTE, *factors, grad_BTE, partial_PHC,
        rows * tokens, tokens, grad_BHTC.stride(0), grad_BHTC.stride(2), grad_BHTC.stride(1),
        first_head, product_BTE.shape[2],
        SIZE=size, HALF=half, EPS=eps, NORMALISED=is_normalised, TURNED=is_rotated, ROWS=tile,
        TILES=TILES, num_warps=4,
    )  # fmt: skip
    return partial_PHC.sum(dim=0)
