"""A diagnosis as plain text for a terminal or a log. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.figures import digits, milliseconds
from flatout.measure.diagnose.diagnosis import Diagnosis
from flatout.measure.diagnose.finding import Finding, Fix

WORDS = {
    "data_wait": "data wait",
    "memory_bound": "memory-bound",
    "gc": "garbage collection",
    "checkpoint": "saving",
}
"""Phases whose name is not their word."""
BETWEEN_STEPS = ("checkpoint", "evaluation")
"""Phases that the rate of the steps leaves out."""
SHOWN = 0.005
"""Phases below this share of the step are left out."""
BAR = 20
"""Characters of a full bar."""


def text_of(diagnosis: Diagnosis) -> str:
    """Return the verdict, where the time goes, the findings with their fixes, and the notes."""
    parts = [diagnosis.verdict]
    if diagnosis.step_s is not None and diagnosis.shares:
        parts.append("\n".join(_breakdown(diagnosis)))
    parts += [
        "\n".join(_finding(number, finding)) for number, finding in enumerate(diagnosis.findings, 1)
    ]
    if diagnosis.notes:
        parts.append("\n".join(f"Note: {note}" for note in diagnosis.notes))
    return "\n\n".join(parts)


def _breakdown(diagnosis: Diagnosis) -> list[str]:
    """Return one line per phase of a step, and the distance to the roof."""
    step_s = diagnosis.step_s or 0.0
    shown = {name: share for name, share in diagnosis.shares.items() if share >= SHOWN}
    lines = [f"A step takes {milliseconds(step_s)}:"]
    width = max((len(WORDS.get(name, name)) for name in shown), default=0)
    for name, share in sorted(shown.items(), key=lambda pair: -pair[1]):
        word, bar = WORDS.get(name, name), "#" * round(share * BAR)
        lines.append(f"  {word:<{width}}  {share:>4.0%}  {milliseconds(share * step_s):>9}  {bar}")
    synthetic_s = diagnosis.counterfactual_s.get("synthetic-data")
    if synthetic_s is not None:
        lines.append(f"  on data in memory already: {milliseconds(synthetic_s)}")
    return [line.rstrip() for line in lines] + _roof(diagnosis)


def _roof(diagnosis: Diagnosis) -> list[str]:
    """Return the rate with and without the saves and evaluations of a step, and the roof."""
    roof, lines = diagnosis.roof, []
    if roof.tokens_per_s is not None:
        rate = f"  {roof.tokens_per_s:,.0f} tokens/s"
        between = sum(diagnosis.shares.get(name, 0.0) for name in BETWEEN_STEPS)
        if between >= SHOWN:
            overall = (1 - between) * roof.tokens_per_s
            lines.append(f"  {overall:,.0f} tokens/s, saves and evaluations included")
            rate += " without them"
        if roof.expected_tokens_per_s is not None:
            rate += f"; expected about {roof.expected_tokens_per_s:,.0f} ({roof.expected_from})"
        lines.append(rate)
    if roof.mfu is not None and roof.peak_tflops is not None:
        lines.append(
            f"  {roof.mfu:.1%} of the roof of {roof.peak_tflops:.3g} TFLOP/s ({roof.peak_source})"
        )
    elif roof.peak_tflops is None:
        lines.append("  roof: unknown")
    return lines


def _finding(number: int, finding: Finding) -> list[str]:
    lines = [f"{number}. {finding.name}: {finding.verdict}"]
    if finding.site is not None and finding.site.describe() not in finding.verdict:
        lines.append(f"   at {finding.site.describe()}")
    figures = figures_text(finding.figures)
    if figures:
        lines.append(f"   {figures}")
    return lines + [f"   Fix: {fix_text(fix)}" for fix in finding.fixes]


def fix_text(fix: Fix) -> str:
    """Return a fix with its expected gain."""
    if fix.gain is None:
        return fix.text
    cost = f", after {fix.cost_s:.0f} s once" if fix.cost_s else ""
    source = f" (from {fix.gain_from})" if fix.gain_from else ""
    return f"{fix.text} It should save about {fix.gain:.0%} of each step{cost}{source}."


def figures_text(figures: Mapping[str, float | int | str | None]) -> str:
    """Return the known figures in one line."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else digits(value)}"
        for name, value in figures.items()
        if value is not None
    )
