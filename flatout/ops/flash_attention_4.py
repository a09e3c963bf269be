"""Causal attention by the kernels of the package flash-attn-4, with the three gradients in one
packed tensor.

torch has a hook that puts these kernels in the place of its own, but it unpacks two values where
the package returns five from 4.0.0b20 on, and hands back three gradients of their own. Here the
kernels write the gradients next to each other; where the model cuts its heads out of one product
and neither turns nor normalises them, Inductor then finds a cut and a join that undo each other,
and drops both.

Letters: B rows, T tokens, H query heads, G key and value heads, C head size, M = H + 2 G.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flatout.errors import MissingPackage
from flatout.ops.block_sparse import narrowed

PACKAGE = "flash-attn-4"
LARGEST_HEAD = 128
"""What kernels for Hopper and Blackwell both train."""
DTYPES = (torch.bfloat16, torch.float16)


def takes(q_BHTC: Tensor, k_BGSC: Tensor, doc_ids_BT: Tensor | None, window: int | None) -> bool:
    """Say whether the kernels can take these shapes and types: as many queries as keys, and nothing
    masked but the future.

    Shapes:  as `flatout.ops.attention.reference`.
    """
    num_tokens, head_dim = q_BHTC.shape[2:]
    device = q_BHTC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_BHTC.dtype
    is_causal_alone = (
        doc_ids_BT is None
        and (window is None or window >= num_tokens)
        and k_BGSC.shape[2] == num_tokens
    )
    return is_causal_alone and dtype in DTYPES and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD


def attend(
    q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, doc_ids_BT: Tensor | None, window: int | None
) -> Tensor:
    """Return causal attention; `doc_ids_BT` and `window` are those that `takes` allows, which mask
    nothing.

    Shapes:  q_BHTC (B, H, T, C); k_BGTC, v_BGTC (B, G, T, C).
    Returns: out_BHTC, narrowed under autocast, laid out in memory as (B, T, H, C).
    Raises:  MissingPackage.
    """
    out_BTHC: Tensor
    out_BTHC, _ = _forward(*(tensor.transpose(1, 2) for tensor in narrowed(q_BHTC, k_BGTC, v_BGTC)))
    return out_BTHC.transpose(1, 2)


@torch.library.custom_op("flatout::flash4", mutates_args=())
def _forward(q_BTHC: Tensor, k_BTGC: Tensor, v_BTGC: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each query gathers and the logarithms of its sums (B, H, T)."""
    with torch.cuda.device_of(q_BTHC):  # type: ignore[no-untyped-call]
        out_BTHC, log_sums_BHT = _kernels()._flash_attn_fwd(
            q_BTHC, k_BTGC, v_BTGC, causal=True, return_lse=True
        )[:2]
    return out_BTHC, log_sums_BHT


@_forward.register_fake
def _forward_shapes(q_BTHC: Tensor, k_BTGC: Tensor, v_BTGC: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _ = q_BTHC.shape
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
    """Return the gradients of queries, keys and values, the kernels' own outputs, as one tensor (B,
    T, M, C).
    """
    grad_BTMC = _packed_like(q_BTHC, k_BTGC)
    outputs = dict(zip(("dq", "dk", "dv"), _cut(grad_BTMC, q_BTHC, k_BTGC), strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.cuda.device_of(q_BTHC):  # type: ignore[no-untyped-call]
        _kernels()._flash_attn_bwd(
            q_BTHC,
            k_BTGC,
            v_BTGC,
            out_BTHC,
            grad_BTHC,
            log_sums_BHT,
            causal=True,
            deterministic=deterministic,
            **outputs,
        )
    return grad_BTMC


@_backward.register_fake
def _backward_shape(
    grad_BTHC: Tensor,
    q_BTHC: Tensor,
    k_BTGC: Tensor,
    v_BTGC: Tensor,
    out_BTHC: Tensor,
    log_sums_BHT: Tensor,
) -> Tensor:
    return _packed_like(q_BTHC, k_BTGC)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_BTHC: Tensor, _: Any) -> tuple[Tensor, ...]:
    q_BTHC, k_BTGC, *others = ctx.saved_tensors
    return _cut(_backward(grad_BTHC, q_BTHC, k_BTGC, *others), q_BTHC, k_BTGC)


_forward.register_autograd(_gradients, setup_context=_keep)


def _packed_like(q_BTHC: Tensor, k_BTGC: Tensor) -> Tensor:
    rows, tokens, heads, size = q_BTHC.shape
    return q_BTHC.new_empty(rows, tokens, heads + 2 * k_BTGC.shape[2], size)


def _cut(packed_BTMC: Tensor, q_BTHC: Tensor, k_BTGC: Tensor) -> tuple[Tensor, ...]:
    groups = k_BTGC.shape[2]
    return torch.split(packed_BTMC, [q_BTHC.shape[2], groups, groups], dim=2)


def _kernels() -> Any:
    try:
        return import_module("flash_attn.cute.interface")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"The speedup flash-attention-4 takes the package {PACKAGE}, and {error.name} is not installed.",
            fix='Install it: pip install "flatout[flash-attention-4]"; or leave flash-attention-4 out.',
        ) from error
