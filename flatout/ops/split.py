"""Numbers of fp32 in two parts of 16 bits: their bfloat16, and what rounding to it took off."""

from __future__ import annotations

import torch
from torch import Tensor


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 of each number, ties to even, and how far its bits are from
    there, in 16 bits.

    An even bfloat16 is the nearest of 65,537 fp32 numbers, and 16 bits tell 65,536 apart: that
    halfway to the next larger one in magnitude is moved by one unit in the last place, towards the
    bfloat16. All others are kept to the bit. What is taken off is the lower half of the bits as a
    signed number: from half on, rounding went up.

    Shapes:  any, fp32.
    Returns: (high, low): bfloat16 and int16, of the same shape.
    """
    bits = weight.view(torch.int32)
    even_tie = (bits & 0x1FFFF) == 0x8000
    return weight.to(torch.bfloat16), (bits - even_tie.to(torch.int32)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers that `split` took apart: by their bits, since compilers take a number
    to bfloat16 and back for the number.

    Shapes:  high (bfloat16) and low (int16), of one shape.
    Returns: a tensor of that shape.
    """
    return (
        high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low).view(torch.float32)
    )
