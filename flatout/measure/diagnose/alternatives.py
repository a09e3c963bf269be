"""Measures a recipe on a CPU with other settings, where those may be faster.

The recipe and its alternatives take turns, each in a separate process. No torch, except where
they are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.assembly.recipe import divisors
from flatout.assembly.selection import adding, parse_request, removing, select, speedup_named
from flatout.config.schema import RunConfig, parse_overrides
from flatout.hardware.machine import GIB, Machine
from flatout.measure.diagnose.spec import LIMIT_S, MeasureSpec
from flatout.measure.results import rate_of
from flatout.measure.scripts.request import Timing
from flatout.measure.steps.evidence import Evidence
from flatout.progress import Progress

ENOUGH_TOKENS = 4_096
"""Tokens of a micro-batch from which a CPU gains nothing by more, as `auto` takes it."""
ROOM = 0.8
"""Share of the free memory that an estimate may reach: it is not exact."""


def with_alternatives(evidence: Evidence, spec: MeasureSpec, progress: Progress) -> Evidence:
    """Return the evidence of a measured recipe with the step times of alternatives that apply.

    They apply on a CPU, where the recipe does not leave them to `auto`. Of two trials each, the
    slowest of an alternative counts against the fastest of the recipe, so that its gain is rather
    too small. All of them take at most four times the measured seconds.
    """
    config, step_s = evidence.config, evidence.step_s
    if evidence.device != "cpu" or not step_s or config is None or evidence.machine is None:
        return evidence
    names = [*alternatives(config, evidence, evidence.machine, spec.config["speedups"])]
    if names and 2 * step_s > spec.seconds:
        note = f"To measure {', '.join(names)}, use --seconds {3 * step_s:.0f}."
        return evidence.model_copy(update={"notes": (*evidence.notes, note)})
    if not names:
        return evidence
    from flatout.measure.trial import try_recipe

    part_s = spec.seconds / (1 + len(names))  # two trials each, half of it to warm up
    timing = Timing(seconds=part_s / 2, warmup_s=part_s / 2, limit_s=part_s)
    order, rates = ("", *names), dict[str, list[float]]()
    with progress.task(f"Measuring {', '.join(names)}"):
        for name in (*order, *reversed(order)):
            setting = applied(config, parse_overrides(name.split(), RunConfig))
            with tempfile.TemporaryDirectory(prefix="flatout-trials-") as scratch:
                result = try_recipe(setting, timing, LIMIT_S, Path(scratch) / "run")
            rates.setdefault(name, []).append((result.is_ok and rate_of(result)) or 0.0)
    aside_s = (evidence.checkpoint_s or 0.0) + (evidence.evaluation_s or 0.0)
    found = {
        name: (step_s - aside_s) * max(rates[""]) / min(rates[name]) + aside_s
        for name in names
        if min(rates[name]) and min(rates[""])
    }
    return evidence.model_copy(update={"counterfactual_s": {**evidence.counterfactual_s, **found}})


def alternatives(
    config: RunConfig, evidence: Evidence, machine: Machine, requested: str
) -> Iterator[str]:
    """Yield the settings that may be faster: more rows, no checkpointing, what `auto` chooses."""
    rows, on = int(config.batch.rows_per_device), evidence.speedups or ()
    number = config.batch.accumulate or 1
    enough = min(ENOUGH_TOKENS // config.data.seq_len, evidence.rows_that_fit or 0)
    more = next(divisors(rows * number, enough), rows)
    if more >= 2 * rows:
        yield f"batch.rows_per_device={more} batch.accumulate={rows * number // more}"
    for name in on:
        if "activations" in speedup_named(name).fills:
            from flatout.assembly.memory import estimate
            from flatout.assembly.resolve import workload_of

            without = workload_of(applied(config, {"speedups": f"-{name}"}))
            if estimate(without, rows, number).total < ROOM * (evidence.free_gib or 0.0) * GIB:
                yield f"speedups=-{name}"
    asked = parse_request(requested)
    if asked.dropped or not asked.auto:
        auto = select(config.with_values({"speedups": "auto"}), machine)
        if any(one.on and one.name not in on for one in auto):
            yield "speedups=auto"


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
