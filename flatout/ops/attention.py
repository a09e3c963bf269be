"""Causal self-attention with grouped heads, a sliding window and packed documents.

Letters: B rows, T queries, S keys, H query heads, G key and value heads, C head size, N blocks of
         tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, product_dtype, runs_triton

FEWEST_QUERIES = 8
"""With fewer queries, as in token-by-token decoding, rounding the factors costs more than their
product.
"""
MOST_KEYS = 512
"""With more keys, the scores of a micro-batch no longer fit into the caches."""
BLOCK_TOKENS = 128
"""Tokens per block of FlexAttention, the unit that is computed or skipped. Its kernels are tuned
for this size.
"""
FLEX_HEADS = range(16, 257)
"""Head sizes of FlexAttention: Triton multiplies no narrower tiles, and wider ones exceed the
shared memory of a multiprocessor.
"""
MOST_FLASH, AMPERE = 256, 8
"""The largest head size of the flash kernel, and the oldest GPUs that it runs on."""
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Mask = Tensor | BlockMask | None
"""What is added to the scores, 0 or minus infinity, (T, S) or (B, 1, T, S), or the blocks of
FlexAttention.
"""


def reference(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BS: Tensor | None = None,
    window: int | None = None,
    mask: Mask = None,
) -> Tensor:
    """Return the values of the visible keys, weighted by the softmax of the scaled scores.

    The queries are the last T of the S positions. A query sees its own position and earlier ones:
    with `window`, only the last `window` positions, its own included, and with `doc_ids_BS`, only
    positions of its own document. Query head h reads key head h // (H / G). `mask` is the mask of
    these documents and this window, if `masks` has built it for all layers. Masked keys and values
    have no effect as long as they are finite: their weight is 0, and 0 x NaN is NaN. These plain
    matmuls over all pairs are the definition. Every variant must match them, gradients included.

    Shapes:  q_BHTC (B, H, T, C); k_BGSC, v_BGSC (B, G, S, C), G divides H, S >= T; doc_ids_BS (B,
             S) integers.
    Returns: out_BHTC in the dtype of v. Scores and softmax are fp32 (fp64 for fp64).
    Units:   window counts keys, the query's own included.
    Cost:    4 B H T S C FLOP forward, twice that backward; B H T S scores are kept for backward.
    Raises:  ShapeError when the shapes do not match.
    Source:  Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023,
             arXiv:2305.13245.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BS)
    k_BHSC, v_BHSC = _repeat_groups(q_BHTC, k_BGSC), _repeat_groups(q_BHTC, v_BGSC)
    scores_BHTS = at_least_fp32(q_BHTC @ k_BHSC.transpose(-2, -1)) / math.sqrt(q_BHTC.shape[-1])
    added = _added(q_BHTC, k_BGSC, doc_ids_BS, window, mask)
    weights_BHTS = (scores_BHTS + added).softmax(dim=-1)
    return weights_BHTS.to(v_BHSC.dtype) @ v_BHSC


def fused(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BS: Tensor | None = None,
    window: int | None = None,
    mask: Mask = None,
) -> Tensor:
    """`reference` through scaled_dot_product_attention, which never stores all scores.

    torch tries cuDNN first on GPUs of capability 9.x and 10.x (from cuDNN 9.15.1 on, which torch
    2.11 to 2.13 ship), flash elsewhere, and falls back to the next kernel: cuDNN does not support
    heads above 128 or head sizes that are not a multiple of 8. No mask is needed without documents
    when the window covers everything and there is one query or as many as keys. With more keys,
    when the flash kernel can be called by name, whose causal mask ends at the last query and key.
    Otherwise the mask is added, and the kernel skips nothing.

    Shapes:  as `reference`.
    Returns: out_BHTC, laid out in memory as (B, T, H, C).
    Cost:    as `reference`; keeps B H T log-sums besides its inputs and its output.
    Raises:  ShapeError as `reference`.
    Source:  Dao 2023, arXiv:2307.08691.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BS)
    num_queries, num_keys = q_BHTC.shape[2], k_BGSC.shape[2]
    is_whole = doc_ids_BS is None and (window is None or window >= num_keys)
    is_plain = is_whole and num_queries in {1, num_keys}
    dtype = product_dtype(q_BHTC, k_BGSC)
    if is_whole and not is_plain and _runs_flash(q_BHTC, dtype):
        # `torch.nn.attention.bias.causal_lower_right` calls it too, but does not compile
        qkv = (each.to(dtype) for each in (q_BHTC, k_BGSC, v_BGSC))
        out_BHTC: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, True)[0]
        return out_BHTC
    return functional.scaled_dot_product_attention(
        q_BHTC,
        k_BGSC,
        v_BGSC,
        attn_mask=None if is_plain else _added(q_BHTC, k_BGSC, doc_ids_BS, window, mask),
        is_causal=is_plain and num_queries > 1,
        enable_gqa=q_BHTC.shape[1] != k_BGSC.shape[1],
    )


def _runs_flash(q_BHTC: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the flash kernel runs on the GPU of these queries in this dtype."""
    fits = q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= MOST_FLASH
    return fits and dtype in (torch.bfloat16, torch.float16) and _has_flash(q_BHTC.device)


def _has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= AMPERE


def flex(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BS: Tensor | None = None,
    window: int | None = None,
    mask: Mask = None,
) -> Tensor:
    """`reference` through FlexAttention, which skips blocks of 128 tokens that are fully masked.

    For GPUs: it has no backward pass on a CPU. `fused` handles CPUs and the inputs that
    FlexAttention does not support or has nothing to skip for: sequences of at most 128 tokens,
    sequences without documents that are no longer than the window, more keys than queries, heads
    below 16 or above 256. In eager mode, the first shape is compiled, and once more
    all others: each gets its own kernel, so few shapes are best.

    Shapes:  as `reference`.
    Returns: out_BHTC.
    Cost:    as `reference`, for the blocks that are not skipped; keeps B H T log-sums besides its
             inputs and its output.
    Raises:  ShapeError as `reference`.
    Source:  Dong et al. 2024, arXiv:2412.05496.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BS)
    num_tokens, head_dim = q_BHTC.shape[2:]
    fits = head_dim in FLEX_HEADS and q_BHTC.dtype in FLEX_DTYPES
    fits = fits and k_BGSC.shape[2] == num_tokens and _masks_blocks(num_tokens, doc_ids_BS, window)
    if not fits or not runs_triton(q_BHTC):
        return fused(q_BHTC, k_BGSC, v_BGSC, doc_ids_BS=doc_ids_BS, window=window, mask=mask)
    dtype = product_dtype(q_BHTC, q_BHTC)
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out_BHTC: Tensor = kernel(
        q_BHTC.to(dtype),
        k_BGSC.to(dtype),
        v_BGSC.to(dtype),
        block_mask=mask
        if isinstance(mask, BlockMask)
        else block_mask(q_BHTC[:, 0, :, 0], doc_ids_BS, window),
        enable_gqa=q_BHTC.shape[1] != k_BGSC.shape[1],
    )
    return out_BHTC


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, fullgraph=True)


def masks(
    attend: Callable[..., Tensor],
    tokens_BT: Tensor,
    doc_ids_BS: Tensor | None,
    windows: Iterable[int | None],
    dtype: torch.dtype,
) -> dict[int | None, Mask]:
    """Return the `mask` of a micro-batch by window, for all layers, without those of whole rows.

    `dtype` is that of queries and keys.

    Shapes:  tokens_BT, doc_ids_BS (B, T) integers: S is T here.
    Memory:  B T^2 elements per window with documents, T^2 without.
    """
    found: dict[int | None, Mask] = {}
    if attend is bf16 and dtype == torch.float32 and tokens_BT.shape[1] > MOST_KEYS:
        dtype = torch.bfloat16  # in which it calls the fused kernel
    for window in {*windows}:
        if doc_ids_BS is None and (window is None or window >= tokens_BT.shape[1]):
            continue
        if attend is flex and tokens_BT.is_cuda:
            if _masks_blocks(tokens_BT.shape[1], doc_ids_BS, window):
                found[window] = block_mask(tokens_BT, doc_ids_BS, window)
        else:
            rows_BHTC = tokens_BT[:, None, :, None]
            found[window] = _added(rows_BHTC, rows_BHTC, doc_ids_BS, window, dtype=dtype)
    return found


def _masks_blocks(num_tokens: int, doc_ids_BS: Tensor | None, window: int | None) -> bool:
    """Return whether documents or the window may mask a whole block."""
    is_masked = doc_ids_BS is not None or (window is not None and window < num_tokens)
    return is_masked and num_tokens > BLOCK_TOKENS


def block_mask(tokens_BT: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> BlockMask:
    """Return the blocks of a micro-batch that attention computes, by torch's `create_block_mask`.

    Shapes:  tokens_BT (B, T), of which only shape and device matter; doc_ids_BT (B, T) integers.
    Cost:    B T^2 comparisons, which are not stored on a GPU.
    """

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        if doc_ids_BT is not None:
            visible = visible & (doc_ids_BT[row, query] == doc_ids_BT[row, key])
        return visible

    rows, num_tokens = tokens_BT.shape
    is_plain = torch.compiler.is_compiling() or not tokens_BT.is_cuda
    create: Callable[..., BlockMask] = create_block_mask if is_plain else _compiled_mask()
    shape = (rows if doc_ids_BT is not None else None, None, num_tokens, num_tokens)
    return create(is_visible, *shape, device=tokens_BT.device, BLOCK_SIZE=BLOCK_TOKENS)


@cache
def _compiled_mask() -> Callable[..., BlockMask]:
    """Return `create_block_mask` without the whole mask, which it stores unless compiled."""
    return torch.compile(create_block_mask)


def bf16(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    doc_ids_BS: Tensor | None = None,
    window: int | None = None,
    mask: Mask = None,
) -> Tensor:
    """`reference` with matmuls in bfloat16 and the softmax in fp32, for CPUs with bf16 matmuls.

    On such CPUs it is faster than the fused kernel as long as the scores fit into the caches.
    `fused` handles longer sequences, in bfloat16 too, other dtypes than fp32 and bfloat16, and few
    queries.

    Shapes:  as `reference`.
    Returns: out_BHTC.
    Cost:    as `reference`, at twice the rate; B H T S weights are kept in two bytes.
    Raises:  ShapeError as `reference`.
    """
    _check(q_BHTC, k_BGSC, v_BGSC, doc_ids_BS)
    may_round = (
        q_BHTC.dtype == k_BGSC.dtype == v_BGSC.dtype
        and q_BHTC.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_autocast_enabled(q_BHTC.device.type)
        and q_BHTC.shape[2] >= FEWEST_QUERIES
    )
    options: Any = {"doc_ids_BS": doc_ids_BS, "window": window, "mask": mask}
    if not may_round:
        return fused(q_BHTC, k_BGSC, v_BGSC, **options)
    if k_BGSC.shape[2] > MOST_KEYS:
        rounded = (each.bfloat16() for each in (q_BHTC, k_BGSC, v_BGSC))
        return fused(*rounded, **options).to(q_BHTC.dtype)
    added = _added(q_BHTC, k_BGSC, doc_ids_BS, window, mask, dtype=torch.float32)
    if q_BHTC.shape[1] != k_BGSC.shape[1]:
        k_BGSC, v_BGSC = _repeat_groups(q_BHTC, k_BGSC), _repeat_groups(q_BHTC, v_BGSC)
    return _Bf16.apply(q_BHTC, k_BGSC, v_BGSC, added)  # type: ignore[no-any-return, no-untyped-call]


class _Bf16(torch.autograd.Function):
    """Softmax of the biased scores times the values. Each factor of a product is rounded once."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, bias_TS: Tensor
    ) -> Tensor:
        """Return the output of each query. The rounded factors are kept for backward."""
        ctx.scale, ctx.dtype = 1 / math.sqrt(q_BHTC.shape[-1]), q_BHTC.dtype
        q_BHTC, k_BHSC, v_BHSC = q_BHTC.bfloat16(), k_BHSC.bfloat16(), v_BHSC.bfloat16()
        scores_BHTS = (q_BHTC @ k_BHSC.mT).float()
        weights_BHTS = torch.add(bias_TS, scores_BHTS, alpha=ctx.scale).softmax(dim=-1).bfloat16()
        ctx.save_for_backward(q_BHTC, k_BHSC, v_BHSC, weights_BHTS)
        return (weights_BHTS @ v_BHSC).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values."""
        q_BHTC, k_BHSC, v_BHSC, weights_BHTS = ctx.saved_tensors
        grad_BHTC = grad_BHTC.bfloat16()
        grad_v_BHSC = (weights_BHTS.mT @ grad_BHTC).to(ctx.dtype)
        grad_weights_BHTS = (grad_BHTC @ v_BHSC.mT).float()
        wide_BHTS = weights_BHTS.float()
        centred_BHTS = grad_weights_BHTS - (grad_weights_BHTS * wide_BHTS).sum(dim=-1, keepdim=True)
        grad_scores_BHTS = (wide_BHTS * centred_BHTS).mul_(ctx.scale).bfloat16()
        return (
            (grad_scores_BHTS @ k_BHSC).to(ctx.dtype),
            (grad_scores_BHTS.mT @ q_BHTC).to(ctx.dtype),
            grad_v_BHSC,
            None,
        )


def _repeat_groups(q_BHTC: Tensor, kv_BGSC: Tensor) -> Tensor:
    """Return a copy with one key or value head per query head."""
    return kv_BGSC.repeat_interleave(q_BHTC.shape[1] // kv_BGSC.shape[1], dim=1)


def _added(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    doc_ids_BS: Tensor | None,
    window: int | None,
    mask: Mask = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what is added to the scores: the mask, if it is known.

    Its dtype is that of the queries by default.
    """
    dtype = dtype or q_BHTC.dtype
    if isinstance(mask, Tensor):
        return mask.to(dtype)
    num_queries, num_keys, device = q_BHTC.shape[2], k_BGSC.shape[2], q_BHTC.device
    query_T = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_S = torch.arange(num_keys, device=device)[None, :]
    visible = key_S <= query_T
    if window is not None:
        visible = visible & (key_S > query_T - window)
    if doc_ids_BS is not None:
        visible = visible & (
            doc_ids_BS[:, None, -num_queries:, None] == doc_ids_BS[:, None, None, :]
        )
    nothing = torch.zeros((), dtype=dtype, device=device)
    return torch.where(visible, nothing, float("-inf"))


def _check(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, doc_ids_BS: Tensor | None) -> None:
    rows, heads, num_queries, head_dim = q_BHTC.shape
    _, groups, num_keys, _ = k_BGSC.shape
    given = [
        None if tensor is None else tuple(tensor.shape)
        for tensor in (q_BHTC, k_BGSC, v_BGSC, doc_ids_BS)
    ]
    if (
        not given[1] == given[2] == (rows, groups, num_keys, head_dim)
        or num_keys < num_queries
        or heads % groups
        or (doc_ids_BS is not None and given[3] != (rows, num_keys))
    ):
        raise ShapeError(
            "Attention got queries {}, keys {}, values {} and document ids {}.".format(*given),
            fix="Keys and values must have one shape, with the rows and the head size of the "
            "queries, a divisor of their heads and at least as many positions. With document ids, "
            "one per row and key.",
        )
