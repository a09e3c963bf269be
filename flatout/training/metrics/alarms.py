"""Alarms of a run: something got worse and stays so, with the step and the most likely cause.

An alarm is an event `alarm`, its end an event `alarm_over`. There is one per episode. They come
from the metrics of the run's records, so that a step pays nothing for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median
from types import MappingProxyType

from flatout.storage.json_io import JsonObject
from flatout.training.metrics.detectors import Change, Creep, Shift, Spike
from flatout.training.metrics.surroundings import Surroundings

MIN_FALL, MIN_WAIT = 0.08, 0.10
"""Smallest fall of the logarithm of tokens/s, and rise of the share of a step spent waiting."""
SAMPLE_S = 1.25
"""Records are combined until they cover this time, so that no change shorter than 7.5 s counts."""
THROTTLING_EVERY_S = 5.0
"""Time between two looks at what slows the device down. Two in a row are an alarm."""
MEMORY = {
    "mem/allocated_gib": ("memory", "The GPU memory of this run"),
    "mem/process_gib": ("host_memory", "The memory of this process"),
}
"""Kind of an alarm and its subject, by the metric that creeps."""
RATE, STEP, WAIT, HOST, DEVICE = (
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/data_wait_ms",
    "perf/host_ms",
    "perf/device_ms",
)
PARTS = {WAIT: "waiting for data", HOST: "work on the host", DEVICE: "work on the device"}

Alarm = JsonObject
"""An event's fields: `event`, `kind`, `step`, `since_step`, `usual`, `now`, `cause`, `text`."""
Sample = dict[str, float]
"""The means of the records of a little more than a second, and the step of the first."""


class Alarms:
    """Watches the records of a run of `last_step` steps, and reports when something gets worse."""

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        last_step: int,
        have_gib: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`have_gib` is the memory that there is, by the metric that creeps."""
        self._surroundings = surroundings
        self._last_step = last_step
        self._have_gib = have_gib
        self._speed = Shift(-1, MIN_FALL)
        self._wait = Shift(1, MIN_WAIT)
        self._spike = Spike()
        self._creeps = {name: Creep() for name in MEMORY}
        self._samples: deque[Sample] = deque(maxlen=256)
        self._bucket: list[Mapping[str, float]] = []
        self._bucket_began_s: float | None = None
        self._open: set[str] = set()
        self._throttled: tuple[float, int, str | None] = (0.0, 0, None)
        self.num_alarms = 0

    def see(self, record: Mapping[str, float]) -> list[Alarm]:
        """Take a line of metrics.jsonl, and return the alarms that begin or are over with it."""
        found = [
            *self._see_loss(record),
            *self._see_memory(record),
            *self._see_throttling(record),
            *self._see_speed(record),
        ]
        self.num_alarms += sum(alarm["event"] == "alarm" for alarm in found)
        return found

    def _see_loss(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        if "train/loss" not in record:
            return
        step, norm = int(record["step"]), record.get("train/grad_norm")
        change = self._spike.see(step, record["train/loss"], norm)
        if change is None:
            return
        usual = self._spike.usual_norm()
        cause = "the gradients are as before, so it is probably the text at these steps"
        if usual is not None and norm is not None and self._spike.is_steep(norm):
            cause = f"the gradient norm rose from {usual:.3g} to {norm:.3g}"
        begun = (
            f"The training loss jumped from {change.usual:.3f} to {change.now:.3f} at step "
            f"{change.since_step:,}"
        )
        over = f"The training loss is back at {change.now:.3f} at step {step:,}."
        yield _event("loss_spike", step, change, begun, cause, over)

    def _see_memory(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        for name, creep in self._creeps.items():
            if name not in record:
                continue
            step = int(record["step"])
            change = creep.see(step, record[name])
            if change is None:
                continue
            kind, subject = MEMORY[name]
            rate = (change.now - change.usual) / max(step - change.since_step, 1)
            at_end = change.now + rate * max(self._last_step - step, 0)
            have = self._have_gib.get(name, math.inf)
            end = f"at the last step it will be {at_end:.1f} GiB"
            if at_end > have > change.now:
                full = step + (have - change.now) / rate
                end = f"all {have:.1f} GiB will be in use at step {full:,.0f}"
            begun = (
                f"{subject} grows by {1e3 * rate:.2f} GiB per 1,000 steps since step "
                f"{change.since_step:,}, from {change.usual:.2f} to {change.now:.2f} GiB, and {end}"
            )
            over = f"{subject} no longer grows: {change.now:.2f} GiB at step {step:,}."
            cause = "objects are kept from step to step"
            yield _event(kind, step, change, begun, cause, over)

    def _see_throttling(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        looked_s, since, before = self._throttled
        wall_s, step = record.get("wall_s", 0.0), int(record["step"])
        if wall_s - looked_s < THROTTLING_EVERY_S:
            return
        reason = self._surroundings.throttled_by()
        began = since if reason and before else step
        self._throttled = (wall_s, began, reason)
        is_open = "throttling" in self._open
        if bool(reason) != bool(before) or bool(reason) == is_open:
            return
        self._open ^= {"throttling"}
        change = Change(began if reason else since, math.nan, math.nan, is_over=is_open)
        over = f"No longer throttled at step {step:,}."
        yield _event("throttling", step, change, f"Throttled since step {began:,}", reason, over)

    def _see_speed(self, record: Mapping[str, float]) -> Iterator[Alarm]:
        """Yield changes of speed and data wait. Where both have one cause, only one of them."""
        sample = self._sampled(record)
        if sample is None:
            return
        self._samples.append(sample)
        step = int(sample["step"])
        wait = self._wait.see(step, sample[WAIT] / sample[STEP] if sample[STEP] else 0.0)
        speed = self._speed.see(step, math.log(max(sample[RATE], 1e-9)))
        self._surroundings.suspect(self._wait.is_suspicious or self._speed.is_suspicious)
        if speed:  # of the rate rather than its logarithm
            speed = replace(speed, usual=math.exp(speed.usual), now=math.exp(speed.now))
        changes = {"data_wait": wait, "throughput": speed}
        for kind, change in changes.items():
            if change and change.is_over and kind in self._open:
                self._open.discard(kind)
                yield self._speed_event(kind, step, change)
        if wait and not wait.is_over and "throughput" not in self._open:
            self._open.add("data_wait")
            yield self._speed_event("data_wait", step, wait)
        if speed and not speed.is_over:
            before, during = self._around(speed.since_step)
            is_waiting = during[WAIT] - before[WAIT] > 0.5 * (during[STEP] - before[STEP])
            if "data_wait" not in self._open or not is_waiting:
                self._open.add("throughput")
                yield self._speed_event("throughput", step, speed)

    def _sampled(self, record: Mapping[str, float]) -> Sample | None:
        """Return the sample that a record completes. The first record includes the warm-up."""
        if RATE not in record or "wall_s" not in record:
            return None
        if self._bucket_began_s is None:
            self._bucket_began_s = record["wall_s"]
            return None
        self._bucket.append(record)
        if record["wall_s"] - self._bucket_began_s < SAMPLE_S:
            return None
        bucket, self._bucket, self._bucket_began_s = self._bucket, [], record["wall_s"]
        means = {
            name: fmean(one.get(name, 0.0) for one in bucket)
            for name in (RATE, STEP, WAIT, HOST, DEVICE)
        }
        return means | {"step": bucket[0]["step"]}

    def _speed_event(self, kind: str, step: int, change: Change) -> Alarm:
        before, during = self._around(change.since_step)
        slower = 1 - during[RATE] / before[RATE] if before[RATE] else 0.0
        if kind == "throughput":
            rates = f"{before[RATE]:,.0f} to {during[RATE]:,.0f} tokens/s"
            begun = f"Throughput fell {slower:.0%} at step {change.since_step:,}, from {rates}"
            over = f"Throughput is back at {change.now:,.0f} tokens/s at step {step:,}."
        else:
            begun = (
                f"Waiting for data rose from {change.usual:.0%} to {change.now:.0%} of a step at "
                f"step {change.since_step:,}, with {slower:.0%} fewer tokens/s"
            )
            over = f"Waiting for data is back at {change.now:.0%} of a step at step {step:,}."
        cause = None if change.is_over else self._cause(before, during, kind)
        return _event(kind, step, change, begun, cause, over)

    def _around(self, since: int) -> tuple[Sample, Sample]:
        """Return the medians before and since a step."""
        before = [sample for sample in self._samples if sample["step"] < since]
        during = [sample for sample in self._samples if sample["step"] >= since]
        return _median(before or during), _median(during)

    def _cause(self, before: Sample, during: Sample, kind: str) -> str:
        """Return the most likely cause: the clocks, other processes, or what grew in a step."""
        known = self._surroundings.throttled_by() or self._surroundings.gpu_change()
        if known := known or self._surroundings.other_load():
            return known
        if kind == "data_wait":
            was = f"up from {before[WAIT]:.1f} ms"
            return f"the next batch takes {during[WAIT]:.1f} ms, {was}"
        most = max(PARTS, key=lambda name: during[name] - before[name])
        return f"{PARTS[most]} rose from {before[most]:.1f} to {during[most]:.1f} ms per step"


def _median(samples: list[Sample]) -> Sample:
    return {name: median(sample[name] for sample in samples) for name in samples[0]}


def _event(kind: str, step: int, change: Change, begun: str, cause: str | None, over: str) -> Alarm:
    """Return the event of a change. `begun` and `over` describe what happened, whichever did."""
    usual, now = (None if math.isnan(value) else value for value in (change.usual, change.now))
    return {
        "event": "alarm_over" if change.is_over else "alarm",
        "kind": kind,
        "step": step,
        "since_step": change.since_step,
        "usual": usual,
        "now": now,
        "cause": None if change.is_over else cause,
        "text": over if change.is_over else f"{begun}: {cause}.",
    }
