"""Query, key and value heads from one matmul: normalised, rotated and laid out for attention.

Letters: B rows, T tokens, H query heads, G key and value heads, N = H + G heads that are rotated, C
         head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32

EPS = 1e-5
"""Added by default to a mean square before its root is taken."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries (B, H, T, C), keys (B, G, T, C), values (B, G, T, C)."""


def reference(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    *,
    counts: tuple[int, int],
    eps: float = EPS,
) -> Heads:
    """Split the product into heads, and apply RMS norm, gain and rotary positions to q and k.

    Component i is paired with i + C/2, and the pair is rotated by an angle whose cosine and sine
    the tables contain: each cosine twice, the sines with the first half negated. Without a gain
    nothing is normalised, without tables nothing is rotated. The computation is in fp32, the result
    in the product's dtype. This code is the definition. Every variant must match it, gradients
    included.

    Shapes:  qkv_BTE (B, T, (H + 2 G) C), queries first, then keys, then values; gain_NC (N, C);
             cos_TC, sin_TC (T, C).
    Returns: (q_BHTC, k_BGTC, v_BGTC), laid out in memory as (B, T, heads, C).
    Units:   counts is (H, G); eps is added to the mean square.
    Cost:    about 10 B T N C FLOP forward, one pass over memory each.
    Raises:  ShapeError when the product cannot be split into the heads or gain and tables do not
             match them.
    Source:  rotary positions: Su et al. 2021, arXiv:2104.09864; normalised queries and keys: Henry
             et al. 2020, arXiv:2010.04245.
    """
    qkv_BTMC = _split(qkv_BTE, gain_NC, cos_TC, sin_TC, counts)
    if gain_NC is None and cos_TC is None:  # one split, so that backward concatenates once
        return _transposed(*torch.split(qkv_BTMC, [*counts, counts[1]], dim=2))
    qk_BTNC, v_BTGC = torch.split(qkv_BTMC, [sum(counts), counts[1]], dim=2)
    if gain_NC is not None:
        qk_BTNC = rms_normed(qk_BTNC, gain_NC, eps)
    if cos_TC is not None and sin_TC is not None:
        # in halves, because the compiler vectorises neither `roll` nor its gradient
        first, second, cos_1, cos_2, sin_1, sin_2 = (
            half
            for tensor in (at_least_fp32(qk_BTNC), cos_TC[:, None], sin_TC[:, None])
            for half in torch.unflatten(tensor, -1, (2, -1)).unbind(-2)
        )
        rotated_BTN2 = (
            torch.addcmul(first * cos_1, second, sin_1),
            torch.addcmul(second * cos_2, first, sin_2),
        )
        qk_BTNC = torch.stack(rotated_BTN2, dim=-2).flatten(-2).to(qkv_BTE.dtype)
    return _transposed(*torch.split(qk_BTNC, list(counts), dim=2), v_BTGC)


def fused(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    *,
    counts: tuple[int, int],
    eps: float = EPS,
) -> Heads:
    """`reference` with a hand-written gradient, in which norm, gain and rotation share passes.

    All gradients are written into one tensor. A compiled model uses `reference`, whose passes the
    compiler fuses.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, about half the passes over memory forward and a third backward; keeps
             the product and B T N scales.
    Raises:  ShapeError as `reference`.
    """
    if torch.compiler.is_compiling() or (gain_NC is None and cos_TC is None):
        return reference(qkv_BTE, gain_NC, cos_TC, sin_TC, counts=counts, eps=eps)
    qkv_BTMC = _split(qkv_BTE, gain_NC, cos_TC, sin_TC, counts)
    qk_BTNC, v_BTGC = _Rotated.apply(qkv_BTMC, gain_NC, cos_TC, sin_TC, sum(counts), eps)  # type: ignore[no-untyped-call]
    return _transposed(*torch.split(qk_BTNC, list(counts), dim=2), v_BTGC)


def rms_normed(hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return the hidden states divided by the root mean square of their last axis, times `gain`.

    Shapes:  hidden (..., C); gain (C,), or (N, C) with one gain per head.
    Returns: the shape of hidden.
    Source:  Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = functional.rms_norm(at_least_fp32(hidden), hidden.shape[-1:], eps=eps)
    return (wide * at_least_fp32(gain)).to(hidden.dtype)


class _Rotated(torch.autograd.Function):
    """Normalised and rotated queries and keys, and the values, with one packed gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTMC: Tensor,
        gain_NC: Tensor | None,
        cos_TC: Tensor | None,
        sin_TC: Tensor | None,
        num_rotated: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return rotated heads and values. The product and the scales are kept for backward."""
        heads_BTNC, v_BTGC = qkv_BTMC[:, :, :num_rotated], qkv_BTMC[:, :, num_rotated:]
        wide_BTNC = at_least_fp32(heads_BTNC)
        scale_BTN1 = None
        if gain_NC is not None:
            square_BTN1 = torch.linalg.vector_norm(wide_BTNC, dim=-1, keepdim=True).square_()
            scale_BTN1 = square_BTN1.div_(wide_BTNC.shape[-1]).add_(eps).rsqrt_()
        gain: Any = 1 if gain_NC is None else gain_NC.to(wide_BTNC.dtype)
        if cos_TC is None or sin_TC is None:
            rotated_BTNC = wide_BTNC * gain
        else:  # the gains are multiplied into the tables
            half = cos_TC.shape[-1] // 2
            rolled = 1 if gain_NC is None else gain.roll(half, dims=-1)
            rotated_BTNC = wide_BTNC * (cos_TC[:, None] * gain).to(wide_BTNC.dtype)
            sin_TNC = (sin_TC[:, None] * rolled).to(wide_BTNC.dtype)
            _add_swapped(rotated_BTNC, wide_BTNC, sin_TNC[..., :half], sin_TNC[..., half:])
        if scale_BTN1 is not None:
            rotated_BTNC *= scale_BTN1
        ctx.num_rotated = num_rotated
        ctx.save_for_backward(qkv_BTMC, gain_NC, cos_TC, sin_TC, scale_BTN1)
        return rotated_BTNC.to(qkv_BTMC.dtype), v_BTGC

    @staticmethod
    def backward(
        ctx: Any, grad_rotated_BTNC: Tensor, grad_v_BTGC: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """Return the gradients of the product and of the gains."""
        qkv_BTMC, gain_NC, cos_TC, sin_TC, scale_BTN1 = ctx.saved_tensors
        wide_BTNC = at_least_fp32(qkv_BTMC[:, :, : ctx.num_rotated])
        grad_qkv_BTMC = torch.empty_like(qkv_BTMC, dtype=wide_BTNC.dtype)
        grad_qkv_BTMC[:, :, ctx.num_rotated :] = grad_v_BTGC
        grad_BTNC = grad_qkv_BTMC[:, :, : ctx.num_rotated]
        wide_grad_BTNC = at_least_fp32(grad_rotated_BTNC)
        if cos_TC is None or sin_TC is None:
            grad_BTNC.copy_(wide_grad_BTNC)
        else:  # by the opposite angles
            half = cos_TC.shape[-1] // 2
            cos_T1C, sin_T1C = (table[:, None].to(wide_BTNC.dtype) for table in (cos_TC, sin_TC))
            torch.mul(wide_grad_BTNC, cos_T1C, out=grad_BTNC)
            _add_swapped(grad_BTNC, wide_grad_BTNC, sin_T1C[..., half:], sin_T1C[..., :half])
        grad_gain_NC = None
        if gain_NC is not None:
            grad_BTNC *= scale_BTN1
            product_BTNC = grad_BTNC * wide_BTNC
            grad_gain_NC = product_BTNC.sum(dim=(0, 1)).to(gain_NC.dtype)
            along_BTN1 = (product_BTNC * gain_NC).sum(dim=-1, keepdim=True)
            along_BTN1.mul_(scale_BTN1).mul_(scale_BTN1)
            grad_BTNC *= gain_NC
            grad_BTNC.addcmul_(wide_BTNC, along_BTN1, value=-1 / wide_BTNC.shape[-1])
        return grad_qkv_BTMC.to(qkv_BTMC.dtype), grad_gain_NC, None, None, None, None


def _add_swapped(out: Tensor, heads: Tensor, sin_1: Tensor, sin_2: Tensor) -> None:
    """Add the swapped halves of the heads, each times its sines, to `out`."""
    half = heads.shape[-1] // 2
    out[..., :half].addcmul_(heads[..., half:], sin_1)
    out[..., half:].addcmul_(heads[..., :half], sin_2)


def _transposed(*heads: Tensor) -> Heads:
    q_BTHC, k_BTGC, v_BTGC = heads
    return q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)


def _split(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    counts: tuple[int, int],
) -> Tensor:
    """Return the product as (B, T, heads, C), and check all shapes."""
    num_heads = counts[0] + 2 * counts[1]
    head_dim, rest = divmod(qkv_BTE.shape[-1], num_heads)
    table = (qkv_BTE.shape[1], head_dim)
    given = (gain_NC, cos_TC, sin_TC)
    fits = all(
        tensor is None or tensor.shape == expected
        for tensor, expected in zip(given, ((sum(counts), head_dim), table, table), strict=True)
    )
    if rest or not fits or (cos_TC is None) != (sin_TC is None):
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in given]
        raise ShapeError(
            f"Cannot split a product {tuple(qkv_BTE.shape)} into {num_heads} heads with gains, "
            f"cosines and sines of shapes {shapes}.",
            fix=f"Give a product (B, T, {num_heads} C), gains ({sum(counts)}, C), and both tables "
            "(T, C) or neither.",
        )
    return torch.unflatten(qkv_BTE, -1, (num_heads, head_dim))
