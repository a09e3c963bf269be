"""The steps of each call of first_contact.py, their order and their expected durations.

A call names its entries as `--only` of throughput.py does, most important first. A step is one
entry at one batch, or the environment, the tests, a profile or the ladder. Nothing here imports
torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from throughput_entries import ENTRIES, Entry

Batches = Callable[[Entry], Sequence[int | None]]


@dataclass(frozen=True)
class Step:
    """One part of a call."""

    kind: str
    """environment, tests, measure, profile or ladder."""
    entry: Entry | None = None
    rows: int | None = None
    number: int = 0
    """The round of a measurement."""

    @property
    def name(self) -> str:
        """A short, unique name."""
        if self.entry is None:
            return self.kind
        named = f"{self.entry.work}/{self.entry.name}"
        if self.kind == "profile":
            return f"profile of {named}"
        return (
            named
            + (f", batch {self.rows}" if self.rows else "")
            + (f", again ({self.number})" if self.number else "")
        )


@dataclass(frozen=True)
class Call:
    """The contents of one call, time permitting."""

    title: str
    first: tuple[str, ...] = ()
    """Kinds of steps that precede all measurements."""
    entries: tuple[str, ...] = ()
    """Entries to measure: each at its first batch, then, after the repeats, at the others."""
    profiles: tuple[str, ...] = ()
    """Entries to profile, unless their measurement already was."""
    repeats: bool = False
    """Whether entries near a target are measured twice more."""
    more: tuple[str, ...] = ()
    """Entries for the remaining time."""
    ladder: bool = False
    """Whether the ladder takes the rest of the call, after the core steps of the other calls."""


CALLS = {
    1: Call(
        "the environment, the essential GPU tests, GPT-2 124M and nanoGPT",
        first=("environment", "tests"),
        entries=("gpt2-124m/set", "gpt2-124m/nanogpt", "gpt2-124m/recipe"),
        more=(
            "gpt2-124m/set-bias",
            "gpt2-124m/nanogpt-bias",
            "gpt2-124m/set-fp32-stream",
            "gpt2-124m/set-*",
        ),
    ),
    2: Call(
        "32,768 tokens and nanoGPT, wide heads, the eigenstate network",
        first=("environment",),
        entries=(
            "eigenstate-small-32k/set",
            "gpt2-124m-32k/set",
            "gpt2-124m-32k/nanogpt",
            "eigenstate-small-32k/fft",
            "gpt2-124m-32k-wide-heads/set",
        ),
        more=(
            "eigenstate-small-32k/set-*",
            "*-32k*/set-*",
            "*-32k*/recipe",
        ),
    ),
    3: Call(
        "the fast recipe, the 700M class and nanoGPT, the hand-written loop, repeats near targets,"
        " profiles",
        first=("environment",),
        entries=(
            "gpt2-124m-fast/set",
            "gpt2-700m/set",
            "gpt2-700m/nanogpt",
            "gpt2-124m/people",
            "gpt2-124m/none",
        ),
        profiles=("gpt2-124m/set", "eigenstate-small-32k/set"),
        repeats=True,
        more=(
            *(
                "gpt2-700m/set-no-fp8",
                "gpt2-124m/huggingface*",
            ),
            *("gpt2-700m/set-*", "gpt2-124m-fast/set-*", "*/recipe"),
        ),
    ),
    4: Call("the ladder of GPT-2 124M", first=("environment",), ladder=True),
}
PROFILED = CALLS[3].profiles

LADDER = Step("ladder")

WORK_S = {
    "gpt2-124m": 80.0,
    "gpt2-124m-fast": 110.0,
    "gpt2-700m": 125.0,
    "gpt2-124m-32k": 90.0,
    "gpt2-124m-32k-wide-heads": 90.0,
    "eigenstate-small-32k": 90.0,
}
"""Expected total seconds of a compiled entry, by workload, before anything was measured.

Compilation takes most of it.
"""
SHARE = {
    "nanogpt": 0.8,
    "recipe": 1.2,
    "fft": 0.8,
    "people": 0.35,
    "none": 0.8,
    "huggingface": 0.5,
    "nanogpt-bias": 0.8,
}
"""Fraction of WORK_S that an entry takes; entries not listed take all of it."""
KIND_S = {"environment": 12.0, "tests": 120.0, "ladder": 480.0}
ENVIRONMENT_LIMIT_S, TESTS_LIMIT_S, LADDER_LEAST_S = 120.0, 150.0, 180.0
PROFILE_S = 12.0
LIMIT_S = 300.0
"""Upper limit of a step while this machine's speed is unknown."""
NEEDED, MOST = 1.25, 2.5
"""A step starts if NEEDED times its expected seconds are left, and is stopped after MOST times."""
LEAST_LIMIT_S = 45.0
"""Minimum time limit of a step: starting a process takes some seconds."""


def guess_s(step: Step) -> float:
    """Return the expected seconds of a step before anything was measured."""
    if step.entry is None:
        return KIND_S[step.kind]
    profiled = PROFILE_S if step.kind == "profile" or is_profiled(step) else 0.0
    return (
        WORK_S.get(step.entry.work, max(WORK_S.values())) * SHARE.get(step.entry.name, 1.0)
        + profiled
    )


def is_profiled(step: Step) -> bool:
    """Return whether a measurement is profiled after its steps: the first of its entry is."""
    return (
        step.kind == "measure"
        and step.number == 0
        and step.entry is not None
        and f"{step.entry.work}/{step.entry.name}" in PROFILED
    )


@dataclass
class Estimates:
    """Durations of steps on this machine, estimated from finished ones.

    Each is {"step", "entry", "guess_s", "seconds", "status"}.
    """

    spent: list[dict[str, Any]]

    @property
    def known(self) -> bool:
        """Whether any measurement has finished."""
        return any(row["entry"] and row["status"] != "timed-out" for row in self.spent)

    @property
    def scale(self) -> float:
        """Median ratio of actual to guessed seconds; a stopped step counts with its time so far."""
        ratios = [
            row["seconds"] / row["guess_s"]
            for row in self.spent
            if row["entry"] and row["status"] == "ok"
        ]
        if ratios:
            return statistics.median(ratios)
        return max(
            [
                1.0,
                *(
                    row["seconds"] / row["guess_s"]
                    for row in self.spent
                    if row["entry"] and row["status"] == "timed-out"
                ),
            ]
        )

    def expected_s(self, step: Step) -> float:
        """Return the expected seconds of a step.

        The longest run of its entry, or the guess scaled to this machine. A step that was stopped
        before gets a fifth more than it had.
        """
        stopped = [
            1.2 * row["seconds"]
            for row in self.spent
            if row["step"] == step.name and row["status"] == "timed-out"
        ]
        if step.entry is None:
            return max([KIND_S[step.kind], *stopped])
        own = [
            row["seconds"]
            for row in self.spent
            if row["entry"] == [step.entry.work, step.entry.name] and row["status"] == "ok"
        ]
        return max([max(own, default=self.scale * guess_s(step)), *stopped])

    def needed_s(self, step: Step) -> float:
        """Return the seconds that must be left to start a step."""
        if step.kind == "tests":
            return TESTS_LIMIT_S
        return LADDER_LEAST_S if step.kind == "ladder" else NEEDED * self.expected_s(step)

    def limit_s(self, step: Step) -> float:
        """Return the seconds after which a step is stopped."""
        if step.entry is None:
            return {
                "environment": ENVIRONMENT_LIMIT_S,
                "tests": TESTS_LIMIT_S,
                "ladder": float("inf"),
            }[step.kind]
        most = max(MOST * self.expected_s(step), LEAST_LIMIT_S)
        return most if self.known else max(most, LIMIT_S)


def matching(pattern: str, is_selected: Callable[[Entry, str], bool]) -> list[Entry]:
    """Return the entries that match a pattern of `--only`."""
    return [entry for entry in ENTRIES if is_selected(entry, pattern)]


def steps(
    call: Call, batches: Batches, is_selected: Callable[[Entry, str], bool]
) -> tuple[list[Step], list[Step]]:
    """Return a call's core steps, and those for the remaining time.

    Repeats come between the two.
    """
    core = [Step(kind) for kind in call.first]
    named = [entry for pattern in call.entries for entry in matching(pattern, is_selected)]
    core += at_batch(named, 0, batches)
    core += [
        Step("profile", entry, batches(entry)[0])
        for pattern in call.profiles
        for entry in matching(pattern, is_selected)
    ]
    later = [
        step
        for index in range(1, max((len(batches(entry)) for entry in named), default=0))
        for step in at_batch(named, index, batches)
    ]
    for pattern in call.more:
        found = [entry for entry in matching(pattern, is_selected) if entry not in named]
        named += found
        later += at_batch(found, 0, batches)
    return core, later


def at_batch(entries: Sequence[Entry], index: int, batches: Batches) -> list[Step]:
    """Return a measurement of each entry at the batch with that index."""
    return [
        Step("measure", entry, rows)
        for entry in entries
        for rows in batches(entry)[index : index + 1]
    ]


def missing(call: Call, is_selected: Callable[[Entry, str], bool]) -> list[str]:
    """Return the patterns that match no entry."""
    return [
        pattern for pattern in (*call.entries, *call.profiles) if not matching(pattern, is_selected)
    ]


def plan_lines(batches: Batches, is_selected: Callable[[Entry, str], bool]) -> Iterator[str]:
    """Yield the contents of each call, with the expected seconds of its steps."""
    for number, call in CALLS.items():
        core, later = steps(call, batches, is_selected)
        # profiles come with their measurements
        timed = [step for step in core if step.kind != "profile"] + [LADDER] * call.ladder
        seconds = sum(guess_s(step) for step in timed)
        yield (
            f"Call {number}: {call.title}; {len(timed)} steps, about {seconds:.0f} s, and"
            f" {len(later)} more if time is left."
        )
        yield from (f"  {guess_s(step):5.0f} s  {step.name}" for step in timed)
        yield from (
            f"          {pattern}: no such entry, skipped."
            for pattern in missing(call, is_selected)
        )


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
