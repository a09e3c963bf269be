"""A row of logits to its loss and its gradient, in Triton's language; ops/loss_rows.py launches it.

A program has one row to itself: it reads it once for the logarithm of the sum of its exponentials,
and once more, out of the cache, to write the gradient over it. No program adds to what another
wrote: every time the same bits.

Letters: v the places in the vocabulary that are at hand.
"""

import triton
import triton.language as tl

PER_LN = tl.constexpr(1.4426950408889634)
"""Times this, a power of e is a power of 2, which a GPU computes."""
LEAST = tl.constexpr(-1e38)
"""Where a lane's largest logit starts: -inf less -inf would be NaN."""


@triton.jit
def _capped(logits, CAP: tl.constexpr):
    """The logits within their cap, c tanh(logits / c); as they are without one."""
    if CAP > 0:
        shrunk = tl.exp(-2.0 * tl.abs(logits) / CAP)
        size = CAP * (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    return logits


@triton.jit
def _blocks(
    row, begin, v, BEYOND: tl.constexpr, POLICY: tl.constexpr,
    CAP: tl.constexpr, VOCAB: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load AT_ONCE blocks one after the other, before the first is used; BEYOND the vocabulary
    that. POLICY: how long they stay in the cache.
    """
    loaded, logits = (), ()
    for i in tl.static_range(AT_ONCE):
        at = begin + i * BLOCK + v
        loaded += (tl.load(row + at, mask=at < PADDED, other=BEYOND, eviction_policy=POLICY),)
    for i in tl.static_range(AT_ONCE):
        block = _capped(loaded[i].to(tl.float32), CAP)
        if CAP > 0 or PADDED > VOCAB:
            block = tl.where(begin + i * BLOCK + v < VOCAB, block, BEYOND)
        logits += (block,)
    return logits


@triton.jit
def _log_sum(
    row,
    v,
    CAP: tl.constexpr,
    VOCAB: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logarithm of the sum of a row's exponentials, each lane with a largest logit of its own
    until the end.
    """
    largest, total = tl.full((BLOCK,), LEAST, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, VOCAB, BLOCK * AT_ONCE):
        blocks = _blocks(
            row, begin, v, float("-inf"), "evict_last", CAP, VOCAB, PADDED, AT_ONCE, BLOCK
        )
        for i in tl.static_range(AT_ONCE):
            logits = blocks[i]
            smaller = tl.exp2(
                tl.abs(logits - largest) * -PER_LN
            )  # the other's is 1: one exponential, whichever is larger
            total = tl.where(logits > largest, total * smaller + 1.0, total + smaller)
            largest = tl.maximum(largest, logits)
    top = tl.max(largest, 0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), 0))


@triton.jit
def losses_and_gradient(
    product, targets, losses,
    Z_LOSS: tl.constexpr, SCALE: tl.constexpr, GRADIENT: tl.constexpr, CAP: tl.constexpr,
    VOCAB: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's loss, and with GRADIENT its gradient times SCALE over the row. An ignored
    target's row is not read.

    STRIDE logits lie from one row to the next; those up to PADDED are the row's own, and hold
    nothing.
    """
    number = tl.program_id(0)
    row, v = product + number.to(tl.int64) * STRIDE, tl.arange(0, BLOCK)
    target = tl.load(targets + number)
    if target < 0:
        tl.store(losses + number, 0.0)
        if GRADIENT:
            nothing = tl.full((BLOCK,), 0.0, tl.float32).to(product.dtype.element_ty)
            for begin in range(0, VOCAB, BLOCK):
                tl.store(row + begin + v, nothing, mask=begin + v < PADDED)
    else:
        wanted = _capped(tl.load(row + target).to(tl.float32), CAP)
        log_sum = _log_sum(row, v, CAP, VOCAB, PADDED, AT_ONCE, BLOCK)
        tl.store(losses + number, log_sum - wanted + Z_LOSS * log_sum * log_sum)
        if GRADIENT:
            factor = SCALE * (1.0 + 2.0 * Z_LOSS * log_sum)
            for begin in range(0, VOCAB, BLOCK * AT_ONCE):
                blocks = _blocks(
                    row, begin, v, 0.0, "evict_first", CAP, VOCAB, PADDED, AT_ONCE, BLOCK
                )
                for i in tl.static_range(AT_ONCE):
                    at, logits = begin + i * BLOCK + v, blocks[i]
                    gradient = tl.exp2((logits - log_sum) * PER_LN) * factor - tl.where(
                        at == target, SCALE, 0.0
                    )
                    if CAP > 0:
                        gradient *= 1.0 - (logits / CAP) * (logits / CAP)
                    tl.store(
                        row + at,
                        gradient.to(product.dtype.element_ty),
                        mask=at < PADDED,
                        eviction_policy="evict_first",
                    )
