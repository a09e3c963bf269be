"""What `diagnose` and `watch` recognise: each rule looks for one cause in the evidence. No torch.

A rule is a `row`, as in `table.py`, or a function in a file of this folder where facts meet:

    @rule(site="save")
    def slow_save(evidence: Evidence) -> Found | None:

Both return the share of the step that is lost, one sentence and a fix. They return None on a
healthy run, and when the facts that they need are None.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from flatout.assembly.choices import speedups_for
from flatout.assembly.parts import divisors
from flatout.config.schema import RunConfig
from flatout.display import Display, digits, milliseconds
from flatout.measure.evidence import CallSite, Evidence
from flatout.storage.files import Stored

Harm = Literal["fails", "spoils", "slows", "warns"]
"""What a finding does to the run: it cannot run, its result will be wrong or worse, it loses time,
or it may do one of these later."""

UNITS = {"s": "s", "mib": "MiB", "gib": "GiB", "c": "°C"}
"""Ends of the names of figures that are their unit."""


class Fix(Stored):
    """Something that the user can do."""

    text: str
    """One imperative sentence."""
    overrides: Mapping[str, Any] = {}
    """Settings of the recipe, by dotted key. {} means it cannot be written in a recipe."""


class Finding(Stored):
    """A cause, as shown to the user."""

    name: str
    """Name of the rule."""
    verdict: str
    """One sentence with the most important number."""
    harm: Harm = "slows"
    """What it does to the run."""
    figures: Mapping[str, float | int | str | None] = {}
    """The evidence, under names that include the unit."""
    share: float | None = None
    """Share of the step's time that a fix saves at most. None if unknown, or no time is lost."""
    site: CallSite | None = None
    """The line of the user's code that causes it."""
    fixes: tuple[Fix, ...] = ()
    """What to do."""

    def display(self) -> Display:
        """Return the verdict, the line, the evidence, and the fix."""
        figures = [in_words(*one) for one in self.figures.items() if one[1] is not None]
        lost, line = f"{self.share or 0.0:.0%}", self.site.describe() if self.site else ""
        figures += [f"{lost} of the step"] if self.share and lost not in self.verdict else []
        values = [("at", line)] if line not in self.verdict else []
        values += [("evidence", ", ".join(figures))] if figures else []
        return Display(self.verdict, values + [("fix", fix.text) for fix in self.fixes])


def in_words(name: str, value: Any) -> str:
    """Return a figure whose name includes its unit as text: `idle_s` is `idle 3 ms`."""
    *words, unit = name.split("_")
    text = value if isinstance(value, str) else digits(value)
    if unit in UNITS:
        text = milliseconds(float(value)) if unit == "s" else f"{text} {UNITS[unit]}"
    return " ".join([*words, text] if unit in UNITS else [*words, unit, text])


Settings: TypeAlias = Mapping[str, Any]
Loss: TypeAlias = Any
"""The share of the step that is lost, or the `Harm` where no time is. Anything false if healthy."""
Remedy: TypeAlias = Any
"""The text of a fix, or the text and its settings. Anything false where it does not apply."""
Way: TypeAlias = Remedy | Callable[[Evidence, float], Remedy]
"""A remedy, or a function that returns it for the share that is lost."""
Found: TypeAlias = tuple[Loss, str, tuple[Way, ...]]
"""A loss, a verdict and ways to mend it, of which the first one that applies is the fix.

Texts may have the words {e}, the evidence, {share}, {site}, its place {line}, and of a fix {set},
its settings.
"""


@dataclass(frozen=True)
class Rule:
    """Looks for one cause."""

    name: str
    summary: str
    """What it looks for, in one sentence."""
    find: Callable[[Evidence], Found | None]
    site: str = ""
    """Kinds of lines that its findings are about: the first one that is known counts."""
    shows: str = ""
    """The facts behind its findings."""
    unless: str = ""
    """Rules with a more specific cause: when one of them finds something, this one is silent."""

    def look(self, evidence: Evidence) -> Finding | None:
        """Return the finding. None on a healthy run, or where no remedy applies."""
        loss, says, ways = self.find(evidence) or (None, "", ())
        share = loss if isinstance(loss, float) else None
        remedies = (way(evidence, share or 0.0) if callable(way) else way for way in ways)
        remedy = loss and next(filter(None, remedies), None)
        if not remedy:
            return None
        text, settings = remedy if isinstance(remedy, tuple) else (remedy, {})
        site = evidence.site(self.site)
        words = {
            "e": evidence,
            "share": share,
            "site": site.describe() if site else "lines of other packages",
            "line": site and site.place,
            "set": shown(settings),
        }
        return Finding(
            name=self.name,
            verdict=says.format(**words),
            harm=loss if isinstance(loss, str) else "slows",
            figures={name: getattr(evidence, name) for name in self.shows.split()},
            share=share,
            site=site,
            fixes=(Fix(text=text.format(**words), overrides=settings if evidence.config else {}),),
        )


def rule(**options: str) -> Callable[[Callable[[Evidence], Found | None]], Rule]:
    """Make a rule of a function, whose docstring is the summary. `options` are fields of `Rule`."""
    return lambda find: Rule(
        find.__name__.replace("_", "-"), str(find.__doc__).partition("\n")[0], find, **options
    )


def row(
    name: str,
    summary: str,
    loss: Callable[[Evidence], Loss] | Harm | float | tuple[str, float],
    says: str,
    *ways: Way,
    **options: str,
) -> Rule:
    """Return a rule of its loss, its sentence and its remedies. `options` are fields of `Rule`.

    A `Harm` as the loss is that of each line of its `site`. A number is the least share of the step
    that such a line takes, or that a fact does, by its name.
    """

    def lost(evidence: Evidence) -> Loss:
        if callable(loss):
            return loss(evidence)
        if isinstance(loss, tuple):
            return evidence.share(getattr(evidence, loss[0]), loss[1])
        site = evidence.site(options.get("site", ""))
        return evidence.share(site, loss) if isinstance(loss, float) else site and loss

    return Rule(name, summary, lambda evidence: (lost(evidence), says, ways), **options)


@cache
def rules() -> list[Rule]:
    """Return every rule of the files in this folder, sorted by name."""
    found: list[Any] = []
    for each in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{each.name}")).values():
            found += value if isinstance(value, list) else [value]
    return sorted((one for one in found if isinstance(one, Rule)), key=lambda one: one.name)


def shown(settings: Settings) -> str:
    """Return settings as a command line states them."""
    words = (f"{key}={'null' if value is None else value}" for key, value in settings.items())
    return " ".join(words).replace("speedups=+", "add the speedup ")


def is_off(evidence: Evidence, speedup: str) -> bool:
    """Return whether the recipe, if there is one, could turn a speedup on."""
    return evidence.config is not None and speedup not in (evidence.speedups or ())


def speedup(part: str, text: str) -> Way:
    """Return the remedy to turn on the first speedup that sets a part of a run, if it is off.

    By the part, a finding needs no speedup's name.
    """
    return lambda evidence, _: next(
        ((text, {"speedups": f"+{name}"}) for name in speedups_for(part) if is_off(evidence, name)),
        None,
    )


def rows_of(config: RunConfig | None) -> int:
    """Return the rows of a micro-batch. 0 where they are not known."""
    rows = config and config.batch.rows_per_device
    return rows if isinstance(rows, int) else 0


def with_rows(evidence: Evidence, most: int, least: int = 1) -> Remedy:
    """Return the remedy of the most rows per micro-batch up to a number, in the same step."""
    config = evidence.config
    if config is None:
        return None
    tokens = config.batch.tokens_per_step or 0
    rows = next(divisors(tokens // config.data.seq_len // evidence.world_size, most), 0)
    keys = ("batch.tokens_per_step", "batch.rows_per_device", "batch.accumulate")
    settings = dict(zip(keys, (tokens, rows, None), strict=True))
    return rows >= least and ("Set {set}: the same step in other micro-batches.", settings)
