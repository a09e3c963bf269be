"""Bad steps are found, counted and skipped; nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flatout.optimizers.step_guard import (
    MIN_NORMS,
    WINDOW,
    StepGuard,
    step_unless,
    step_with_flag,
)


def judged(guard, norm, loss=2.0):
    return int(guard.judge(torch.tensor(loss), torch.tensor(float(norm))))


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


def noisy(count, seed=0, level=1.0):
    torch.manual_seed(seed)
    return (level * (0.2 * torch.randn(count)).exp()).tolist()


def test_a_norm_far_above_the_median_is_a_spike_once_there_are_enough_norms():
    guard = StepGuard(spikes=6.0)
    assert not any(judged(guard, norm) for norm in (100.0, *noisy(MIN_NORMS - 2), 100.0))
    assert not any(judged(guard, norm) for norm in noisy(WINDOW))
    assert judged(guard, 10.0) == 1
    assert 2.0 < float(guard.limit) < 10.0
    assert judged(guard, 1.0) == 0


def test_a_norm_that_hardly_varies_may_double():
    guard = StepGuard(spikes=6.0)
    assert not any(judged(guard, 1.0) for _ in range(WINDOW))
    assert [judged(guard, 1.99), judged(guard, 2.01)] == [0, 1]


def test_norms_that_drift_or_noise_without_outliers_are_no_spikes():
    guard = StepGuard(spikes=6.0)
    assert not any(judged(guard, 1.02**step) for step in range(300))
    guard = StepGuard(spikes=6.0)
    assert not any(judged(guard, norm) for norm in noisy(2000, seed=1))


def test_a_lasting_rise_is_accepted_once_it_fills_half_of_the_window():
    guard = StepGuard(spikes=6.0, most=WINDOW)
    steps = [judged(guard, norm) for norm in [*noisy(WINDOW), *noisy(WINDOW, level=20.0)]]
    assert steps[WINDOW] == 1
    assert steps[-1] == 0


def test_norms_that_are_not_finite_do_not_change_the_limit():
    clean, dirty = StepGuard(spikes=6.0), StepGuard(spikes=6.0)
    for number, norm in enumerate(noisy(200)):
        judged(clean, norm)
        judged(dirty, norm)
        if number % 10 == 0:
            judged(dirty, math.nan)
    assert float(dirty.limit) == pytest.approx(float(clean.limit), rel=0.5)


@pytest.mark.parametrize("spikes", [None, 6.0])
def test_a_restored_guard_judges_as_the_first_one(spikes):
    norms = [*noisy(60), math.nan, math.nan]
    guard, again = StepGuard(spikes=spikes), StepGuard(spikes=spikes)
    for norm in norms:
        judged(guard, norm)
    again.load_state_dict(guard.state_dict())
    rest = [math.nan, *noisy(40, seed=3), 3.0, 1.9, 50.0]
    assert [judged(again, norm) for norm in rest] == [judged(guard, norm) for norm in rest]
    assert again.state_dict() == guard.state_dict()


def test_a_lower_limit_of_bad_steps_does_not_skip_the_first_step_of_a_resumed_run():
    guard, again = StepGuard(most=10), StepGuard(most=2)
    for _ in range(5):
        judged(guard, math.nan)
    again.load_state_dict(guard.state_dict())
    assert judged(again, 1.0) == 0


def test_a_bad_step_leaves_buffers_as_they_were():
    model = nn.BatchNorm1d(3)
    guard = StepGuard(model=model)
    for rows, bad in ((torch.randn(4, 3), False), (torch.full((4, 3), math.nan), True)):
        before = [buffer.clone() for buffer in model.buffers()]
        guard.begin()
        loss = model(rows).sum().detach()
        guard.judge(loss, torch.tensor(1.0))
        kept = [torch.equal(one, two) for one, two in zip(before, model.buffers(), strict=True)]
        assert kept == [bad] * 3


def adamw(fused, seed=0):
    torch.manual_seed(seed)
    weights = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5))]
    return weights, torch.optim.AdamW(weights, lr=0.1, fused=fused, foreach=False)


def bits(weights, optimizer):
    state = [value for p in weights for _, value in sorted(optimizer.state[p].items())]
    return [tensor.detach().numpy().tobytes() for tensor in (*weights, *state)]


def on_the_host(optimizer, skip):
    step_unless(skip, [optimizer])


@pytest.mark.parametrize(
    ("step", "fused"), [(step_with_flag, True), (on_the_host, True), (on_the_host, False)]
)
def test_a_skipped_update_keeps_every_bit_and_others_are_those_of_a_plain_step(step, fused):
    """The flag of the fused kernel, which a GPU reads, is tested with torch's CPU kernel."""
    plain, guarded = adamw(fused), adamw(fused)
    for number in range(5):
        gradients = [torch.randn_like(weight) for weight in plain[0]]
        for weights, _ in (plain, guarded):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
        plain[1].step()
        step(guarded[1], torch.tensor(0.0))
        assert bits(*guarded) == bits(*plain)
        for weight in guarded[0]:
            weight.grad = torch.full_like(weight, math.nan)
        step(guarded[1], torch.tensor(1.0))
        assert bits(*guarded) == bits(*plain), number
