"""FlexAttention over blocks of tokens: what `flatout.ops.attention.flex` does on a GPU.

Letters: B rows, T tokens, H query heads, G key and value heads, C head size, N blocks of tokens.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

BLOCK_TOKENS = 128
"""Tokens of a block: the unit that is computed or skipped, the one that FlexAttention's kernels are
tuned for.
"""
HEAD_SIZES = (16, 256)
"""The smallest and the largest C: Triton multiplies no narrower tiles, and wider ones overflow a
multiprocessor's memory.
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_KEPT = WeakTensorKeyDictionary()
"""Document ids to their version and window, and the mask made of them: in eager mode each layer
asks for the same.
"""


def takes(q_BHTC: Tensor, k_BGSC: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Say whether FlexAttention can take these shapes and types, and has a block to skip.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    num_tokens, head_dim = q_BHTC.shape[2:]
    is_masked = doc_ids_BT is not None or (window is not None and window < num_tokens)
    is_long = k_BGSC.shape[2] == num_tokens > BLOCK_TOKENS
    return (
        is_masked
        and is_long
        and HEAD_SIZES[0] <= head_dim <= HEAD_SIZES[1]
        and q_BHTC.dtype in DTYPES
    )


def attend(
    q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, doc_ids_BT: Tensor | None, window: int | None
) -> Tensor:
    """Return causal attention within documents and window; what is not being compiled already is
    compiled here.

    Eager mode compiles for the first shape, and once more for all others: each has its own kernel,
    so few are best.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C); doc_ids_BT (B, T) integers.
    Returns: out_BHTC in the dtype of q, narrowed under autocast.
    """
    q_BHTC, k_BGTC, v_BGTC = narrowed(q_BHTC, k_BGTC, v_BGTC)
    num_tokens, grouped = q_BHTC.shape[2], q_BHTC.shape[1] != k_BGTC.shape[1]
    if torch.compiler.is_compiling():
        mask = block_mask(doc_ids_BT, window, num_tokens, q_BHTC.device)
        return flex_attention(q_BHTC, k_BGTC, v_BGTC, block_mask=mask, enable_gqa=grouped)
    mask = shared_block_mask(doc_ids_BT, window, num_tokens, q_BHTC.device)
    out_BHTC: Tensor = _compiled()(q_BHTC, k_BGTC, v_BGTC, block_mask=mask, enable_gqa=grouped)
    return out_BHTC


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the type that autocast wants of products; as they are without it.

    Shapes:  any.
    """
    device = tensors[0].device.type
    return (
        tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
        if torch.is_autocast_enabled(device)
        else tensors
    )


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(
    doc_ids_BT: Tensor | None, window: int | None, num_tokens: int, device: torch.device
) -> BlockMask:
    """Return FlexAttention's BlockMask: which blocks of keys a block of queries must look at, and
    which of those without asking.

    It follows from each block's first and last position and its smallest and largest document id,
    so that no mask of T x T is ever made. A block is passed over only where no pair in it is
    visible; the converse holds where ids do not fall along a row, as packing numbers them. The last
    block is never taken whole unless it is full.

    Shapes:  doc_ids_BT (B, T) integers.
    Cost:    B N^2 comparisons; keeps 8 B N^2 integers of 4 bytes.
    """

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        if doc_ids_BT is not None:
            visible = visible & (doc_ids_BT[row, query] == doc_ids_BT[row, key])
        return visible

    touched_BNN, whole_BNN = _touched_and_whole(doc_ids_BT, window, num_tokens, device)
    return BlockMask.from_kv_blocks(
        *_listed(touched_BNN & ~whole_BNN),
        *_listed(whole_BNN),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


def shared_block_mask(
    doc_ids_BT: Tensor | None, window: int | None, num_tokens: int, device: torch.device
) -> BlockMask:
    """Return `block_mask`, made once for all layers: kept as long as the document ids live and stay
    as they are.

    While a CUDA graph is captured none is kept: a replay finds other ids in the same place, and
    must make its mask of them.

    Shapes:  doc_ids_BT (B, T) integers.
    """
    if doc_ids_BT is None:
        return _window_mask(window, num_tokens, device)
    if _is_captured(device):
        return block_mask(doc_ids_BT, window, num_tokens, device)
    state = (doc_ids_BT._version, window)
    if _KEPT.get(doc_ids_BT, (None, None))[0] != state:  # type: ignore[no-untyped-call]
        _KEPT[doc_ids_BT] = (state, block_mask(doc_ids_BT.detach(), window, num_tokens, device))
    mask: BlockMask = _KEPT[doc_ids_BT][1]
    return mask


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=8)
def _window_mask(window: int | None, num_tokens: int, device: torch.device) -> BlockMask:
    return block_mask(None, window, num_tokens, device)


def _touched_and_whole(
    doc_ids_BT: Tensor | None, window: int | None, num_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of blocks of queries against blocks of keys: in which a pair is visible, and in which all
    are.
    """
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    first_N = torch.arange(num_blocks, device=device) * BLOCK_TOKENS
    last_N = (first_N + BLOCK_TOKENS - 1).clamp_max(num_tokens - 1)
    is_full_N = last_N - first_N == BLOCK_TOKENS - 1
    least_NN, most_NN = (
        first_N[:, None] - last_N,
        last_N[:, None] - first_N,
    )  # the distances from keys to queries, a row of blocks of queries
    touched_BNN = (most_NN >= 0)[None]
    whole_BNN = (least_NN >= 0) & is_full_N[:, None] & is_full_N
    whole_BNN = whole_BNN[None]
    if window is not None:
        touched_BNN = touched_BNN & (least_NN < window)
        whole_BNN = whole_BNN & (most_NN < window)
    if doc_ids_BT is not None:
        missing = num_blocks * BLOCK_TOKENS - num_tokens
        padded_BT = (
            torch.cat((doc_ids_BT, doc_ids_BT[:, -1:].expand(-1, missing)), dim=1)
            if missing
            else doc_ids_BT
        )
        low_BN, high_BN = torch.unflatten(padded_BT, 1, (num_blocks, BLOCK_TOKENS)).aminmax(dim=-1)
        touched_BNN = (
            touched_BNN
            & (low_BN[:, :, None] <= high_BN[:, None])
            & (low_BN[:, None] <= high_BN[:, :, None])
        )
        whole_BNN = (
            whole_BNN
            & (low_BN[:, :, None] == high_BN[:, None])
            & (low_BN[:, None] == high_BN[:, :, None])
        )
    return touched_BNN, whole_BNN


def _listed(is_wanted_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries wants, and their numbers, those first; for all
    heads.
    """
    wanted_B1NN = is_wanted_BNN[:, None].to(torch.int32)
    order_B1NN = wanted_B1NN.argsort(dim=-1, descending=True, stable=True)
    return wanted_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)
