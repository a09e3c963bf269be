"""Query, key and value heads from one product: normalised, turned by their positions, and laid out
for attention.

Letters: B rows, T tokens, H query heads, G key and value heads, N = H + G heads that are turned, C
         head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import MissingPackage, ShapeError
from flatout.ops import at_least_fp32

EPS = 1e-5
"""Added to a mean square before its root is taken, where nothing else is asked for."""

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
    """Cut the product into heads; divide queries and keys by their root mean square, times a gain a
    head; turn them by their positions.

    Component i is paired with i + C/2 and the pair is turned by an angle whose cosine and sine the
    tables hold: cosines twice over, sines with the first half negated. Without a gain nothing is
    normalised, without tables nothing is turned. In fp32, returned in the product's dtype. These
    lines are the definition; every variant must match it, gradients included.

    Shapes:  qkv_BTE (B, T, (H + 2 G) C), queries first, then keys, then values; gain_NC (N, C);
             cos_TC, sin_TC (T, C).
    Returns: (q_BHTC, k_BGTC, v_BGTC), laid out in memory as (B, T, heads, C).
    Units:   counts is (H, G); eps is added to the mean square.
    Cost:    about 10 B T N C FLOP forward, one pass over memory each.
    Raises:  ShapeError when the product does not divide into heads or gain and tables do not fit
             them.
    Source:  rotary positions: Su et al. 2021, arXiv:2104.09864; normalised queries and keys: Henry
             et al. 2020, arXiv:2010.04245.
    """
    qkv_BTMC = _cut(qkv_BTE, gain_NC, cos_TC, sin_TC, counts)
    if gain_NC is None and cos_TC is None:  # cut once, so that backward joins once
        q_BTHC, k_BTGC, v_BTGC = torch.split(qkv_BTMC, [*counts, counts[1]], dim=2)
        return q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)
    turned_BTNC, v_BTGC = torch.split(qkv_BTMC, [sum(counts), counts[1]], dim=2)
    if gain_NC is not None:
        turned_BTNC = rms_normed(turned_BTNC, gain_NC, eps)
    if cos_TC is not None and sin_TC is not None:
        wide_BTNC = at_least_fp32(turned_BTNC)
        swapped_BTNC = wide_BTNC.roll(cos_TC.shape[-1] // 2, dims=-1)
        turned_BTNC = torch.addcmul(wide_BTNC * cos_TC[:, None], swapped_BTNC, sin_TC[:, None]).to(
            qkv_BTE.dtype
        )
    return _laid_out(turned_BTNC, v_BTGC, counts)


def fused(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    *,
    counts: tuple[int, int],
    eps: float = EPS,
) -> Heads:
    """`reference` with its gradient by hand: norm, gain and turn share their passes, and all
    gradients are written where they belong.

    A compiled model takes `reference`, whose passes the compiler joins by itself.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, about half the passes over memory forward and a third backward; keeps
             the product and B T N scales.
    Raises:  ShapeError as `reference`.
    """
    if torch.compiler.is_compiling() or (gain_NC is None and cos_TC is None):
        return reference(qkv_BTE, gain_NC, cos_TC, sin_TC, counts=counts, eps=eps)
    qkv_BTMC = _cut(qkv_BTE, gain_NC, cos_TC, sin_TC, counts)
    turned_BTNC, v_BTGC = _Turned.apply(qkv_BTMC, gain_NC, cos_TC, sin_TC, sum(counts), eps)  # type: ignore[no-untyped-call]
    return _laid_out(turned_BTNC, v_BTGC, counts)


def packed(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    *,
    counts: tuple[int, int],
    eps: float = EPS,
) -> Heads:
    """`reference` with its gradient in one pass of a Triton kernel on an NVIDIA GPU, from three
    gradients to the packed one.

    Compiled or not; forward it is `reference` when compiled, whose passes the compiler joins, and
    `fused` when not. Where nothing is normalised or turned, on a CPU, where Triton does not run,
    and in fp64 it is `fused` both ways.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`; backward reads the gradients and, with a gain, the product once and
             writes the packed gradient once. What Inductor makes of `reference` also writes and
             reads 4 B T N C bytes and reads the product twice, for the gains' gradient.
    Raises:  ShapeError as `reference`; MissingPackage on a GPU without Triton.
    """
    if (
        (gain_NC is None and cos_TC is None)
        or qkv_BTE.dtype == torch.float64
        or not _runs_triton(qkv_BTE)
    ):
        return fused(qkv_BTE, gain_NC, cos_TC, sin_TC, counts=counts, eps=eps)
    _cut(qkv_BTE, gain_NC, cos_TC, sin_TC, counts)
    return _Packed.apply(_passes(), qkv_BTE, gain_NC, cos_TC, sin_TC, counts, eps)  # type: ignore[no-any-return, no-untyped-call]


def rms_normed(hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return the hidden states divided by their root mean square over the last axis, times `gain`;
    in fp32, returned in the input's dtype.

    Shapes:  hidden (..., C); gain (C,), or with the last axes of hidden, such as (N, C) for one a
             head.
    Returns: the shape of hidden.
    Source:  Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return (
        functional.rms_norm(at_least_fp32(hidden), hidden.shape[-1:], eps=eps) * at_least_fp32(gain)
    ).to(hidden.dtype)


class _Turned(torch.autograd.Function):
    """Queries and keys normalised and turned, and the values as they are, from one tensor to one
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTMC: Tensor,
        gain_NC: Tensor | None,
        cos_TC: Tensor | None,
        sin_TC: Tensor | None,
        num_turned: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return turned heads and values, and keep the product and the scales."""
        heads_BTNC, v_BTGC = qkv_BTMC[:, :, :num_turned], qkv_BTMC[:, :, num_turned:]
        wide_BTNC = at_least_fp32(heads_BTNC)
        scale_BTN1 = None
        if gain_NC is not None:
            square_BTN1 = torch.linalg.vector_norm(wide_BTNC, dim=-1, keepdim=True).square_()
            scale_BTN1 = square_BTN1.div_(wide_BTNC.shape[-1]).add_(eps).rsqrt_()
        turned_BTNC = _turn(wide_BTNC, gain_NC, cos_TC, sin_TC)
        if scale_BTN1 is not None:
            turned_BTNC *= scale_BTN1
        ctx.num_turned = num_turned
        ctx.save_for_backward(qkv_BTMC, gain_NC, cos_TC, sin_TC, scale_BTN1)
        return turned_BTNC.to(qkv_BTMC.dtype), v_BTGC

    @staticmethod
    def backward(
        ctx: Any, grad_turned_BTNC: Tensor, grad_v_BTGC: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """Return the gradients of the product and of the gains."""
        qkv_BTMC, gain_NC, cos_TC, sin_TC, scale_BTN1 = ctx.saved_tensors
        wide_BTNC = at_least_fp32(qkv_BTMC[:, :, : ctx.num_turned])
        grad_qkv_BTMC = torch.empty_like(qkv_BTMC, dtype=wide_BTNC.dtype)
        grad_qkv_BTMC[:, :, ctx.num_turned :] = grad_v_BTGC
        grad_BTNC = grad_qkv_BTMC[:, :, : ctx.num_turned]
        _turn_back(at_least_fp32(grad_turned_BTNC), cos_TC, sin_TC, grad_BTNC)
        grad_gain_NC = None
        if gain_NC is not None:
            grad_BTNC *= scale_BTN1
            product_BTNC = grad_BTNC * wide_BTNC
            grad_gain_NC = product_BTNC.sum(dim=(0, 1)).to(gain_NC.dtype)
            along_BTN1 = (product_BTNC * gain_NC).sum(dim=-1, keepdim=True)
            grad_BTNC *= gain_NC
            grad_BTNC.addcmul_(
                wide_BTNC,
                along_BTN1.mul_(scale_BTN1).mul_(scale_BTN1),
                value=-1 / wide_BTNC.shape[-1],
            )
        return grad_qkv_BTMC.to(qkv_BTMC.dtype), grad_gain_NC, None, None, None, None


class _Packed(torch.autograd.Function):
    """Heads as `fused` or a compiler makes them, and their gradients by one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Any,
        qkv_BTE: Tensor,
        gain_NC: Tensor | None,
        cos_TC: Tensor | None,
        sin_TC: Tensor | None,
        counts: tuple[int, int],
        eps: float,
    ) -> Heads:
        """Return the heads, and keep the product."""
        ctx.passes, ctx.eps = passes, eps
        ctx.save_for_backward(qkv_BTE, gain_NC, cos_TC, sin_TC)
        return fused(qkv_BTE, gain_NC, cos_TC, sin_TC, counts=counts, eps=eps)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[None, Tensor, Tensor | None, None, None, None, None]:
        """Return the gradients of the product and of the gains."""
        qkv_BTE, gain_NC, cos_TC, sin_TC = ctx.saved_tensors
        grad_BTE, grad_gain_NC = ctx.passes.gradient(
            *grads, qkv_BTE, gain_NC, cos_TC, sin_TC, ctx.eps
        )
        return (
            None,
            grad_BTE,
            None if gain_NC is None else grad_gain_NC.to(gain_NC.dtype),
            None,
            None,
            None,
            None,
        )


def _runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _passes() -> Any:
    try:
        from flatout.ops import head_passes
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingPackage(
            "The speedup packed-heads takes the package triton, which is not installed.",
            fix="Install it: `pip install triton`; or leave packed-heads out.",
        ) from error
    return head_passes


def _turn(
    wide_BTNC: Tensor, gain_NC: Tensor | None, cos_TC: Tensor | None, sin_TC: Tensor | None
) -> Tensor:
    """The heads times the gains, turned: both in the tables that they are multiplied by."""
    gain = (
        wide_BTNC.new_ones(wide_BTNC.shape[2:]) if gain_NC is None else gain_NC.to(wide_BTNC.dtype)
    )
    if cos_TC is None or sin_TC is None:
        return wide_BTNC * gain
    half = cos_TC.shape[-1] // 2
    cos_TNC = (cos_TC[:, None] * gain).to(wide_BTNC.dtype)
    sin_TNC = (sin_TC[:, None] * gain.roll(half, dims=-1)).to(wide_BTNC.dtype)
    turned_BTNC = wide_BTNC * cos_TNC
    turned_BTNC[..., :half].addcmul_(wide_BTNC[..., half:], sin_TNC[..., :half])
    turned_BTNC[..., half:].addcmul_(wide_BTNC[..., :half], sin_TNC[..., half:])
    return turned_BTNC


def _turn_back(
    grad_BTNC: Tensor, cos_TC: Tensor | None, sin_TC: Tensor | None, out_BTNC: Tensor
) -> None:
    """The gradients turned by the opposite angles, into `out_BTNC`."""
    if cos_TC is None or sin_TC is None:
        out_BTNC.copy_(grad_BTNC)
        return
    half = cos_TC.shape[-1] // 2
    cos_T1C, sin_T1C = cos_TC[:, None].to(grad_BTNC.dtype), sin_TC[:, None].to(grad_BTNC.dtype)
    torch.mul(grad_BTNC, cos_T1C, out=out_BTNC)
    out_BTNC[..., :half].addcmul_(grad_BTNC[..., half:], sin_T1C[..., half:])
    out_BTNC[..., half:].addcmul_(grad_BTNC[..., :half], sin_T1C[..., :half])


def _laid_out(turned_BTNC: Tensor, v_BTGC: Tensor, counts: tuple[int, int]) -> Heads:
    q_BTHC, k_BTGC = torch.split(turned_BTNC, list(counts), dim=2)
    return q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)


def _cut(
    qkv_BTE: Tensor,
    gain_NC: Tensor | None,
    cos_TC: Tensor | None,
    sin_TC: Tensor | None,
    counts: tuple[int, int],
) -> Tensor:
    num_heads = counts[0] + 2 * counts[1]
    head_dim, rest = divmod(qkv_BTE.shape[-1], num_heads)
    table = (qkv_BTE.shape[1], head_dim)
    fits = all(
        given is None or given.shape == wanted
        for given, wanted in ((gain_NC, (sum(counts), head_dim)), (cos_TC, table), (sin_TC, table))
    )
    if rest or not fits or (cos_TC is None) != (sin_TC is None):
        shapes = [
            None if given is None else tuple(given.shape) for given in (gain_NC, cos_TC, sin_TC)
        ]
        raise ShapeError(
            f"A product {tuple(qkv_BTE.shape)} was to be cut into {num_heads} heads with gains, cosines and sines of shapes {shapes}.",
            fix=f"Give a product (B, T, {num_heads} C), gains ({sum(counts)}, C), and both tables (T, C) or neither.",
        )
    return torch.unflatten(qkv_BTE, -1, (num_heads, head_dim))
