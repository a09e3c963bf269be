"""Variable-length flash attention over packed documents on a GPU: `flatout.ops.attention.varlen`.

Letters: B rows, T tokens, N = B T tokens of all rows, H query heads, G key and value heads, C head
         size, S = documents + 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops import product_dtype
from flatout.ops.flex_attention import autocast
from flatout.ops.uncompiled import constant_in_graphs

TOKENS_PER_DOCUMENT = 64
"""Minimum average length of the documents in a micro-batch. It fixes the size of the kernel's grid,
which does not depend on the documents.
"""
FEWEST_DOCUMENTS = 128
"""The grid has room for at least this many documents, however few the tokens."""
LARGEST_HEAD = 192
"""Flash kernels support heads up to 256, but on some GPUs they cannot train heads above 192."""
DTYPES = (torch.bfloat16, torch.float16)


def takes(q_BHTC: Tensor, _: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Return whether the kernel supports these inputs, and there are documents to separate.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    head_dim = q_BHTC.shape[3]
    fits = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD
    is_narrow = product_dtype(q_BHTC, q_BHTC) in DTYPES
    return doc_ids_BT is not None and is_narrow and fits and _kernel_has("window_size")


def attend(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTC: Tensor,
    doc_ids_BT: Tensor | None,
    window: int | None,
    _blocks: object = None,
) -> Tensor:
    """Return causal attention within the documents and the window, with all rows concatenated.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C); doc_ids_BT (B, T) integers.
    Returns: out_BHTC, in autocast's dtype under autocast, laid out in memory as (B, T, H, C).
    """
    assert doc_ids_BT is not None  # takes() requires it
    rows, heads, num_tokens, _ = q_BHTC.shape
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in autocast(q_BHTC, k_BGTC, v_BGTC)]
    bounds_S = cumulative_lengths(doc_ids_BT)
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _kernel_has("enable_gqa"):
        options["enable_gqa"] = heads != k_BGTC.shape[1]
    out_NHC = _kernel()(*flat, bounds_S, bounds_S, num_tokens, num_tokens, **options)
    return torch.unflatten(out_NHC, 0, (rows, num_tokens)).transpose(1, 2)


def max_documents(rows: int, num_tokens: int) -> int:
    """Return how many documents `attend` accepts at most in `rows` rows of `num_tokens` tokens."""
    return max(rows * num_tokens // TOKENS_PER_DOCUMENT + rows, FEWEST_DOCUMENTS)


def cumulative_lengths(doc_ids_BT: Tensor) -> Tensor:
    """Return where each document starts in the concatenated rows, padded with the total length.

    The length of the result depends on the shape only, so nothing waits for the device.

    Shapes:  doc_ids_BT (B, T) integers; the tokens of a document are contiguous.
    Returns: bounds_S int32, S = max_documents(B, T) + 1.
    Raises:  RuntimeError, on a GPU a failed device assertion, when there are more documents: the
             ids did not come from flatout's feed, which rejects such a micro-batch on the host.
             Without the assertion the kernel would leave the remaining output unwritten.
    """
    rows, num_tokens = doc_ids_BT.shape
    limit = max_documents(rows, num_tokens)
    starts_BT = functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0), value=True)
    document_N = starts_BT.flatten().cumsum(0) - 1
    bounds_S = torch.searchsorted(
        document_N, torch.arange(limit + 1, device=doc_ids_BT.device), out_int32=True
    )
    torch._assert_async(
        bounds_S[-1] == rows * num_tokens,
        f"varlen-attention has room for {limit} documents in {rows} x {num_tokens} tokens. "
        "Fix: remove varlen-attention from speedups.",
    )
    return bounds_S


def _kernel() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]


@constant_in_graphs
def _kernel_has(parameter: str) -> bool:
    """Return whether torch's kernel has a parameter.

    Its signature changes between versions: the window comes with 2.11, `enable_gqa` with 2.12 or
    2.13. Earlier versions share key heads without that option.
    """
    return parameter in inspect.signature(_kernel()).parameters
