"""Triton kernels that update split weights; ops/split_update.py defines what they compute.

One launch updates many tensors: `table` has a row of 64-bit numbers for each, with the number of
its weights and then the addresses of its parts. Programs along axis 1 are tensors; those along
axis 0 share the blocks of one tensor. Each weight is read once and written once. Operations are not
fused with each other (enable_fp_fusion=False), so each is rounded, as in torch's separate
operations. Where the number at `skip` is not 0, nothing is read or written.
"""

import triton
import triton.language as tl


@triton.jit
def _address(row, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor whose address is in a field of a row.

    ALIGNED promises a multiple of 16 bytes; without it, each number is loaded separately.
    """
    address = tl.load(row + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _count(row, skip, ALIGNED: tl.constexpr):
    """The number of weights of a row's tensor to update: none of them where `skip` is not 0.

    ALIGNED promises a multiple of 16, so that each vector is loaded completely or not at all.
    """
    count = tl.where(tl.load(skip) == 0.0, tl.load(row), 0)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return count


@triton.jit
def _number(numbers, INDEX: tl.constexpr):
    """A number that all tensors share, rounded to fp32."""
    return tl.load(numbers + INDEX).to(tl.float32)


@triton.jit
def _joined(high, low, at, mask):
    """`flatout.ops.split.join` of the parts at these indices."""
    upper, lower = (
        tl.load(high + at, mask=mask, other=0).to(tl.int32),
        tl.load(low + at, mask=mask, other=0).to(tl.int32),
    )
    return ((upper << 16) + lower).to(tl.float32, bitcast=True)


@triton.jit
def _store_split(high, low, at, mask, weight):
    """Store `flatout.ops.split.split` of a number.

    Its bits minus their lower half, as a signed number, are its bfloat16.
    """
    # The bits of a NaN could overflow into an infinity or a zero.
    bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
    bits -= ((bits & 0x1FFFF) == 0x8000).to(tl.int32)
    lower = (bits << 16) >> 16
    tl.store(high + at, ((bits - lower) >> 16).to(tl.int16), mask=mask)
    tl.store(low + at, lower.to(tl.int16), mask=mask)


@triton.jit
def adamw(table, numbers, skip, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """AdamW. The fields of a row: weights, high, low, gradient, exp_avg, exp_avg_sq, step.

    `split_update.adamw` lists `numbers`, in fp64.
    """
    row = table + tl.program_id(1) * 7
    count = _count(row, skip, ALIGNED)
    high, low = _address(row, 1, tl.int16, ALIGNED), _address(row, 2, tl.int16, ALIGNED)
    gradients = _address(row, 3, tl.float32, ALIGNED)
    means, squares = _address(row, 4, tl.float32, ALIGNED), _address(row, 5, tl.float32, ALIGNED)
    step = tl.load(_address(row, 6, tl.float32, False)).to(tl.float64)
    rate = (tl.load(numbers) / (1.0 - tl.exp(step * tl.load(numbers + 1)))).to(tl.float32)
    scale = (1.0 / tl.sqrt(1.0 - tl.exp(step * tl.load(numbers + 2)))).to(tl.float32)
    new_mean, old_square, new_square = _number(numbers, 3), _number(numbers, 4), _number(numbers, 5)
    kept, eps = _number(numbers, 6), _number(numbers, 7)
    for block in range(tl.program_id(0), (count + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        gradient, mean = (
            tl.load(gradients + at, mask=mask, other=0.0),
            tl.load(means + at, mask=mask, other=0.0),
        )
        square, weight = tl.load(squares + at, mask=mask, other=0.0), _joined(high, low, at, mask)
        mean += (gradient - mean) * new_mean
        square = square * old_square + gradient * gradient * new_square
        weight = weight * kept - tl.div_rn(mean, tl.sqrt_rn(square) * scale + eps) * rate
        tl.store(means + at, mean, mask=mask)
        tl.store(squares + at, square, mask=mask)
        _store_split(high, low, at, mask, weight)


@triton.jit
def decay_and_add(
    table, numbers, skip, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """kept * weight + alpha * step. The fields of a row: weights, high, low, step of dtype DTYPE.

    `numbers`, in fp64: kept, alpha.
    """
    row = table + tl.program_id(1) * 4
    count = _count(row, skip, ALIGNED)
    high, low, steps = (
        _address(row, 1, tl.int16, ALIGNED),
        _address(row, 2, tl.int16, ALIGNED),
        _address(row, 3, DTYPE, ALIGNED),
    )
    kept, alpha = _number(numbers, 0), _number(numbers, 1)
    for block in range(tl.program_id(0), (count + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        step = tl.load(steps + at, mask=mask, other=0.0).to(tl.float32)
        _store_split(high, low, at, mask, _joined(high, low, at, mask) * kept + step * alpha)
