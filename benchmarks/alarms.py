"""Alarms: how often healthy runs raise one, how late troubles do, and what watching costs.

    python benchmarks/alarms.py

Feeds made-up records of 2.5 s each to the alarms of a run: healthy ones with four kinds of noise,
and planted troubles of three strengths. The seeds are fixed, so only the cost depends on the
machine: it is CPU time of the calling thread. Writes benchmarks/results/alarms.json and .md.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from measurement import facts, markdown, parser, publish

from flatout.hardware.machine import CpuTimes
from flatout.training.metrics.alarms import Alarms
from flatout.training.metrics.surroundings import Surroundings

RECORDS, PLANTED_AT = 1000, 500
STEP_MS, STEPS_PER_RECORD = 250.0, 10
Record = dict[str, float]
Noise = Callable[[random.Random, float], float]
"""(generator, the value before) -> the next value."""
Change = Callable[[Record], None]


def student_t(rng: random.Random) -> float:
    """Draw from Student's t with three degrees of freedom."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


NOISES: dict[str, Noise] = {
    "normal": lambda rng, _: rng.gauss(0, 1),
    "heavy tails": lambda rng, _: student_t(rng),
    "lasting for several records": lambda rng, before: (
        0.7 * before + math.sqrt(1 - 0.7**2) * rng.gauss(0, 1)
    ),
    "one record in twenty far off": lambda rng, _: (
        rng.gauss(0, 1) + (rng.uniform(5, 40) if rng.random() < 0.05 else 0)
    ),
}


def raised(name: str, by: float) -> Change:
    """Return a change that adds to a value."""

    def change(record: Record) -> None:
        record[name] += by

    return change


def slower(share: float) -> Change:
    def change(record: Record) -> None:
        record["perf/device_ms"] /= 1 - share

    return change


def waiting(share: float) -> Change:
    return raised("perf/data_wait_ms", STEP_MS * share / (1 - share))


def growing(mib_per_record: float) -> Change:
    def change(record: Record) -> None:
        since = record["step"] / STEPS_PER_RECORD - PLANTED_AT
        record["mem/process_gib"] += since * mib_per_record / 1024

    return change


TROUBLES: dict[str, tuple[str, Change]] = {
    "throughput falls by 10%": ("throughput", slower(0.10)),
    "throughput falls by 15%": ("throughput", slower(0.15)),
    "throughput falls by 30%": ("throughput", slower(0.30)),
    "15% of a step waits for data": ("data_wait", waiting(0.15)),
    "30% of a step waits for data": ("data_wait", waiting(0.30)),
    "60% of a step waits for data": ("data_wait", waiting(0.60)),
    "the loss is 0.3 higher": ("loss_spike", raised("train/loss", 0.3)),
    "the loss is 1 higher": ("loss_spike", raised("train/loss", 1.0)),
    "the loss is 3 higher": ("loss_spike", raised("train/loss", 3.0)),
    "1 MiB leaks per record": ("host_memory", growing(1)),
    "4 MiB leak per record": ("host_memory", growing(4)),
    "16 MiB leak per record": ("host_memory", growing(16)),
}
"""The alarm that each should raise, and what it does to records from PLANTED_AT on."""


def records(noise: Noise, rng: random.Random, count: int) -> Iterator[Record]:
    """Yield the records of a healthy run: 2% noise in its times, 1% of a falling loss in that."""
    time_noise = loss_noise = 0.0
    for i in range(1, count + 1):
        time_noise, loss_noise = noise(rng, time_noise), noise(rng, loss_noise)
        scale = max(1 + 0.02 * time_noise, 0.5)
        yield {
            "step": i * STEPS_PER_RECORD,
            "train/loss": (2 + 4 * math.exp(-i / 100)) * (1 + 0.01 * loss_noise),
            "train/grad_norm": math.exp(0.2 * rng.gauss(0, 1)),
            "train/lr": 1e-3,
            "perf/data_wait_ms": 0.01 * STEP_MS * scale,
            "perf/host_ms": 0.02 * STEP_MS * scale,
            "perf/device_ms": 0.97 * STEP_MS * scale,
            "mem/process_gib": 2.0 + 0.02 * (i % 7) + 0.01 * rng.random(),
        }


def watch(noise: Noise, seed: int, trouble: Change | None = None) -> tuple[list[Any], float]:
    """Return the alarms of a run, and the CPU seconds that watching it took."""
    idle = {"read_load": lambda: CpuTimes(time.perf_counter(), 0, 0)}
    machine = Surroundings(cores=2, read_limits=lambda: (0, 0, 0), **idle)
    alarms = Alarms(machine, last_step=RECORDS * STEPS_PER_RECORD)
    found, wall_s, spent_s = [], 0.0, 0.0
    for i, record in enumerate(records(noise, random.Random(seed), RECORDS), start=1):
        if trouble and i >= PLANTED_AT:
            trouble(record)
        step_ms = sum(record[f"perf/{name}_ms"] for name in ("data_wait", "host", "device"))
        wall_s += STEPS_PER_RECORD * step_ms / 1e3
        record |= {"wall_s": wall_s, "perf/step_ms": step_ms, "perf/tokens_per_s": 1e6 / step_ms}
        before_s = time.thread_time()
        found += alarms.see(record)
        spent_s += time.thread_time() - before_s
    return [one for one in found if one["event"] == "alarm"], spent_s


def main() -> None:
    given = parser(__doc__, runs=60).parse_args()
    found = measure(given.runs) | {"runs": given.runs, **facts()}
    publish(given.out, "alarms", found, table(found))


def measure(runs: int) -> dict[str, Any]:
    """Return false alarms by noise, delays by trouble, and microseconds per record."""
    healthy, costs = {}, []
    for name, noise in NOISES.items():
        kinds: Counter[str] = Counter()
        for seed in range(runs):
            alarms, spent_s = watch(noise, seed)
            kinds.update(alarm["kind"] for alarm in alarms)
            costs.append(1e6 * spent_s / RECORDS)
        healthy[name] = dict(kinds)
    planted = {}
    for name, (kind, trouble) in TROUBLES.items():
        delays, others = [], 0
        for seed in range(runs):
            alarms, _ = watch(NOISES["normal"], seed, trouble)
            first = next((alarm for alarm in alarms if alarm["kind"] == kind), None)
            if first:
                delays.append(first["step"] // STEPS_PER_RECORD - PLANTED_AT + 1)
            others += len(alarms) - (first is not None)
        planted[name] = {"kind": kind, "delays": delays, "others": others}
    return {"healthy": healthy, "planted": planted, "us_per_record": costs}


def table(found: dict[str, Any]) -> str:
    """Return both tables."""
    runs, rows = found["runs"], []
    for name, row in found["planted"].items():
        late = row["delays"]
        delay = f"{statistics.median(late):.0f} ({max(late)})" if late else ""
        rows.append((name, f"`{row['kind']}`", f"{len(late)} of {runs}", delay, row["others"]))
    healthy = markdown(
        "noise of a healthy run | false alarms | in records",
        [
            (
                name,
                ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "0",
                f"{runs * RECORDS:,}",
            )
            for name, kinds in found["healthy"].items()
        ],
    )
    return f"{healthy}\n" + markdown(
        "planted trouble | alarm | found | after records, median (most) | other alarms",
        rows,
        f"Records have 2% noise in their times and 1% in the loss; watching costs "
        f"{statistics.median(found['us_per_record']):.0f} us of CPU time per record. "
        f"{found['machine']}; {runs} made-up runs of {RECORDS:,} records per row; commit "
        f"{found['commit']}; `python benchmarks/alarms.py`.",
    )


if __name__ == "__main__":
    main()
