"""Applies a fix, measures again, and keeps it if it holds.

The run without the fix and the run with it take turns, each in a separate process, so that a
machine that becomes slower or faster affects both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.assembly.selection import adding, parse_request, removing
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig, flat, nested
from flatout.errors import ConfigError
from flatout.measure.diagnose.diagnosis import Diagnosis
from flatout.measure.experiments.noise import mean_of
from flatout.measure.steps.evidence import Evidence
from flatout.progress import SILENT, Progress, Task
from flatout.storage.files import Stored, write_text

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
    """Whether it holds: its whole interval is above 1, or the run works now and did not."""
    gain: float | None = None
    """How many times faster steps are. None when the run did not work before."""
    gain_low: float | None = None
    """Lower end of the 95% interval."""
    gain_high: float | None = None
    """Upper end."""
    reason: str
    """The result in one sentence."""


def try_fixes(
    evidence: Evidence,
    diagnosis: Diagnosis,
    measure: Measure,
    *,
    progress: Progress = SILENT,
) -> list[FixOutcome]:
    """Try fixes that keep the run's result until one holds, the best first, and return those tried.

    `measure` returns the evidence of a configuration, from a separate process.
    """
    base, works = evidence.config, evidence.step_s is not None
    outcomes: list[FixOutcome] = []
    every = diagnosis.fixes(evidence.remaining_s) if base is not None else []
    applicable = [(f, fix) for f, fix in every if fix.overrides and fix.same_result]
    for finding, fix in applicable[:MOST_TRIED]:
        assert base is not None
        try:
            changed = applied(base, fix.overrides)
        except ConfigError as error:
            result: dict[str, Any] = {"kept": False, "reason": error.what}
        else:
            what = f"Trying: {fix.text.rstrip('.')}"
            with progress.task(what, total=(1 + works) * REPEATS) as task:
                result = compare(base if works else None, changed, measure, task)
        outcome = FixOutcome(finding=finding.name, text=fix.text, overrides=fix.overrides, **result)
        outcomes.append(outcome)
        if outcome.kept:
            break
    return outcomes


def compare(
    before: RunConfig | None, after: RunConfig, measure: Measure, task: Task
) -> dict[str, Any]:
    """Measure both configurations in turns, and return the fields of the outcome.

    Without `before`, which is a run that does not work, the second only has to work.
    """

    def rate(config: RunConfig) -> tuple[Evidence, float | None]:
        """Return the tokens per second, saves and evaluations included."""
        found = measure(config)
        task.advance()
        if not found.step_s or not found.tokens_per_step:
            return found, None
        return found, found.tokens_per_step / found.step_s

    logs: list[float] = []
    for number in range(REPEATS):
        # whichever comes second may profit from a warm machine: they take turns
        order = [after, before] if number % 2 else [before, after]
        rates = {id(config): rate(config) for config in order if config is not None}
        (found, new), (_, old) = rates[id(after)], rates.get(id(before), (None, None))
        if new is None:
            why = found.failure.message if found.failure else "it could not be measured."
            return {"kept": False, "reason": f"The run fails with it: {why}"}
        if before is None:
            return {"kept": True, "reason": "The run works with it."}
        if old is None:
            return {"kept": False, "reason": "The run without it could not be measured."}
        logs.append(math.log(new / old))
    low, gain, high = (math.exp(value) for value in mean_of(logs))
    kept = low > 1
    verdict = "kept." if kept else "not kept: it may not be a gain."
    return {
        "kept": kept,
        "gain": gain,
        "gain_low": low,
        "gain_high": high,
        "reason": f"x{gain:.2f} ({low:.2f} to {high:.2f} in {REPEATS} pairs): {verdict}",
    }


def applied(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with the overrides of a fix. `+name` and `-name` edit the speedups.

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
    other = "Choose a different file with --out FILE."
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
    text = dump_yaml(nested(own))
    write_text(path, "\n".join(comment) + "\n" + text)
