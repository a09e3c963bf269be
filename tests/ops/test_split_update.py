"""Updates of weights in two parts: Triton's kernels against the definition, to the bit, and what
they read and write, counted.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from flatout.models.split_weights import SplitTensor, decay_and_add, whole
from flatout.ops import split_update
from flatout.ops.split import join, split
from flatout.optimizers.adamw import fused

triton = pytest.importorskip("triton", reason="the package triton is not installed")
interpreter = pytest.importorskip("triton.runtime.interpreter")

from flatout.ops import split_kernels  # noqa: E402

NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
SHAPES = [(32, 48), (7, 5), (1, 1), (3, 1031), (64, 16), (1, 16), (0, 4), (16, 520)]
"""Whole vectors and odd numbers, less than a block, several blocks, one of them partly filled, and
nothing at all.
"""


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run in Triton's interpreter, on the CPU."""
    for name, function in list(vars(split_kernels).items()):
        if isinstance(function, triton.runtime.jit.JITFunction):
            made = interpreter.InterpretedFunction(function.fn)
            monkeypatch.setattr(
                split_kernels, name, made.rewrite() if name.startswith("_") else made
            )
    monkeypatch.setattr(
        interpreter,
        "_patch_lang_tensor",
        partial(counting_with_any_numpy, interpreter._patch_lang_tensor),
    )
    monkeypatch.setattr(split_update, "_runs_triton", lambda tensor: True)


def counting_with_any_numpy(patch, tensor, scope):
    """Triton 3.6 takes the ends of a loop, arrays of one number, for numbers, which numpy no longer
    does.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@pytest.fixture
def bytes_moved(interpreted, monkeypatch):
    """What the kernels load and store of tensors, in bytes: every number that is not masked, the
    tables and scalars apart.
    """
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


def drawn(shape, seed, size=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def lists(shapes, *, seed=0, laid_out=lambda tensor: tensor):
    """Everything that AdamW's update takes, in the middle of a run."""
    weights = [laid_out(drawn(shape, seed + i, 0.02)) for i, shape in enumerate(shapes)]
    highs, lows = map(list, zip(*map(split, weights), strict=True))
    gradients = [laid_out(drawn(shape, seed + 100 + i, 1e-3)) for i, shape in enumerate(shapes)]
    means = [laid_out(drawn(shape, seed + 200 + i, 1e-3)) for i, shape in enumerate(shapes)]
    squares = [
        laid_out(drawn(shape, seed + 300 + i, 1e-3).square()) for i, shape in enumerate(shapes)
    ]
    return [
        highs,
        lows,
        gradients,
        means,
        squares,
        [torch.tensor(float(i % 3)) for i in range(len(shapes))],
    ]


def copied(columns):
    return [[tensor.clone() for tensor in column] for column in columns]


def advance(steps):
    for step in steps:
        step += 1


def assert_same_bits(found, wanted):
    for one_column, other_column in zip(found, wanted, strict=True):
        for one, other in zip(one_column, other_column, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_the_kernel_is_the_definition_to_the_bit(interpreted, weight_decay, beta1):
    numbers = NUMBERS | {"weight_decay": weight_decay, "beta1": beta1}
    wanted = lists(SHAPES)
    found = copied(wanted)
    for number in range(4):
        for columns, update in (
            (wanted, split_update.adamw_reference),
            (found, split_update.adamw),
        ):
            columns[2] = [
                drawn(tensor.shape, 500 * number + i, 1e-2) for i, tensor in enumerate(columns[2])
            ]
            advance(columns[5])
            update(*columns, **numbers | {"lr": 0.01 / (1 + number)})
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("name", ["adamw", "decay_and_add"])
def test_the_same_bits_when_a_program_takes_several_blocks_of_a_tensor(
    name, interpreted, monkeypatch
):
    monkeypatch.setattr(split_update, "PROGRAMS", 2)
    columns = lists([(5, 700), (32, 80)])
    advance(columns[5])
    if name == "decay_and_add":
        columns, numbers = columns[:3], {"kept": 0.99, "alpha": -0.3}
    else:
        numbers = NUMBERS
    found = copied(columns)
    getattr(split_update, f"{name}_reference")(*columns, **numbers)
    getattr(split_update, name)(*found, **numbers)
    assert_same_bits(found, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decayed_sum_is_the_definition_to_the_bit(interpreted, dtype):
    highs, lows, steps, *_ = lists(SHAPES)
    steps = [step.to(dtype) for step in steps]
    found = copied([highs, lows])
    split_update.decay_and_add_reference(highs, lows, steps, kept=0.999, alpha=-0.004)
    split_update.decay_and_add(*found, steps, kept=0.999, alpha=-0.004)
    assert_same_bits(found, [highs, lows])


def test_what_is_stored_is_split_as_split_does_it(interpreted):
    """Ties, signed zeros, infinities, the smallest and the largest numbers and NaNs; what is added
    is zero.
    """
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
    for part, wanted in zip(
        (high, low), split(weights + 0.0), strict=True
    ):  # a negative zero added to zero is zero
        assert torch.equal(part[finite], wanted[finite])
    assert high[~finite].isnan().all()
    assert join(high, low)[~finite].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of a signalling NaN
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1])
def test_a_nan_stays_a_nan_in_both_forms(interpreted, pattern):
    """Rounded by its bits alone, one NaN would become a negative zero, another an infinity."""
    columns = lists([(1, 16)])
    columns[2][0].fill_(1.0).view(torch.int32)[0, 3] = pattern
    advance(columns[5])
    split_update.adamw(*columns, **NUMBERS)
    found = columns[0][0].isnan(), join(columns[0][0], columns[1][0]).isnan()
    for nans in found:
        assert nans[0, 3]
        assert nans.sum() == 1


def test_nothing_beside_a_tensor_is_touched(interpreted):
    """Each part lies inside a larger tensor of NaN and ones, which are neither read into a weight
    nor written.
    """
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
    for found, wanted, old in zip(columns, plain[:5], before, strict=True):
        for around, tensor, previous in zip(found, wanted, old, strict=True):
            assert torch.equal(around[32:-32], tensor)
            for edge in (slice(32), slice(-32, None)):
                assert torch.equal(around[edge].nan_to_num(7), previous[edge].nan_to_num(7))


def test_what_adamw_moves_is_28_bytes_a_weight(bytes_moved):
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
def test_what_a_decayed_sum_moves_is_8_bytes_a_weight_and_the_step(bytes_moved, dtype, step_bytes):
    highs, lows, steps, *_ = lists([(64, 48), (7, 5)])
    split_update.decay_and_add(highs, lows, [step.to(dtype) for step in steps], kept=0.9, alpha=1.0)
    assert sum(bytes_moved.values()) == (8 + step_bytes) * sum(tensor.numel() for tensor in highs)


def test_one_launch_for_tensors_that_are_read_as_vectors_and_one_for_the_others(
    interpreted, monkeypatch
):
    launches = []
    kernel = split_kernels.adamw

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **constants: (
                launches.append((grid[1], constants["ALIGNED"])),
                kernel[grid](*given, **constants),
            )

    monkeypatch.setattr(split_kernels, "adamw", Noted())
    columns = lists([(32, 48), (7, 5), (64, 16), (16, 16)])
    for column in columns[:5]:
        column[3] = torch.cat([column[3].new_zeros(1), column[3].flatten()])[
            1:
        ]  # a whole number of vectors that does not begin at one
    advance(columns[5])
    split_update.adamw(*columns, **NUMBERS)
    assert launches == [(2, True), (2, False)]


def test_what_does_not_fit_is_told(interpreted):
    high, low = split(drawn((6, 10), 1))
    kept = torch.zeros(6, 10)
    assert split_update.fits(high, low, kept, kept)
    assert split_update.fits(high.T, low.T, kept.T)
    assert not split_update.fits(high[:, ::2], low[:, ::2])
    assert not split_update.fits(high, low, kept.double())
    assert not split_update.fits(high.T, low.T, torch.zeros(10, 6))
    assert not split_update.fits(high.as_strided((6, 10), (1, 1)), low.as_strided((6, 10), (1, 1)))


def test_a_cpu_has_no_kernel():
    assert not split_update.fits(*split(drawn((4, 4), 1)))


class Trained:
    """Parameters, some split, in groups with and without decay, under AdamW."""

    SHAPES = ((24, 32), (7, 9), (33, 5), (16,), (3,))

    def __init__(self, *, lr=0.01):
        weights = [join(*split(drawn(shape, 40 + i))) for i, shape in enumerate(self.SHAPES)]
        weights[2] = weights[2].T.contiguous().T
        self.parameters = [
            nn.Parameter(SplitTensor(*split(w)) if w.dim() == 2 else w.clone()) for w in weights
        ]
        groups = [
            {"params": self.parameters[0:2], "weight_decay": 0.1},
            {"params": self.parameters[2:], "weight_decay": 0.0},
        ]
        self.optimizer = fused(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    def step(self, numbers):
        for number in numbers:
            for index, parameter in enumerate(self.parameters):
                parameter.grad = torch.empty_like(whole(parameter.detach())).copy_(
                    drawn(parameter.shape, 1_000 + 10 * number + index)
                )
            self.optimizer.step()

    def state(self):
        kept = [tensor for p in self.parameters for tensor in self.optimizer.state[p].values()]
        return [whole(p.detach()) for p in self.parameters] + kept


def test_torchs_adamw_goes_through_the_kernel_and_agrees_to_rounding(interpreted, monkeypatch):
    """Decayed and not, transposed, odd, many small ones, and plain parameters beside them, which
    torch's own kernel updates.
    """
    by_kernel = Trained()
    by_kernel.step(range(5))
    assert {key for state in by_kernel.optimizer.state.values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    monkeypatch.setattr(split_update, "_runs_triton", lambda tensor: False)
    by_torch = Trained()
    by_torch.step(range(5))
    for found, wanted in zip(by_kernel.state(), by_torch.state(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert all(
        torch.equal(one, other)
        for one, other in zip(by_kernel.parameters[3:], by_torch.parameters[3:], strict=True)
    )
    assert not all(
        torch.equal(one, other)
        for one, other in zip(by_kernel.state(), by_torch.state(), strict=True)
    )


def test_torchs_adamw_through_the_kernel_is_the_definition_to_the_bit(interpreted):
    trained = Trained()
    wanted = [
        [*split(whole(p.detach())), torch.zeros(p.shape), torch.zeros(p.shape)]
        for p in trained.parameters[:3]
    ]
    for number in range(4):
        trained.step([number])
        for index, (high, low, mean, square) in enumerate(wanted):
            gradient, decay = trained.parameters[index].grad, 0.1 if index < 2 else 0.0
            split_update.adamw_reference(
                [high],
                [low],
                [gradient],
                [mean],
                [square],
                [torch.tensor(number + 1.0)],
                **NUMBERS | {"weight_decay": decay},
            )
    for parameter, (high, low, mean, square) in zip(trained.parameters, wanted, strict=False):
        state = trained.optimizer.state[parameter]
        assert_same_bits(
            [[parameter.high, parameter.low, state["exp_avg"], state["exp_avg_sq"]]],
            [[high, low, mean, square]],
        )


def test_a_gradient_laid_out_otherwise_is_the_same_gradient(interpreted):
    columns = lists([(24, 10)])
    advance(columns[5])
    wanted = copied(columns)
    split_update.adamw_reference(*wanted, **NUMBERS)
    columns[2] = [columns[2][0].T.contiguous().T]
    split_update.adamw(*columns, **NUMBERS)
    assert_same_bits(columns, wanted)


@pytest.mark.parametrize("first", [True, False])
def test_a_state_of_torchs_is_gone_on_with_and_the_other_way_round(interpreted, monkeypatch, first):
    runs = []
    for second in (first, not first):
        trained, again = Trained(), Trained(lr=0.3)
        monkeypatch.setattr(split_update, "_runs_triton", lambda tensor: first)
        trained.step(range(3))
        again.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        for old, new in zip(trained.parameters, again.parameters, strict=True):
            new.data.copy_(old.data)
        monkeypatch.setattr(split_update, "_runs_triton", lambda tensor, second=second: second)
        again.step(range(3, 6))
        runs.append(again.state())
    for found, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_resumed_is_not_stopped_to_the_bit(interpreted):
    straight, stopped, again = Trained(), Trained(), Trained()
    straight.step(range(6))
    stopped.step(range(3))
    again.optimizer.load_state_dict(stopped.optimizer.state_dict())
    for old, new in zip(stopped.parameters, again.parameters, strict=True):
        new.data.copy_(old.data)
    again.step(range(3, 6))
    assert_same_bits([again.state()], [straight.state()])


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_decayed_sum_of_split_and_plain_weights_is_that_of_fp32(
    interpreted, monkeypatch, by_kernel
):
    """Rows of a weight, a transposed weight, columns with gaps, and a plain one."""
    monkeypatch.setattr(split_update, "_runs_triton", lambda tensor: by_kernel)
    start = [
        join(*split(drawn(shape, 60 + i)))
        for i, shape in enumerate([(12, 20), (9, 8), (6, 6), (4, 5)])
    ]
    parts = [SplitTensor(*split(w)) for w in start[:3]] + [start[3].clone()]
    views = [lambda w: w[4:12], lambda w: w.T, lambda w: w[:, 1:4], lambda w: w]
    steps = [
        drawn(view(w).shape, 80 + i) for i, (view, w) in enumerate(zip(views, start, strict=True))
    ]
    decay_and_add(
        [view(w) for view, w in zip(views, parts, strict=True)], steps, kept=0.99, alpha=-0.3
    )
    for view, weight, found, step in zip(views, start, parts, steps, strict=True):
        view(weight).mul_(0.99).add_(step, alpha=-0.3)
        torch.testing.assert_close(whole(found), weight, rtol=1e-6, atol=1e-7)
        if not by_kernel:
            assert torch.equal(
                whole(found), join(*split(weight)) if isinstance(found, SplitTensor) else weight
            )


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("name", "constants"), [("adamw", {}), ("decay_and_add", {"DTYPE": triton.language.bfloat16})]
)
def test_kernels_compile_for_a_gpu_that_is_not_here(name, constants, aligned):
    """Down to the binary for an H100 or H200: vectors where promised, each operation rounded by
    itself, nothing exchanged between threads.
    """
    kernel = getattr(split_kernels, name)
    constants = {"ALIGNED": aligned, "BLOCK": split_update.BLOCK} | constants
    types = {"table": "*i64", "numbers": "*fp64"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        kernel, {key: types[key] for key in kernel.arg_names}, constants
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made = triton.compile(
        source, target=target, options={"num_warps": 4, "enable_fp_fusion": False}
    )
    assert made.asm["cubin"]
    text = made.asm["ptx"]
    assert ("ld.global.v2.b32" in text) is aligned
    assert ("ld.global.b16" in text) is not aligned
    assert "fma.rn.f32" not in text
    assert "bar.sync" not in text
    assert ("div.rn.f32" in text) is ("sqrt.rn.f32" in text) is (name == "adamw")


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_updates_to_the_bits_of_the_definition():
    wanted = lists([*SHAPES, (300, 768)])
    found = [[tensor.cuda() for tensor in column] for column in wanted]
    for columns, update in ((wanted, split_update.adamw_reference), (found, split_update.adamw)):
        for _ in range(3):
            advance(columns[5])
            update(*columns, **NUMBERS)
    assert_same_bits([[tensor.cpu() for tensor in column] for column in found], wanted)
    for dtype in (torch.float32, torch.bfloat16):
        for columns, update in (
            (wanted, split_update.decay_and_add_reference),
            (found, split_update.decay_and_add),
        ):
            update(
                columns[0],
                columns[1],
                [tensor.to(dtype) for tensor in columns[2]],
                kept=0.999,
                alpha=-0.3,
            )
    assert_same_bits([[tensor.cpu() for tensor in column] for column in found], wanted)
