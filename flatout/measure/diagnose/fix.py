"""Applies a fix, measures again, and keeps it if it holds.

The run without the fix and the run with it take turns, each in a process of its own, so that a
machine that becomes slower or faster affects both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flatout.assembly.selection import adding, parse_request, removing
from flatout.config.schema import RunConfig, flat, nested
from flatout.errors import ConfigError
from flatout.files import Stored, write_text
from flatout.measure.diagnose.diagnosis import Diagnosis
from flatout.measure.diagnose.finding import Finding, Fix
from flatout.measure.experiments.noise import mean_of
from flatout.measure.steps.evidence import Evidence
from flatout.progress import SILENT, Progress, Task

MARK = "with the fix that `flatout diagnose --fix` measured"
"""What the first line of a recipe ends with that `--fix` wrote, and which it may replace."""
REPEATS = 3
"""Measurements of each of the two."""
MOST_TRIED = 3
"""Fixes that are tried until one holds."""
Measure = Callable[[RunConfig], Evidence]


class FixOutcome(Stored):
    """A fix that was tried."""

    finding: str
    """The finding that it belongs to."""
    text: str
    """What was changed."""
    overrides: Mapping[str, Any]
    """The settings."""
    kept: bool
    """Whether it holds: its whole interval lies above 1, or the run works now and did not."""
    gain: float | None = None
    """How many times faster steps are; None when the run did not work before."""
    gain_low: float | None = None
    """Lower end of the 95% interval."""
    gain_high: float | None = None
    """Upper end."""
    reason: str
    """The result in one sentence."""


def candidates(diagnosis: Diagnosis, remaining_s: float | None) -> list[tuple[Finding, Fix]]:
    """Return the fixes that can be applied without changing the run's result, the best first."""
    return [
        (finding, fix)
        for finding, fix in diagnosis.fixes(remaining_s)
        if fix.overrides and fix.same_result
    ]


def try_fixes(
    evidence: Evidence,
    diagnosis: Diagnosis,
    measure: Measure,
    *,
    progress: Progress = SILENT,
) -> list[FixOutcome]:
    """Try the applicable fixes in order until one holds; return all that were tried.

    `measure` returns the evidence of a configuration, from a process of its own.
    """
    base = evidence.config
    if base is None:
        return []
    outcomes: list[FixOutcome] = []
    works = evidence.step_s is not None
    for candidate in candidates(diagnosis, evidence.remaining_s)[:MOST_TRIED]:
        try:
            changed = applied(base, candidate[1].overrides)
        except ConfigError as error:
            outcomes.append(_outcome(candidate, kept=False, reason=error.what))
            continue
        with progress.task(f"Trying: {candidate[1].text}", total=(1 + works) * REPEATS) as task:

            def measured(config: RunConfig, task: Task = task) -> Evidence:
                found = measure(config)
                task.advance()
                return found

            outcomes.append(compare(candidate, base if works else None, changed, measured))
        if outcomes[-1].kept:
            break
    return outcomes


def compare(
    candidate: tuple[Finding, Fix],
    before: RunConfig | None,
    after: RunConfig,
    measure: Measure,
) -> FixOutcome:
    """Measure both configurations in turns, and return whether the second is faster.

    Without `before`, which is a run that does not work, the second only has to work.
    """
    logs: list[float] = []
    for number in range(REPEATS):
        # whichever comes second may profit from a warm machine: they take turns
        order = [after, before] if number % 2 else [before, after]
        found = {id(config): measure(config) for config in order if config is not None}
        new = rate(found[id(after)])
        if new is None:
            failure = found[id(after)].failure
            why = failure.message if failure else "it could not be measured."
            return _outcome(candidate, kept=False, reason=f"The run fails with it: {why}")
        if before is None:
            return _outcome(candidate, kept=True, reason="The run works with it.")
        old = rate(found[id(before)])
        if old is not None:
            logs.append(math.log(new / old))
    if len(logs) < REPEATS:
        return _outcome(candidate, kept=False, reason="The run without it could not be measured.")
    low, middle, high = (math.exp(value) for value in mean_of(logs))
    kept = low > 1
    return _outcome(
        candidate,
        kept=kept,
        reason=f"x{middle:.2f} ({low:.2f} to {high:.2f} in {REPEATS} pairs)"
        + (": kept." if kept else ": not kept, it may be no gain."),
        gain=middle,
        gain_low=low,
        gain_high=high,
    )


def rate(evidence: Evidence) -> float | None:
    """Return the tokens per second of a measured run, saves and evaluations included."""
    if not evidence.step_s or not evidence.tokens_per_step:
        return None
    return evidence.tokens_per_step / evidence.step_s


def applied(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with the overrides of a fix; `+name` and `-name` edit the speedups.

    Raises: ConfigError when they contradict it.
    """
    values = dict(overrides)
    edit = values.get("speedups")
    if isinstance(edit, str) and edit[:1] in "+-" and "," not in edit:
        name = edit[1:]
        if edit.startswith("+"):
            before = () if config.speedups == "none" else config.speedups
            values["speedups"] = adding(before, [name])
        else:
            without = removing(name, config.speedups)
            auto = parse_request(without).auto
            values["speedups"] = f"{without},-{name}" if auto else without
    return config.with_values(values)


def require_writable(path: Path) -> None:
    """Check, before anything is measured, that the recipe can be written.

    Raises: ConfigError when the path has a file that `--fix` did not write, or has no directory.
    """
    other = "Choose another file with --out FILE."
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}.", fix=f"Create it. {other}")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory.", fix=other)
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.", fix=other) from error
    if not first.endswith(MARK):
        raise ConfigError(
            f"{path} exists, and `flatout diagnose --fix` did not write it.", fix=other
        )


def write_recipe(path: Path, config: RunConfig, outcomes: Sequence[FixOutcome]) -> None:
    """Write a recipe with what differs from the defaults, and what was changed as a comment."""
    defaults = flat(RunConfig().to_dict())
    own = {
        key: value for key, value in flat(config.to_dict()).items() if defaults.get(key) != value
    }
    kept = [outcome for outcome in outcomes if outcome.kept]
    comment = [f"# {config.name}, {MARK}"]
    comment += [f"# {outcome.finding}: {outcome.text} {outcome.reason}" for outcome in kept]
    text = yaml.safe_dump(nested(own), sort_keys=False, allow_unicode=True)
    write_text(path, "\n".join(comment) + "\n" + text)


def _outcome(
    candidate: tuple[Finding, Fix], *, kept: bool, reason: str, **figures: float
) -> FixOutcome:
    finding, fix = candidate
    return FixOutcome(
        finding=finding.name,
        text=fix.text,
        overrides=fix.overrides,
        kept=kept,
        reason=reason,
        **figures,
    )
