"""Updates of weights in two parts (`flatout.ops.split`) that read and write each part once.

Torch's operations would join, compute and split: a dozen passes and 102 bytes a weight for AdamW.
Each function here has a `_reference`, which is the definition, and a variant in Triton's kernels
(`flatout.ops.split_kernels`): the same operations in the same order, each rounded to fp32 by
itself, so the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flatout.ops.split import join, split

BLOCK = 512
"""Weights that a program updates at a time: 4 for each of its 128 threads, 16 bytes of fp32. With
8, parts would change threads on the way.
"""
PROGRAMS = 1_024
"""Most programs a tensor: enough to fill 132 multiprocessors, few enough that what each works out
for its tensor does not count.
"""
ADAMW_BYTES = {"high": 2 + 2, "low": 2 + 2, "gradient": 4, "exp_avg": 4 + 4, "exp_avg_sq": 4 + 4}
"""What `adamw` reads and writes of a weight, 28 bytes. A test counts the kernel's loads and stores.
"""


def adamw_reference(
    highs: Sequence[Tensor], lows: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """Update weights in two parts, and their moments, by AdamW in place; `steps` count this update
    already.

    This loop is the definition. The two bias corrections are computed in fp64; all else is fp32,
    each operation rounded by itself.

    Shapes:  one tensor a weight in each list: high (bfloat16), low (int16), the others fp32, all of
             one shape; steps 0-D, fp32.
    Cost:    28 bytes a weight where each is read and written once (`ADAMW_BYTES`); here about 260.
    Source:  Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with torch.optim.AdamW's
             names.
    """
    for high, low, gradient, mean, square, step in zip(
        highs, lows, gradients, exp_avgs, exp_avg_sqs, steps, strict=True
    ):
        rate, scale = lr / (1 - beta1 ** float(step)), 1 / math.sqrt(1 - beta2 ** float(step))
        mean.copy_(mean + (gradient - mean) * (1 - beta1))
        square.copy_(square * beta2 + gradient * gradient * (1 - beta2))
        root = square.double().sqrt().float()  # torch's own on a CPU may be off by the last bit
        _store(
            high,
            low,
            join(high, low) * (1 - lr * weight_decay) - mean / (root * scale + eps) * rate,
        )


def adamw(
    highs: Sequence[Tensor], lows: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """`adamw_reference` in Triton: one launch for all tensors, or two where some are of odd sizes.
    `fits` says of which it can be asked.

    Nothing waits for the device: the steps are read there.

    Shapes:  as `adamw_reference`; a gradient laid out otherwise than its weight is copied first.
    Cost:    28 bytes a weight.
    """
    numbers = [
        lr,
        _log(beta1),
        _log(beta2),
        1 - beta1,
        beta2,
        1 - beta2,
        1 - lr * weight_decay,
        eps,
    ]
    alike = [
        _laid_out_like(high, gradient) for high, gradient in zip(highs, gradients, strict=True)
    ]
    _launch(_kernels().adamw, [highs, lows, alike, exp_avgs, exp_avg_sqs, steps], numbers)


def decay_and_add_reference(
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    kept: float,
    alpha: float,
) -> None:
    """Replace each weight by kept * weight + alpha * step, in place; each operation rounded to fp32
    by itself.

    Shapes:  one tensor a weight in each list: high (bfloat16), low (int16), step (fp32 or
             bfloat16), all of one shape.
    Cost:    8 bytes a weight and the step, where each is read and written once.
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
) -> None:
    """`decay_and_add_reference` in Triton, as `adamw` is.

    Shapes:  as `decay_and_add_reference`, steps of one type; a step laid out otherwise than its
             weight is copied first.
    Cost:    8 bytes a weight and the step.
    """
    alike = [_laid_out_like(high, step) for high, step in zip(highs, steps, strict=True)]
    _launch(
        _kernels().decay_and_add,
        [highs, lows, alike],
        [kept, alpha],
        DTYPE=_triton_dtype(steps[0].dtype),
    )


def fits(high: Tensor, low: Tensor, *kept: Tensor) -> bool:
    """Return whether the kernels can update a weight: on a GPU, without gaps, both parts and what
    is kept beside them in one layout.

    Shapes:  high (bfloat16) and low (int16); kept fp32, of the same shape.
    """
    return (
        type(high) is Tensor  # not a compiler's stand-in, which has no memory
        and _runs_triton(high)
        and all(tensor.dtype == torch.float32 for tensor in kept)
        and bool(torch.ops.aten.is_non_overlapping_and_dense(high))
        and all(_layout(tensor) == _layout(high) for tensor in (low, *kept))
    )


def _launch(
    kernel: Any, columns: Sequence[Sequence[Tensor]], numbers: list[float], **constants: Any
) -> None:
    """Run a kernel on tensors, each a row of `columns`: once for those that are loaded as vectors,
    once for the others.
    """
    device = columns[0][0].device
    rows: dict[bool, list[list[int]]] = {True: [], False: []}
    for tensors in zip(*columns, strict=True):
        sized = [tensors[0].numel(), *(tensor.data_ptr() for tensor in tensors)]
        rows[
            sized[0] % 16 == 0
            and all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.dim())
        ].append(sized)
    with torch.cuda.device_of(columns[0][0]):  # type: ignore[no-untyped-call]
        shared = _on(device, numbers, torch.float64)
        for aligned, table in rows.items():
            if table:
                programs = min(PROGRAMS, max(1, math.ceil(max(row[0] for row in table) / BLOCK)))
                kernel[(programs, len(table))](
                    _on(device, table, torch.int64),
                    shared,
                    ALIGNED=aligned,
                    BLOCK=BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
                    **constants,
                )


def _on(device: torch.device, values: list[Any], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _store(high: Tensor, low: Tensor, weight: Tensor) -> None:
    for part, new in zip((high, low), split(weight), strict=True):
        part.copy_(new)


def _laid_out_like(high: Tensor, tensor: Tensor) -> Tensor:
    return (
        tensor
        if _layout(tensor) == _layout(high)
        else torch.empty_like(high, dtype=tensor.dtype).copy_(tensor)
    )


def _layout(tensor: Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels() -> Any:
    from flatout.ops import split_kernels

    return split_kernels


def _triton_dtype(dtype: torch.dtype) -> Any:
    from triton import language

    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16}[dtype]
