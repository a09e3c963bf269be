"""The gradient of ops/heads.py as a Triton kernel, which ops/head_passes.py launches.

A program processes one head of some rows and keeps everything in registers between the incoming
gradients and the packed one. A vector consists of two halves of SIZE / 2 components, which rotary
positions pair; each half is padded to HALF, a power of two.

Letters: r the rows of a tile, i the components of a half.
"""

import triton
import triton.language as tl


@triton.jit
def _halves(pointer, row, i, second, mask, other):
    """Load both halves of each row's vector as fp32."""
    first = pointer + row[:, None] + i[None, :]
    return tl.load(first, mask=mask, other=0.0).to(tl.float32), tl.load(
        first + second, mask=other, other=0.0
    ).to(tl.float32)


@triton.jit
def _rotated_back(grad_1, grad_2, cos, sin, row, i, second, mask_1, mask_2):
    """The gradient before the rotation by the positions' angles."""
    cos_1, cos_2 = _halves(cos, row, i, second, mask_1, mask_2)
    sin_1, sin_2 = _halves(sin, row, i, second, mask_1, mask_2)
    return grad_1 * cos_1 + grad_2 * sin_2, grad_2 * cos_2 + grad_1 * sin_1


@triton.jit
def _before_norm(grad_1, grad_2, x_1, x_2, gain_1, gain_2, SIZE: tl.constexpr, EPS: tl.constexpr):
    """The gradient before the RMS norm, and what these rows contribute to the gain's gradient."""
    square = tl.sum(x_1 * x_1, axis=1) + tl.sum(x_2 * x_2, axis=1)
    scale = (1.0 / tl.sqrt(square / SIZE + EPS))[:, None]
    of_gain_1 = tl.sum(grad_1 * x_1 * scale, axis=0)
    of_gain_2 = tl.sum(grad_2 * x_2 * scale, axis=0)
    grad_1, grad_2 = grad_1 * gain_1[None, :], grad_2 * gain_2[None, :]
    dot = (tl.sum(grad_1 * x_1, axis=1) + tl.sum(grad_2 * x_2, axis=1))[:, None]
    along = dot * scale * scale / SIZE
    return scale * (grad_1 - x_1 * along), scale * (grad_2 - x_2 * along), of_gain_1, of_gain_2


@triton.jit
def gradient(
    grad_out, product, gain, cos, sin, grad_product, grad_gain,
    rows, tokens, row_stride, token_stride, head_stride, first_head, width,
    SIZE: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, NORMALISED: tl.constexpr,
    TURNED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Backpropagate one head through rotation and norm, and write to the gradient of the product.

    Each program stores its contribution to the gain's gradient separately; they are summed
    afterwards, in a fixed order.
    """
    head = tl.program_id(1)
    column = (first_head + head) * SIZE
    second = (SIZE + 1) // 2
    i = tl.arange(0, HALF)
    if NORMALISED:
        gain_1 = tl.load(gain + column + i, mask=i < second, other=0.0).to(tl.float32)
        gain_2 = tl.load(gain + column + second + i, mask=second + i < SIZE, other=0.0).to(
            tl.float32
        )
        sum_1, sum_2 = tl.full((HALF,), 0.0, tl.float32), tl.full((HALF,), 0.0, tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        in_rows = (r < rows)[:, None]
        mask_1, mask_2 = in_rows & (i < second)[None, :], in_rows & (second + i < SIZE)[None, :]
        token = r % tokens
        row_start = (r // tokens).to(tl.int64) * row_stride
        source = row_start + token.to(tl.int64) * token_stride + head * head_stride
        grad_1, grad_2 = _halves(grad_out, source, i, second, mask_1, mask_2)
        if TURNED:
            grad_1, grad_2 = _rotated_back(
                grad_1, grad_2, cos, sin, token * SIZE, i, second, mask_1, mask_2
            )
        offset = r.to(tl.int64) * width + column
        if NORMALISED:
            x_1, x_2 = _halves(product, offset, i, second, mask_1, mask_2)
            grad_1, grad_2, of_gain_1, of_gain_2 = _before_norm(
                grad_1, grad_2, x_1, x_2, gain_1, gain_2, SIZE, EPS
            )
            sum_1, sum_2 = sum_1 + of_gain_1, sum_2 + of_gain_2
        target = grad_product + offset[:, None] + i[None, :]
        tl.store(target, grad_1, mask=mask_1)
        tl.store(target + second, grad_2, mask=mask_2)
    if NORMALISED:
        total = grad_gain + (tl.program_id(0) * (tl.num_programs(1)) + head) * SIZE + i
        tl.store(total, sum_1, mask=i < second)
        tl.store(total + second, sum_2, mask=second + i < SIZE)
