"""Bad steps are found, counted and skipped. Nothing else changes."""

import math
from collections import defaultdict
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.ops import newton_schulz
from flatout.optim.muon import Muon
from flatout.optim.step_guard import StepGuard, reads_flag, step_unless, step_with_flag


class Average(nn.Module):
    """Assigns a new tensor to its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, rows):
        self.mean = 0.5 * self.mean + 0.5 * rows.mean(0)
        return self.mean


def judged(guard, norm, loss=2.0):
    return int(guard.judge(torch.tensor(loss), torch.tensor(float(norm)), torch.tensor(1)))


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf), (math.inf, -math.inf)],
)
def test_a_step_whose_loss_or_norm_is_not_finite_is_skipped(loss, norm):
    guard = StepGuard()
    assert [judged(guard, 1), judged(guard, norm, loss), judged(guard, 1)] == [0, 1, 0]
    assert (int(guard.streak), int(guard.skipped)) == (0, 1)


def test_after_too_many_bad_steps_every_step_is_skipped():
    """The weights are then those before the first bad step, whatever is queued behind it."""
    guard = StepGuard(most=2)
    steps = [judged(guard, norm) for norm in (1, math.nan, 1, math.nan, math.nan, 1, 1)]
    assert steps == [0, 1, 0, 1, 1, 1, 1]
    assert (int(guard.streak), int(guard.skipped)) == (4, 5)


def test_a_restored_guard_judges_as_the_first_one():
    norms = [1.0, math.nan, 1.0, math.nan, math.nan]
    guard, again = StepGuard(most=4), StepGuard(most=4)
    for norm in norms:
        judged(guard, norm)
    again.load_state_dict(guard.state_dict())
    rest = [math.nan, 1.0, math.nan, 1.0, *[math.nan] * 5, 1.0]
    assert [judged(again, norm) for norm in rest] == [judged(guard, norm) for norm in rest]
    assert again.state_dict() == guard.state_dict()


def test_a_lower_limit_of_bad_steps_does_not_skip_the_first_step_of_a_resumed_run():
    guard, again = StepGuard(most=10), StepGuard(most=2)
    for _ in range(5):
        judged(guard, math.nan)
    again.load_state_dict(guard.state_dict())
    assert judged(again, 1.0) == 0


@pytest.mark.parametrize("model", [nn.BatchNorm1d(3), Average()], ids=["in place", "assigned"])
def test_a_bad_step_leaves_buffers_as_they_were(model):
    guard = StepGuard(model=model)
    for rows, bad in ((torch.randn(4, 3), False), (torch.full((4, 3), math.nan), True)):
        before = [buffer.clone() for buffer in model.buffers()]
        guard.begin()
        loss = model(rows).sum().detach()
        guard.judge(loss, torch.tensor(1.0), torch.tensor(1))
        kept = [torch.equal(one, two) for one, two in zip(before, model.buffers(), strict=True)]
        assert kept == [bad] * len(kept)


@pytest.mark.parametrize("model", [nn.BatchNorm1d(3), Average()], ids=["in place", "assigned"])
def test_undone_passes_leave_buffers_as_they_were(model):
    guard = StepGuard(model=model)
    for _ in range(2):
        before = [buffer.clone() for buffer in model.buffers()]
        guard.begin()
        model(torch.randn(4, 3) + 1)
        assert not torch.equal(before[0], next(model.buffers()))
        guard.undo()
        assert all(map(torch.equal, before, model.buffers()))
        model(torch.randn(4, 3))


LR = 0.1
SHAPES = [(64, 64), (96, 64), (7, 5)]
"""The first two are large enough for 8-bit moments. The second is a stack of three matrices."""
no_warning = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")


def muon(newton_schulz):
    def make(weights):
        rows = {weights[1]: (64, 16, 16)}
        return Muon([{"params": weights}], LR, stacked_rows=rows, newton_schulz=newton_schulz)

    return make


def adamw_8bit(weights):
    from flatout.speedups.adamw_8bit import adamw_8bit as make

    settings = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8}
    return make([{"params": weights, "weight_decay": 0.1, "lr": LR}], settings)


READING = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=LR, fused=True),
    "adamw-8bit": adamw_8bit,
    "muon": muon(newton_schulz.reference),
    "muon-batched": muon(newton_schulz.batched),
}
"""The optimizers that read the flag on the device."""


CASES = [
    pytest.param(name, marks=[needs_torchao, no_warning] * (name == "adamw-8bit"))
    for name in READING
]


def parameters(device="cpu"):
    """Return weights with negative zeros, whose sign an addition of zero would lose."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for weight in weights:
        weight[0, :3] = -0.0
    weights = [weight.to(device) for weight in weights]
    return [nn.Parameter(w) for w in weights]


def give_gradients(step, *models):
    generator = torch.Generator().manual_seed(step)
    for members in zip(*models, strict=True):
        gradient = torch.randn(members[0].shape, generator=generator)
        gradient[0, :3] = -0.0
        for member in members:
            member.grad = gradient.to(member.device)


def give_bad_gradients(weights):
    for number, weight in enumerate(weights):
        weight.grad = torch.full_like(weight.grad, math.nan if number else math.inf)


def bits(weights, optimizer):
    tensors = []
    for weight in weights:
        tensors.append(weight)
        tensors += [value for _, value in sorted(optimizer.state[weight].items())]
    return [
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for tensor in (tensor.reshape(-1) for tensor in tensors)
    ]


def on_the_host(optimizer, skip):
    step_unless(skip, [optimizer])


@pytest.mark.quick_cases("adamw", "muon", "muon-batched")
@pytest.mark.parametrize("name", CASES)
def test_a_flag_of_1_keeps_every_bit_and_0_gives_those_of_a_plain_step(name):
    """The path of a GPU, on a CPU: weights, moments and counters, -0 and first steps included."""
    plain, guarded = parameters(), parameters()
    optimizers = READING[name](plain), READING[name](guarded)
    assert reads_flag(optimizers[1])
    for number in range(4):
        give_gradients(number, plain, guarded)
        optimizers[0].step()
        step_with_flag(optimizers[1], torch.tensor(0.0))
        assert bits(guarded, optimizers[1]) == bits(plain, optimizers[0]), number
        give_bad_gradients(guarded)
        step_with_flag(optimizers[1], torch.tensor(1.0))
        assert bits(guarded, optimizers[1]) == bits(plain, optimizers[0]), number
    assert not hasattr(optimizers[1], "found_inf")


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_first_step_leaves_the_weights(name):
    weights = parameters()
    optimizer, before = READING[name](weights), bits(weights, SimpleNamespace(state=empty()))
    give_gradients(0, weights)
    give_bad_gradients(weights)
    step_with_flag(optimizer, torch.tensor(1.0))
    assert bits(weights, SimpleNamespace(state=empty())) == before
    assert all(not value.any() for state in optimizer.state.values() for value in state.values()), (
        "state that is not zero"
    )


def empty():
    return defaultdict(dict)


@pytest.mark.parametrize("fused", [True, False])
def test_on_a_cpu_the_host_reads_the_flag(fused):
    weights = parameters()
    optimizer = torch.optim.AdamW(weights, lr=LR, fused=fused, foreach=False)
    assert reads_flag(optimizer) is fused
    give_gradients(0, weights)
    on_the_host(optimizer, torch.tensor(0.0))
    before = bits(weights, optimizer)
    give_bad_gradients(weights)
    on_the_host(optimizer, torch.tensor(1.0))
    assert bits(weights, optimizer) == before


def test_a_flag_on_a_device_is_not_read_by_the_host():
    """One without a value stands for it. One on the host is read, and no step is taken."""
    seen = []
    optimizer = SimpleNamespace(_step_supports_amp_scaling=True)
    optimizer.step = lambda: seen.append(optimizer.found_inf)
    flag = torch.zeros((), device="meta")
    assert step_unless(flag, [optimizer]) == step_unless(torch.tensor(1.0), [optimizer]) == 0.0
    assert len(seen) == 1
    assert seen[0] is flag


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_nothing_waits_and_a_skipped_step_keeps_every_bit(name):
    weights = parameters("cuda")
    optimizer = READING[name](weights)
    flags = [torch.zeros((), device="cuda"), torch.ones((), device="cuda")]
    give_gradients(0, weights)
    step_unless(flags[0], [optimizer])  # compiles
    give_gradients(1, weights)
    try:
        torch.cuda.set_sync_debug_mode("error")
        waited_s = step_unless(flags[0], [optimizer])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = bits(weights, optimizer)
    give_bad_gradients(weights)
    try:
        torch.cuda.set_sync_debug_mode("error")
        waited_s += step_unless(flags[1], [optimizer])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits(weights, optimizer) == before
    assert waited_s == 0
