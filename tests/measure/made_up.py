"""Trials of an imaginary machine."""

import random

from flatout.measure.experiments.records import TrialResult

SLOW = {"pretokenised": 1.3, "micro-batch": 2.0, "onednn": 1.2}
"""The gains of speedups on the made-up machine; all others gain nothing."""


class MadeUp:
    """Runs trials on an imaginary clock.

    `fails` maps a speedup to the result of the sets that contain it. On a GPU no run repeats.
    """

    def __init__(
        self,
        *,
        overhead_s=5.0,
        fails=None,
        stops_after=10**9,
        error=KeyboardInterrupt,
        is_gpu=False,
    ):
        self.now, self.overhead_s, self.fails, self.specs, self.is_gpu = (
            0.0,
            overhead_s,
            fails or {},
            [],
            is_gpu,
        )
        self.stops_after, self.error = stops_after, error

    def clock(self):
        return self.now

    def __call__(self, spec, timeout_s):
        if len(self.specs) >= self.stops_after:
            raise self.error
        self.specs.append(spec)
        took = self.overhead_s + spec.seconds
        self.now += took
        speedups = [] if spec.config["speedups"] == "none" else spec.config["speedups"]
        for name, result in self.fails.items():
            if name in speedups:
                return result.model_copy(update={"process_s": took})
        rate = 1000.0
        for name in speedups:
            rate *= SLOW.get(name, 1.0)
        rate *= 1 + 0.02 * random.Random(len(self.specs)).uniform(-1, 1)
        noise = 0 if spec.config["train"]["deterministic"] else 1e-7 * len(self.specs) * self.is_gpu
        losses = [
            3.0 - 0.01 * step + spec.config["train"]["seed"] + noise
            for step in range(spec.loss_steps or 9)
        ]
        facts = {
            "losses": losses,
            "speedups": speedups,
            "rows_per_device": 1,
            "accumulate": 8,
            "warmup_steps": 9,
            "measured_steps": 20,
            "settled": len(self.specs) > 1,
        }
        split = {"step_ms": 10.0, "data_ms": 1.0, "host_ms": 2.0, "device_ms": 7.0, "peak_gib": 0.5}
        return TrialResult(status="ok", tokens_per_s=rate, process_s=took, **facts, **split)
