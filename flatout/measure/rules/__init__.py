"""What `diagnose` and `watch` recognise: each rule looks for one cause in the evidence. No torch.

A rule is a row of `table.py` where one share, one threshold, one sentence, one line and one fix are
enough, or else a function in a file of this folder:

    @rule()
    def slow_save(evidence: Evidence) -> Finding | None:

It is silent on a healthy run, and when the facts that it needs are None.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from flatout.assembly.selection import all_speedups
from flatout.config.schema import RunConfig
from flatout.measure.steps.evidence import CallSite, Evidence
from flatout.storage.files import Stored

Harm = Literal["fails", "spoils", "slows", "warns"]
"""What a finding does to the run: it cannot run, its result will be wrong or worse, it loses time,
or it may do one of these later."""


class Fix(Stored):
    """Something that the user can do."""

    text: str
    """One imperative sentence."""
    overrides: Mapping[str, Any] = {}
    """Settings of the recipe, by dotted key. {} means it cannot be written in a recipe."""
    gain: float | None = None
    """Share of the step's time that it should save, between 0 and 1. None if unknown."""
    gain_from: str | None = None
    """How the gain was estimated."""
    cost_s: float = 0.0
    """Seconds that it costs once, such as compiling."""
    same_result: bool = True
    """Whether the run computes the same losses, except for rounding."""

    def worth(self, remaining_s: float | None) -> float:
        """Return a key to rank by: the seconds saved in the rest of the run, if that is known.

        Otherwise it is the share of the step. Fixes of unknown gain come before those that cost
        more than they save.
        """
        if self.gain is None:
            return 0.0
        return self.gain if remaining_s is None else self.gain * remaining_s - self.cost_s

    def described(self) -> str:
        """Return the text with the expected gain."""
        if self.gain is None:
            return self.text
        cost = f", after {self.cost_s:.0f} s once" if self.cost_s else ""
        source = f" (from {self.gain_from})" if self.gain_from else ""
        return f"{self.text} It should save about {self.gain:.0%} of each step{cost}{source}."


class Finding(Stored):
    """A cause, as shown to the user and written to findings.json."""

    name: str = ""
    """Name of the rule, which it fills in."""
    verdict: str
    """One sentence with the most important number."""
    harm: Harm = "slows"
    """What it does to the run."""
    figures: Mapping[str, float | int | str | None] = {}
    """The evidence, under names that include the unit."""
    share: float | None = None
    """Share of the step's time that is lost. None if unknown, or no time is lost."""
    site: CallSite | None = None
    """The line of the user's code that causes it."""
    fixes: tuple[Fix, ...] = ()
    """What to do, the best first in a diagnosis."""


Look = Callable[[Evidence], Finding | None]


@dataclass(frozen=True)
class Rule:
    """Looks for one cause."""

    name: str
    summary: str
    """What it looks for, in one sentence."""
    look: Look
    """Returns the finding, or None."""
    unless: tuple[str, ...] = ()
    """Rules with a more specific cause: when one of them finds something, this one is silent."""


def rule(
    site: str = "", shows: tuple[str, ...] = (), unless: tuple[str, ...] = ()
) -> Callable[[Look], Rule]:
    """Make a rule of a function, whose docstring is the summary.

    `site` is the kind of line that its findings are about, and `shows` the facts behind them.
    """

    def made(function: Look) -> Rule:
        name, summary = (
            function.__name__.replace("_", "-"),
            (function.__doc__ or "").partition("\n"),
        )

        def look(evidence: Evidence) -> Finding | None:
            found = function(evidence)
            if found is None:
                return None
            known = {"figures": {**facts(evidence, *shows), **found.figures}, "name": name}
            return found.model_copy(update=known | {"site": found.site or evidence.site(site)})

        return Rule(name, summary[0], look, unless)

    return made


@cache
def rules() -> list[Rule]:
    """Return every rule of the files in this folder, sorted by name."""
    found: list[Rule] = []
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        for value in vars(module).values():
            listed = value if isinstance(value, list) else [value]
            found += [one for one in listed if isinstance(one, Rule)]
    return sorted(found, key=lambda rule: rule.name)


def fix(text: str, gain: float | None = None, gain_from: str | None = None, **more: Any) -> Fix:
    """Return a fix. `gain_from` counts only if there is a gain."""
    return Fix(text=text, gain=gain, gain_from=None if gain is None else gain_from, **more)


def speedup_fixes(
    evidence: Evidence,
    slot: str,
    text: str,
    gain: float | None = None,
    gain_from: str | None = None,
) -> list[Fix]:
    """Return a fix per speedup that fills `slot` and is off. [] for loops without a recipe.

    `text` describes what it does, without a full stop. By its slot, a finding needs no speedup's
    name.
    """
    return [
        fix(
            f"{text}: add the speedup {each.name}.",
            gain,
            gain_from,
            overrides={"speedups": f"+{each.name}"},
        )
        for each in all_speedups()
        if slot in each.fills and is_off(evidence, each.name)
    ]


def is_off(evidence: Evidence, speedup: str) -> bool:
    """Return whether the recipe, if there is one, could turn a speedup on."""
    return evidence.config is not None and speedup not in (evidence.speedups or ())


def with_rows(config: RunConfig, rows: int) -> dict[str, Any]:
    """Return the overrides for other rows per micro-batch and the same tokens per step."""
    return {
        "batch.tokens_per_step": config.batch.tokens_per_step,
        "batch.rows_per_device": rows,
        "batch.accumulate": None,
    }


def facts(evidence: Evidence, *names: str) -> dict[str, Any]:
    """Return fields of the evidence as figures of a finding, seconds as milliseconds."""
    found = {}
    for name in names:
        value = getattr(evidence, name)
        if name.endswith("_s") and value is not None:
            name, value = f"{name[:-2]}_ms", 1e3 * value
        found[name] = value
    return found
