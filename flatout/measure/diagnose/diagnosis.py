"""The diagnosis of a run: a verdict in one line, its findings in order, and their fixes. No torch.

`diagnosis_of(evidence)` is the one way from evidence to findings, for `diagnose` and for
`flatout.watch`.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from flatout.files import Stored, write_text
from flatout.measure import rules as package
from flatout.measure.diagnose.finding import Finding, Fix, Rule
from flatout.measure.steps.evidence import Evidence, Roof

FORMAT_VERSION = 1
FILE = "findings.json"
"""Its name in a run directory."""
BUSY = "busy-machine"
"""The rule that looks for other processes on the cores of a run."""
ORDER = ("fails", "spoils", "slows", "warns")
"""Kinds of harm, the worst first."""


class Diagnosis(Stored):
    """A verdict and its evidence, as written to findings.json."""

    format_version: int = FORMAT_VERSION
    """Version of the format."""
    verdict: str
    """One line."""
    source: str
    """How the evidence was collected, as in `Evidence.source`."""
    shares: Mapping[str, float]
    """Share of an average step by phase; only measured phases."""
    step_s: float | None
    """Seconds of an average step."""
    roof: Roof
    """The distance to what the device can do."""
    counterfactual_s: Mapping[str, float]
    """Seconds of an average step with one thing replaced."""
    findings: tuple[Finding, ...]
    """The worst first."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def fixes(self, remaining_s: float | None = None) -> Iterator[tuple[Finding, Fix]]:
        """Yield all fixes, those of failures first, then by the time that they save."""
        found = [(finding, fix) for finding in self.findings for fix in finding.fixes]
        yield from sorted(
            found,
            key=lambda pair: (
                ORDER.index(pair[0].harm) if pair[0].harm == "fails" else 1,
                -_worth(pair[1], remaining_s),
            ),
        )

    def write(self, folder: Path) -> Path:
        """Write findings.json into a directory and return its path."""
        path = folder / FILE
        write_text(path, self.model_dump_json(indent=1) + "\n")
        return path


def read_diagnosis(folder: Path) -> Diagnosis | None:
    """Return the diagnosis in a directory's findings.json; None when it is missing or damaged."""
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
    found: dict[str, Finding] = {}
    every = rules()
    for rule in every:
        finding = rule.look(evidence)
        if finding is not None:
            found[rule.name] = finding.model_copy(
                update={"name": rule.name, "fixes": ranked(finding.fixes, evidence.remaining_s)}
            )
    specific = [
        found[rule.name]
        for rule in every
        if rule.name in found and not found.keys() & {*rule.unless}
    ]
    findings = sorted(  # on a busy machine, what is slow besides is slow because of that
        specific,
        key=lambda one: (ORDER.index(one.harm), one.name != BUSY, -(one.share or 0.0)),
    )
    return Diagnosis(
        verdict=verdict_of(findings, evidence),
        source=evidence.source,
        shares=evidence.phase_shares(),
        step_s=evidence.step_s,
        roof=evidence.roof,
        counterfactual_s=evidence.counterfactual_s,
        findings=tuple(findings),
        notes=evidence.notes,
    )


def ranked(fixes: tuple[Fix, ...], remaining_s: float | None) -> tuple[Fix, ...]:
    """Return fixes by the time that they save over the rest of the run, the most first.

    Fixes of unknown gain keep their order, before those that cost more than they save.
    """
    return tuple(sorted(fixes, key=lambda fix: -_worth(fix, remaining_s)))


def verdict_of(findings: list[Finding], evidence: Evidence) -> str:
    """Return the worst finding in one line, or that nothing was found."""
    if findings:
        return findings[0].verdict
    if evidence.step_s is None:
        return "Nothing stands in the way of this run."
    shares = evidence.phase_shares()
    work = sum(shares.get(name, 0.0) for name in ("compute", "memory_bound", "optimizer"))
    parts = [f"{work:.0%} of each step is computation"] if work else []
    if evidence.roof.mfu is not None:
        parts.append(f"{evidence.roof.mfu:.0%} of the peak of matrix products")
    found = f": {', '.join(parts)}." if parts else "."
    gpu = evidence.gpu
    if (gpu and gpu.other_processes if evidence.on_gpu else evidence.host.other_busy_cores) is None:
        device = "GPU" if evidence.on_gpu else "cores"
        return f"Nothing was found{found} Other use of the {device} was not measured."
    return f"Nothing holds this run back{found}"


def _worth(fix: Fix, remaining_s: float | None) -> float:
    """Return a key to rank fixes by: seconds saved, or the share when the time is unknown."""
    saved_s = fix.saved_s(remaining_s)
    if saved_s is not None:
        return saved_s
    return 0.0 if fix.gain is None else fix.gain if remaining_s is None else -math.inf
