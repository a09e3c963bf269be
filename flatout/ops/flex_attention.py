"""FlexAttention on a GPU with masks built from block bounds: `flatout.ops.attention.flex`.

Letters: B rows, T tokens, H query heads, G key and value heads, C head size, N blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flatout.ops import product_dtype

BLOCK_TOKENS = 128
"""Tokens per block, the unit that is computed or skipped; FlexAttention's kernels are tuned for
this size.
"""
HEAD_SIZES = (16, 256)
"""The smallest and largest C: Triton multiplies no narrower tiles, and wider ones exceed the shared
memory of a multiprocessor.
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(q_BHTC: Tensor, k_BGSC: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Return whether FlexAttention supports these inputs and has a block to skip.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    num_tokens, head_dim = q_BHTC.shape[2:]
    fits = HEAD_SIZES[0] <= head_dim <= HEAD_SIZES[1] and q_BHTC.dtype in DTYPES
    return fits and k_BGSC.shape[2] == num_tokens and masks(num_tokens, doc_ids_BT, window)


def masks(num_tokens: int, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Return whether documents or the window may mask a whole block.

    Shapes:  doc_ids_BT (B, T) integers.
    """
    is_masked = doc_ids_BT is not None or (window is not None and window < num_tokens)
    return is_masked and num_tokens > BLOCK_TOKENS


def attend(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTC: Tensor,
    doc_ids_BT: Tensor | None,
    window: int | None,
    blocks: BlockMask | None = None,
) -> Tensor:
    """Return causal attention within documents and window, compiled here in eager mode.

    `blocks` is their `block_mask`, built here if it is None. Eager mode compiles for the first
    shape and once more for all others: each gets its own kernel, so few shapes are best.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C); doc_ids_BT (B, T) integers.
    Returns: out_BHTC in the dtype of q, in autocast's dtype under autocast.
    """
    q_BHTC, k_BGTC, v_BGTC = autocast(q_BHTC, k_BGTC, v_BGTC)
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out_BHTC: Tensor = kernel(
        q_BHTC,
        k_BGTC,
        v_BGTC,
        block_mask=block_mask(q_BHTC[:, 0, :, 0], doc_ids_BT, window) if blocks is None else blocks,
        enable_gqa=q_BHTC.shape[1] != k_BGTC.shape[1],
    )
    return out_BHTC


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype that autocast uses for products; unchanged without autocast.

    Shapes:  any.
    """
    return tuple(tensor.to(product_dtype(tensor, tensor)) for tensor in tensors)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(tokens_BT: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> BlockMask:
    """Return the BlockMask of a micro-batch.

    It says which key blocks a query block reads, and which of these need no masking. It is derived
    from the first and last position and the smallest and largest document id of each block, so no
    T x T mask is built. A block is skipped only if no pair in it is visible; the converse holds if
    ids never decrease along a row, as in packed rows. An incomplete last block never counts as
    fully visible.

    Shapes:  tokens_BT (B, T), of which only shape and device matter; doc_ids_BT (B, T) integers.
    Cost:    B N^2 comparisons; keeps 8 B N^2 integers of 4 bytes.
    """

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        if doc_ids_BT is not None:
            visible = visible & (doc_ids_BT[row, query] == doc_ids_BT[row, key])
        return visible

    num_tokens = tokens_BT.shape[1]
    some_BNN, all_BNN = _some_and_all_visible(doc_ids_BT, window, num_tokens, tokens_BT.device)
    return BlockMask.from_kv_blocks(
        *_counts_and_indices(some_BNN & ~all_BNN),
        *_counts_and_indices(all_BNN),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


def _some_and_all_visible(
    doc_ids_BT: Tensor | None, window: int | None, num_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return for which query and key blocks some pair, and every pair, is visible."""
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    first_N = torch.arange(num_blocks, device=device) * BLOCK_TOKENS
    last_N = (first_N + BLOCK_TOKENS - 1).clamp_max(num_tokens - 1)
    is_full_N = last_N - first_N == BLOCK_TOKENS - 1
    # Distances from keys to queries; query blocks are rows.
    least_NN, most_NN = first_N[:, None] - last_N, last_N[:, None] - first_N
    some_BNN = (most_NN >= 0)[None]
    all_BNN = ((least_NN >= 0) & is_full_N[:, None] & is_full_N)[None]
    if window is not None:
        some_BNN = some_BNN & (least_NN < window)
        all_BNN = all_BNN & (most_NN < window)
    if doc_ids_BT is not None:
        missing = num_blocks * BLOCK_TOKENS - num_tokens
        if missing:
            doc_ids_BT = torch.cat((doc_ids_BT, doc_ids_BT[:, -1:].expand(-1, missing)), dim=1)
        low_BN, high_BN = torch.unflatten(doc_ids_BT, 1, (num_blocks, BLOCK_TOKENS)).aminmax(dim=-1)
        query_low, query_high, key_low, key_high = (
            low_BN[:, :, None],
            high_BN[:, :, None],
            low_BN[:, None],
            high_BN[:, None],
        )
        some_BNN = some_BNN & (query_low <= key_high) & (key_low <= query_high)
        all_BNN = all_BNN & (query_low == key_high) & (key_low == query_high)
    return some_BNN, all_BNN


def _counts_and_indices(is_wanted_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block reads, and the key blocks with those first.

    The extra dimension of size 1 stands for the heads.
    """
    wanted_B1NN = is_wanted_BNN[:, None].to(torch.int32)
    order_B1NN = wanted_B1NN.argsort(dim=-1, descending=True, stable=True)
    return wanted_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)
