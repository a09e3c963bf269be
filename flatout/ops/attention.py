"""Causal self-attention with grouped heads, a sliding window and packed documents.

Letters: B rows, T queries, S keys, H query heads, G key and value heads, C head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, block_sparse, flash_attention_4, segments

FEWEST_QUERIES = 8
"""Below, rounding the factors costs more than their product: a model that writes one token at a
time.
"""
MOST_KEYS = 512
"""Beyond, the scores of a micro-batch leave the caches."""


def reference(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Softmax of the scaled scores over the keys a query may see, times their values.

    The queries are the last T of the S positions. A query sees itself and what came before it: with
    `window`, itself and the window - 1 before it; with `doc_ids_BT`, only positions of its own
    document. Query head h reads key head h // (H / G). What a query may not see counts for nothing
    as long as it is finite: its weight is 0, and 0 x NaN is NaN. These plain matmuls over the whole
    square are the definition; every variant must match it, gradients included.

    Shapes:  q_BHTC (B, H, T, C); k_BGSC, v_BGSC (B, G, S, C), G divides H, S >= T; doc_ids_BT (B,
             T) integers, then S = T.
    Returns: out_BHTC in the dtype of v; scores and softmax are fp32 (fp64 for fp64).
    Units:   window counts keys, the query's own included.
    Cost:    4 B H T S C FLOP forward, twice that backward; B H T S scores are kept for backward.
    Raises:  ShapeError when the shapes do not fit or the window is below 1.
    Source:  Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023,
             arXiv:2305.13245.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    heads_per_group = q_BHTC.shape[1] // k_BGSC.shape[1]
    k_BHSC = k_BGSC.repeat_interleave(heads_per_group, dim=1)
    v_BHSC = v_BGSC.repeat_interleave(heads_per_group, dim=1)
    scores_BHTS = at_least_fp32(q_BHTC @ k_BHSC.transpose(-2, -1)) / math.sqrt(q_BHTC.shape[-1])
    visible = _visible(q_BHTC.shape[2], k_BGSC.shape[2], doc_ids_BT, window, q_BHTC.device)
    weights_BHTS = scores_BHTS.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return weights_BHTS.to(v_BHSC.dtype) @ v_BHSC


def fused(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`reference` through torch's scaled_dot_product_attention: flash or cuDNN kernels, the scores
    are never whole.

    torch itself tries cuDNN first on GPUs of capability 9.x and 10.x (from cuDNN 9.15.1 on, as
    torch 2.11 to 2.13 come with), flash elsewhere, and takes the next kernel where one cannot:
    heads above 128 and of no multiple of 8 are not for cuDNN. Without documents and with a window
    that covers all, one query, or as many as keys, need no mask; otherwise a boolean mask (T, S),
    or (B, 1, T, S) with documents, is built and the kernel skips nothing.

    Shapes:  as `reference`.
    Returns: out_BHTC, laid out in memory as (B, T, H, C).
    Cost:    as `reference`; keeps B H T log-sums besides its inputs and its output.
    Raises:  ShapeError as `reference`.
    Source:  Dao 2023, arXiv:2307.08691.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    num_queries, num_keys = q_BHTC.shape[2], k_BGSC.shape[2]
    grouped = q_BHTC.shape[1] != k_BGSC.shape[1]
    if (
        doc_ids_BT is None
        and num_queries in {1, num_keys}
        and (window is None or window >= num_keys)
    ):
        return functional.scaled_dot_product_attention(
            q_BHTC, k_BGSC, v_BGSC, is_causal=num_queries > 1, enable_gqa=grouped
        )
    visible = _visible(num_queries, num_keys, doc_ids_BT, window, q_BHTC.device)
    return functional.scaled_dot_product_attention(
        q_BHTC, k_BGSC, v_BGSC, attn_mask=visible, enable_gqa=grouped
    )


def flex(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`reference` through FlexAttention: blocks of 128 tokens in which a document's or the window's
    bounds leave nothing are skipped.

    For GPUs: it has no backward on a CPU. That, and what it could not take or would skip nothing of
    (windows of 128 tokens and fewer, as many keys as a query sees, more keys than queries, heads
    below 16 or above 256), is left to `fused`.

    Shapes:  as `reference`.
    Returns: out_BHTC.
    Cost:    as `reference`, of the blocks that are not skipped; keeps B H T log-sums besides its
             inputs and its output.
    Raises:  ShapeError as `reference`.
    Source:  Dong et al. 2024, arXiv:2412.05496.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    if not block_sparse.takes(q_BHTC, k_BGSC, doc_ids_BT, window):
        return fused(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=window)
    return _on_gpu(block_sparse.attend, q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)


def varlen(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`reference` through torch's flash attention of segments: all rows are one line, cut where a
    document ends.

    For GPUs and bf16 or fp16, with documents; all else, and heads that the kernel does not take
    (above 192 or no multiple of 8), is left to `flex`. The tokens of a document stand side by side,
    and a row holds at most T / 64 + 1 documents on average: the feed, which numbers the documents
    on the host, refuses a micro-batch with more (`most_documents`) before it reaches the device.

    Shapes:  as `reference`.
    Returns: out_BHTC, laid out in memory as (B, T, H, C).
    Cost:    as `reference`, of the pairs within a document; keeps H B T log-sums besides its inputs
             and its output.
    Raises:  ShapeError as `reference`; without that feed, a failed assertion of the device when
             there are more documents.
    Source:  Dao 2023, arXiv:2307.08691.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    if not segments.takes(q_BHTC, doc_ids_BT, window):
        return flex(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=window)
    return _on_gpu(segments.attend, q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)


def flash4(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`reference` through FlashAttention 4, for NVIDIA GPUs of capability 9.0 and more and the
    package flash-attn-4.

    For bf16 and fp16, heads up to 128 of a multiple of 8, and nothing masked but the future; all
    else is left to `flex`.

    Shapes:  as `reference`.
    Returns: out_BHTC, laid out in memory as (B, T, H, C).
    Cost:    as `reference`, of the pairs that are visible; keeps B H T log-sums besides its inputs
             and its output.
    Raises:  ShapeError as `reference`; MissingPackage.
    Source:  Zadouri et al. 2026, arXiv:2603.05451; on Hopper its kernels follow Shah et al. 2024,
             arXiv:2407.08608.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    if not flash_attention_4.takes(q_BHTC, k_BGSC, doc_ids_BT, window):
        return flex(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=window)
    return _on_gpu(flash_attention_4.attend, q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)


def most_documents(attend: Callable[..., Tensor]) -> Callable[[int, int], int] | None:
    """Return, of a variant, (rows, tokens of a row) -> the documents that it has room for; None
    where that is any number.
    """
    return segments.room if attend is varlen else None


def _on_gpu(
    attend: Callable[..., Tensor],
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    doc_ids_BT: Tensor | None,
    window: int | None,
) -> Tensor:
    """Call a kernel of GPUs; elsewhere `fused`, and where only bytes are counted, that without the
    mask which the kernel does not make.
    """
    if q_BHTC.is_cuda:
        return attend(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    if isinstance(q_BHTC, FakeTensor):
        return fused(q_BHTC, k_BGSC, v_BGSC)
    return fused(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=window)


def bf16(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`reference` with its products in bfloat16 and the softmax in fp32: for CPUs that multiply
    bfloat16.

    On those it is faster than the fused kernel as long as the scores stay in the caches: longer
    windows, other types than fp32 and few queries are left to `fused`.

    Shapes:  as `reference`.
    Returns: out_BHTC.
    Cost:    as `reference`, at twice the rate; B H T S weights are kept in two bytes.
    Raises:  ShapeError as `reference`.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT, window)
    is_fp32 = (
        q_BHTC.dtype == k_BGSC.dtype == v_BGSC.dtype == torch.float32
        and not torch.is_autocast_enabled(q_BHTC.device.type)
    )
    if not is_fp32 or q_BHTC.shape[2] < FEWEST_QUERIES or k_BGSC.shape[2] > MOST_KEYS:
        return fused(q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=window)
    heads_per_group = q_BHTC.shape[1] // k_BGSC.shape[1]
    if heads_per_group > 1:
        k_BGSC, v_BGSC = (
            tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (k_BGSC, v_BGSC)
        )
    visible = _visible(q_BHTC.shape[2], k_BGSC.shape[2], doc_ids_BT, window, q_BHTC.device)
    return _Bf16.apply(q_BHTC, k_BGSC, v_BGSC, torch.where(visible, 0.0, float("-inf")))  # type: ignore[no-any-return, no-untyped-call]


class _Bf16(torch.autograd.Function):
    """Softmax of the biased scores times the values; each factor of a product is rounded once."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, bias_TS: Tensor
    ) -> Tensor:
        """Return what each query gathers, and keep the factors, rounded."""
        ctx.scale = 1 / math.sqrt(q_BHTC.shape[-1])
        q_BHTC, k_BHSC, v_BHSC = q_BHTC.bfloat16(), k_BHSC.bfloat16(), v_BHSC.bfloat16()
        scores_BHTS = (q_BHTC @ k_BHSC.mT).float()
        weights_BHTS = torch.add(bias_TS, scores_BHTS, alpha=ctx.scale).softmax(dim=-1).bfloat16()
        ctx.save_for_backward(q_BHTC, k_BHSC, v_BHSC, weights_BHTS)
        return (weights_BHTS @ v_BHSC).float()

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values."""
        q_BHTC, k_BHSC, v_BHSC, weights_BHTS = ctx.saved_tensors
        grad_BHTC = grad_BHTC.bfloat16()
        grad_v_BHSC = (weights_BHTS.mT @ grad_BHTC).float()
        grad_weights_BHTS = (grad_BHTC @ v_BHSC.mT).float()
        wide_BHTS = weights_BHTS.float()
        centred_BHTS = grad_weights_BHTS - (grad_weights_BHTS * wide_BHTS).sum(dim=-1, keepdim=True)
        grad_scores_BHTS = (wide_BHTS * centred_BHTS).mul_(ctx.scale).bfloat16()
        return (
            (grad_scores_BHTS @ k_BHSC).float(),
            (grad_scores_BHTS.mT @ q_BHTC).float(),
            grad_v_BHSC,
            None,
        )


def _visible(
    num_queries: int,
    num_keys: int,
    doc_ids_BT: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Which key each query may see: (T, S), or (B, 1, T, S) with documents."""
    query_T = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_S = torch.arange(num_keys, device=device)[None, :]
    visible = key_S <= query_T
    if window is not None:
        visible = visible & (key_S > query_T - window)
    if doc_ids_BT is not None:
        visible = visible & (doc_ids_BT[:, None, :, None] == doc_ids_BT[:, None, None, :])
    return visible


def _check(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, doc_ids_BT: Tensor | None, window: int | None
) -> None:
    rows, heads, num_queries, head_dim = q_BHTC.shape
    if (
        k_BGSC.shape != v_BGSC.shape
        or k_BGSC.shape[0] != rows
        or k_BGSC.shape[3] != head_dim
        or k_BGSC.shape[2] < num_queries
    ):
        raise ShapeError(
            f"Attention got queries {tuple(q_BHTC.shape)}, keys {tuple(k_BGSC.shape)}, values {tuple(v_BGSC.shape)}.",
            fix="Give keys and values one shape, with the queries' rows and head size and at least as many positions.",
        )
    if heads % k_BGSC.shape[1]:
        raise ShapeError(
            f"{heads} query heads cannot share {k_BGSC.shape[1]} key heads evenly.",
            fix="Set model.num_kv_heads to a divisor of num_heads.",
        )
    if window is not None and window < 1:
        raise ShapeError(
            f"A window of {window} keys leaves nothing to attend to.",
            fix="Set model.window=1 or more, or leave it out.",
        )
    if doc_ids_BT is not None and (
        doc_ids_BT.shape != (rows, num_queries) or k_BGSC.shape[2] != num_queries
    ):
        raise ShapeError(
            f"Document ids {tuple(doc_ids_BT.shape)} do not name the positions of {tuple(q_BHTC.shape)} queries and {tuple(k_BGSC.shape)} keys.",
            fix="Give one id for each row and position, and as many queries as keys.",
        )
