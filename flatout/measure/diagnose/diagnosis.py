"""The diagnosis of a run: its findings in order, a verdict in one line, and how both are shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig
from flatout.display import Column, Display, Table, digits, duration, milliseconds
from flatout.measure.diagnose.alternatives import applied
from flatout.measure.rules import Finding, rules
from flatout.measure.steps.evidence import Evidence
from flatout.progress import counted
from flatout.storage.files import write_text
from flatout.storage.json_io import Result

FORMAT_VERSION = 2
FILE = "findings.json"
"""Its name in a run directory."""
BUSY = "busy-machine"
"""The rule that looks for other processes on the cores of a run."""
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
"""The phases in which a step computes."""
HALF = 0.5
"""A step that computes for less of its time is not called healthy."""
UNITS = {"ms": "ms", "kib": "KiB", "mib": "MiB", "gib": "GiB", "gb": "GB", "c": "°C"}
"""Parts of the names of figures that are their unit."""
SHOWN, BAR = 0.005, 20
"""Phases below this share of the step are omitted from the text. Characters of a full bar."""
ROOFLINE = (
    *("peak_tflops", "peak_source", "achieved_tflops", "mfu"),
    *("tokens_per_s", "expected_tokens_per_s", "expected_from"),
)
"""The facts about the distance to what the device can do."""
PHASE = (Column(""), Column("", "right"), Column("", "right"), Column(""))


class Diagnosis(Result):
    """A verdict and its evidence, as written to findings.json."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    verdict: str
    """One line."""
    source: str
    """How the evidence was collected, as in `Evidence.source`."""
    steps: int | None
    """Steps that were measured."""
    step_s: float | None
    """Seconds of an average step."""
    shares: Mapping[str, float]
    """Share of an average step by phase. Only measured phases."""
    roofline: Mapping[str, float | str | None]
    """The distance to what the device can do."""
    counterfactual_s: Mapping[str, float]
    """Seconds of an average step with one thing replaced."""
    findings: tuple[Finding, ...]
    """The worst first."""
    about: tuple[tuple[str, str], ...] = ()
    """The run or the machine in some lines, each a name and a text."""
    next: str | None = None
    """The command to run next."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def write(self, folder: Path) -> Path:
        """Write findings.json into a directory and return its path."""
        path = folder / FILE
        write_text(path, self.model_dump_json(indent=1) + "\n")
        return path

    def display(self) -> Display:
        """Return the verdict, where the time goes, the findings with their fixes, and the notes."""
        tables = []
        if self.step_s is not None and self.shares:
            shares = sorted(self.shares.items(), key=lambda each: -each[1])
            rows = [
                (
                    f"  {WORDS.get(name, name)}",
                    f"{share:.0%}",
                    milliseconds(share * self.step_s),
                    "#" * round(share * BAR),
                )
                for name, share in shares
                if share >= SHOWN
            ]
            title = f"A step takes {milliseconds(self.step_s)}"
            if self.steps is not None:
                title += f", on average of {counted(self.steps, 'step')}"
            tables.append(Table(PHASE, rows, f"{title}:"))
        tables += [shown(finding, number) for number, finding in enumerate(self.findings, 1)]
        notes = [f"Note: {note}" for note in self.notes]
        notes += [] if self.next is None else [f"Next: {self.next}"]
        return Display(self.verdict, (*self.about, *self._rates()), tables, notes)

    def _rates(self) -> Iterator[tuple[str, str]]:
        """Yield the rate with and without saves and evaluations, and the share of the peak."""
        peak, source, _, mfu, rate, expected, how = map(self.roofline.get, ROOFLINE)
        if isinstance(rate, float):
            text = f"{rate:,.0f} tokens/s"
            between = self.shares.get("checkpoint", 0.0) + self.shares.get("evaluation", 0.0)
            if between >= SHOWN:
                text += f", {(1 - between) * rate:,.0f} with saves and evaluations"
            if expected is not None:
                text += f", expected about {expected:,.0f} ({how})"
            yield "Rate", text
        if mfu is not None:
            yield "Peak", f"{mfu:.1%} of {peak:.3g} TFLOP/s ({source})"


def shown(finding: Finding, number: int) -> Table:
    """Return a finding as a table of texts with their names."""
    site, known = finding.site, finding.figures.items()
    rows = [] if site is None or site.describe() in finding.verdict else [("at", site.describe())]
    texts = [in_words(name, value) for name, value in known if value is not None]
    rows += [("evidence", ", ".join(texts))] if texts else []
    rows += [("fix", fix.described()) for fix in finding.fixes]
    columns = (Column(""), Column(""))
    indented = [(f"   {name}", text) for name, text in rows]
    return Table(columns, indented, f"{number}. {finding.name}: {finding.verdict}")


def in_words(name: str, value: float | str) -> str:
    """Return a figure whose name includes its unit as text: `idle_ms` is `idle 3 ms`."""
    words, text = name.split("_"), value if isinstance(value, str) else digits(value)
    for place, word in enumerate(words):
        if word in UNITS and words[place - 1] != "per":
            return " ".join([*words[:place], text, UNITS[word], *words[place + 1 :]])
    return " ".join([*words, text])


def read_diagnosis(folder: Path) -> Diagnosis | None:
    """Return the diagnosis in a directory's findings.json. None when it is missing or damaged."""
    try:
        found = Diagnosis.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if found.format_version == FORMAT_VERSION else None


def diagnosis_of(evidence: Evidence) -> Diagnosis:
    """Return what the rules find in the evidence, in order, with the verdict."""
    every = {one: finding for one in rules() if (finding := one.look(evidence)) is not None}
    names = {one.name for one in every}

    def rank(one: Finding) -> tuple[int, int, float]:
        """Return a sort key.

        A busy machine comes before what it slows down, but not before a line. A cause whose time is
        unknown, such as a variable that is set, comes before those that were measured beside it.
        """
        share, group = 1.0 if one.share is None else one.share, 1 if one.name == BUSY else 2
        if evidence.source == "script" and one.site is not None and share >= CLEAR:
            group = 0
        return ORDER.index(one.harm), group, -share

    remaining_s = evidence.remaining_s
    findings = tuple(
        finding.model_copy(
            update={"fixes": tuple(sorted(finding.fixes, key=lambda fix: -fix.worth(remaining_s)))}
        )
        for finding in sorted(
            (finding for one, finding in every.items() if not names & {*one.unless}), key=rank
        )
    )
    return Diagnosis(
        verdict=findings[0].verdict if findings else _healthy(evidence),
        source=evidence.source,
        steps=evidence.steps,
        step_s=evidence.step_s,
        shares=evidence.phase_shares(),
        roofline={name: getattr(evidence, name) for name in ROOFLINE},
        counterfactual_s=evidence.counterfactual_s,
        findings=findings,
        about=(*evidence.machine_lines, *_about(evidence)),
        notes=evidence.notes,
    )


def _about(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the length of a recipe's run and its data."""
    steps, tokens = evidence.planned_steps, evidence.train_tokens
    if evidence.source not in ("measured run", "preflight"):
        return
    if steps and evidence.step_s:
        took = duration(steps * evidence.step_s)
        yield "Training", f"about {took} for {counted(steps, 'step')}"
    if tokens is not None:
        passes = f", read {evidence.epochs:.3g} times" if evidence.epochs else ""
        held_out = f", and {evidence.val_tokens:,} for validation" if evidence.val_tokens else ""
        yield "Dataset", f"{tokens:,} tokens{passes}{held_out}"


def _healthy(evidence: Evidence) -> str:
    """Return in one line that nothing was found, and how well the steps use the device."""
    if evidence.step_s is None:
        return "Nothing keeps this run from starting."
    shares = evidence.phase_shares()
    work = sum(shares.get(name, 0.0) for name in WORK)
    parts = [f"{work:.0%} of each step is computation"] if work else []
    if 0 < work < HALF:
        most = max(shares.keys() - WORK, key=shares.__getitem__)
        word = WORDS.get(most, most)
        return f"Nothing was found, but only {parts[0]}, and {shares[most]:.0%} is {word}."
    if evidence.mfu is not None:
        parts.append(f"{evidence.mfu:.0%} of the peak matmul rate")
    found = f": {', '.join(parts)}." if parts else "."
    others, device = evidence.other_busy_cores, "cores"
    if evidence.on_gpu:
        others, device = evidence.gpu_others, "GPU"
    if others is None:
        return f"Nothing was found{found} Other use of the {device} was not measured."
    return f"Nothing holds this run back{found}"


def of_script(
    found: Diagnosis, script: Sequence[str], code: int | None, *, to_the_end: bool
) -> dict[str, Any]:
    """Return how a script ended, and the command to run next, as fields of its diagnosis."""
    how = "ended after the measurement; --to-the-end lets it continue"
    if to_the_end:
        how = f"ran to its end, with exit code {code}"
    elif code:
        how = f"failed with exit code {code}"
    about = (*found.about, ("Script", how))
    return {"about": about, "next": f"`flatout tune -- {shlex.join(script)}`"}


def next_for_recipe(
    found: Diagnosis, asked: RunConfig, recipe: str | Path, overrides: Sequence[str]
) -> str | None:
    """Return the command that trains with the best fix, or else measures what is faster."""
    serious = [one for one in found.findings if one.harm != "warns"]
    settings = next((f.overrides for one in serious for f in one.fixes if f.overrides), {})
    if not settings and any(one.harm == "fails" for one in serious):
        return None
    words = [word for word in overrides if word.partition("=")[0] not in settings]
    for key, value in settings.items():
        if key == "speedups":
            value = applied(asked, {key: value}).speedups
        words.append(f"{key}={'null' if value is None else value}")
    return f"`{shlex.join(['flatout', 'train' if settings else 'tune', str(recipe), *words])}`"
