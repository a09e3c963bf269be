"""Screens changes inside a running script: blocks of steps with and without each, in turns.

A block with a change lies between two without it, a few steps apart, so that neither a slow start
nor the load of the machine gets into their ratio. Compiling comes last, and its time is kept apart.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from flatout.measure.attach.request import ENDED, Screened
from flatout.measure.intervals import LEAST_GAIN, Figure, figure_of, spread
from flatout.training.metrics.compile_events import CompilationWatch

BLOCK_S, MIN_STEPS, LONG_S = 0.25, 2, 2.0
"""The least seconds and steps of a block. One step is enough if it takes longer than LONG_S."""
MIN_ROUNDS, MAX_ROUNDS = 3, 6
"""Blocks with a change after which it may be known to be faster, and after which it is unclear."""
SETTLED_STEPS = 12
"""Most steps of a change before its first block: until nothing is compiled any more."""
LAST = "compile"
"""The change that is screened on top of all others, since each of them would compile again."""
BY_WALL = ("threads",)
"""Changes that use more cores, so that seconds of the processor do not show their gain."""
Pair = tuple[float, float]
"""Seconds, and those that do not depend on the load."""
Switches = Mapping[str, Callable[[], AbstractContextManager[object]]]
"""Contexts in which a change is on, by its name. It is made and undone between two steps."""


class Clock(NamedTuple):
    """A moment of this process."""

    wall_s: float
    cpu_s: float
    """Seconds that its threads have run."""
    queued_s: float
    """Seconds for which they have waited for a core. NaN: the system does not say."""

    @classmethod
    def now(cls) -> Clock:
        """Return the current moment."""
        threads, queued_s = Path("/proc/self/task"), 0.0
        try:
            for thread in os.listdir(threads):
                queued_s += 1e-9 * int((threads / thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            queued_s = math.nan
        return cls(time.perf_counter(), time.process_time(), queued_s)

    def until(self, later: Clock) -> Pair:
        """Return the seconds until a later moment, and those that do not depend on the load.

        The latter are what the threads have run, and when none of them had anything to do, as in a
        wait for data.
        """
        wall_s, cpu_s, queued_s = (b - a for a, b in zip(self, later, strict=True))
        own_s = cpu_s + max(wall_s - cpu_s - queued_s, 0.0)
        return wall_s, wall_s if math.isnan(queued_s) else own_s


class Screening:
    """Measures what each change gains, and those that gain on top of each other."""

    def __init__(
        self,
        prepare: Callable[[], Switches],
        *,
        limit_s: float = math.inf,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.screened: dict[str, Screened] = {}
        self.failed: dict[str, str] = {}
        """Changes that could not be made, and why."""
        self.kept: list[str] = []
        """Those that are faster together, in the order in which they were added."""
        self._prepare, self._tell = prepare, tell
        self._ratios: dict[str, list[float]] = {}
        """Of each change, block after block."""
        self._limit_s, self._blocks_s, self._on_gpu = limit_s, 0.0, False

    def run(self, *, on_gpu: bool, is_busy: bool) -> Generator[None, None, None]:
        """Yield once per step of the script."""
        self._on_gpu, self._is_busy = on_gpu, is_busy and not on_gpu
        self._switches = self._prepare()
        cheap = [name for name in self._switches if name != LAST]
        with ExitStack() as stack:
            yield from self._keep(cheap, 0.5, stack)
            if self.kept:  # beside something slow, nothing else seems to take much
                rest = [name for name in cheap if name not in (*self.kept, *self.failed)]
                yield from self._keep(rest, 0.25, stack)
            yield from self._keep([LAST] * (LAST in self._switches), 0.25, stack)

    def _keep(
        self, names: Sequence[str], share: float, stack: ExitStack
    ) -> Generator[None, None, None]:
        """Screen changes in a share of the time, and keep those that gain on top of each other."""
        yield from self._in_turns(names, share)
        # the largest gains first, of which the order of the table decides ties
        gain = {name: self.screened[name].screened.median for name in filter(self._gains, names)}
        for name in sorted(gain, key=lambda name: -round(5 * math.log(gain[name]))):
            if self.screened[name].against != self._on():
                yield from self._in_turns([name], 0.1)
            if self._gains(name):
                stack.enter_context(self._switches[name]())
                self.kept.append(name)

    def _gain(self, name: str) -> Figure:
        """Return how many times faster a change is, by the usual noise of all so far."""
        noises = [spread([each]) for each in self._ratios.values() if len(each) > 1]
        usual = statistics.median([deviation for deviation, _ in noises] or [0.0])
        return figure_of(self._ratios[name], (usual, sum(freedom for _, freedom in noises)))

    def _on(self) -> str | None:
        """Return what is kept, as a part of a sentence."""
        return " ".join(f"+ {name}" for name in self.kept) or None

    def _gains(self, name: str) -> bool:
        return name in self.screened and (self.screened[name].screened.low or 0.0) > LEAST_GAIN

    def _in_turns(self, names: Sequence[str], share: float) -> Generator[None, None, None]:
        """Take turns between blocks with each change and blocks without, until all are decided.

        What is kept is on in both. `share` is that of the time which the blocks may take.
        """
        end_s = self._blocks_s + share * self._limit_s
        waiting, settled, before = [*names], dict[str, float](), None
        self._ratios |= {name: [] for name in names}
        for number in range(MAX_ROUNDS):
            for name in [*waiting]:
                if self._blocks_s >= end_s:
                    return
                before = before or (yield from self._block())
                self.failed[name] = ENDED  # until it did not
                with ExitStack() as stack:
                    try:
                        stack.enter_context(self._switches[name]())
                    except Exception as error:
                        self.failed[name] = str(error) or type(error).__name__
                        waiting.remove(name)
                        continue
                    if name not in settled:
                        self._tell(f"screening {name}")
                        settled[name] = yield from self._settled()
                    on = yield from self._block()
                del self.failed[name]
                after = yield from self._block()
                clock = self._is_busy and name not in BY_WALL
                off_s = (before[clock] + after[clock]) / 2
                self._ratios[name].append(off_s / on[clock])
                before, gain, compile_s = after, self._gain(name), settled[name]
                saved_s = max(off_s * (1 - 1 / gain.median), 1e-9)
                self.screened[name] = Screened(
                    screened=gain,
                    compile_s=compile_s or None,
                    pays_after=math.ceil(compile_s / saved_s) if gain.median > 1 else None,
                    against=self._on(),
                )
                self._tell(f"screening {name}: {gain.median:.2f} times so far")
                low, high = gain.low or 0.0, gain.high or math.inf
                if high < LEAST_GAIN or (low > LEAST_GAIN and number + 1 >= MIN_ROUNDS):
                    waiting.remove(name)

    def _settled(self) -> Generator[None, None, float]:
        """Take a step, and more until nothing is compiled. Return the seconds of compiling."""
        watch, compile_s = CompilationWatch(), 0.0
        for _ in range(SETTLED_STEPS):
            yield
            if not watch.changed():
                break
            compile_s += watch.poll().compile_s
        return compile_s

    def _block(self) -> Generator[None, None, Pair]:
        """Take some steps, and return the seconds of one."""
        self._wait()
        start, steps, wall_s = Clock.now(), 0, 0.0
        while wall_s < BLOCK_S or (steps < MIN_STEPS and wall_s < LONG_S):
            yield
            steps += 1
            wall_s = time.perf_counter() - start.wall_s
        self._wait()
        wall_s, own_s = start.until(Clock.now())
        self._blocks_s += wall_s
        return wall_s / steps, own_s / steps

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
