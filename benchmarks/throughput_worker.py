"""One measurement of throughput.py in its own process: JSON spec in, JSON figures out.

flatout trains as `flatout train` does, in its own loop. A peer's model takes the same step on
random tokens that are already on the device. A step lasts from its start on the device to the start
of the next one, so device idle time is included and the measurement adds no synchronisation.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from throughput_peers import PEERS, Order, step
from throughput_profile import ProfiledSteps, in_range

from flatout import roof
from flatout.assembly.build import build
from flatout.assembly.run import Run
from flatout.config.schema import RunConfig, validate
from flatout.errors import FlatoutError, OutOfMemory
from flatout.hardware import fingerprint
from flatout.measure.trials.resolving import resolve_here
from flatout.measure.trials.trial import end_with
from flatout.measure.trials.workload import QUIET
from flatout.parallel.mesh import make_mesh
from flatout.registry import MODELS
from flatout.training.loop import fit
from flatout.training.metrics.device import memory_gib
from flatout.training.metrics.log import Log
from flatout.training.session import Session
from flatout.training.warmup import warm_up

BATCHES = 32
"""Number of different batches that a peer cycles through."""
LEAST_FALL = 0.01
"""The loss must fall by this share to prove that the model trains."""


class StepTimes:
    """Replaces the run's stop check: marks the start of each step, stops after enough."""

    def __init__(self, device: torch.device, warmup_steps: int, steps: int) -> None:
        self._device, self._warmup_steps, self._most = device, warmup_steps, warmup_steps + steps
        self._marks: list[Any] = []

    def requested(self, run: Run | None = None) -> bool:
        """Mark the start of a step."""
        self._marks.append(self._mark())
        return len(self._marks) > self._most

    def milliseconds(self) -> list[float]:
        """Return the time of each step after the warm-up; synchronises the device."""
        marks = self._marks[self._warmup_steps :]
        if self._device.type != "cuda":
            return [1e3 * (end - begin) for begin, end in itertools.pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def main() -> None:
    """Read a spec from stdin, measure, and print the figures; other output goes to stderr."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    results.write(json.dumps(measured(json.loads(sys.stdin.read()))) + "\n")
    results.flush()


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure; an error becomes a row with the reason."""
    try:
        return measure(spec)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"status": "out-of-memory", "reason": first_line(error)}
    except OutOfMemory as error:
        return {"status": "out-of-memory", "reason": error.what}
    except FlatoutError as error:
        return {"status": "failed", "reason": error.what}
    except Exception as error:  # any error becomes the reason in the row
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return (str(error).splitlines() or [""])[0][:300]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one entry at one batch, profiled too with `profile_steps`.

    Raises: whatever building and training raise, including out of memory.
    """
    config = validate(spec["config"])
    device = torch.device(config.train.device if config.train.device != "auto" else "cuda")
    roof_tflops = matmul_tflops(device.type)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = StepTimes(device, spec["warmup_steps"], spec["steps"])
    train = train_ours if spec["kind"] == "flatout" else train_peer
    found = train(spec, config, device, times)
    steps_ms, instead = times.milliseconds(), found.pop("instead", {})
    rate = found["tokens_per_step"] / (1e-3 * statistics.median(steps_ms))
    found |= {
        "status": "ok",
        "reason": None,
        "tokens_per_s": rate,
        "step_ms": statistics.median(steps_ms),
        "steps_ms": [round(milliseconds, 3) for milliseconds in steps_ms],
        "peak_gib": found.get("peak_gib", memory_gib(device)["mem/peak_gib"]),
        "roof_tflops": roof_tflops,
        "mfu": rate * flops_per_token(config) / (1e12 * roof_tflops),
        "environment": fingerprint(str(device)),
    }
    return found | unless_it_trains(found["losses"]) | instead


@functools.cache
def matmul_tflops(device: str) -> float:
    """Return the matmul rate used as 100% MFU, measured now: bf16 on a GPU, fp32 on a CPU."""
    return roof.measure(device, "bf16" if device == "cuda" else "fp32")[0]


def flops_per_token(config: RunConfig) -> float:
    """Return the FLOPs per token that MFU counts: 6 N_matmul + 6 L T d, causal.

    A recurrence counts no matmul.
    """
    return float(
        MODELS.get(config.model.kind)
        .count_flops(model_config(config), config.data.seq_len)
        .causal_exact
    )


def model_config(config: RunConfig) -> Any:
    """Return the validated config of the model."""
    return MODELS.get(config.model.kind).check(
        config.model.own() | {"vocab_size": config.model.vocab_size}, seq_len=config.data.seq_len
    )


def unless_it_trains(losses: Sequence[float]) -> dict[str, Any]:
    """Return an empty dict if the losses are finite and falling, else a failed row's fields."""
    lost = next((number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if lost is not None:
        return {"status": "failed", "reason": f"The loss of step {lost} is {losses[lost - 1]}."}
    if statistics.fmean(losses[-3:]) > (1 - LEAST_FALL) * losses[0]:
        return {
            "status": "failed",
            "reason": (
                f"It does not train: its loss went from {losses[0]:.3f} to"
                f" {statistics.fmean(losses[-3:]):.3f}."
            ),
        }
    return {}


def train_ours(
    spec: dict[str, Any], config: RunConfig, device: torch.device, times: StepTimes
) -> dict[str, Any]:
    """Train the recipe's run in its own loop; return everything but the step times."""
    # QUIET: without evaluations, no graph of an evaluation is compiled
    resolved = resolve_here(config.with_values(QUIET))
    steps = spec["warmup_steps"] + spec["steps"]
    config = resolved.config.with_values(
        {"train.steps": max(resolved.config.train.steps or 0, 2 * steps)}
    )
    folder = Path(spec["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    mesh = make_mesh(config.parallel, config.train.device)
    run = build(
        config,
        machine=resolved.machine,
        mesh=mesh,
        dataset=resolved.dataset,
        folder=folder,
        decisions=resolved.decisions,
    )
    wanted = {decision.name for decision in run.decisions if decision.on}
    losses: list[torch.Tensor] = []
    try:
        with Log(run) as log:
            run.feed.prime(steps + 1)
            warm_up(run, log)
            fit(Session(run, log, keeping_losses(log, times, losses)))
            log.time_breakdown()
            peak_gib = memory_gib(device)["mem/peak_gib"]
            profiled = profile_of(run, log, spec) if spec.get("profile_steps") else {}
    finally:
        run.feed.close()
    dropped = [
        decision for decision in run.decisions if decision.name in wanted and not decision.on
    ]
    return {
        "tokens_per_step": run.tokens_per_step,
        "rows_per_device": run.rows_per_device,
        "accumulate": run.config.batch.accumulate,
        "speedups": [decision.name for decision in run.decisions if decision.on],
        "losses": [float(loss) for loss in losses[:steps]],
        "peak_gib": peak_gib,
        **profiled,
        "instead": (
            {"status": "failed", "reason": f"{dropped[0].name}: {dropped[0].reason}."}
            if dropped
            else {}
        ),
    }


def keeping_losses(log: Log, times: StepTimes, losses: list[torch.Tensor]) -> Callable[[Run], bool]:
    """Return a stop condition that adds each step's loss to `losses`, still on the device."""

    def stop(run: Run) -> bool:
        if log.last_result is not None:
            losses.append(log.last_result.loss)
        return times.requested(run)

    return stop


def profile_of(run: Run, log: Log, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of the next steps; an error does not discard earlier measurements."""
    steps = ProfiledSteps(run.mesh.device, 1, spec["profile_steps"])
    for optimizer in run.optimizers:
        optimizer.step = in_range(optimizer.step)  # type: ignore[method-assign]
    try:
        fit(Session(run, log, steps.requested))
        return {"profile": steps.groups(Path(spec["folder"]))}
    except Exception as error:  # any error becomes the reason in the profile
        return {"profile": {"failed": f"{type(error).__name__}: {first_line(error)}"}}


def train_peer(
    spec: dict[str, Any], config: RunConfig, device: torch.device, times: StepTimes
) -> dict[str, Any]:
    """Train a peer's model on random tokens; return everything but the step times."""
    torch.manual_seed(config.train.seed)
    torch.set_float32_matmul_precision("high")
    folder = Path(spec["peer_folder"]) if spec["peer_folder"] else None
    peer = PEERS[spec["kind"]](
        Order(
            model_config(config),
            config.data.seq_len,
            config.optim.lr,
            device,
            spec["compiled"],
            folder,
        )
    )
    rows = (
        torch.randint(
            0, spec["vocabulary"] // 2, (spec["rows"], config.data.seq_len + 1), device=device
        )
        for _ in range(BATCHES)
    )
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
    losses: list[torch.Tensor] = []
    while not times.requested():
        losses.append(step(peer, *batches[len(losses) % BATCHES], config.optim.clip))
    return {
        "tokens_per_step": spec["rows"] * config.data.seq_len,
        "rows_per_device": spec["rows"],
        "accumulate": 1,
        "speedups": [],
        "losses": [float(loss) for loss in losses],
    }


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
