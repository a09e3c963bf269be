"""The diagnosis of a run: findings in order, a verdict in one line, and fixes, as text and JSON.

A rule is a function in a file of `measure/rules/`:

    @rule()
    def slow_save(evidence: Evidence) -> Finding | None:

It must be silent on a healthy run, and when the values that it needs are None.
`diagnosis_of(evidence)` calls every rule, for `diagnose` and for `flatout.watch`. No torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from flatout.assembly.selection import all_speedups
from flatout.config.schema import RunConfig
from flatout.display import digits, duration, milliseconds
from flatout.measure import rules as package
from flatout.measure.steps.evidence import CallSite, Evidence, Roofline
from flatout.progress import counted
from flatout.storage.files import Stored, write_text

FORMAT_VERSION = 1
FILE = "findings.json"
"""Its name in a run directory."""
BUSY = "busy-machine"
"""The rule that looks for other processes on the cores of a run."""
CLEAR = 0.1
"""Share of a script's step from which a line is at fault, however busy the machine is."""
Harm = Literal["fails", "spoils", "slows", "warns"]
"""What a finding does to the run: it cannot run, its result will be wrong or worse, it loses time,
or it may do one of these later."""
ORDER = ("fails", "spoils", "slows", "warns")
"""Kinds of harm, the worst first."""
WORDS = {
    "data_wait": "data wait",
    "memory_bound": "memory-bound",
    "gc": "garbage collection",
    "checkpoint": "saving",
}
"""Phases whose name is not their word."""
UNITS = {"ms": "ms", "kib": "KiB", "mib": "MiB", "gib": "GiB", "gb": "GB", "c": "°C"}
"""Parts of the names of figures that are their unit."""
SHOWN = 0.005
"""Phases below this share of the step are omitted from the text."""
BAR = 20
"""Characters of a full bar."""


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
    """Name of the rule. `diagnosis_of` fills it in."""
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
    """What to do, the best first after `diagnosis_of`."""

    def lines(self, number: int) -> Iterator[str]:
        """Yield the lines of its text."""
        yield f"{number}. {self.name}: {self.verdict}"
        if self.site is not None and self.site.describe() not in self.verdict:
            yield f"   at {self.site.describe()}"
        known = {name: value for name, value in self.figures.items() if value is not None}
        if known:
            yield "   " + ", ".join(in_words(name, value) for name, value in known.items())
        yield from (f"   Fix: {fix.described()}" for fix in self.fixes)


def in_words(name: str, value: float | str) -> str:
    """Return a figure whose name includes its unit as text: `idle_ms` is `idle 3 ms`."""
    words, text = name.split("_"), value if isinstance(value, str) else digits(value)
    for place, word in enumerate(words):
        if word in UNITS and words[place - 1] != "per":
            return " ".join([*words[:place], text, UNITS[word], *words[place + 1 :]])
    return " ".join([*words, text])


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
    """Make a rule of a function. Its docstring describes what it looks for."""
    return lambda look: Rule(look, look.__name__.replace("_", "-"), unless)


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
    on = evidence.speedups or ()
    return [
        fix(
            f"{text}: add the speedup {speedup.name}.",
            gain,
            gain_from,
            overrides={"speedups": f"+{speedup.name}"},
        )
        for speedup in all_speedups()
        if evidence.config is not None and slot in speedup.fills and speedup.name not in on
    ]


def ms(seconds: float | None) -> float | None:
    """Return milliseconds. None stays None."""
    return None if seconds is None else 1e3 * seconds


def with_rows(config: RunConfig, rows: int) -> dict[str, Any]:
    """Return the overrides for other rows per micro-batch and the same tokens per step."""
    return {
        "batch.tokens_per_step": config.batch.tokens_per_step,
        "batch.rows_per_device": rows,
        "batch.accumulate": None,
    }


class Diagnosis(Stored):
    """A verdict and its evidence, as written to findings.json."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    verdict: str
    """One line."""
    source: str
    """How the evidence was collected, as in `Evidence.source`."""
    shares: Mapping[str, float]
    """Share of an average step by phase. Only measured phases."""
    step_s: float | None
    """Seconds of an average step."""
    roofline: Roofline
    """The distance to what the device can do."""
    counterfactual_s: Mapping[str, float]
    """Seconds of an average step with one thing replaced."""
    findings: tuple[Finding, ...]
    """The worst first."""
    about: tuple[tuple[str, str], ...] = ()
    """The run or the machine in some lines, each a name and a text."""
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

    def text(self) -> str:
        """Return the verdict, where the time goes, the findings with their fixes, and the notes."""
        width = max((len(name) for name, _ in self.about), default=0) + 2
        parts = [[self.verdict], [f"{name:<{width}}{text}" for name, text in self.about]]
        if self.step_s is not None and self.shares:
            parts.append([*self._breakdown(self.step_s), *self._roofline()])
        parts += [[*finding.lines(at)] for at, finding in enumerate(self.findings, 1)]
        parts.append([f"Note: {note}" for note in self.notes])
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _breakdown(self, step_s: float) -> Iterator[str]:
        """Yield one line per phase of a step."""
        yield f"A step takes {milliseconds(step_s)}:"
        shown = {WORDS.get(name, name): s for name, s in self.shares.items() if s >= SHOWN}
        width = max(map(len, shown), default=0)
        for word, share in sorted(shown.items(), key=lambda pair: -pair[1]):
            bar = "#" * round(share * BAR)
            took = milliseconds(share * step_s)
            yield f"  {word:<{width}}  {share:>4.0%}  {took:>9}  {bar}".rstrip()
        synthetic_s = self.counterfactual_s.get("synthetic-data")
        if synthetic_s is not None:
            yield f"  on data in memory already: {milliseconds(synthetic_s)}"

    def _roofline(self) -> Iterator[str]:
        """Yield the rate with and without saves and evaluations, and the share of the peak."""
        roofline = self.roofline
        if roofline.tokens_per_s is not None:
            rate = f"  {roofline.tokens_per_s:,.0f} tokens/s"
            between = self.shares.get("checkpoint", 0.0) + self.shares.get("evaluation", 0.0)
            if between >= SHOWN:
                overall = (1 - between) * roofline.tokens_per_s
                yield f"  {overall:,.0f} tokens/s, saves and evaluations included"
                rate += " without them"
            if roofline.expected_tokens_per_s is not None:
                expected = f"{roofline.expected_tokens_per_s:,.0f} ({roofline.expected_from})"
                rate += f", expected about {expected}"
            yield rate
        if roofline.peak_tflops is None:
            yield "  peak: unknown"
        elif roofline.mfu is not None:
            peak = f"{roofline.peak_tflops:.3g} TFLOP/s ({roofline.peak_source})"
            yield f"  {roofline.mfu:.1%} of the peak of {peak}"


def read_diagnosis(folder: Path) -> Diagnosis | None:
    """Return the diagnosis in a directory's findings.json. None when it is missing or damaged."""
    try:
        found = Diagnosis.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if found.format_version == FORMAT_VERSION else None


@cache
def rules() -> list[Rule]:
    """Return every rule of the files in `measure/rules/`, sorted by name."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    found = [one for module in modules for one in vars(module).values() if isinstance(one, Rule)]
    return sorted(found, key=lambda rule: rule.name)


def diagnosis_of(evidence: Evidence) -> Diagnosis:
    """Return what the rules find in the evidence, in order, with the verdict."""
    every = [(rule, rule.look(evidence)) for rule in rules()]
    names = {rule.name for rule, finding in every if finding is not None}
    specific = [
        finding.model_copy(
            update={
                "name": rule.name,
                "fixes": tuple(
                    sorted(finding.fixes, key=lambda fix: -fix.worth(evidence.remaining_s))
                ),
            }
        )
        for rule, finding in every
        if finding is not None and not names & {*rule.unless}
    ]

    def place(one: Finding) -> tuple[int, int, float]:
        """Return a sort key. A busy machine comes before what it slows down, but not a line."""
        share, group = one.share or 0.0, 1 if one.name == BUSY else 2
        if evidence.source == "script" and one.site is not None and share >= CLEAR:
            group = 0
        return ORDER.index(one.harm), group, -share

    findings = sorted(specific, key=place)
    return Diagnosis(
        verdict=findings[0].verdict if findings else _healthy(evidence),
        source=evidence.source,
        shares=evidence.phase_shares(),
        step_s=evidence.step_s,
        roofline=evidence.roofline,
        counterfactual_s=evidence.counterfactual_s,
        findings=tuple(findings),
        about=(*evidence.machine_lines, *_about(evidence, {one.name for one in findings})),
        notes=evidence.notes,
    )


PASSED: dict[str, tuple[tuple[str, ...], Callable[[Evidence], object]]] = {
    "environment": (("environment",), lambda facts: facts.host.environment),
    "idle cores": ((BUSY,), lambda facts: facts.host.other_busy_cores),
    "threads": (("cpu-threads",), lambda facts: facts.counterfactual_s.get("all-threads")),
    "disk space": (("disk-space",), lambda facts: facts.host.disk_needed_gib),
    "GPU clocks and sharing": (("throttling", "gpu-shared"), lambda facts: facts.gpu),
    "data": (("no-data", "vocabulary", "length"), lambda facts: facts.data.train_tokens),
    "memory": (("out-of-memory", "full-memory"), lambda facts: facts.memory.estimated_gib),
    "data wait": (("slow-data", "slow-disk"), lambda facts: facts.phases.data_wait_s),
    "reads of tensors": (("host-sync",), lambda facts: facts.counts.syncs),
    "small operations": (("tiny-kernels", "memory-bound"), lambda facts: facts.counts.ops),
    "recompiling": (("recompiles",), lambda facts: facts.counts.recompiles),
    "garbage collection": (("garbage-collection",), lambda facts: facts.phases.gc_s),
    "logging": (("slow-logging",), lambda facts: facts.phases.logging_s),
    "saves": (("slow-save",), lambda facts: facts.phases.checkpoint_s),
    "evaluations": (("frequent-evaluation",), lambda facts: facts.phases.evaluation_s),
    "losses": (("unstable-training",), lambda facts: facts.losses),
}
"""What passes if its rules are silent and the fact that they look at is known, by name."""
RATINGS = {0.9: "excellent", 0.7: "good", 0.4: "fair", 0.0: "poor"}
"""The words for a share of the throughput that a device should give."""


def _about(evidence: Evidence, found: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the length of the run and its data, how good its rate is, and what passed."""
    data, roofline, steps = evidence.data, evidence.roofline, evidence.planned_steps
    if evidence.source not in ("measured run", "preflight"):
        return
    if steps and evidence.step_s:
        took = duration(steps * evidence.step_s)
        yield "Training", f"about {took} for {counted(steps, 'step')}"
    if data.train_tokens is not None:
        passes = f", read {evidence.epochs:.3g} times" if evidence.epochs else ""
        held_out = f", and {data.val_tokens:,} for validation" if data.val_tokens else ""
        yield "Dataset", f"{data.train_tokens:,} tokens{passes}{held_out}"
    if roofline.tokens_per_s and roofline.expected_tokens_per_s:
        share = roofline.tokens_per_s / roofline.expected_tokens_per_s
        word = next(word for least, word in RATINGS.items() if share >= least)
        yield "Rating", f"{word}: {share:.0%} of the tokens/s that this device should give"
    passed = [
        name
        for name, (rules_of, fact) in PASSED.items()
        if fact(evidence) is not None and not found & {*rules_of}
    ]
    if passed:
        yield "Passed", ", ".join(passed)


WORK = frozenset({"compute", "memory_bound", "optimizer"})
"""The phases in which a step computes."""
HALF = 0.5
"""A step that computes for less of its time is not called healthy."""


def _healthy(evidence: Evidence) -> str:
    """Return in one line that nothing was found, and how well the steps use the device."""
    if evidence.step_s is None:
        return "Nothing keeps this run from starting."
    shares = evidence.phase_shares()
    work = sum(shares.get(name, 0.0) for name in WORK)
    parts = [f"{work:.0%} of each step is computation"] if work else []
    if 0 < work < HALF:
        most = max(shares.keys() - WORK, key=lambda name: shares[name])
        word = WORDS.get(most, most)
        return f"Nothing was found, but only {parts[0]}, and {shares[most]:.0%} is {word}."
    if evidence.roofline.mfu is not None:
        parts.append(f"{evidence.roofline.mfu:.0%} of the peak matmul rate")
    found = f": {', '.join(parts)}." if parts else "."
    gpu = evidence.gpu
    if (gpu and gpu.other_processes if evidence.on_gpu else evidence.host.other_busy_cores) is None:
        device = "GPU" if evidence.on_gpu else "cores"
        return f"Nothing was found{found} Other use of the {device} was not measured."
    return f"Nothing holds this run back{found}"
