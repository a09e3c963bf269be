"""One optimizer step: forward and backward on every micro-batch, then one update.

An update from values that are not finite is skipped (`optim/step_guard.py`). Nothing here
waits for the device, except with float16 and with optimizers that cannot read the guard's flag.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flatout.distributed.pipeline import Pipeline
from flatout.distributed.tensor import cut_dim, is_shared, local
from flatout.optim.loss_scale import SMALLEST
from flatout.optim.schedule import factor
from flatout.optim.step_guard import step_unless

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.data.load.loader import StepBatch

Drop = Callable[["Run", int], bool]
"""(run, number of the next batch, from 2) -> whether to drop the work. Equal on all ranks."""


class Dropped(Exception):
    """A step or an evaluation was abandoned between two batches and changed nothing."""


@dataclass(frozen=True)
class StepResult:
    """The results of one step, still on the device."""

    loss: Tensor
    """Mean loss per valid token over all micro-batches and ranks, in nats. NaN without any."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping. NaN without a valid token."""
    num_valid: Tensor
    """Number of targets that were not masked."""
    learning_rate: float
    """The peak learning rate times the schedule's factor."""
    skipped: bool = False
    """Whether float16 overflowed, so the update was skipped. The guard counts other skips."""


def seed_step(run: Run) -> None:
    """Seed all generators for the next step: what it draws depends on nothing before it.

    The seed is a hash of the run's seed, the step, and the rank among those that hold other tokens,
    so that ranks with parts of one layer draw the same. Cost: some 10 microseconds, where
    torch.manual_seed, which looks for devices of all kinds, takes 140.
    """
    text = f"{run.config.train.seed} {run.step} {run.mesh.rank // run.mesh.tensor}"
    seeds = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint64).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1] % 2**31)
    torch.default_generator.manual_seed(seeds[2] % 2**63)
    if run.mesh.device.type != "cpu":
        torch.get_device_module(run.mesh.device).manual_seed(seeds[2] % 2**63)


def train_step(
    run: Run,
    batch: StepBatch,
    drop: Drop | None = None,
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> StepResult:
    """Take one optimizer step on this rank's share of a global batch.

    Each micro-batch's loss sum is divided by the step's nominal number of tokens, a constant. The
    number of valid tokens is known only at the end, when `correct_gradients` substitutes it. The
    result therefore does not depend on how the step is divided into micro-batches and ranks.

    `drop` is called before every micro-batch but the first, except in a pipeline. `phase` returns a
    context that times forward (with backward, in a pipeline), backward or optimizer.
    Raises: Dropped when it returns True. Gradients are cleared, and persistent buffers, which
            forward passes may change, have their values from before the step again.
    """
    seed_step(run)
    loss_scale = run.scaler.scale if run.scaler else 1.0
    run.guard.begin()
    loss_sum = torch.zeros((), device=run.mesh.device)
    num_valid = torch.zeros((), device=run.mesh.device)
    scale, micro_batches = loss_scale / run.tokens_per_step, batch.micro_batches()
    if isinstance(run.model, Pipeline):
        run.pulse.beat()
        with phase("forward"):
            loss_sum, num_valid = run.model.step([*micro_batches], scale)  # none are left
    for number, micro in enumerate(micro_batches, 1):
        run.pulse.beat()
        if number > 1 and drop is not None and drop(run, number):
            run.parts.zero_grad(run.trained())
            run.guard.undo()
            raise Dropped
        with run.grad_sync(number == batch.num_micro_batches):
            with phase("forward"), run.autocast():
                micro_loss, micro_valid = run.model(
                    micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT
                )
            with phase("backward"):
                (micro_loss * scale).backward()
        loss_sum += micro_loss.detach()
        num_valid += micro_valid
        del micro_loss  # and its graph, before the next forward pass
    with phase("optimizer"):
        loss_sum, num_valid = run.mesh.sum(loss_sum, num_valid)
        grad_norm = correct_gradients(run, num_valid, loss_scale)
        learning_rate = run.config.optim.lr * set_learning_rate(run)
        loss = loss_sum / num_valid
        overflowed = update(run, loss, grad_norm, num_valid)
    run.parts.zero_grad(run.trained())
    run.is_updating = False
    return StepResult(loss, grad_norm, num_valid, learning_rate, skipped=overflowed)


def update(run: Run, loss: Tensor, grad_norm: Tensor, num_valid: Tensor) -> bool:
    """Update the weights unless the values are bad, and return whether float16 overflowed.

    An overflow at the smallest loss scale counts as a bad step. So does a loss that is not finite,
    which tells nothing about the loss scale: only gradients are scaled. A step without a target
    changes nothing: neither weights, by decay or momentum, nor the count of bad steps.

    Shapes:  loss, grad_norm and num_valid are 0-D.
    """
    run.is_updating = True
    if run.scaler and torch.isfinite(loss):
        can_shrink, is_finite = run.scaler.scale > SMALLEST, bool(torch.isfinite(grad_norm))
        run.scaler.update(is_finite)
        if not is_finite and can_shrink:
            return True
    skip = run.guard.judge(loss, grad_norm, num_valid).to(run.mesh.weights_device)
    run.saver.before_update()
    run.guard.waited_s = step_unless(skip, run.optimizers)
    return False


def set_learning_rate(run: Run) -> float:
    """Set the learning rate of every parameter group, and return it as a fraction of the peak."""
    share = factor(run.config.schedule, run.config.optim.lr, run.step, run.last_step)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
    return share


def correct_gradients(run: Run, num_valid: Tensor, loss_scale: float) -> Tensor:
    """Rescale gradients to the mean loss per valid token and clip them, and return their norm.

    DDP and fully_shard average over the ranks with the same weights, so the factor is their number
    times nominal / (num_valid * loss_scale). Scaling and clipping take one pass over the gradients.

    Shapes:  num_valid and the norm are 0-D. The norm is NaN when num_valid is 0.
    """
    gradients = [p.grad for p in run.core.parameters() if p.grad is not None]
    ranks = run.mesh.world_size // (run.mesh.tensor * run.mesh.pipeline)
    correction = ranks * run.tokens_per_step / (num_valid.clamp(min=1) * loss_scale)
    parts = [local(gradient) for gradient in gradients]
    if run.mesh.tensor * run.mesh.pipeline > 1:
        is_whole = [cut_dim(gradient) is None for gradient in gradients]
        whole = list(compress(parts, is_whole))
        cut = list(compress(parts, map(not_, is_whole)))
        if run.core.split is not None:
            run.core.split.add_parts(whole)
        squares = [torch.nn.utils.get_total_norm(each).square() for each in (cut, whole)]
        (total,) = run.mesh.sum(squares[0] + squares[1] / run.mesh.tensor)  # equal on those ranks
        norm = (total / run.mesh.replicate).sqrt()
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if is_shared(norm) else norm
    norm = torch.where(num_valid > 0, norm * correction, torch.nan)
    multiplier = correction
    if run.config.optim.clip > 0:
        multiplier = correction * (run.config.optim.clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(parts, multiplier.to(run.mesh.weights_device))
    return norm
