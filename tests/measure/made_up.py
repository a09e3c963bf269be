"""An imaginary machine, whose trials take no time, and whose speed depends on every setting."""

import random
from types import SimpleNamespace

from flatout.measure import bench, race, resolving, tune
from flatout.measure.evidence import Failure
from flatout.measure.trial import Result

OUT_OF_MEMORY = Result(
    failure=Failure(kind="out-of-memory", message="Out of memory: too many rows.")
)
STEPS = 30


class MadeUp:
    """Runs trials on an imaginary clock. Each factor multiplies a rate of 1,000 tokens/s.

    `speedups` maps a name to its factor, `rows` rows to theirs. `fits` tells whether a trial has
    enough memory. `losses` maps a speedup to the amount by which it changes the losses. `fails`
    maps a speedup, or "all", to the result of trials with it. On a GPU no run repeats.
    """

    def __init__(self, **settings):
        self.speedups, self.rows = settings.pop("speedups", {}), settings.pop("rows", {})
        self.fits = settings.pop("fits", lambda rows, on: True)
        self.losses, self.noise = settings.pop("losses", {}), settings.pop("noise", 0.005)
        self.overhead_s = settings.pop("overhead_s", 5.0)
        self.compile_s = settings.pop("compile_s", {})
        self.stops_after = settings.pop("stops_after", 10**9)
        self.error, self.fails = settings.pop("error", KeyboardInterrupt), settings.pop("fails", {})
        self.is_gpu = settings.pop("is_gpu", False)
        assert not settings
        self.now, self.trials = 0.0, []

    def install(self, monkeypatch):
        """Run all trials of recipes on this machine, on its clock."""
        monkeypatch.setattr(bench, "try_recipe", self)
        for module in (bench, race, tune):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        # the look at other processes takes a fifth of a second
        monkeypatch.setattr(resolving, "spin_less_beside_others", lambda *_: None)

    def rate(self, rows, on):
        rate = 1000.0 * self.rows.get(rows, 1.0)
        for name in on:
            rate *= self.speedups.get(name, 1.0)
        return rate

    def __call__(self, config, timing, limit_s):
        if len(self.trials) >= self.stops_after:
            raise self.error
        self.trials.append((config, timing))
        on = [] if config.speedups == "none" else list(config.speedups)
        rows = config.batch.rows_per_device
        rows = rows if isinstance(rows, int) else 8
        took = self.overhead_s + timing.seconds
        if took > limit_s:
            self.now += limit_s
            late = Failure(kind="hang", message="It took too long.")
            return Result(failure=late, process_s=limit_s)
        self.now += took
        for name, result in self.fails.items():
            if name == "all" or name in on:
                return result.model_copy(update={"process_s": took})
        if not self.fits(rows, on):
            return OUT_OF_MEMORY.model_copy(update={"process_s": took})
        draw = random.Random(len(self.trials)).uniform(-1, 1)
        step_s = config.batch.tokens_per_step / self.rate(rows, on) * (1 + self.noise * draw)
        change = sum(self.losses.get(name, 0.0) for name in on)
        change += 1e-7 * len(self.trials) * self.is_gpu
        return Result(
            step_s=[step_s] * STEPS,
            warmup_steps=9,
            losses=[3.0 + config.train.seed + change - 0.01 * step for step in range(STEPS)],
            compile_s=max((self.compile_s.get(name, 0.0) for name in on), default=0.0) or None,
            rows_per_device=rows,
            accumulate=config.batch.tokens_per_step // (rows * config.data.seq_len),
            tokens=[config.batch.tokens_per_step] * STEPS,
            peak_gib=0.5,
            environment={"torch": "2.13.0", "device": "cpu"},
            process_s=took,
        )
