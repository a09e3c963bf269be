"""Failures: the run ended, or cannot start."""

from __future__ import annotations

from flatout.measure.diagnose.diagnosis import Finding, fix, rule
from flatout.measure.steps.evidence import Evidence


@rule()
def failure(evidence: Evidence) -> Finding | None:
    """The run ends with an error that no other rule explains."""
    failure = evidence.failed("error")
    if failure is None:
        return None
    at = f" at step {failure.step}" if failure.step else ""
    return Finding(
        verdict=f"The run fails{at}: {failure.message.rstrip('.')}.",
        harm="fails",
        site=failure.site,
        fixes=[fix(failure.fix)] if failure.fix else [],
    )


@rule()
def hang(evidence: Evidence) -> Finding | None:
    """The run makes no progress."""
    failure = evidence.failed("hang")
    if failure is None:
        return None
    where, text = "", "Start it with `flatout train`, and inspect it with `py-spy dump --pid PID`."
    if failure.site is not None:
        where = f" It was at {failure.site.describe()}."
        text = "Look at the line: a lock, a read from a network, or a loop without an end."
    verdict = f"{failure.message}{where}"
    return Finding(verdict=verdict, harm="fails", site=failure.site, fixes=[fix(text)])


@rule()
def missing_package(evidence: Evidence) -> Finding | None:
    """An optional package that the recipe or its code needs is not installed."""
    failure = evidence.failed("missing-package")
    if failure is None:
        return None
    fixes = [fix(failure.fix or "Install it.")]
    return Finding(verdict=failure.message, harm="fails", site=failure.site, fixes=fixes)


@rule()
def no_data(evidence: Evidence) -> Finding | None:
    """There is no prepared dataset at the path of the recipe."""
    failure = evidence.failed("no-data")
    missing, advice = evidence.data.missing, evidence.data.missing_fix
    if missing is None and failure is not None:
        missing, advice = failure.message, failure.fix
    if missing is None:
        return None
    return Finding(
        verdict=missing,
        harm="fails",
        figures={"path": evidence.setting("data.path")},
        fixes=[fix(advice or "Prepare one: `flatout prepare FILE --out data/NAME`.")],
    )


@rule()
def disk_space(evidence: Evidence) -> Finding | None:
    """The disk is too small for the checkpoints of the run."""
    free, needed = evidence.host.disk_free_gib, evidence.host.disk_needed_gib
    if free is None or needed is None or needed <= free:
        return None
    fixes = [fix("Free space, or set checkpoint.dir to a larger disk.")]
    if evidence.config is not None:
        overrides: dict[str, int | None] = {"checkpoint.keep": 1}
        if evidence.config.checkpoint.keep_every is not None:
            overrides["checkpoint.keep_every"] = None
        text = " ".join(f"{key}={value or 'null'}" for key, value in overrides.items())
        fixes.append(fix(f"Keep fewer: {text}.", overrides=overrides))
    return Finding(
        verdict=f"The checkpoints need {needed:.1f} GiB, but the disk has {free:.1f} GiB free.",
        harm="fails",
        figures={"needed_gib": needed, "free_gib": free},
        fixes=fixes,
    )
