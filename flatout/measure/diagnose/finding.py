"""Finding: one cause of lost time, memory or quality, its evidence, and its fixes. No torch.

A rule is a function in a file of `measure/rules/`:

    @rule()
    def slow_save(evidence: Evidence) -> Finding | None:

It must be silent on a healthy run, and when the figures that it needs are None.
`flatout.measure.diagnose.diagnosis.diagnosis_of` calls every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flatout.assembly.selection import all_speedups
from flatout.config.schema import RunConfig
from flatout.files import Stored
from flatout.measure.steps.evidence import CallSite, Evidence

Harm = Literal["fails", "spoils", "slows", "warns"]
"""What a finding does to the run: it cannot run, its result will be wrong or worse, it loses time,
or it may do one of these later."""


class Fix(Stored):
    """Something that the user can do."""

    text: str
    """One imperative sentence."""
    overrides: Mapping[str, Any] = {}
    """Settings of the recipe, by dotted key; {}: it cannot be written in a recipe."""
    gain: float | None = None
    """Share of the step's time that it should save, between 0 and 1; None: unknown."""
    gain_from: str | None = None
    """How the gain was estimated."""
    cost_s: float = 0.0
    """Seconds that it costs once, such as compiling."""
    same_result: bool = True
    """Whether the run computes the same losses, except for rounding. `--fix` applies only those."""

    def saved_s(self, remaining_s: float | None) -> float | None:
        """Return the seconds that it saves over the rest of a run; None: unknown."""
        if self.gain is None or remaining_s is None:
            return None
        return self.gain * remaining_s - self.cost_s


class Finding(Stored):
    """A cause, as shown to the user and written to findings.json."""

    name: str = ""
    """Name of the rule; `diagnosis_of` fills it in."""
    verdict: str
    """One sentence with the most important number."""
    harm: Harm
    """What it does to the run."""
    figures: Mapping[str, float | int | str | None] = {}
    """The evidence, under names that include the unit."""
    share: float | None = None
    """Share of the step's time that is lost; None: unknown, or no time is lost."""
    site: CallSite | None = None
    """The line of the user's code that causes it."""
    fixes: tuple[Fix, ...] = ()
    """What to do, the best first after `diagnosis_of`."""


Look = Callable[[Evidence], Finding | None]


@dataclass(frozen=True)
class Rule:
    """A function that looks for one cause."""

    look: Look
    """Returns the finding, or None."""
    name: str
    """The function's name, with hyphens for underscores."""
    unless: tuple[str, ...] = ()
    """Rules with a more specific cause: when one of them finds something, this one is silent."""


def rule(*, unless: tuple[str, ...] = ()) -> Callable[[Look], Rule]:
    """Make a rule of a function; its docstring says what it looks for."""
    return lambda look: Rule(look, look.__name__.replace("_", "-"), unless)


def ms(seconds: float | None) -> float | None:
    """Return milliseconds; None stays None."""
    return None if seconds is None else 1e3 * seconds


def with_rows(config: RunConfig, rows: int) -> dict[str, Any]:
    """Return the overrides for other rows per micro-batch and the same tokens per step."""
    return {
        "batch.tokens_per_step": config.batch.tokens_per_step,
        "batch.rows_per_device": rows,
        "batch.accumulate": None,
    }


def speedup_fixes(
    evidence: Evidence,
    slot: str,
    text: str,
    gain: float | None = None,
    gain_from: str | None = None,
) -> list[Fix]:
    """Return a fix per speedup that fills `slot` and is off; [] for loops without a recipe.

    `text` says what it does, without a full stop. By its slot, a finding needs no speedup's name.
    """
    if evidence.config is None:
        return []
    on = evidence.speedups or ()
    return [
        Fix(
            text=f"{text}: add the speedup {speedup.name}.",
            overrides={"speedups": f"+{speedup.name}"},
            gain=gain,
            gain_from=gain_from,
        )
        for speedup in all_speedups()
        if slot in speedup.fills and speedup.name not in on
    ]
