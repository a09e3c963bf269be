"""Attention of packed documents as one line of segments: what `flatout.ops.attention.varlen` does
on a GPU.

Letters: B rows, T tokens, N = B T tokens of all rows, H query heads, G key and value heads, C head
         size, S segments and one more.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops.block_sparse import narrowed

FEWEST_TOKENS = 64
"""Of a document, on average over a micro-batch: the kernel's grid has room for so many segments,
and is the same whatever the documents.
"""
LEAST_ROOM = 128
"""Segments there is room for however few the tokens."""
LARGEST_HEAD = 192
"""Flash kernels go up to 256, but those of some GPUs train no head beyond this one."""
DTYPES = (torch.bfloat16, torch.float16)


def takes(q_BHTC: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Say whether the flash kernel of segments can take these shapes and types, and has documents
    to keep apart.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    head_dim, device = q_BHTC.shape[3], q_BHTC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_BHTC.dtype
    fits = dtype in DTYPES and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD
    return doc_ids_BT is not None and fits and _kernel_has("window_size")


def attend(
    q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, doc_ids_BT: Tensor, window: int | None
) -> Tensor:
    """Return causal attention within the documents, each a segment of one line, and the window.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C); doc_ids_BT (B, T) integers.
    Returns: out_BHTC, narrowed under autocast, laid out in memory as (B, T, H, C).
    """
    rows, heads, num_tokens, _ = q_BHTC.shape
    lines = [tensor.transpose(1, 2).flatten(0, 1) for tensor in narrowed(q_BHTC, k_BGTC, v_BGTC)]
    bounds_S = cumulative_lengths(doc_ids_BT)
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _kernel_has("enable_gqa"):
        options["enable_gqa"] = heads != k_BGTC.shape[1]
    out_NHC: Tensor = _kernel()(*lines, bounds_S, bounds_S, num_tokens, num_tokens, **options)
    return torch.unflatten(out_NHC, 0, (rows, num_tokens)).transpose(1, 2)


def room(rows: int, num_tokens: int) -> int:
    """Return the most documents that `attend` takes in `rows` rows of `num_tokens` tokens."""
    return max(rows * num_tokens // FEWEST_TOKENS + rows, LEAST_ROOM)


def cumulative_lengths(doc_ids_BT: Tensor) -> Tensor:
    """Return where each document begins in the line of all rows, in order, and then the line's
    length, over and over.

    As many as there is room for, whatever the ids: the shape is static and the device is not waited
    for.

    Shapes:  doc_ids_BT (B, T) integers; a document's tokens stand side by side.
    Returns: bounds_S int32, S = room(B, T) + 1.
    Raises:  RuntimeError, on a GPU a failed assertion of the device, when there are more documents:
             ids that did not come through flatout's feed, which refuses them on the host. Without
             it the rest of the line would be read from unwritten memory.
    """
    rows, num_tokens = doc_ids_BT.shape
    most = room(rows, num_tokens)
    begins_BT = functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0), value=True)
    segment_N = begins_BT.flatten().cumsum(0) - 1
    bounds_S = torch.searchsorted(
        segment_N, torch.arange(most + 1, device=doc_ids_BT.device), out_int32=True
    )
    message = f"varlen-attention has room for {most} documents in {rows} x {num_tokens} tokens. Fix: leave varlen-attention out of speedups."
    torch._assert_async(bounds_S[-1] == rows * num_tokens, message)
    return bounds_S


def _kernel() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernel_has(parameter: str) -> bool:
    """Torch changes this signature: before 2.11 no window, and before 2.12 or 2.13 key heads are
    shared unasked.
    """
    return parameter in inspect.signature(_kernel()).parameters
