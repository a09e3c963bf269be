"""Triton kernels for the diagonal recurrence of ops/scan.py, combined by ops/scan_passes.py.

A program walks one chunk of one row for a block of eigenstates, with the state in registers.
Complex numbers are stored as K real parts, then K imaginary parts. The loads of a program do not
depend on its state, so those of several steps are in flight before the first is used.

Letters: k the eigenstates of a program, `at` counts steps over all rows.
"""

import triton
import triton.language as tl


@triton.jit
def _times(a, b, c, d):
    """The product of a + i b and c + i d."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _reset(left, right, reset, CUT: tl.constexpr):
    """Both values, or zero where a document starts. Multiplying by zero would keep a NaN."""
    if CUT:
        left, right = tl.where(reset, 0.0, left), tl.where(reset, 0.0, right)
    return left, right


@triton.jit
def _load(pointer, at, k, mask, COUNT: tl.constexpr):
    """Load a complex number per eigenstate, zero where masked."""
    source = pointer + at * 2 * COUNT + k
    return tl.load(source, mask=mask, other=0.0).to(tl.float32), tl.load(
        source + COUNT, mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def _store(pointer, at, k, mask, real, imaginary, COUNT: tl.constexpr):
    """Store a complex number per eigenstate."""
    target = pointer + at * 2 * COUNT + k
    tl.store(target, real, mask=mask)
    tl.store(target + COUNT, imaginary, mask=mask)


@triton.jit
def _program(chunks, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Row, chunk and eigenstates of this program. Programs of one chunk are adjacent."""
    blocks = (COUNT + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row, chunk = program // (blocks * chunks), (program // blocks) % chunks
    return row.to(tl.int64), chunk.to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _initial(
    entering,
    factors,
    here,
    k,
    inside,
    COUNT: tl.constexpr,
    ENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state that enters a chunk, and the factor of all its steps."""
    real = tl.full((BLOCK,), 0.0, tl.float32)
    imaginary = real
    if ENTERED:
        real, imaginary = _load(entering, here, k, inside, COUNT)
    factor, factor_i = _load(factors, 0, k, inside, COUNT)
    return real, imaginary, factor, factor_i


@triton.jit
def _step(drive, resets, row, step, k, steps, inside, COUNT: tl.constexpr, CUT: tl.constexpr):
    """Load a step.

    Returns its index, whether it exists, its drive, and whether a document starts there.
    """
    at, mask = row * steps + step, inside & (step < steps)
    real, imaginary = _load(drive, at, k, mask, COUNT)
    reset = step < 0
    if CUT:
        reset = tl.load(resets + at, mask=step < steps, other=0) != 0
    return at, mask, real, imaginary, reset


@triton.jit
def walk(
    drive, factors, resets, entering, kept, cuts, steps, chunks,
    KEEPS: tl.constexpr, ADDS_FIRST: tl.constexpr, COUNT: tl.constexpr, ENTERED: tl.constexpr,
    BACKWARD: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk a chunk and store the state `after` each step, `before` each, or where the chunk `ends`.

    Backward multiplies by the conjugate factors.
    """
    row, chunk, k = _program(chunks, COUNT, BLOCK)
    inside, here = k < COUNT, row * chunks + chunk
    real, imaginary, factor, factor_i = _initial(
        entering, factors, here, k, inside, COUNT, ENTERED, BLOCK
    )
    if BACKWARD:
        factor_i = -factor_i
    was_cut = chunk < 0
    for begin in range(0, CHUNK, AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            step = chunk * CHUNK + (CHUNK - 1 - begin - i if BACKWARD else begin + i)
            loaded += (_step(drive, resets, row, step, k, steps, inside, COUNT, CUT),)
        for i in tl.static_range(AT_ONCE):
            at, mask, added, added_i, reset = loaded[i]
            if KEEPS == "before":
                _store(kept, at, k, mask, real, imaginary, COUNT)
            if ADDS_FIRST:
                real, imaginary = _times(real + added, imaginary + added_i, factor, factor_i)
            real, imaginary = _reset(real, imaginary, reset, CUT)
            was_cut = was_cut | reset
            if not ADDS_FIRST:
                real, imaginary = _times(real, imaginary, factor, factor_i)
                real, imaginary = real + added, imaginary + added_i
            if KEEPS == "after":
                _store(kept, at, k, mask, real, imaginary, COUNT)
    if KEEPS == "ends":
        _store(kept, here, k, inside, real, imaginary, COUNT)
        tl.store(cuts + here, was_cut.to(tl.uint8), mask=CUT)


@triton.jit
def gradients(
    drive, factors, resets, entering, states, start,
    drive_grad, log_decay_grad, angle_grad, start_grad, steps, chunks,
    STARTED: tl.constexpr, COUNT: tl.constexpr, ENTERED: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk a chunk backward and store all gradients, those of the eigenvalues summed over it.

    The gradient g of a state, times the conjugate eigenvalue, is the gradient of the state before,
    s. That times the conjugate of s is the gradient of the eigenvalue's logarithm: the real part is
    for log_decay, the imaginary part for angle.
    """
    row, chunk, k = _program(chunks, COUNT, BLOCK)
    inside, here = k < COUNT, row * chunks + chunk
    real, imaginary, factor, factor_i = _initial(
        entering, factors, here, k, inside, COUNT, ENTERED, BLOCK
    )
    factor_i = -factor_i
    along_sum, across_sum = tl.full((BLOCK,), 0.0, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, CHUNK, AT_ONCE):
        loaded, befores = (), ()
        for i in tl.static_range(AT_ONCE):
            step = chunk * CHUNK + CHUNK - 1 - begin - i
            loaded += (_step(drive, resets, row, step, k, steps, inside, COUNT, CUT),)
            same_document = (step > 0) & (loaded[i][4] == 0)
            befores += (_load(states, loaded[i][0] - 1, k, loaded[i][1] & same_document, COUNT),)
        for i in tl.static_range(AT_ONCE):
            at, mask, added, added_i, reset = loaded[i]
            before, before_i = befores[i]
            if STARTED:
                started, started_i = _load(start, row, k, inside & (at == row * steps), COUNT)
                before, before_i = before + started, before_i + started_i
            real, imaginary = real + added, imaginary + added_i
            _store(drive_grad, at, k, mask, real, imaginary, COUNT)
            real, imaginary = _times(real, imaginary, factor, factor_i)
            real, imaginary = _reset(real, imaginary, reset, CUT)
            along_sum += real * before + imaginary * before_i
            across_sum += imaginary * before - real * before_i
    tl.store(log_decay_grad + here * COUNT + k, along_sum, mask=inside)
    tl.store(angle_grad + here * COUNT + k, across_sum, mask=inside)
    _store(start_grad, row, k, inside & (chunk == 0), real, imaginary, COUNT)
