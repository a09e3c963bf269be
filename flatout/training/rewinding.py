"""Continues from an earlier checkpoint after a rewind, in the same process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from flatout.assembly.run import Run
from flatout.errors import Stopped
from flatout.json_io import JsonObject
from flatout.training.divergence import Rewound, require_good_steps
from flatout.training.loop import fit
from flatout.training.metrics.log import Log
from flatout.training.request import RunRequest
from flatout.training.run_plan import RunPlan, agree_on_plan
from flatout.training.signals import StopRequests


def with_rewinds(
    train: Callable[[RunRequest, RunPlan], JsonObject], request: RunRequest, plan: RunPlan
) -> JsonObject:
    """Train a plan to its end, and return its summary; after a rewind, plan and train again.

    A rewind has prepared the run directory, so the new plan is that of an ordinary resume.

    Raises: as `train`, and as `agree_on_plan`.
    """
    while True:
        try:
            return train(request, plan)
        except Rewound:
            request = replace(request, resume="auto")
        gc.collect()  # the model of the attempt that failed is in reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        plan = agree_on_plan(request)


def fit_or_stop(
    run: Run, log: Log, stop: StopRequests, sample: Callable[[Run], str] | None
) -> None:
    """Train to the end or to a stop.

    Raises: Stopped when a signal arrived before a rewind; RunFailed when training has diverged.
    """
    try:
        fit(run, log, stop.requested, drop=stop.requested_within_step, sample=sample)
        require_good_steps(run, log, flush=True)
    except Rewound as rewound:
        asked = torch.tensor(float(stop.signal_number is not None), device=run.mesh.device)
        if float(run.mesh.sum(asked)[0]):
            raise Stopped(rewound.what, fix=rewound.fix) from None
        raise
