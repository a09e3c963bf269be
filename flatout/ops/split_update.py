"""Updates of split weights (`flatout.ops.split`) that read and write each part once.

Separate torch operations would join, compute and split: a dozen passes and 102 bytes per weight for
AdamW. Each function here has a `_reference`, which is the definition, and a variant in Triton
(`flatout.ops.split_kernels`): the same operations in the same order, each rounded to fp32, so the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flatout.ops import triton_kernels
from flatout.ops.split import join, split

BLOCK = 512
"""Weights that a program updates at a time: 4 for each of its 128 threads, 16 bytes of fp32. With
8, parts would have to move between threads.
"""
PROGRAMS = 1_024
"""The maximum of programs per tensor: enough to fill 132 multiprocessors, and few enough to make
the work that each does once per tensor negligible.
"""
ADAMW_BYTES = {"high": 2 + 2, "low": 2 + 2, "gradient": 4, "exp_avg": 4 + 4, "exp_avg_sq": 4 + 4}
"""Bytes that `adamw` reads and writes per weight, 28 in all; a test counts the kernel's traffic."""


def adamw_reference(
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Update split weights and their moments by AdamW in place; `steps` already count this update.

    This loop is the definition. The two bias corrections are computed in fp64; everything else is
    fp32, with each operation rounded separately.

    Shapes:  each list has one tensor per weight: high (bfloat16), low (int16), the others fp32, all
             of one shape; steps 0-D, fp32.
    Cost:    28 bytes per weight if each is read and written once (`ADAMW_BYTES`); here about 260.
    Source:  Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with torch.optim.AdamW's
             names.
    """
    for high, low, gradient, mean, square, step in zip(
        highs, lows, gradients, exp_avgs, exp_avg_sqs, steps, strict=True
    ):
        rate, scale = lr / (1 - beta1 ** float(step)), 1 / math.sqrt(1 - beta2 ** float(step))
        mean.copy_(mean + (gradient - mean) * (1 - beta1))
        square.copy_(square * beta2 + gradient * gradient * (1 - beta2))
        root = square.double().sqrt().float()  # torch's fp32 root on a CPU may be off by one bit
        kept = join(high, low) * (1 - lr * weight_decay)
        _store(high, low, kept - mean / (root * scale + eps) * rate)


def adamw(
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    skip: Tensor | None = None,
) -> None:
    """`adamw_reference` in Triton: one launch for all tensors, or two if some have odd sizes.

    `fits` tells which tensors it supports. Nothing changes if `skip` is 1. It and the steps are
    read on the device, so nothing waits.

    Shapes:  as `adamw_reference`; a gradient with another layout than its weight is copied first;
             skip is 0-D, fp32.
    Cost:    28 bytes per weight.
    """
    betas = [_log(beta1), _log(beta2), 1 - beta1, beta2, 1 - beta2]
    alike = list(map(_laid_out_like, highs, gradients))
    _launch(
        "adamw",
        [highs, lows, alike, exp_avgs, exp_avg_sqs, steps],
        [lr, *betas, 1 - lr * weight_decay, eps],
        skip,
    )


def decay_and_add_reference(
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    kept: float,
    alpha: float,
) -> None:
    """Set each weight to kept * weight + alpha * step in place; each operation is rounded to fp32.

    Shapes:  each list has one tensor per weight: high (bfloat16), low (int16), step (fp32 or
             bfloat16), all of one shape.
    Cost:    8 bytes per weight and the step, if each is read and written once.
    """
    for high, low, step in zip(highs, lows, steps, strict=True):
        _store(high, low, join(high, low) * kept + step.float() * alpha)


def decay_and_add(
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    kept: float,
    alpha: float,
    skip: Tensor | None = None,
) -> None:
    """`decay_and_add_reference` in Triton, in one or two launches as `adamw`.

    Shapes:  as `decay_and_add_reference`, with steps of one dtype; a step with another layout than
             its weight is copied first; skip as in `adamw`.
    Cost:    8 bytes per weight and the step.
    """
    alike = list(map(_laid_out_like, highs, steps))
    dtype = _triton_dtype(steps[0].dtype)
    _launch("decay_and_add", [highs, lows, alike], [kept, alpha], skip, DTYPE=dtype)


def fits(high: Tensor, low: Tensor, *moments: Tensor) -> bool:
    """Return whether the kernels can update a weight.

    It must be on a GPU and without gaps in memory, and all its tensors must have one layout.

    Shapes:  high (bfloat16) and low (int16); moments fp32, of the same shape.
    """
    return (
        type(high) is Tensor  # a compiler's fake tensor has no memory
        and triton_kernels.run_on(high)
        and _has_triton()
        and all(tensor.dtype == torch.float32 for tensor in moments)
        and bool(torch.ops.aten.is_non_overlapping_and_dense(high))
        and all(_layout(tensor) == _layout(high) for tensor in (low, *moments))
    )


def _launch(
    kernel: str,
    columns: Sequence[Sequence[Tensor]],
    numbers: list[float],
    skip: Tensor | None,
    **constants: object,
) -> None:
    """Run a kernel on all tensors: once for those that load as vectors, once for the others."""
    first = columns[0][0]
    rows: dict[bool, list[list[int]]] = {True: [], False: []}
    for tensors in zip(*columns, strict=True):
        count = tensors[0].numel()
        aligned = count % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors if t.dim())
        rows[aligned].append([count, *(tensor.data_ptr() for tensor in tensors)])
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        shared = _on(first.device, numbers, torch.float64)
        flag = torch.zeros((), device=first.device) if skip is None else skip
        for aligned, table in rows.items():
            if table:
                programs = min(PROGRAMS, max(1, math.ceil(max(row[0] for row in table) / BLOCK)))
                getattr(triton_kernels.load("split_kernels"), kernel)[(programs, len(table))](
                    _on(first.device, table, torch.int64),
                    shared,
                    flag,
                    ALIGNED=aligned,
                    BLOCK=BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
                    **constants,
                )


def _on(device: torch.device, values: Sequence[float | list[int]], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _store(high: Tensor, low: Tensor, weight: Tensor) -> None:
    for part, new in zip((high, low), split(weight), strict=True):
        part.copy_(new)


def _laid_out_like(high: Tensor, tensor: Tensor) -> Tensor:
    if _layout(tensor) == _layout(high):
        return tensor
    return torch.empty_like(high, dtype=tensor.dtype).copy_(tensor)


def _layout(tensor: Tensor) -> list[int]:
    """Return the strides of all dimensions of more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton_dtype(dtype: torch.dtype) -> Any:
    from triton import language

    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16}[dtype]
