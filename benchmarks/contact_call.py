"""One call of first_contact.py: which steps it runs, in which order, and for how long."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import throughput
from contact_plan import CALLS, LADDER, Estimates, Step, guess_s, is_profiled, missing, steps
from contact_report import near_targets, summary
from contact_results import Results
from contact_steps import environment, gpu_tests, profile_steps
from throughput_ladder import ladder

from flatout.config.schema import RunConfig

END_S = 8.0
"""Time reserved for the end of a call."""


@dataclass
class Contact:
    """One running call."""

    session: throughput.Session
    results: Results
    arguments: argparse.Namespace
    began_s: float
    clock: Callable[[], float] = time.monotonic
    tried: set[str] = field(default_factory=set)
    """Names of the steps started by this call; no step starts twice."""
    waiting: dict[str, Step] = field(default_factory=dict)
    """Steps that did not fit in the remaining time, by name."""
    configs: dict[tuple[str, str], RunConfig | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = self.session.read()
        self.identity = self.session.identity(throughput.ENTRIES[0])
        held = {(row["device"], row["torch"]) for row in self.found.rows} - {
            (self.identity["device"], self.identity["torch"])
        }
        if held:
            what = " with torch ".join(held.pop())
            raise SystemExit(
                f"{self.results.folder} contains figures of {what}. Fix: give another folder with"
                " --results."
            )
        self.works = {
            work.name: throughput.shape(work, tiny=self.session.arguments.tiny)
            for work in throughput.WORKS
        }

    def run(self, number: int) -> None:
        """Run the steps that are due, most important first, until the time is up."""
        for pattern in missing(CALLS[number], throughput.is_selected):
            self.session.say(f"{pattern}: no such entry, skipped.")
        for step in self.order(number):
            if step.name in self.tried or self.is_done(step) or not self.can_be_done(step):
                continue
            if self.remaining_s() < self.estimates.needed_s(step):
                self.waiting[step.name] = step
                continue
            self.tried.add(step.name)
            self.waiting.pop(step.name, None)
            self.do(step, number)
        self.results.end_call(number, self.clock() - self.began_s)
        self.session.write(self.found)

    def order(self, number: int) -> Iterator[Step]:
        """Yield this call's steps, then the other calls' steps, then those stopped before."""
        plans = {
            each: steps(CALLS[each], self.session.batches, throughput.is_selected)
            for each in (number, *(n for n in CALLS if n != number))
        }
        stopped: list[Step] = []
        for step in self.planned(plans, number):
            if self.was_stopped(step):
                stopped.append(step)
            else:
                yield step
        yield from stopped

    def planned(
        self, plans: dict[int, tuple[list[Step], list[Step]]], number: int
    ) -> Iterator[Step]:
        """Yield all steps in order, finished or not."""
        yield from plans[number][0]
        if CALLS[number].repeats:
            yield from self.repeats()
        if CALLS[number].ladder:
            yield from (step for core, _ in plans.values() for step in core)
            yield LADDER
        yield from plans[number][1]
        yield from (step for core, _ in plans.values() for step in core)
        yield from (step for _, later in plans.values() for step in later)

    def repeats(self) -> Iterator[Step]:
        """Yield two more measurements of entries near a target, and of their baselines."""
        for again in (1, 2):
            for entry, rows in near_targets(self.found):
                yield Step("measure", entry, rows, again)

    def do(self, step: Step, number: int) -> None:
        """Run one step and record its outcome."""
        self.results.begin(step.name, number)
        began_s = self.clock()
        own_limit_s, left_s = self.estimates.limit_s(step), self.remaining_s()
        limit_s = min(own_limit_s, left_s)
        self.session.say(
            f"{step.name}: expected {self.estimates.expected_s(step):.0f} s, {left_s:.0f} s left."
        )
        status = "ok"
        if step.entry is not None:
            status = self.measure(step, limit_s)
        elif step.kind == "ladder":
            status = self.climb(limit_s)
        else:
            does = environment if step.kind == "environment" else gpu_tests
            self.results.keep(
                step.kind,
                {
                    **does(limit_s, tiny=self.session.arguments.tiny),
                    **self.identity,
                    "commit": self.session.arguments.commit,
                },
            )
        entry = [step.entry.work, step.entry.name] if step.entry else None
        spent = {
            "step": step.name,
            "entry": entry,
            "guess_s": guess_s(step),
            "seconds": round(self.clock() - began_s, 1),
            "status": status,
        }
        spent["cut"] = status == "timed-out" and left_s < own_limit_s
        self.results.end(spent)

    def climb(self, limit_s: float) -> str:
        """Run the ladder; a failure is recorded."""
        try:
            ladder(
                self.results.folder,
                self.session.scratch,
                minutes=limit_s / 60,
                rounds=None,
                tiny=self.session.arguments.tiny,
            )
        except SystemExit as error:  # how the ladder reports errors
            self.session.say(f"The ladder failed: {error}")
            self.results.keep(
                "ladder",
                {"status": "failed", "failed": [str(error)[-600:]], "code": self.identity["code"]},
            )
            return "failed"
        self.results.keep("ladder", {"status": "ok", "code": self.identity["code"]})
        return "ok"

    def measure(self, step: Step, limit_s: float) -> str:
        """Measure or only profile an entry; return the status of its row."""
        assert step.entry is not None
        before = self.rows(step)
        profiled = step.kind == "profile" or (
            is_profiled(step) and not before and not self.results.profile(step.entry)
        )
        ends_call = limit_s < self.estimates.limit_s(step)
        row = self.row(step, limit_s, profiled=profiled)
        if (
            profiled
            and step.kind == "measure"
            and row["status"] == "failed"
            and self.remaining_s() >= self.estimates.needed_s(step)
        ):
            self.session.say(
                f"{step.name} failed while being profiled ({row['reason']}); measuring it without a"
                " profile."
            )
            row = self.row(step, min(limit_s, self.remaining_s()), profiled=False)
        if row["status"] == "timed-out":
            why = "the call's time was up" if ends_call else "it took much longer than expected"
            row["reason"] = (
                f"It was stopped after {row['process_s']:.0f} s: {why}. A later call retries it if"
                " there is time."
            )
        if step.kind == "measure":
            self.found.drop(before)
            self.session.keep(row, self.found)
        return str(row["status"])

    def row(self, step: Step, limit_s: float, *, profiled: bool) -> dict[str, Any]:
        """Measure an entry and return its row; store its profile if there is one."""
        assert step.entry is not None
        config = self.config(step)
        assert config is not None
        more = (
            {"profile_steps": profile_steps(tiny=self.session.arguments.tiny)} if profiled else {}
        )
        row = self.session.row(step.entry, step.rows, step.number, config, limit_s, **more)
        profile = row.pop("profile", {"failed": row["reason"]})
        if profiled:
            row["profiled"] = True
            about = {
                "code": row["code"],
                "commit": row["commit"],
                "rows": row["rows"],
                "alone": step.kind == "profile",
            }
            self.results.keep_profile(step.entry, profile | about)
        return row

    def rows(self, step: Step) -> list[dict[str, Any]]:
        """Return the rows that belong to a step."""
        assert step.entry is not None
        return [
            row
            for row in self.found.of(step.entry)
            if (row["round"], row["rows"]) == (step.number, step.rows)
        ]

    def is_done(self, step: Step) -> bool:
        """Return whether a step is finished.

        A step that failed with other code, or while it was profiled, is retried.
        """
        if step.kind == "ladder":
            held = self.results.of("ladder")
            return bool(held) and (held["status"] == "ok" or held["code"] == self.identity["code"])
        if step.entry is None:
            held = self.results.of(step.kind)
            is_bad = bool(held.get("failed")) or held.get("status") != "ok"
            return (
                bool(held)
                and held.get("device") == self.identity["device"]
                and not (is_bad and held.get("code") != self.identity["code"])
            )
        if step.kind == "profile":
            profile = self.results.profile(step.entry)
            is_final = (
                profile.get("alone")
                and profile.get("code") == self.session.identity(step.entry)["code"]
            )
            return bool(profile) and bool("failed" not in profile or is_final)
        return any(self.stands(row) for row in self.rows(step))

    def stands(self, row: dict[str, Any]) -> bool:
        """Return whether a row is final."""
        if row["status"] in ("ok", "timed-out"):
            return bool(row["status"] == "ok")
        entry = next(
            entry
            for entry in throughput.ENTRIES
            if (entry.work, entry.name) == (row["work"], row["entry"])
        )
        return row["code"] == self.session.identity(entry)["code"] and not row.get("profiled")

    def was_stopped(self, step: Step) -> bool:
        """Return whether a step was stopped for taking too long, not because its call ended."""
        ends = [row for row in self.results.spent if row["step"] == step.name]
        return bool(ends) and ends[-1]["status"] == "timed-out" and not ends[-1]["cut"]

    def can_be_done(self, step: Step) -> bool:
        """Return whether an entry can be measured here; the reason is printed if not."""
        if step.entry is None:
            return True
        return (
            throughput.is_selected(step.entry, self.arguments.only)
            and self.config(step) is not None
        )

    def config(self, step: Step) -> RunConfig | None:
        """Return the config of an entry, or None if it cannot be measured here."""
        assert step.entry is not None
        key = (step.entry.work, step.entry.name)
        if key not in self.configs:
            self.configs[key] = self.session.available.config(
                step.entry, self.works[step.entry.work]
            )
        return self.configs[key]

    @property
    def estimates(self) -> Estimates:
        """Estimates from the steps that have finished so far."""
        return Estimates(self.results.spent)

    def remaining_s(self) -> float:
        """Return the seconds left for steps."""
        return 60 * float(self.arguments.minutes) - END_S - (self.clock() - self.began_s)

    def next_call(self) -> int:
        """Return the first call with core steps left, or the last call."""
        for number, call in CALLS.items():
            core, _ = steps(call, self.session.batches, throughput.is_selected)
            if any(
                not self.is_done(step) and not self.was_stopped(step) and self.can_be_done(step)
                for step in core
            ):
                return number
        return max(CALLS)

    def table(self, number: int) -> list[str]:
        """Return the summary of a call, and write it next to the figures."""
        core, _ = steps(CALLS[number], self.session.batches, throughput.is_selected)
        left = [name for name in self.waiting if name in {step.name for step in core}]
        lines = summary(self.found, self.results, call=number, left=left)
        self.results.write_table(lines)
        return lines


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
