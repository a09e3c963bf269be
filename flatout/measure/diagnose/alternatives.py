"""Measures a recipe on a CPU with other settings, where those may be faster.

The recipe and its alternatives take turns, each in a separate process. No torch, except where
they are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.assembly.recipe import divisors
from flatout.assembly.selection import adding, parse_request, removing, select, speedup_named
from flatout.config.schema import RunConfig, parse_overrides
from flatout.hardware.machine import GIB
from flatout.measure.diagnose.spec import LIMIT_S, MeasureSpec
from flatout.measure.results import rate_of
from flatout.measure.scripts.request import Timing
from flatout.measure.steps.evidence import Evidence
from flatout.progress import Progress

ENOUGH_TOKENS = 4_096
"""Tokens of a micro-batch from which a CPU gains nothing by more, as `auto` takes it."""
ROOM = 0.8
"""Share of the free memory that an estimate may reach: it is not exact."""
MOST = 4.0
"""Multiple of the measured seconds that the steps of all trials take at most."""


def with_alternatives(evidence: Evidence, spec: MeasureSpec, progress: Progress) -> Evidence:
    """Return the evidence of a measured recipe with the step times of alternatives that apply.

    They apply on a CPU, where the recipe does not leave them to `auto`. Of two pairs, the slowest
    trial of an alternative counts against the fastest of the recipe, so that its gain is rather
    too small.
    """
    config, step_s, on = evidence.config, evidence.step_s, evidence.speedups or ()
    if evidence.device != "cpu" or not step_s or config is None or evidence.machine is None:
        return evidence
    rows, number = int(config.batch.rows_per_device), config.batch.accumulate or 1
    rates: dict[str, list[float]] = {"": []}
    enough = min(ENOUGH_TOKENS // config.data.seq_len, evidence.rows_that_fit or 0)
    more = next(divisors(rows * number, enough), rows)
    if more >= 2 * rows:
        rates[f"batch.rows_per_device={more} batch.accumulate={rows * number // more}"] = []
    for name in on:
        if "activations" in speedup_named(name).fills:
            from flatout.assembly.memory import estimate
            from flatout.assembly.resolve import workload_of

            workload = workload_of(applied(config, {"speedups": f"-{name}"}))
            need = estimate(workload, rows, number).total / GIB
            if need < ROOM * (evidence.free_gib or 0.0):
                rates[f"speedups=-{name}"] = []
    asked = parse_request(spec.config["speedups"])
    if asked.dropped or not asked.auto:
        auto = select(config.with_values({"speedups": "auto"}), evidence.machine)
        if any(one.on and one.name not in on for one in auto):
            rates["speedups=auto"] = []
    names = [*rates][1:]
    if not names:
        return evidence
    if 2 * step_s > spec.seconds:
        note = f"To measure {', '.join(names)}, use --seconds {3 * step_s:.0f}."
        return evidence.model_copy(update={"notes": (*evidence.notes, note)})
    from flatout.measure.trial import try_recipe

    part_s = MOST * spec.seconds / (4 * len(rates))  # two trials each, half of it to warm up
    with progress.task(f"Measuring {', '.join(names)}"):
        for name in ("", *names, *names[::-1], ""):
            with tempfile.TemporaryDirectory(prefix="flatout-trials-") as scratch:
                result = try_recipe(
                    applied(config, parse_overrides(name.split(), RunConfig)),
                    Timing(seconds=part_s / 2, warmup_s=part_s / 2, limit_s=part_s),
                    LIMIT_S,
                    Path(scratch) / "run",
                )
            rates[name].append((rate_of(result) or 0.0) if result.is_ok else 0.0)
    aside_s = (evidence.checkpoint_s or 0.0) + (evidence.evaluation_s or 0.0)
    found = {
        name: (step_s - aside_s) * max(rates[""]) / min(rates[name]) + aside_s
        for name in names
        if min(rates[name]) and min(rates[""])
    }
    return evidence.model_copy(update={"counterfactual_s": {**evidence.counterfactual_s, **found}})


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
