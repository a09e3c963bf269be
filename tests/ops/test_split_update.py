"""Updates of split weights: Triton kernels equal the reference and move no more than they must."""

import pytest
import torch
from split_update_cases import (
    NUMBERS,
    SHAPES,
    advance,
    assert_same_bits,
    copied,
    lists,
    random_inputs,
)

from flatout.ops import split_update
from flatout.ops.split import join, split

triton = pytest.importorskip("triton", reason="the package triton is not installed")
interpreter = pytest.importorskip("triton.runtime.interpreter")

from flatout.ops import split_kernels  # noqa: E402


@pytest.fixture
def bytes_moved(interpreted, monkeypatch):
    """Count the bytes of tensors that kernels load and store, without tables and scalars."""
    moved = {"loaded": 0, "stored": 0}
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, pointers, mask, *others):
        result = load(self, pointers, mask, *others)
        moved["loaded"] += int(mask.data.sum()) * result.data.itemsize if mask.data.size > 1 else 0
        return result

    def counted_store(self, pointers, value, mask, *others):
        moved["stored"] += int(mask.data.sum()) * value.data.itemsize
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_the_kernel_equals_the_reference(interpreted, weight_decay, beta1):
    numbers = NUMBERS | {"weight_decay": weight_decay, "beta1": beta1}
    expected = lists(SHAPES)
    actual = copied(expected)
    for number in range(4):
        for columns, update in (
            (expected, split_update.adamw_reference),
            (actual, split_update.adamw),
        ):
            columns[2] = [
                random_inputs(tensor.shape, 500 * number + i, 1e-2)
                for i, tensor in enumerate(columns[2])
            ]
            advance(columns[5])
            update(*columns, **numbers | {"lr": 0.01 / (1 + number)})
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["adamw", "decay_and_add"])
def test_a_program_with_several_blocks_gives_the_same_bits(name, interpreted, monkeypatch):
    monkeypatch.setattr(split_update, "PROGRAMS", 2)
    columns = lists([(5, 700), (32, 80)])
    advance(columns[5])
    if name == "decay_and_add":
        columns, numbers = columns[:3], {"kept": 0.99, "alpha": -0.3}
    else:
        numbers = NUMBERS
    actual = copied(columns)
    getattr(split_update, f"{name}_reference")(*columns, **numbers)
    getattr(split_update, name)(*actual, **numbers)
    assert_same_bits(actual, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decay_and_add_equals_the_reference(interpreted, dtype):
    highs, lows, steps, *_ = lists(SHAPES)
    steps = [step.to(dtype) for step in steps]
    actual = copied([highs, lows])
    split_update.decay_and_add_reference(highs, lows, steps, kept=0.999, alpha=-0.004)
    split_update.decay_and_add(*actual, steps, kept=0.999, alpha=-0.004)
    assert_same_bits(actual, [highs, lows])


def test_weights_are_stored_as_split_returns_them(interpreted):
    """Ties, signed zeros, infinities, extreme numbers and NaN; the added step is zero."""
    patterns = [
        0x3F808000,
        0x3F818000,
        -0x407F8000,
        0,
        -0x80000000,
        0x7F7FFFFF,
        0x7F7F8000,
        0x7F800000,
        -0x800000,
        1,
        0x8000,
        -0x7FFF8000,
    ]
    random = torch.randint(-(2**31), 2**31, (4_000,), generator=torch.Generator().manual_seed(1))
    bits = torch.cat([torch.tensor(patterns), random]).to(torch.int32)
    weights = bits.view(torch.float32)
    weights = torch.where(weights.isnan(), torch.nan, weights)
    high, low = split(torch.zeros_like(weights))
    split_update.decay_and_add([high], [low], [weights], kept=0.0, alpha=1.0)
    finite = ~weights.isnan()
    for part, expected in zip(
        (high, low), split(weights + 0.0), strict=True
    ):  # negative zero plus zero is zero
        assert torch.equal(part[finite], expected[finite])
    assert high[~finite].isnan().all()
    assert join(high, low)[~finite].isnan().all()


@pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning"
)  # NumPy's, about a signalling NaN
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1])
def test_nan_survives_in_both_parts(interpreted, pattern):
    """Rounding its bits would turn one NaN into a negative zero and another into an infinity."""
    columns = lists([(1, 16)])
    columns[2][0].fill_(1.0).view(torch.int32)[0, 3] = pattern
    advance(columns[5])
    split_update.adamw(*columns, **NUMBERS)
    actual = columns[0][0].isnan(), join(columns[0][0], columns[1][0]).isnan()
    for nans in actual:
        assert nans[0, 3]
        assert nans.sum() == 1


def test_memory_next_to_a_tensor_is_not_touched(interpreted):
    """Each part lies inside a larger tensor of NaN and ones."""
    counts = (512, 37, 16)
    plain = lists([(count,) for count in counts])
    columns = []
    for column in plain[:5]:
        columns.append([])
        for tensor in column:
            around = torch.full(
                (tensor.numel() + 64,),
                float("nan") if tensor.is_floating_point() else 1,
                dtype=tensor.dtype,
            )
            around[32:-32] = tensor
            columns[-1].append(around)
    advance(plain[5])
    before = copied(columns)
    split_update.adamw(
        *[[around[32:-32] for around in column] for column in columns], plain[5], **NUMBERS
    )
    split_update.adamw_reference(*plain, **NUMBERS)
    for actual, expected, old in zip(columns, plain[:5], before, strict=True):
        for around, tensor, previous in zip(actual, expected, old, strict=True):
            assert torch.equal(around[32:-32], tensor)
            for edge in (slice(32), slice(-32, None)):
                assert torch.equal(around[edge].nan_to_num(7), previous[edge].nan_to_num(7))


def test_adamw_moves_28_bytes_per_weight(bytes_moved):
    shapes = [(64, 48), (7, 5), (3, 1031)]
    columns = lists(shapes)
    advance(columns[5])
    weights = sum(tensor.numel() for tensor in columns[0])
    split_update.adamw(*columns, **NUMBERS)
    assert bytes_moved == {
        "loaded": (2 + 2 + 4 + 4 + 4) * weights,
        "stored": (2 + 2 + 4 + 4) * weights,
    }
    assert (
        sum(bytes_moved.values())
        == 28 * weights
        == sum(split_update.ADAMW_BYTES.values()) * weights
    )


@pytest.mark.parametrize(
    ("dtype", "step_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str
)
def test_decay_and_add_moves_8_bytes_per_weight_and_the_step(bytes_moved, dtype, step_bytes):
    highs, lows, steps, *_ = lists([(64, 48), (7, 5)])
    split_update.decay_and_add(highs, lows, [step.to(dtype) for step in steps], kept=0.9, alpha=1.0)
    assert sum(bytes_moved.values()) == (8 + step_bytes) * sum(tensor.numel() for tensor in highs)


@pytest.mark.parametrize("name", ["adamw", "decay_and_add"])
def test_a_flag_of_1_on_the_device_moves_nothing(name, bytes_moved):
    """The gradients and steps are NaN then; a flag of 0 changes no bit of the update."""
    columns = lists(SHAPES)
    advance(columns[5])
    numbers = NUMBERS
    if name == "decay_and_add":
        columns, numbers = columns[:3], {"kept": 0.99, "alpha": -0.3}
    bad = [*columns[:2], [torch.full_like(g, torch.nan) for g in columns[2]], *columns[3:]]
    before = copied(columns)
    getattr(split_update, name)(*bad, **numbers, skip=torch.tensor(1.0))
    assert_same_bits(columns, before)
    assert bytes_moved == {"loaded": 0, "stored": 0}
    getattr(split_update, f"{name}_reference")(*before, **numbers)
    getattr(split_update, name)(*columns, **numbers, skip=torch.tensor(0.0))
    assert_same_bits(columns, before)


def test_vector_loads_and_other_loads_take_one_launch_each(interpreted, monkeypatch):
    launches = []
    kernel = split_kernels.adamw

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **constants: (
                launches.append((grid[1], constants["ALIGNED"])),
                kernel[grid](*given, **constants),
            )

    monkeypatch.setattr(split_kernels, "adamw", Recorder())
    columns = lists([(32, 48), (7, 5), (64, 16), (16, 16)])
    for column in columns[:5]:
        column[3] = torch.cat([column[3].new_zeros(1), column[3].flatten()])[
            1:
        ]  # full vectors that are not aligned
    advance(columns[5])
    split_update.adamw(*columns, **NUMBERS)
    assert launches == [(2, True), (2, False)]


def test_unsupported_layouts_do_not_fit(interpreted):
    high, low = split(random_inputs((6, 10), 1))
    kept = torch.zeros(6, 10)
    assert split_update.fits(high, low, kept, kept)
    assert split_update.fits(high.T, low.T, kept.T)
    assert not split_update.fits(high[:, ::2], low[:, ::2])
    assert not split_update.fits(high, low, kept.double())
    assert not split_update.fits(high.T, low.T, torch.zeros(10, 6))
    assert not split_update.fits(high.as_strided((6, 10), (1, 1)), low.as_strided((6, 10), (1, 1)))


def test_kernels_do_not_run_on_a_cpu():
    assert not split_update.fits(*split(random_inputs((4, 4), 1)))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("name", "constants"), [("adamw", {}), ("decay_and_add", {"DTYPE": triton.language.bfloat16})]
)
def test_kernels_compile_for_a_gpu(name, constants, aligned):
    """They compile to binaries for an H100 or H200, with vector loads for aligned tensors.

    Each operation is rounded separately, and threads do not exchange data.
    """
    kernel = getattr(split_kernels, name)
    constants = {"ALIGNED": aligned, "BLOCK": split_update.BLOCK} | constants
    types = {"table": "*i64", "numbers": "*fp64", "skip": "*fp32"} | dict.fromkeys(
        constants, "constexpr"
    )
    source = triton.compiler.ASTSource(
        kernel, {key: types[key] for key in kernel.arg_names}, constants
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    kernel = triton.compile(
        source, target=target, options={"num_warps": 4, "enable_fp_fusion": False}
    )
    assert kernel.asm["cubin"]
    text = kernel.asm["ptx"]
    assert ("ld.global.v2.b32" in text) is aligned
    assert ("ld.global.b16" in text) is not aligned
    assert "fma.rn.f32" not in text
    assert "bar.sync" not in text
    assert ("div.rn.f32" in text) is ("sqrt.rn.f32" in text) is (name == "adamw")


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_equals_the_reference():
    expected = lists([*SHAPES, (300, 768)])
    actual = [[tensor.cuda() for tensor in column] for column in expected]
    for columns, update in ((expected, split_update.adamw_reference), (actual, split_update.adamw)):
        for _ in range(3):
            advance(columns[5])
            update(*columns, **NUMBERS)
    assert_same_bits([[tensor.cpu() for tensor in column] for column in actual], expected)
    for dtype in (torch.float32, torch.bfloat16):
        for columns, update in (
            (expected, split_update.decay_and_add_reference),
            (actual, split_update.decay_and_add),
        ):
            update(
                columns[0],
                columns[1],
                [tensor.to(dtype) for tensor in columns[2]],
                kept=0.999,
                alpha=-0.3,
            )
    assert_same_bits([[tensor.cpu() for tensor in column] for column in actual], expected)
