"""Triton kernels for the diagonal recurrence of ops/scan.py, combined by ops/scan_passes.py.

A program walks one chunk of one row for a block of eigenstates, with the state in registers.
Complex numbers are stored as K real parts, then K imaginary parts. The loads of a program do not
depend on its state, so those of several steps are in flight before the first is used.

Letters: k the eigenstates of a program, `at` counts steps over all rows.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    """The exponential, accurate to the last bits near 0.

    There the error of the GPU's own exponential is biased and accumulates over tokens.
    """
    near = 1.0 + x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x))


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
def _store_polar(
    logs, angles, at, k, mask, log_decay, angle, COUNT: tl.constexpr, FORM: tl.constexpr
):
    """Store the log decay and the angle of a step, if each step has its own eigenvalues."""
    if FORM == "polar":
        tl.store(logs + at * COUNT + k, log_decay, mask=mask)
        tl.store(angles + at * COUNT + k, angle, mask=mask)


@triton.jit
def _program(chunks, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Row, chunk and eigenstates of this program. Programs of one chunk are adjacent."""
    blocks = (COUNT + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row, chunk = program // (blocks * chunks), (program // blocks) % chunks
    return row.to(tl.int64), chunk.to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _factor(real, imaginary, log_decay, angle, FORM: tl.constexpr, BACKWARD: tl.constexpr):
    """The factor of the state: the `fixed` one, or that of the step's own log decay and angle.

    Backward uses its conjugate.
    """
    if FORM == "polar":
        magnitude = _exp(log_decay)
        real, imaginary = (
            (magnitude * tl.cos(angle)).to(tl.float32),
            (magnitude * tl.sin(angle)).to(tl.float32),
        )
    if BACKWARD:
        imaginary = -imaginary
    return real, imaginary


@triton.jit
def _initial(
    entering,
    first,
    here,
    k,
    inside,
    COUNT: tl.constexpr,
    ENTERED: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state that enters a chunk, and the factor of all its steps if it is `fixed`."""
    zero = tl.full((BLOCK,), 0.0, tl.float32)
    real, imaginary, fixed, fixed_i = zero, zero, zero, zero
    if ENTERED:
        real, imaginary = _load(entering, here, k, inside, COUNT)
    if FORM == "fixed":
        fixed, fixed_i = _load(first, 0, k, inside, COUNT)
    return real, imaginary, fixed, fixed_i


@triton.jit
def _step(
    drive,
    first,
    second,
    resets,
    row,
    step,
    k,
    steps,
    inside,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
    CUT: tl.constexpr,
):
    """Load a step.

    Returns its index, whether it exists, its drive, its log decay and angle, and whether a document
    starts there.
    """
    at, mask = row * steps + step, inside & (step < steps)
    real, imaginary = _load(drive, at, k, mask, COUNT)
    log_decay, angle, reset = real, imaginary, step < 0
    if FORM == "polar":
        log_decay, angle = (
            tl.load(first + at * COUNT + k, mask=mask, other=0.0),
            tl.load(second + at * COUNT + k, mask=mask, other=0.0),
        )
    if CUT:
        reset = tl.load(resets + at, mask=step < steps, other=0) != 0
    return at, mask, real, imaginary, log_decay, angle, reset


@triton.jit
def walk(
    drive, first, second, resets, entering, kept, logs, angles, cuts, steps, chunks,
    KEEPS: tl.constexpr, ADDS_FIRST: tl.constexpr, COUNT: tl.constexpr, ENTERED: tl.constexpr,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk a chunk and store the state `after` each step, `before` each, or where the chunk `ends`.

    With `ends`, the sums of the steps' own log decays and angles are stored too, in fp64: a product
    of rounded factors would multiply their errors.
    """
    row, chunk, k = _program(chunks, COUNT, BLOCK)
    inside, here = k < COUNT, row * chunks + chunk
    real, imaginary, fixed, fixed_i = _initial(
        entering, first, here, k, inside, COUNT, ENTERED, FORM, BLOCK
    )
    log_sum, angle_sum, was_cut = (
        tl.full((BLOCK,), 0.0, tl.float64),
        tl.full((BLOCK,), 0.0, tl.float64),
        chunk < 0,
    )
    for begin in range(0, CHUNK, AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            step = chunk * CHUNK + (CHUNK - 1 - begin - i if BACKWARD else begin + i)
            loaded += (
                _step(drive, first, second, resets, row, step, k, steps, inside, COUNT, FORM, CUT),
            )
        for i in tl.static_range(AT_ONCE):
            at, mask, added, added_i, log_decay, angle, reset = loaded[i]
            factor, factor_i = _factor(fixed, fixed_i, log_decay, angle, FORM, BACKWARD)
            if KEEPS == "before":
                _store(kept, at, k, mask, real, imaginary, COUNT)
            if ADDS_FIRST:
                real, imaginary = _times(real + added, imaginary + added_i, factor, factor_i)
                log_sum, angle_sum = log_sum + log_decay, angle_sum + angle
            real, imaginary = _reset(real, imaginary, reset, CUT)
            log_sum, angle_sum = _reset(log_sum, angle_sum, reset, CUT)
            was_cut = was_cut | reset
            if not ADDS_FIRST:
                real, imaginary = _times(real, imaginary, factor, factor_i)
                real, imaginary = real + added, imaginary + added_i
                log_sum, angle_sum = log_sum + log_decay, angle_sum + angle
            if KEEPS == "after":
                _store(kept, at, k, mask, real, imaginary, COUNT)
    if KEEPS == "ends":
        _store(kept, here, k, inside, real, imaginary, COUNT)
        _store_polar(logs, angles, here, k, inside, log_sum, angle_sum, COUNT, FORM)
        tl.store(cuts + here, was_cut.to(tl.uint8), mask=CUT)


@triton.jit
def gradients(
    drive, first, second, resets, entering, states, start,
    drive_grad, log_decay_grad, angle_grad, start_grad, steps, chunks,
    STARTED: tl.constexpr, COUNT: tl.constexpr, ENTERED: tl.constexpr, FORM: tl.constexpr,
    CUT: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk a chunk backward and store all gradients, those of fixed eigenvalues summed over it.

    The gradient g of a state, times the conjugate eigenvalue, is the gradient of the state before,
    s. That times the conjugate of s is the gradient of the eigenvalue's logarithm: the real part is
    for log_decay, the imaginary part for angle.
    """
    row, chunk, k = _program(chunks, COUNT, BLOCK)
    inside, here = k < COUNT, row * chunks + chunk
    real, imaginary, fixed, fixed_i = _initial(
        entering, first, here, k, inside, COUNT, ENTERED, FORM, BLOCK
    )
    along_sum, across_sum = tl.full((BLOCK,), 0.0, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, CHUNK, AT_ONCE):
        loaded, befores = (), ()
        for i in tl.static_range(AT_ONCE):
            step = chunk * CHUNK + CHUNK - 1 - begin - i
            loaded += (
                _step(drive, first, second, resets, row, step, k, steps, inside, COUNT, FORM, CUT),
            )
            same_document = (step > 0) & (loaded[i][6] == 0)
            befores += (_load(states, loaded[i][0] - 1, k, loaded[i][1] & same_document, COUNT),)
        for i in tl.static_range(AT_ONCE):
            at, mask, added, added_i, log_decay, angle, reset = loaded[i]
            factor, factor_i = _factor(fixed, fixed_i, log_decay, angle, FORM, True)
            before, before_i = befores[i]
            if STARTED:
                started, started_i = _load(start, row, k, inside & (at == row * steps), COUNT)
                before, before_i = before + started, before_i + started_i
            real, imaginary = real + added, imaginary + added_i
            _store(drive_grad, at, k, mask, real, imaginary, COUNT)
            real, imaginary = _times(real, imaginary, factor, factor_i)
            real, imaginary = _reset(real, imaginary, reset, CUT)
            along, across = (
                real * before + imaginary * before_i,
                imaginary * before - real * before_i,
            )
            along_sum, across_sum = along_sum + along, across_sum + across
            _store_polar(log_decay_grad, angle_grad, at, k, mask, along, across, COUNT, FORM)
    if FORM == "fixed":
        tl.store(log_decay_grad + here * COUNT + k, along_sum, mask=inside)
        tl.store(angle_grad + here * COUNT + k, across_sum, mask=inside)
    _store(start_grad, row, k, inside & (chunk == 0), real, imaginary, COUNT)
