"""Alarms of a run: something got worse and stays so, with the step and the most likely cause.

An alarm is an event `alarm`, its end an event `alarm_over`. There is one per episode. They come
from the figures of the run's records, so that a step pays nothing for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from types import MappingProxyType
from typing import Literal

from flatout.json_io import JsonObject
from flatout.training.metrics.detectors import Change, Creep, Shift, Spike
from flatout.training.metrics.surroundings import Surroundings

MIN_FALL, MIN_WAIT = 0.08, 0.10
"""Smallest fall of the logarithm of tokens/s, and rise of the share of a step spent waiting."""
MIN_GROWTH_GIB, MIN_GROWTH_SHARE = 1 / 32, 0.02
"""Smallest growth of memory in the time over which it is sought."""
SAMPLE_S = 1.25
"""Records are combined until they cover this time, so that no change shorter than 7.5 s counts."""
THROTTLING_EVERY_S = 5.0
"""Time between two looks at what slows the device down; two in a row are an alarm."""
MEMORY = {
    "mem/allocated_gib": ("memory", "The GPU memory of this run"),
    "mem/process_gib": ("host_memory", "The memory of this process"),
}
"""Kind of an alarm and its subject, by the figure that creeps."""

Alarm = JsonObject
"""An event's fields: `event`, `kind`, `step`, `since_step`, `usual`, `now`, `cause`, `text`."""


@dataclass(frozen=True)
class Sample:
    """The means of the records of a little more than a second."""

    step: int
    tokens_per_s: float
    step_ms: float
    wait_ms: float
    host_ms: float
    device_ms: float

    @property
    def wait_share(self) -> float:
        """Share of a step spent waiting for data."""
        return self.wait_ms / self.step_ms if self.step_ms else 0.0


class Alarms:
    """Watches the records of a run of `last_step` steps, and says when something gets worse."""

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        last_step: int,
        have_gib: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`have_gib` is the memory that there is, by the figure that creeps."""
        self._surroundings = surroundings
        self._last_step = last_step
        self._have_gib = have_gib
        self._speed = Shift(-1, MIN_FALL)
        self._wait = Shift(1, MIN_WAIT)
        self._spike = Spike()
        self._creeps = {
            name: Creep(min_growth=MIN_GROWTH_GIB, min_share=MIN_GROWTH_SHARE) for name in MEMORY
        }
        self._samples: deque[Sample] = deque(maxlen=256)
        self._bucket: list[Mapping[str, float]] = []
        self._bucket_began_s: float | None = None
        self._open: set[str] = set()
        self._throttled: tuple[float, int, str | None] = (0.0, 0, None)
        self.num_alarms = 0

    def see(self, record: Mapping[str, float]) -> list[Alarm]:
        """Take a line of metrics.jsonl; return the alarms that begin or are over with it."""
        found = [*self._see_loss(record), *self._see_memory(record), *self._see_throttling(record)]
        sample = self._sampled(record)
        if sample is not None:
            self._samples.append(sample)
            found += self._see_sample(sample)
        self.num_alarms += sum(alarm["event"] == "alarm" for alarm in found)
        return found

    def _see_loss(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        if "train/loss" not in record:
            return
        step, norm = int(record["step"]), record.get("train/grad_norm")
        change = self._spike.see(step, record["train/loss"], norm)
        if change is None:
            return
        if change.is_over:
            text = f"The training loss is back at {change.now:.3f} at step {step:,}."
            yield _event("loss_spike", step, change, None, text)
            return
        usual = self._spike.usual_norm()
        cause = "the gradients are as before, so it is probably the text at these steps"
        if usual is not None and norm is not None and self._spike.is_steep(norm):
            cause = f"the gradient norm rose from {usual:.3g} to {norm:.3g}"
        text = (
            f"The training loss jumped from {change.usual:.3f} to {change.now:.3f} at step "
            f"{change.since_step:,}: {cause}."
        )
        yield _event("loss_spike", step, change, cause, text)

    def _see_memory(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        for name, creep in self._creeps.items():
            if name not in record:
                continue
            step = int(record["step"])
            change = creep.see(step, record[name])
            if change is None:
                continue
            kind, subject = MEMORY[name]
            if change.is_over:
                text = f"{subject} no longer grows: {change.now:.2f} GiB at step {step:,}."
                yield _event(kind, step, change, None, text)
                continue
            rate = (change.now - change.usual) / max(step - change.since_step, 1)
            at_end = change.now + rate * max(self._last_step - step, 0)
            have = self._have_gib.get(name, math.inf)
            end = f"at the last step it will be {at_end:.1f} GiB"
            if at_end > have > change.now:
                full = step + (have - change.now) / rate
                end = f"all {have:.1f} GiB will be in use at step {full:,.0f}"
            cause = "objects are kept from step to step"
            text = (
                f"{subject} grows by {1e3 * rate:.2f} GiB per 1,000 steps since step "
                f"{change.since_step:,}, from {change.usual:.2f} to {change.now:.2f} GiB; "
                f"{end}: {cause}."
            )
            yield _event(kind, step, change, cause, text)

    def _see_throttling(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        looked_s, since, before = self._throttled
        wall_s, step = record.get("wall_s", 0.0), int(record["step"])
        if wall_s - looked_s < THROTTLING_EVERY_S:
            return
        reason = self._surroundings.throttled_by()
        began = since if reason and before else step
        self._throttled = (wall_s, began, reason)
        if reason and before and "throttling" not in self._open:
            self._open.add("throttling")
            change = Change(began, 0.0, 0.0)
            text = f"Throttled since step {began:,}: {reason}."
            yield _event("throttling", step, change, reason, text)
        if not reason and not before and "throttling" in self._open:
            self._open.discard("throttling")
            change = Change(since, 0.0, 0.0, is_over=True)
            text = f"No longer throttled at step {step:,}."
            yield _event("throttling", step, change, None, text)

    def _sampled(self, record: Mapping[str, float]) -> Sample | None:
        """Return the sample that a record completes; the first record includes the warm-up."""
        if "perf/tokens_per_s" not in record or "wall_s" not in record:
            return None
        if self._bucket_began_s is None:
            self._bucket_began_s = record["wall_s"]
            return None
        self._bucket.append(record)
        if record["wall_s"] - self._bucket_began_s < SAMPLE_S:
            return None
        bucket, self._bucket, self._bucket_began_s = self._bucket, [], record["wall_s"]

        def mean(name: str) -> float:
            return fmean(one.get(name, 0.0) for one in bucket)

        return Sample(
            step=int(bucket[0]["step"]),
            tokens_per_s=mean("perf/tokens_per_s"),
            step_ms=mean("perf/step_ms"),
            wait_ms=mean("perf/data_wait_ms"),
            host_ms=mean("perf/host_ms"),
            device_ms=mean("perf/device_ms"),
        )

    def _see_sample(self, sample: Sample) -> Iterator[Alarm]:
        """Yield changes of speed and data wait; where both have one cause, only one of them."""
        wait = self._wait.see(sample.step, sample.wait_share)
        speed = self._speed.see(sample.step, math.log(max(sample.tokens_per_s, 1e-9)))
        self._surroundings.suspect(self._wait.is_suspicious or self._speed.is_suspicious)
        if wait and wait.is_over:
            yield from self._over("data_wait", sample.step, wait)
        if speed and speed.is_over:
            yield from self._over("throughput", sample.step, _exp(speed))
        if wait and not wait.is_over and "throughput" not in self._open:
            yield self._begin("data_wait", sample, wait)
        if speed and not speed.is_over:
            is_said = "data_wait" in self._open and self._is_lost_waiting(speed.since_step)
            if not is_said:
                yield self._begin("throughput", sample, _exp(speed))

    def _begin(
        self, kind: Literal["throughput", "data_wait"], sample: Sample, change: Change
    ) -> Alarm:
        self._open.add(kind)
        before, during = self._around(change.since_step)
        slower = 1 - during.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 0.0
        cause = self._cause(before, during, kind)
        rates = f"{before.tokens_per_s:,.0f} to {during.tokens_per_s:,.0f} tokens/s"
        what = f"Throughput fell {slower:.0%} at step {change.since_step:,}, from {rates}"
        if kind == "data_wait":
            what = (
                f"Waiting for data rose from {change.usual:.0%} to {change.now:.0%} of a step at "
                f"step {change.since_step:,}; {slower:.0%} fewer tokens/s"
            )
        return _event(kind, sample.step, change, cause, f"{what}: {cause}.")

    def _over(self, kind: str, step: int, change: Change) -> Iterator[Alarm]:
        """Yield the end of an alarm, nothing if it was part of another one."""
        if kind not in self._open:
            return
        self._open.discard(kind)
        text = (
            f"Throughput is back at {change.now:,.0f} tokens/s at step {step:,}."
            if kind == "throughput"
            else f"Waiting for data is back at {change.now:.0%} of a step at step {step:,}."
        )
        yield _event(kind, step, change, None, text)

    def _around(self, since: int) -> tuple[Sample, Sample]:
        """Return the medians before and since a step."""
        before = [sample for sample in self._samples if sample.step < since]
        during = [sample for sample in self._samples if sample.step >= since]
        return _median(before or during), _median(during)

    def _is_lost_waiting(self, since: int) -> bool:
        before, during = self._around(since)
        return during.wait_ms - before.wait_ms > 0.5 * (during.step_ms - before.step_ms)

    def _cause(self, before: Sample, during: Sample, kind: str) -> str:
        """Return the most likely cause: the clocks, other processes, or what grew in a step."""
        known = self._surroundings.throttled_by() or self._surroundings.gpu_change()
        if known := known or self._surroundings.other_load():
            return known
        if kind == "data_wait":
            was = f"before it took {before.wait_ms:.1f} ms"
            return f"the next batch takes {during.wait_ms:.1f} ms, {was}"
        grown = {
            "waiting for data": (before.wait_ms, during.wait_ms),
            "work on the host": (before.host_ms, during.host_ms),
            "work on the device": (before.device_ms, during.device_ms),
        }
        most = max(grown, key=lambda name: grown[name][1] - grown[name][0])
        return "{} rose from {:.1f} to {:.1f} ms per step".format(most, *grown[most])


def _exp(change: Change) -> Change:
    """Return a change of a logarithm as one of the figure itself."""
    return replace(change, usual=math.exp(change.usual), now=math.exp(change.now))


def _median(samples: list[Sample]) -> Sample:
    fields = {
        name: median(getattr(sample, name) for sample in samples)
        for name in Sample.__dataclass_fields__
        if name != "step"
    }
    return Sample(step=samples[0].step, **fields)


def _event(kind: str, step: int, change: Change, cause: str | None, text: str) -> Alarm:
    is_measured = kind != "throttling"  # which the driver only states
    return {
        "event": "alarm_over" if change.is_over else "alarm",
        "kind": kind,
        "step": step,
        "since_step": change.since_step,
        "usual": change.usual if is_measured else None,
        "now": change.now if is_measured else None,
        "cause": cause,
        "text": text,
    }
