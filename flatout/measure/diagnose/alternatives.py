"""Measures a recipe on a CPU with what `auto` would choose, where it has chosen otherwise.

The two take turns, each in a separate process. No torch, except where they are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.assembly.recipe import divisors
from flatout.assembly.selection import adding, parse_request, removing, select
from flatout.config.schema import RunConfig, parse_overrides
from flatout.hardware.machine import GIB, probe
from flatout.measure.attach.request import Timing
from flatout.measure.evidence import Evidence
from flatout.progress import Progress

ENOUGH_TOKENS = 4_096
"""Tokens of a micro-batch from which a CPU gains nothing by more, as `auto` takes it."""
ROOM = 0.8
"""Share of the free memory that an estimate may reach: it is not exact."""
LIMIT_S = 150.0
"""Longest measured run before it counts as hanging. More seconds of steps extend it."""


def with_alternatives(
    evidence: Evidence, asked: RunConfig, seconds: float, progress: Progress
) -> Evidence:
    """Return the evidence of a measured recipe with the step time of what `auto` would choose.

    `asked` is the recipe before it was resolved. It applies on a CPU, where the recipe does not
    leave that to `auto`. Of two trials each, the slower one with other settings counts against the
    faster one of the recipe, so that their gain is rather too small. All of them take at most four
    times the measured seconds.
    """
    config, step_s = evidence.config, evidence.step_s
    if evidence.device != "cpu" or not step_s or config is None:
        return evidence
    config = config.with_values({"train.precision": asked.train.precision})
    words = alternative(config, evidence, asked.speedups)
    name = " ".join(words)
    if not words or 2 * step_s > seconds:  # a trial would be too short
        return evidence
    from flatout.measure.trial import try_recipe

    part_s, rates = seconds / 2, []  # half of each trial is its warm-up
    timing = Timing(seconds=part_s, warmup_s=part_s, limit_s=2 * part_s)
    with progress.task(f"Measuring {name}"):
        for overrides in ([], words, words, []):
            setting = config.with_values(parse_overrides(overrides, RunConfig))
            with tempfile.TemporaryDirectory(prefix="flatout-trials-") as scratch:
                result = try_recipe(setting, timing, LIMIT_S, Path(scratch) / "run")
            rates.append((result.is_ok and result.tokens_per_s) or 0.0)
    first, *others, last = rates
    aside_s = (evidence.checkpoint_s or 0.0) + (evidence.evaluation_s or 0.0)
    if not all(rates):
        return evidence
    found = {name: (step_s - aside_s) * max(first, last) / min(others) + aside_s}
    return evidence.model_copy(update={"counterfactual_s": {**evidence.counterfactual_s, **found}})


def alternative(config: RunConfig, evidence: Evidence, requested: Any) -> list[str]:
    """Return the settings that `auto` would choose and the recipe has not: rows, speedups.

    [] where there are none, or they may not fit.
    """
    from flatout.assembly.memory import estimate
    from flatout.assembly.resolve import workload_of

    rows, number = int(config.batch.rows_per_device), config.batch.accumulate or 1
    enough = min(ENOUGH_TOKENS // config.data.seq_len, evidence.rows_that_fit or 0)
    more, words = next(divisors(rows * number, enough), rows), list[str]()
    decisions = select(config.with_values({"speedups": "auto"}), evidence.machine or probe())
    auto = [one.name for one in decisions if one.on]
    if more >= 2 * rows:
        words += [f"batch.rows_per_device={more}", f"batch.accumulate={rows * number // more}"]
    if requested != "auto" and {*auto} != {*(evidence.speedups or ())}:
        words.append("speedups=auto")
        config = config.with_values({"speedups": auto or "none"})
    need = estimate(workload_of(config), max(more, rows), rows * number // max(more, rows))
    return words if need.total < ROOM * (evidence.free_gib or 0.0) * GIB else []


def applied(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with the overrides of a fix. `+name` and `-name` edit the speedups.

    Raises: ConfigError when they contradict it.
    """
    values, before = dict(overrides), config.speedups
    edit = values.get("speedups", "auto")
    sign, name = edit[:1], edit[1:]
    if sign == "+":
        values["speedups"] = adding(() if before == "none" else before, [name])
    elif sign == "-":
        without = removing(name, before)
        values["speedups"] = f"{without},{edit}" if parse_request(without).auto else without
    return config.with_values(values)
