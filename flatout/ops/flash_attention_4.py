"""Causal attention by the kernels of flash-attn-4, with the three gradients packed in one tensor.

torch has a hook that replaces its own kernels with these, but the hook unpacks two values where the
package returns five since 4.0.0b20, and it returns three separate gradients. Here the kernels write
the gradients next to each other. In a model that splits its heads from one product and applies
neither rotary positions nor normalisation, Inductor then cancels the split against the
concatenation in its backward pass.

Letters: B rows, T tokens, H query heads, G key and value heads, C head size, M = H + 2 G.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from flatout.errors import MissingPackage
from flatout.ops import product_dtype
from flatout.ops.autograd import Context
from flatout.ops.flex_attention import autocast

PACKAGE = "flash-attn-4"
LARGEST_HEAD = 128
"""The largest head that the kernels for both Hopper and Blackwell can train."""
DTYPES = (torch.bfloat16, torch.float16)


def takes(q_BHTC: Tensor, k_BGSC: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Return whether the kernels support these inputs: as many queries as keys, a causal mask only.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    num_tokens, head_dim = q_BHTC.shape[2:]
    is_only_causal = doc_ids_BT is None and (window is None or window >= num_tokens)
    fits = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and k_BGSC.shape[2] == num_tokens
    return is_only_causal and fits and product_dtype(q_BHTC, q_BHTC) in DTYPES


def attend(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTC: Tensor,
    doc_ids_BT: Tensor | None,
    window: int | None,
    _blocks: object = None,
) -> Tensor:
    """Return causal attention; `takes` ensures that `doc_ids_BT` and `window` mask nothing.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C).
    Returns: out_BHTC, in autocast's dtype under autocast, laid out in memory as (B, T, H, C).
    Raises:  MissingPackage.
    """
    out_BTHC: Tensor
    out_BTHC, _ = _forward(*(tensor.transpose(1, 2) for tensor in autocast(q_BHTC, k_BGTC, v_BGTC)))
    return out_BTHC.transpose(1, 2)


@torch.library.custom_op("flatout::flash4", mutates_args=())
def _forward(q_BTHC: Tensor, k_BTGC: Tensor, v_BTGC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of each query and the log-sums (B, H, T) of its scores."""
    with torch.cuda.device_of(q_BTHC):  # type: ignore[no-untyped-call]
        out_BTHC, log_sums_BHT = _kernels()._flash_attn_fwd(
            q_BTHC, k_BTGC, v_BTGC, causal=True, return_lse=True
        )[:2]
    return out_BTHC, log_sums_BHT


@_forward.register_fake
def _forward_shapes(q_BTHC: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _size = q_BTHC.shape
    return q_BTHC.new_empty(q_BTHC.shape), q_BTHC.new_empty(
        rows, heads, tokens, dtype=torch.float32
    )


@torch.library.custom_op("flatout::flash4_backward", mutates_args=())
def _backward(
    grad_BTHC: Tensor,
    q_BTHC: Tensor,
    k_BTGC: Tensor,
    v_BTGC: Tensor,
    out_BTHC: Tensor,
    log_sums_BHT: Tensor,
) -> Tensor:
    """Return the gradients of queries, keys and values, written into one tensor (B, T, M, C)."""
    grad_BTMC = _packed_like(q_BTHC, k_BTGC)
    dq, dk, dv = _split(grad_BTMC, q_BTHC, k_BTGC)
    with torch.cuda.device_of(q_BTHC):  # type: ignore[no-untyped-call]
        _kernels()._flash_attn_bwd(
            q_BTHC,
            k_BTGC,
            v_BTGC,
            out_BTHC,
            grad_BTHC,
            log_sums_BHT,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
        )
    return grad_BTMC


@_backward.register_fake
def _backward_shape(_: Tensor, q_BTHC: Tensor, k_BTGC: Tensor, *_others: Tensor) -> Tensor:
    return _packed_like(q_BTHC, k_BTGC)


def _keep_for_backward(
    ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Context, grad_BTHC: Tensor, _: object) -> tuple[Tensor, ...]:
    q_BTHC, k_BTGC, *others = ctx.saved_tensors
    return _split(_backward(grad_BTHC, q_BTHC, k_BTGC, *others), q_BTHC, k_BTGC)


_forward.register_autograd(_gradients, setup_context=_keep_for_backward)


def _packed_like(q_BTHC: Tensor, k_BTGC: Tensor) -> Tensor:
    rows, tokens, heads, size = q_BTHC.shape
    return q_BTHC.new_empty(rows, tokens, heads + 2 * k_BTGC.shape[2], size)


def _split(packed_BTMC: Tensor, q_BTHC: Tensor, k_BTGC: Tensor) -> tuple[Tensor, ...]:
    groups = k_BTGC.shape[2]
    return torch.split(packed_BTMC, [q_BTHC.shape[2], groups, groups], dim=2)


def _kernels() -> ModuleType:
    try:
        return import_module("flash_attn.cute.interface")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"The speedup flash-attention-4 needs the package {PACKAGE}, and {error.name} is not "
            "installed.",
            fix='Install it: `pip install "flatout[flash-attention-4]"`, or remove '
            "flash-attention-4 from speedups.",
        ) from error
