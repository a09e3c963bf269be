"""What the calls of first_contact.py do, in which order, and how long each part of it is expected
to take.

A call names its entries as `--only` of throughput.py does, what matters most first. A step is one
of them at one batch, or the environment, the tests, a profile, the ladder. Nothing here imports
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
    """The round that a measurement is of."""

    @property
    def name(self) -> str:
        """What it is, in a word or three."""
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
    """What one call does, if there is time."""

    title: str
    first: tuple[str, ...] = ()
    """Kinds of steps that come before all measurements."""
    entries: tuple[str, ...] = ()
    """First each at its likeliest batch, then, after the repeats, at the others."""
    profiles: tuple[str, ...] = ()
    """Entries that are profiled, unless their measurement was."""
    repeats: bool = False
    """Whether what lies near a target is measured twice more."""
    more: tuple[str, ...] = ()
    """Entries for the time that is left."""
    ladder: bool = False
    """Whether the rest of the call is the ladder's, once nothing that matters is left of the other
    calls.
    """


CALLS = {
    1: Call(
        "the environment, the essential GPU tests, GPT-2 124M and nanoGPT",
        first=("environment", "tests"),
        entries=("gpt2-124m/set", "gpt2-124m/nanogpt", "gpt2-124m/set-every", "gpt2-124m/recipe"),
        more=(
            "gpt2-124m/set-bias",
            "gpt2-124m/nanogpt-bias",
            "gpt2-124m/set-fp32-stream",
            "gpt2-124m/set-bf16-weights",
            "gpt2-124m/set-*",
        ),
    ),
    2: Call(
        "32,768 tokens and nanoGPT, wide heads, the eigenstate network",
        first=("environment",),
        entries=(
            "eigenstate-small-32k/set-every",
            "gpt2-124m-32k/set",
            "gpt2-124m-32k/nanogpt",
            "eigenstate-small-32k/fft",
            "gpt2-124m-32k-wide-heads/set",
        ),
        more=(
            "eigenstate-small-32k/set",
            "*-32k*/set-every",
            "eigenstate-small-32k/set-*",
            "*-32k*/set-*",
            "*-32k*/recipe",
        ),
    ),
    3: Call(
        "the fast recipe, the 700M class and nanoGPT, the way people write it, repeats near targets, profiles",
        first=("environment",),
        entries=(
            "gpt2-124m-fast/set",
            "gpt2-700m/set",
            "gpt2-700m/nanogpt",
            "gpt2-124m/people",
            "gpt2-124m/none",
        ),
        profiles=("gpt2-124m/set", "eigenstate-small-32k/set-every"),
        repeats=True,
        more=(
            *(
                "gpt2-700m/set-no-fp8",
                "gpt2-124m-fast/set-every",
                "gpt2-700m/set-every",
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
"""Seconds that a compiled entry of a work may take in all, before anything has been measured. Most
of them compile.
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
"""What an entry takes of that; others take all of it."""
KIND_S = {"environment": 12.0, "tests": 120.0, "ladder": 480.0}
ENVIRONMENT_LIMIT_S, TESTS_LIMIT_S, LADDER_LEAST_S = 120.0, 150.0, 180.0
PROFILE_S = 12.0
LIMIT_S = 300.0
"""The longest that a step may take while nothing is known of this machine's speed."""
NEEDED, MOST = 1.25, 2.5
"""A step is begun when so many times its expected seconds are left, and stopped after so many."""
LEAST_LIMIT_S = 45.0
"""No step is stopped before: a process takes some seconds to start, whatever it measures."""


def guess_s(step: Step) -> float:
    """Return what a step is expected to take before anything has been measured."""
    if step.entry is None:
        return KIND_S[step.kind]
    profiled = PROFILE_S if step.kind == "profile" or is_profiled(step) else 0.0
    return (
        WORK_S.get(step.entry.work, max(WORK_S.values())) * SHARE.get(step.entry.name, 1.0)
        + profiled
    )


def is_profiled(step: Step) -> bool:
    """Say whether a measurement is one that is profiled after its steps: the first of its entry."""
    return (
        step.kind == "measure"
        and step.number == 0
        and step.entry is not None
        and f"{step.entry.work}/{step.entry.name}" in PROFILED
    )


@dataclass
class Estimates:
    """What steps take on this machine, from those that have ended: {"step", "entry", "guess_s",
    "seconds", "status"} each.
    """

    spent: list[dict[str, Any]]

    @property
    def known(self) -> bool:
        """Whether any measurement has ended."""
        return any(row["entry"] and row["status"] != "timed-out" for row in self.spent)

    @property
    def scale(self) -> float:
        """How many times its guess a measurement takes here; of those that were stopped at least
        what they had taken.
        """
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
        """Return the seconds that a step is expected to take: as long as its entry's longest, else
        the guess at this machine's pace.

        Of a step that was stopped before, a fifth more than it had.
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
        """Return how much time must be left for a step to begin."""
        if step.kind == "tests":
            return TESTS_LIMIT_S
        return LADDER_LEAST_S if step.kind == "ladder" else NEEDED * self.expected_s(step)

    def limit_s(self, step: Step) -> float:
        """Return after how long a step is stopped."""
        if step.entry is None:
            return {
                "environment": ENVIRONMENT_LIMIT_S,
                "tests": TESTS_LIMIT_S,
                "ladder": float("inf"),
            }[step.kind]
        most = max(MOST * self.expected_s(step), LEAST_LIMIT_S)
        return most if self.known else max(most, LIMIT_S)


def matching(pattern: str, is_asked: Callable[[Entry, str], bool]) -> list[Entry]:
    """Return the entries that a pattern of `--only` names."""
    return [entry for entry in ENTRIES if is_asked(entry, pattern)]


def steps(
    call: Call, batches: Batches, is_asked: Callable[[Entry, str], bool]
) -> tuple[list[Step], list[Step]]:
    """Return the steps of a call that are known beforehand: those that matter, then those for the
    time that is left.

    Repeats come between the two.
    """
    core = [Step(kind) for kind in call.first]
    named = [entry for pattern in call.entries for entry in matching(pattern, is_asked)]
    core += at_batch(named, 0, batches)
    core += [
        Step("profile", entry, batches(entry)[0])
        for pattern in call.profiles
        for entry in matching(pattern, is_asked)
    ]
    later = [
        step
        for place in range(1, max((len(batches(entry)) for entry in named), default=0))
        for step in at_batch(named, place, batches)
    ]
    for pattern in call.more:
        found = [entry for entry in matching(pattern, is_asked) if entry not in named]
        named += found
        later += at_batch(found, 0, batches)
    return core, later


def at_batch(entries: Sequence[Entry], place: int, batches: Batches) -> list[Step]:
    """Return the measurement of each entry at the batch in that place of its list."""
    return [
        Step("measure", entry, rows)
        for entry in entries
        for rows in batches(entry)[place : place + 1]
    ]


def missing(call: Call, is_asked: Callable[[Entry, str], bool]) -> list[str]:
    """Return the patterns that name no entry."""
    return [
        pattern for pattern in (*call.entries, *call.profiles) if not matching(pattern, is_asked)
    ]


def plan_lines(batches: Batches, is_asked: Callable[[Entry, str], bool]) -> Iterator[str]:
    """Yield what each call does, with the seconds that its steps are expected to take before
    anything is measured.
    """
    for number, call in CALLS.items():
        core, later = steps(call, batches, is_asked)
        waits = [step for step in core if step.kind != "profile"] + [
            LADDER
        ] * call.ladder  # profiles come with their measurements
        seconds = sum(guess_s(step) for step in waits)
        yield f"Call {number}: {call.title}; {len(waits)} steps, about {seconds:.0f} s, and {len(later)} more for the time that is left."
        yield from (f"  {guess_s(step):5.0f} s  {step.name}" for step in waits)
        yield from (
            f"          {pattern}: there is no such entry; the call goes on without it."
            for pattern in missing(call, is_asked)
        )


if __name__ == "__main__":
    raise SystemExit(
        "It is a part of benchmarks/first_contact.py, which is the command: python benchmarks/first_contact.py --help"
    )
