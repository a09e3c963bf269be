"""Record the rate of a finished run, from which `plan` predicts others on this hardware."""

from __future__ import annotations

from contextlib import suppress

import psutil

from flatout.assembly.measured import EVALUATION_COST, hardware_name, keep, past_run
from flatout.assembly.resolve import tokens_to_score
from flatout.assembly.run import Run
from flatout.hardware.machine import BUSY_CORES, CpuTimes
from flatout.storage.json_io import JsonObject
from flatout.training.run_plan import RunRequest


def record(run: Run, request: RunRequest, summary: JsonObject, cached_s: float) -> None:
    """Store how fast a finished run was, for later plans. A resumed one tells too little.

    `cached_s` is the part of its time in which torch compiled what it then kept on disk.
    """
    hardware, rate = hardware_name(run.machine, str(run.mesh.device)), summary["tokens_per_s"]
    if request.cache is None or hardware is None or run.resumed_from or not rate:
        return
    on_cpu = run.mesh.device.type == "cpu"
    others = request.began.others_until(CpuTimes.read(psutil.Process().children(recursive=True)))
    steps = {"train.steps": run.step}  # fewer than planned if patience ran out
    scored = tokens_to_score(run.config.with_values(steps), run.dataset)
    done = past_run(
        run.config,
        run.decisions,
        run.mesh.world_size,
        dataset=run.dataset,
        is_busy=on_cpu and run.mesh.world_size == 1 and others > BUSY_CORES,
        tokens_per_s=rate,
        flops_per_token=run.flops_per_token(run.config.data.seq_len),
        beside_s=summary["wall_s"] - (summary["tokens"] + scored / EVALUATION_COST) / rate,
        cached_s=cached_s,
    )
    with suppress(OSError):  # a cache that cannot be written is left alone
        keep(hardware, request.cache, run=done)
