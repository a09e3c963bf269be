"""What a run does after too many bad steps in a row: a report, then an end or a rewind.

The updates of bad steps were skipped, so the weights are still those before the first of them, and
repeating the last one shows which micro-batches and which gradients are at fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from flatout.assembly.run import Run
from flatout.errors import RunFailed, in_shell
from flatout.json_io import JsonObject, parsing, read_json, write_json
from flatout.ops import in_float64
from flatout.progress import counted
from flatout.training.checkpoint import catalog
from flatout.training.metrics.bad_steps import BadStep, in_json
from flatout.training.metrics.log import LESS_STEEP, Log
from flatout.training.run_dir.layout import DIVERGENCE
from flatout.training.run_dir.left_out import Rewind, add_rewind, read_left_out
from flatout.training.run_dir.origin import read_origin
from flatout.training.saving import wait_for_saves
from flatout.training.step import add_gradients

NUM_LARGEST = 10
"""Gradients that a report names."""
MOST_SEQUENCES = 64
"""Sequences of a micro-batch that a report lists."""


class Rewound(RunFailed):
    """Training has diverged, and the run directory is ready to continue from an earlier step."""


@dataclass(frozen=True)
class Repeated:
    """The figures of a bad step that was repeated without an update."""

    losses: list[float]
    """Mean loss per token of each micro-batch, over all ranks."""
    norms: dict[str, float]
    """Norm of each parameter's gradient, over all ranks."""
    rows: int
    """Rows of a micro-batch, over all ranks."""


def require_good_steps(run: Run, log: Log, *, flush: bool = False) -> None:
    """End the run, or rewind it, when `train.max_bad_steps` steps in a row were bad.

    All ranks call it at the same points. On a GPU it knows the last step only with `flush`.

    Raises: RunFailed with the cause; Rewound when the run is to continue from an earlier step.
    """
    if flush:
        log.write_pending()
    if log.bad_steps.in_a_row >= run.guard.most:
        _diverged(run, log)


def _diverged(run: Run, log: Log) -> NoReturn:
    """Write the report, and raise what ends this attempt."""
    log.write_pending()
    with log.progress.task("Repeating the last bad step for a report"):
        bad = [one for one in log.bad_steps.last if one.in_a_row <= run.guard.most]
        repeated = repeat(run, bad[-1])
    wait_for_saves(run, log)
    good = run.mesh.broadcast_object(last_good(run.folder) if run.mesh.is_main else None)
    rewinds = len(read_left_out(run.folder).own())
    if run.mesh.is_main:
        write_json(run.folder / DIVERGENCE, _report(run, bad, repeated, good))
    largest = ", ".join(f"{name} ({norm:.3g})" for name, norm in _largest(repeated.norms)[:3])
    what = (
        f"Training has diverged: {_in_a_row(bad)}: "
        f"{bad[-1].reason}. Its largest gradients: {largest}. "
        f"{run.folder / DIVERGENCE} names its data."
    )
    if run.config.train.on_divergence == "rewind" and rewinds < run.config.train.max_rewinds:
        _rewind(run, log, bad, good, what)
    raise RunFailed(what, fix=_fix(run, good, rewinds))


def _in_a_row(bad: list[BadStep]) -> str:
    """Return how many bad steps there were, and which was the last one."""
    last = bad[-1]  # the first ones may be of an earlier process
    if last.in_a_row == 1:
        return f"step {last.step} was bad"
    return f"{last.in_a_row} bad steps in a row, the last one step {last.step}"


def _fix(run: Run, good: Path | None, rewinds: int) -> str:
    most = run.config.train.max_rewinds
    if rewinds >= most:
        return f"The run was rewound as often as train.max_rewinds={most} allows. {LESS_STEEP}"
    at = "at the start" if good is None else f"from {in_shell(good)}"
    return (
        f"Run the same command with train.on_divergence=rewind: it continues {at} without the data "
        f"of these steps. Or: {LESS_STEEP[0].lower()}{LESS_STEEP[1:]}"
    )


def _rewind(run: Run, log: Log, bad: list[BadStep], good: Path | None, what: str) -> NoReturn:
    """Prepare the run directory for a start from the last good checkpoint, and raise Rewound."""
    origin = read_origin(run.folder)
    start = catalog.step_of(Path(origin.checkpoint)) if origin else 0
    to_step = start if good is None else catalog.step_of(good)
    steps = [[one.start, one.stop] for one in bad]
    text = f"The run goes back to step {to_step} and leaves out the data of "
    text += f"{counted(len(bad), 'step')}."
    if run.mesh.is_main:
        add_rewind(run.folder, Rewind(from_step=run.step, to_step=to_step, steps=steps))
        catalog.set_aside(run.folder, after=-1 if good is None else to_step)
    run.mesh.barrier()
    log.event("rewind", to_step=to_step, positions=steps, text=text)
    log.progress.say(f"{what} {text}")
    raise Rewound(what, fix=f"Run the same command again. {text}")


def repeat(run: Run, bad: BadStep) -> Repeated:
    """Repeat a bad step's forward and backward passes, and leave the gradients cleared.

    Random numbers, as for dropout, are others than in the step itself.
    """
    run.feed.seek(bad.start)
    batch = next(run.feed)
    loss_scale = run.scaler.scale if run.scaler else 1.0
    losses = []
    for number, micro in enumerate(batch.micro_batches(), 1):
        is_last = number == batch.num_micro_batches
        loss_sum, num_valid = run.mesh.sum(*add_gradients(run, micro, loss_scale, is_last=is_last))
        losses.append(float(loss_sum) / max(float(num_valid), 1.0))
    names, squares = [], []
    for name, parameter in run.core.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            names.append(name)
            squares.append(in_float64(local.detach().float().norm() / loss_scale) ** 2)
    run.zero_grad(run.trained())
    (total,) = run.mesh.sum(torch.stack(squares))
    norms = (total / run.mesh.replicate).sqrt().tolist()
    rows = batch.sequences_ABW.shape[1] * run.mesh.world_size
    return Repeated(losses, dict(zip(names, norms, strict=True)), rows)


def last_good(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that was not saved between bad steps, if any."""
    for step in reversed(catalog.steps(folder)):
        path = catalog.checkpoint_path(folder, step)
        if catalog.verify(path):
            continue
        with parsing(path / catalog.STATE):
            if not read_json(path / catalog.STATE)["values"].get("guard", {}).get("streak"):
                return path
    return None


def _report(run: Run, bad: list[BadStep], repeated: Repeated, good: Path | None) -> JsonObject:
    return {
        "format_version": 1,
        "step": bad[-1].step,
        "reason": bad[-1].reason,
        "bad_steps": [one.to_dict() for one in bad],
        "micro_batches": _micro_batches(run, bad[-1], repeated),
        "largest_gradients": [
            {"parameter": name, "norm": in_json(norm)} for name, norm in _largest(repeated.norms)
        ],
        "last_good_checkpoint": None if good is None else str(good),
        "on_divergence": run.config.train.on_divergence,
    }


def _micro_batches(run: Run, bad: BadStep, repeated: Repeated) -> list[JsonObject]:
    """Return the worst micro-batches of a repeated step, with their data.

    These are all without a finite loss, or else the one with the highest loss.
    """
    losses, data, rows = repeated.losses, run.feed.data_at(bad.start), repeated.rows
    worst = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    return [
        {
            "micro_batch": number,
            "loss": in_json(losses[number]),
            "data": data[number * rows : (number + 1) * rows][:MOST_SEQUENCES],
        }
        for number in worst or [max(range(len(losses)), key=losses.__getitem__)]
    ]


def _largest(norms: dict[str, float]) -> list[tuple[str, float]]:
    """Return the largest gradients; those that are not finite come first."""
    in_order = sorted(
        norms.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf
    )
    return in_order[::-1][:NUM_LARGEST]
