"""The arithmetic of a step: micro-batches, masked targets, clipping, loss scaling, dropping."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout.training.step import Dropped, seed_step, train_step


def steps(run, count=4):
    found = []
    for _ in range(count):
        found.append(train_step(run, next(run.loader)))
        run.step += 1
    return found


def test_the_loss_is_the_mean_over_all_targets_of_the_step(build_run, tiny_config):
    run = build_run(tiny_config(optim__lr=1e-12))
    with torch.no_grad():
        batch = next(run.loader)
        micro = list(batch.micro_batches())
        sums = [run.core(m.tokens_BT, m.targets_BT, m.doc_ids_BT) for m in micro]
    expected = sum(float(loss) for loss, _ in sums) / sum(int(valid) for _, valid in sums)
    run.loader.seek(0)
    assert float(train_step(run, next(run.loader)).loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("data", ["tiny_set", "ragged_set"])
def test_dividing_a_step_into_micro_batches_changes_only_rounding(
    build_run, tiny_config, request, data
):
    path = str(request.getfixturevalue(data))
    whole = steps(build_run(tiny_config(data__path=path, batch__rows_per_device=8)))
    divided = steps(build_run(tiny_config(data__path=path, batch__rows_per_device=1)))
    for one, many in zip(whole, divided, strict=True):
        assert float(many.loss) == pytest.approx(float(one.loss), rel=2e-5)
        assert float(many.grad_norm) == pytest.approx(float(one.grad_norm), rel=2e-4)
        assert float(many.num_valid) == float(one.num_valid)


def test_micro_batches_by_tokens_have_the_losses_and_gradients_of_fixed_ones(
    build_run, tiny_config, ragged_set
):
    """In float64: the same documents, padded to data.seq_len or to the longest of a micro-batch."""
    changes = {"data__path": str(ragged_set), "data__seq_len": 128, "batch__tokens_per_step": 2048}
    changes |= {"batch__by_tokens": True, "speedups": "auto,-compile,+length-buckets"}
    run = build_run(tiny_config(**changes, batch__rows_per_device=2))
    run.core.double()
    for _ in range(3):
        batch = next(run.loader)
        found = []
        for one in (batch, replace(batch, shapes=())):
            sums = [run.core(m.tokens_BT, m.targets_BT, None) for m in one.micro_batches()]
            loss, valid = (sum(each) for each in zip(*sums, strict=True))
            found.append((loss, valid, torch.autograd.grad(loss, list(run.core.parameters()))))
        (loss, valid, gradients), (plain, plain_valid, plain_gradients) = found
        assert (valid, loss.dtype) == (plain_valid, torch.float64)
        assert sum(rows * seq_len for rows, seq_len in batch.shapes) < 0.9 * 16 * 128
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients, plain_gradients, rtol=1e-10, atol=1e-12)


def test_masked_targets_do_not_count(build_run, tiny_config, ragged_set):
    found = steps(build_run(tiny_config(data__path=str(ragged_set))))
    counts = [int(result.num_valid) for result in found]
    assert all(0 < count < 128 for count in counts)
    assert len(set(counts)) > 1


def test_gradients_are_those_of_the_mean_over_valid_targets(build_run, tiny_config, ragged_set):
    """The optimizer gets the gradients that autograd computes for the plain mean."""
    run = build_run(tiny_config(data__path=str(ragged_set), optim__clip=0.0))
    batch = next(run.loader)
    micro = list(batch.micro_batches())
    sums = [run.core(m.tokens_BT, m.targets_BT, m.doc_ids_BT) for m in micro]
    mean = sum(loss for loss, _ in sums) / sum(valid for _, valid in sums)
    plain = torch.autograd.grad(mean, list(run.core.parameters()))
    kept = {}
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(
            lambda *_: kept.update({p: p.grad.clone() for p in run.core.parameters()})
        )
    run.loader.seek(0)
    result = train_step(run, next(run.loader))
    for parameter, gradient in zip(run.core.parameters(), plain, strict=True):
        torch.testing.assert_close(kept[parameter], gradient, rtol=1e-4, atol=1e-7)
    assert float(result.grad_norm) == pytest.approx(
        float(torch.nn.utils.get_total_norm(plain)), rel=1e-5
    )


def test_clipping_bounds_the_gradient_and_reports_the_norm_before(build_run, tiny_config):
    run = build_run(tiny_config(optim__clip=0.01))
    seen = []
    run.optimizers[0].register_step_pre_hook(
        lambda *_: seen.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in run.core.parameters()]))
        )
    )
    result = train_step(run, next(run.loader))
    assert float(result.grad_norm) > 0.05
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_the_schedule_counts_optimizer_steps_not_micro_batches(build_run, tiny_config):
    config = tiny_config(
        train__steps=4, schedule__kind="cosine", schedule__warmup=0, schedule__min_lr=1e-3
    )
    for rows in (8, 1):
        run = build_run(config.with_values({"batch.rows_per_device": rows}))
        rates = [result.learning_rate for result in steps(run)]
        assert rates[0] == 1e-2
        assert rates[-1] == pytest.approx(1e-3)
        assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
def test_float16_scales_the_loss_but_not_the_result(build_run, tiny_config):
    plain = steps(build_run(tiny_config(train__precision="fp32")))
    scaled_run = build_run(tiny_config(train__precision="fp16"))
    scaled = steps(scaled_run)
    assert scaled_run.scaler.scale == 2.0**16
    for one, other in zip(plain, scaled, strict=True):
        assert float(other.loss) == pytest.approx(float(one.loss), rel=2e-2)
        assert float(other.grad_norm) == pytest.approx(float(one.grad_norm), rel=0.1)


def test_a_step_that_overflows_is_skipped_and_the_scale_halved(build_run, tiny_config):
    run = build_run(tiny_config(train__precision="fp16"))
    run.scaler.scale = 2.0**120
    before = [p.detach().clone() for p in run.core.parameters()]
    result = train_step(run, next(run.loader))
    assert not torch.isfinite(result.grad_norm)
    assert run.scaler.scale == 2.0**119
    assert all(torch.equal(p, b) for p, b in zip(run.core.parameters(), before, strict=True))
    assert not any(run.optimizers[0].state.values())
    run.scaler.scale = 2.0**10
    train_step(run, next(run.loader))
    assert not torch.equal(next(run.core.parameters()), before[0])


def test_a_step_with_only_masked_targets_changes_nothing(build_run, tiny_config, ragged_set):
    run = build_run(tiny_config(data__path=str(ragged_set), optim__weight_decay=0.5))
    batch = next(run.loader)
    object.__setattr__(batch, "mask_ABT", torch.zeros_like(batch.mask_ABT))
    before = [p.detach().clone() for p in run.core.parameters()]
    result = train_step(run, batch)
    assert math.isnan(result.loss)
    assert (int(run.guard.streak), int(run.guard.skipped)) == (0, 0)
    assert all(torch.equal(p, b) for p, b in zip(run.core.parameters(), before, strict=True))


def test_a_dropped_step_changes_nothing(build_run, tiny_config):
    """Buffers, gradients, weights and learning rates stay as before."""
    run = build_run(tiny_config(batch__rows_per_device=2))
    run.core.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(*_):
        run.core.calls += 1

    run.core.register_forward_pre_hook(count)
    steps(run, 1)
    rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    weights = {name: tensor.clone() for name, tensor in run.core.state_dict().items()}
    numbers = []
    with pytest.raises(Dropped):
        train_step(run, next(run.loader), lambda _, number: numbers.append(number) or number == 3)
    assert numbers == [2, 3]
    assert all(p.grad is None for p in run.core.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.core.state_dict().items())
    assert [
        group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups
    ] == rates


def test_what_a_step_draws_depends_on_seed_step_and_tokens_alone(build_run, tiny_config):
    def draws(seed, *, disturbed=False):
        run, found = build_run(tiny_config(train__seed=seed)), []
        run.core.register_forward_pre_hook(lambda *_: found.append(drawn()))
        for _ in range(3):
            if disturbed:
                drawn()
            steps(run, 1)
        return found

    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(1))

    assert draws(1) == draws(1, disturbed=True)
    both = [*draws(1), *draws(2)]
    assert len({*both}) == len(both)

    def of_rank(rank, tensor):
        run = build_run(tiny_config())
        run.mesh = replace(run.mesh, rank=rank, tensor=tensor)
        seed_step(run)
        return drawn()

    assert of_rank(0, 2) == of_rank(1, 2) != of_rank(2, 2)
    assert of_rank(0, 1) != of_rank(1, 1)


def poisoned(run):
    """Return the run's model with a loss that is not a number."""
    model = run.model

    def call(*inputs):
        loss_sum, num_valid = model(*inputs)
        return loss_sum * torch.nan, num_valid

    return call


def all_bits(run):
    """Return the bits of all weights, buffers and optimizer states."""
    state = [
        value
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor)
    ]
    tensors = [tensor.detach() for tensor in (*run.core.state_dict().values(), *state)]
    return [tensor.numpy().tobytes() for tensor in tensors]


BAD_STEPS = {
    "plain": {"speedups": "none"},
    "fused-adamw": {"speedups": ("pretokenised", "fused-adamw")},
    "muon": {"optim__kind": "muon"},
    "accumulated": {"batch__rows_per_device": 2},
    "fp16": {"train__precision": "fp16", "speedups": "none"},
    "lora": {"lora__rank": 2, "lora__alpha": 8.0},
    "adamw-8bit": {"model__vocab_size": 264, "speedups": "adamw-8bit"},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, for 8 bits
@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_bad_step_changes_no_weight_and_no_optimizer_state(
    kind, build_run, tiny_config, tmp_path
):
    """Schedule and data advance. The next step is that of a run that passed the batch over."""
    if kind == "adamw-8bit":
        pytest.importorskip("torchao")
    run, twin = (build_run(tiny_config(**BAD_STEPS[kind]), tmp_path / name) for name in "ab")
    steps(twin, 2)
    next(twin.loader)
    steps(run, 2)
    before, plain, position = all_bits(run), run.model, run.loader.position
    run.model = poisoned(run)
    result = train_step(run, next(run.loader))
    assert not torch.isfinite(result.loss)
    assert not result.skipped
    assert (int(run.guard.streak), int(run.guard.skipped)) == (1, 1)
    assert all_bits(run) == before
    assert run.loader.position > position
    run.model = plain
    after, expected = (train_step(each, next(each.loader)) for each in (run, twin))
    assert int(run.guard.streak) == 0
    assert all_bits(run) != before
    assert torch.equal(after.loss, expected.loss)
    assert all_bits(run) == all_bits(twin)
    if run.scaler:
        assert run.scaler == twin.scaler


def test_without_bad_numbers_the_guard_changes_no_bit(build_run, tiny_config, tmp_path):
    """The reference is a loop without a guard."""
    guarded = build_run(tiny_config())
    plain = build_run(tiny_config(), tmp_path / "plain")
    plain.guard.judge = lambda loss, grad_norm, num_valid: torch.zeros(())
    for one, other in zip(steps(guarded), steps(plain), strict=True):
        assert torch.equal(one.loss, other.loss)
    assert all_bits(guarded) == all_bits(plain)


def test_an_overflow_at_the_smallest_loss_scale_is_a_bad_step(build_run, tiny_config):
    run = build_run(tiny_config(train__precision="fp16"))
    run.scaler.scale = 1.0
    next(run.core.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    result = train_step(run, next(run.loader))
    assert not result.skipped
    assert int(run.guard.streak) == 1
