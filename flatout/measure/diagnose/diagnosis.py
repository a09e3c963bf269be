"""The diagnosis of a run: its findings in order, a verdict in one line, and how both are shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from flatout.assembly.choices import adding, parse_request, removing
from flatout.config.schema import RunConfig
from flatout.display import Column, Display, Show, Table, displayed, duration, milliseconds
from flatout.measure.evidence import Evidence
from flatout.measure.rules import Finding, rules
from flatout.progress import counted
from flatout.storage.json_io import Result

FORMAT_VERSION = 4
CLEAR = 0.1
"""Share of a script's step from which a line is at fault, however busy the machine is."""
ORDER = ("fails", "spoils", "slows", "warns")
"""Kinds of harm, the worst first."""
WORDS = {
    "data_wait": "data wait",
    "memory_bound": "memory-bound",
    "gc": "garbage collection",
    "checkpoint": "saving",
}
"""Phases whose name is not their word."""
WORK = frozenset({"compute", "memory_bound", "optimizer"})
"""The phases in which a step computes. One that computes for less than half of it is not healthy.
"""
SHOWN = 0.005
"""Phases below this share of the step are omitted from the text."""
ROOFLINE = ("peak_tflops", "peak_source", "mfu", "tokens_per_s")
"""The facts about the distance to what the device can do."""


NAMED = (Column(""), Column(""))
"""The columns of texts with their names."""


def step_in_words(found: Diagnosis) -> str:
    """Return the time of an average step, and its phases."""
    if found.step_s is None:
        return ""
    text = milliseconds(found.step_s)
    if found.steps is not None:
        text += f", on average of {counted(found.steps, 'step')}"
    phases = sorted(found.shares.items(), key=lambda each: -each[1])
    parts = [f"{share:.0%} {WORDS.get(name, name)}" for name, share in phases if share >= SHOWN]
    return f"{text}: {', '.join(parts)}" if parts else text


class Diagnosis(Result):
    """A verdict and its evidence."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    verdict: str
    """One line."""
    source: str
    """How the evidence was collected, as in `Evidence.source`."""
    steps: int | None
    """Steps that were measured."""
    step_s: Annotated[float | None, Show("Step", record=step_in_words)]
    """Seconds of an average step."""
    shares: Mapping[str, float]
    """Share of an average step by phase. Only measured phases."""
    roofline: Mapping[str, float | str | None]
    """The distance to what the device can do."""
    findings: tuple[Finding, ...]
    """The worst first."""
    about: tuple[tuple[str, str], ...] = ()
    """The run or the machine in some lines, each a name and a text."""
    next: str | None = None
    """The command to run next."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""
    script_code: int | None = None
    """Exit code of a script. Null when it was ended after its measurement."""

    @property
    def exit_code(self) -> int:
        """As for `train`: 2 if the recipe cannot start, 1 if its measured steps failed, else 0.

        For a recorded run, it is 0. A script's is its own.
        """
        codes = {"preflight": 2, "measured run": 1, "script": self.script_code or 1}
        fails = any(finding.harm == "fails" for finding in self.findings)
        return codes.get(self.source, 0) if fails else 0

    def display(self) -> Display:
        """Return the verdict, where the time goes, the findings with their fixes, and the notes."""
        tables = []
        for number, finding in enumerate(self.findings, 1):
            shown = finding.display()
            verdict = f": {shown.headline}" if number > 1 else ""  # the first one is the headline
            tables.append(Table(NAMED, shown.values, f"{number}. {finding.name}{verdict}"))
        notes = [f"Note: {note}" for note in self.notes]
        notes += [f"Next: {self.next}"] if self.next else []
        return Display(self.verdict, [*displayed(self).values, *self.about], tables, notes)


def diagnosis_of(evidence: Evidence) -> Diagnosis:
    """Return what the rules find in the evidence, in order, with the verdict."""
    every = {one: finding for one in rules() if (finding := one.look(evidence)) is not None}
    names = {one.name for one in every}

    def rank(one: Finding) -> tuple[int, bool, float]:
        """Return a sort key: what no busy machine explains comes first, such as lines of a script.

        A cause whose time is unknown, such as a variable that is set, comes before those that were
        measured beside it.
        """
        share = 1.0 if one.share is None else one.share
        is_sure = one.share is None or (one.site is not None and share >= CLEAR)
        return ORDER.index(one.harm), not (is_sure and evidence.source == "script"), -share

    kept = (finding for one, finding in every.items() if not names & {*one.unless.split()})
    findings = tuple(sorted(kept, key=rank))
    return Diagnosis(
        verdict=findings[0].verdict if findings else _healthy(evidence),
        source=evidence.source,
        steps=evidence.steps,
        step_s=evidence.step_s,
        shares=evidence.phase_shares(),
        roofline={name: getattr(evidence, name) for name in ROOFLINE},
        findings=findings,
        about=(*evidence.machine_lines, *_about(evidence)),
        notes=evidence.notes,
    )


def _about(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the length of a recipe's run, its data, its rate, and its share of the peak."""
    steps, tokens, rate = evidence.planned_steps, evidence.train_tokens, evidence.tokens_per_s
    if tokens is not None:
        yield "Dataset", f"{tokens:,} tokens, read {evidence.epochs or 0.0:.3g} times"
        if steps and evidence.step_s:
            took = duration(steps * evidence.step_s)
            yield "Training", f"about {took} for {counted(steps, 'step')}"
    if rate is not None:
        aside_s = (evidence.checkpoint_s or 0.0) + (evidence.evaluation_s or 0.0)
        aside = evidence.share(aside_s, SHOWN)
        whole = f", {(1 - aside) * rate:,.0f} with saves and evaluations" if aside else ""
        yield "Rate", f"{rate:,.0f} tokens/s{whole}"
    if evidence.mfu is not None and evidence.peak_tflops is not None:
        peak = f"{evidence.peak_tflops:.3g} TFLOP/s ({evidence.peak_source})"
        yield "Peak", f"{evidence.mfu:.1%} of {peak}"


def _healthy(evidence: Evidence) -> str:
    """Return in one line that nothing was found, and whether that means something."""
    if evidence.step_s is None:
        kind = "on this machine slows training down"
        return f"Nothing {kind if evidence.machine_lines else 'keeps this run from starting'}."
    work = sum(share for name, share in evidence.phase_shares().items() if name in WORK)
    if 0 < work < 0.5:
        return f"Nothing was found, but only {work:.0%} of each step is computation."
    if (evidence.gpu_others if evidence.on_gpu else evidence.other_busy_cores) is None:
        return "Nothing was found. Other use of the machine was not measured."
    return "Nothing holds this run back."


def of_script(
    found: Diagnosis, script: Sequence[str], code: int | None, *, to_the_end: bool
) -> Diagnosis:
    """Return a diagnosis of a script with how it ended, and the command to run next."""
    how = "ended after the measurement; --to-the-end lets it continue"
    if code:
        how = f"failed with exit code {code}"
    elif to_the_end or code == 0:
        how = "was interrupted" if code is None else "ran to its end"
    about = (*found.about, ("Script", how))
    fails = any(one.harm == "fails" for one in found.findings)
    then = None if fails else f"`flatout tune -- {shlex.join(script)}`"
    return found.model_copy(update={"about": about, "next": then, "script_code": code})


def next_for_recipe(
    found: Diagnosis, asked: RunConfig, recipe: str | Path, overrides: Sequence[str]
) -> str | None:
    """Return the command that trains with the best fix, or else measures what is faster."""
    serious = [one for one in found.findings if one.harm != "warns"]
    fixes = (fix.overrides for one in serious for fix in one.fixes if fix.overrides)
    settings = dict(next(fixes, {}))
    if not settings and any(one.harm == "fails" for one in serious):
        return None
    words = [word for word in overrides if word.partition("=")[0] not in settings]
    if edit := settings.get("speedups"):
        settings["speedups"] = edited(asked.speedups, edit)
    words += [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    return f"`{shlex.join(['flatout', 'train' if settings else 'tune', str(recipe), *words])}`"


def edited(speedups: str | Sequence[str], edit: str) -> str:
    """Return a request for speedups with the edit of a fix: `+name` or `-name`."""
    name = edit[1:]
    if edit[0] == "+":
        return adding(speedups, [name])
    without = removing(name, speedups)
    return f"{without},{edit}" if parse_request(without).auto else without
