"""An imaginary machine whose speed depends on every setting that tune varies."""

import random
from importlib.metadata import version

from flatout.measure.experiments.records import TrialResult

OUT_OF_MEMORY = TrialResult(status="out-of-memory", reason="Out of memory: too many rows.")


class MadeUpSpeeds:
    """Runs trials on an imaginary clock; each factor multiplies a rate of 1,000 tokens/s.

    `speedups` maps a name to its factor, `rows` rows to theirs; `fits` tells whether a trial has
    enough memory; `losses` maps a speedup to the amount by which it changes the losses.
    """

    def __init__(
        self, *, speedups=None, rows=None, fits=None, losses=None, noise=0.005, **settings
    ):
        self.speedups, self.rows = speedups or {}, rows or {}
        self.fits, self.losses, self.noise = (
            fits or (lambda rows, on, spec: True),
            losses or {},
            noise,
        )
        self.overhead_s = settings.pop("overhead_s", 5.0)
        self.compile_s = settings.pop("compile_s", {})
        self.data_ms = settings.pop("data_ms", 1.0)
        self.stops_after = settings.pop("stops_after", 10**9)
        self.error = settings.pop("error", KeyboardInterrupt)
        self.fails = settings.pop("fails", {})
        assert not settings
        self.now, self.specs = 0.0, []

    def clock(self):
        return self.now

    def rate(self, rows, on):
        rate = 1000.0 * self.rows.get(rows, 1.0)
        for name in on:
            rate *= self.speedups.get(name, 1.0)
        return rate

    def __call__(self, spec, timeout_s):
        if len(self.specs) >= self.stops_after:
            raise self.error
        self.specs.append(spec)
        took = self.overhead_s + spec.seconds
        self.now += took
        on, rows = spec.config["speedups"], spec.config["batch"]["rows_per_device"]
        on = [] if on == "none" else on
        for name, result in self.fails.items():
            if name == "all" or name in on:
                return result.model_copy(update={"process_s": took})
        if not self.fits(rows, on, spec):
            return OUT_OF_MEMORY.model_copy(update={"process_s": took})
        draw = random.Random(len(self.specs)).uniform(-1, 1)
        change = sum(self.losses.get(name, 0.0) for name in on)
        seed = spec.config["train"]["seed"]
        return TrialResult(
            status="ok",
            tokens_per_s=self.rate(rows, on) * (1 + self.noise * draw),
            process_s=took,
            losses=[3.0 + seed + change - 0.01 * step for step in range(spec.loss_steps)],
            speedups=on,
            rows_per_device=rows,
            compile_s=max((self.compile_s.get(name, 0.0) for name in on), default=0.0) or None,
            step_ms=100.0,
            data_ms=self.data_ms,
            peak_gib=0.5,
            rehearsed=spec.rehearse,
            environment={"torch": version("torch")},
        )
