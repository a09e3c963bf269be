"""Predict what a run needs: memory, time, energy, cost."""

from __future__ import annotations

import re
from typing import Annotated

from flatout.assembly import preflight
from flatout.cli.commands import Command, Overrides, RecipeName
from flatout.config.schema import load_config
from flatout.config.signature import Option, checked
from flatout.errors import ConfigError
from flatout.measure.plan.result import Plan
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache


@checked
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    machine: Annotated[
        str | None,
        Option(
            "Plan for a different machine, such as '8x H100', or '4x8 H100, 400 Gb/s': machines x "
            "GPUs, and the network of each GPU (default: this machine)."
        ),
    ] = None,
    rows: Annotated[
        str | None, Option("Micro-batches to compare in a table, such as '64,96,128,256'.")
    ] = None,
    price_per_hour: Annotated[
        float | None, Option("Price of the whole machine per hour, for the cost.", min=0)
    ] = None,
    *,
    progress: Progress = SILENT,
) -> Plan:
    """Predict what a run needs before it starts: memory, time, energy, cost.

    It needs neither the data nor a GPU. A dataset that is here gives the vocabulary size and the
    length of an epoch. Otherwise model.vocab_size must be set. The memory is traced on tensors
    without values. The rate comes from earlier runs of the same shape on this hardware, then from
    bench, then from an assumed share of the peak rate. A run that does not fit gets a list of
    changes, each with what it saves and what it costs in speed. `rows` compares micro-batches.

    Raises: UsageError.
    """
    if not re.fullmatch(r"( *[1-9]\d* *(,|$))+", "1" if rows is None else rows):
        raise ConfigError(f"--rows {rows} is not a list of rows.", fix="Write --rows 64,128,256.")
    config = load_config(recipe, overrides)
    preflight.check_settings(config)
    if machine is not None:
        preflight.require_machine(config, machine)
    from flatout.measure.plan.plan import make_plan

    return make_plan(
        config,
        machine,
        rows=sorted({*map(int, re.findall(r"\d+", rows or ""))}),
        price_per_hour=price_per_hour,
        cache=default_cache(),
        progress=progress,
    )


COMMAND = Command(
    plan,
    example="flatout plan gpt2-124m --machine '8x H100'",
)
