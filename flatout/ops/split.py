"""fp32 numbers in two parts of 16 bits: the nearest bfloat16, and its rounding error."""

from __future__ import annotations

import torch
from torch import Tensor


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 of each number, ties to even, and the distance of their bits.

    The distance is the lower half of the bits as a signed number: from one half on, rounding went
    up. 16 bits represent 65,536 distances, and an even bfloat16 is the nearest of 65,537 fp32
    numbers: the one halfway to the next larger magnitude moves by one unit in the last place,
    towards the bfloat16. All other numbers are exact.

    Shapes:  any, fp32.
    Returns: (high, low): bfloat16 and int16, of the same shape.
    """
    bits = weight.view(torch.int32)
    even_tie = (bits & 0x1FFFF) == 0x8000
    return weight.to(torch.bfloat16), (bits - even_tie.to(torch.int32)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers that `split` separated.

    The bits are shifted, since a compiler removes a conversion to bfloat16 and back.

    Shapes:  high (bfloat16) and low (int16), of one shape.
    Returns: a tensor of that shape.
    """
    bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
    return bits.view(torch.float32)
