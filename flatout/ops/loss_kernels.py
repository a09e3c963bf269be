"""The Triton kernel that turns a row of logits into its loss and gradient; see ops/loss_rows.py.

A program processes one row: it reads the row once for the logsumexp, and once more, from the cache,
to overwrite it with the gradient. No program adds to the output of another, so results are the same
bits on every run.

Letters: v the positions in the vocabulary that are being processed.
"""

import triton
import triton.language as tl

PER_LN = tl.constexpr(1.4426950408889634)
"""Converts a power of e into a power of 2, which a GPU computes."""
LEAST = tl.constexpr(-1e38)
"""The initial maximum of a lane: with -inf, -inf - -inf would be NaN."""


@triton.jit
def _capped(logits, CAP: tl.constexpr):
    """The capped logits, c tanh(logits / c); unchanged without a cap."""
    if CAP > 0:
        shrunk = tl.exp(-2.0 * tl.abs(logits) / CAP)
        size = CAP * (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    return logits


@triton.jit
def _blocks(
    row, begin, v, BEYOND: tl.constexpr, POLICY: tl.constexpr,
    CAP: tl.constexpr, VOCAB: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load AT_ONCE consecutive blocks before the first is used.

    Positions past the vocabulary get the value BEYOND; POLICY is the cache eviction policy.
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
    """The logsumexp of a row; each lane keeps its own maximum until the end."""
    largest, total = tl.full((BLOCK,), LEAST, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, VOCAB, BLOCK * AT_ONCE):
        blocks = _blocks(
            row, begin, v, float("-inf"), "evict_last", CAP, VOCAB, PADDED, AT_ONCE, BLOCK
        )
        for i in tl.static_range(AT_ONCE):
            logits = blocks[i]
            # The exponential of the larger one is 1, so one exponential is enough.
            smaller = tl.exp2(tl.abs(logits - largest) * -PER_LN)
            total = tl.where(logits > largest, total * smaller + 1.0, total + smaller)
            largest = tl.maximum(largest, logits)
    top = tl.max(largest, 0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), 0))


@triton.jit
def losses_and_gradient(
    product, targets, losses,
    Z_LOSS: tl.constexpr, SCALE: tl.constexpr, GRADIENT: tl.constexpr, CAP: tl.constexpr,
    VOCAB: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row, and with GRADIENT overwrite the row with its gradient times SCALE.

    The row of an ignored target is not read. Rows are STRIDE logits apart; the logits from VOCAB to
    PADDED are padding.
    """
    number = tl.program_id(0)
    row, v = product + number.to(tl.int64) * STRIDE, tl.arange(0, BLOCK)
    target = tl.load(targets + number)
    if target < 0:
        tl.store(losses + number, 0.0)
        if GRADIENT:
            zeros = tl.full((BLOCK,), 0.0, tl.float32).to(product.dtype.element_ty)
            for begin in range(0, VOCAB, BLOCK):
                tl.store(row + begin + v, zeros, mask=begin + v < PADDED)
    else:
        correct = _capped(tl.load(row + target).to(tl.float32), CAP)
        log_sum = _log_sum(row, v, CAP, VOCAB, PADDED, AT_ONCE, BLOCK)
        tl.store(losses + number, log_sum - correct + Z_LOSS * log_sum * log_sum)
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
