"""List models, recipes, speedups and the other kinds of entries."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

from flatout.assembly.choices import is_measured, select, speedup_named
from flatout.assembly.measured import gains_here
from flatout.cli.commands import Command
from flatout.config.registry import (
    ARCHITECTURES,
    DATASETS,
    LOGGERS,
    MACHINES,
    MODELS,
    OPTIMIZERS,
    RECIPES,
    SOURCES,
    Folder,
    YamlFolder,
    YamlTable,
    unknown_name,
)
from flatout.config.schema import load_config
from flatout.config.signature import Argument, Option, checked, one_of
from flatout.data.tokenizers import FILES, FORMS
from flatout.display import Display, Show, amount, table_of
from flatout.hardware.machine import ASSUMED_MFU, probe
from flatout.measure.scripts.changes import CHANGES
from flatout.storage.cache import default_cache
from flatout.storage.files import Stored
from flatout.storage.json_io import Result

FOLDERS: dict[str, Folder | YamlFolder | YamlTable] = {
    "architectures": ARCHITECTURES,
    "datasets": DATASETS,
    "loggers": LOGGERS,
    "machines": MACHINES,
    "models": MODELS,
    "optimizers": OPTIMIZERS,
    "recipes": RECIPES,
    "sources": SOURCES,
}
PARAMETERS = re.compile(r"([\d,]+) parameters")
"""The size of a recipe's model, in its description."""


class Listed(Stored):
    """One entry."""

    name: Annotated[str, Show()]
    """Its name."""
    parameters: Annotated[
        int | None, Show(form=lambda count: amount(count).replace("G", "B"), unknown="")
    ] = None
    """Of a recipe, the parameters of its model. Null if they are those of its base model."""
    description: Annotated[str, Show()]
    """What it is."""


class ListedSpeedup(Stored):
    """One speedup, as a run on this machine would use it."""

    on: Annotated[bool, Show(form=lambda on: "on" if on else "off")]
    """Whether it is on."""
    measured: bool | None
    """Whether that rests on a measurement on such a device. Null: it is not for this device."""
    name: Annotated[str, Show()]
    """Its name."""
    reason: Annotated[str, Show(record=lambda item: item.why())]
    """Why it is on or off."""
    description: str
    """What it saves."""
    tolerance: str
    """How much it may change the losses."""
    gain: str | None
    """The gain that bench measured on this hardware."""

    def why(self) -> str:
        """Return the reason, with a gain that it does not state, or that nothing was measured."""
        is_stated = self.gain is None or self.gain in self.reason
        gain = "" if is_stated else f" (measured here: {self.gain})"
        return self.reason + gain + " (not measured)" * (self.measured is False)


class ListResult(Result):
    """The entries of one kind."""

    kind: str
    """A kind of entry, such as speedups."""
    note: str | None = None
    """For speedups: whether the recipe's GPU is missing here."""
    items: list[Listed] | list[ListedSpeedup]
    """One object per entry. Of recipes, the smallest come first, of speedups those that are on."""

    def display(self) -> Display:
        """Return one row per entry."""
        return Display(self.note or "", (), [table_of(self.items)])


@checked
def list_entries(
    kind: Annotated[
        str,
        Argument(
            "architectures, changes (of scripts), datasets, loggers, machines, models, "
            "optimizers, recipes, sources, speedups or tokenizers."
        ),
    ],
    recipe: Annotated[
        str | Path | None, Option("For speedups: decide for this recipe, not the defaults.")
    ] = None,
) -> ListResult:
    """List the entries of one kind, such as models, recipes or speedups.

    Speedups are shown as a run on this machine would use them, each with the reason why it is on or
    off.

    Raises: ConfigError for an unknown kind or recipe, with the nearest name.
    """
    if kind == "speedups":
        return _speedups(recipe)
    one_of({"--recipe": recipe, f"`{kind}`": True})
    if kind == "changes":
        items = {name: change.does for name, change in CHANGES.items()}
    elif kind == "tokenizers":
        items = FORMS | FILES  # as written after --tokenizer
    elif kind in FOLDERS:
        items = {name: FOLDERS[kind].describe(name) for name in FOLDERS[kind].names()}
    else:
        raise unknown_name("kind of entry", kind, [*FOLDERS, "changes", "speedups", "tokenizers"])
    if kind == "machines":
        machine = probe()
        if machine.row:
            items[machine.row.name] += ", this machine's GPU"
        items = {"(this machine)": machine.describe()} | items
    listed = [
        Listed(name=name, description=text, parameters=_parameters(text))
        for name, text in items.items()
    ]
    if kind == "recipes":
        listed.sort(key=lambda one: one.parameters or math.inf)
    return ListResult(kind=kind, items=listed)


def _parameters(description: str) -> int | None:
    found = PARAMETERS.search(description)
    return int(found[1].replace(",", "")) if found else None


def _speedups(recipe: str | Path | None) -> ListResult:
    machine, config = probe(), load_config(recipe)
    device = config.train.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    minutes = note = None
    if device.startswith("cuda"):
        peak = machine.row and machine.row.peak_tflops.get(machine.gpu_dtype)
        if peak:
            from flatout.assembly.resolve import expected_minutes  # imports torch

            minutes = expected_minutes(config, peak.value * ASSUMED_MFU)
        if not machine.gpus:
            note = (
                f"This recipe needs a GPU (train.device={device}), and there is none here. On a "
                "GPU it would use:"
            )

    def flops() -> float:
        from flatout.assembly.resolve import flops_per_token

        return flops_per_token(config)

    gains = gains_here(machine, device, default_cache(), None if recipe is None else flops)
    items = []
    for decision in select(config, machine, device=device, minutes=minutes, measured=gains):
        speedup, gain = speedup_named(decision.name), gains.get(decision.name)
        items.append(
            ListedSpeedup(
                name=decision.name,
                description=speedup.saves,
                on=decision.on,
                reason=decision.reason,
                tolerance=speedup.tolerance.kind,
                measured=True if gain else is_measured(speedup, config, machine, device),
                gain=gain and gain.describe(),
            )
        )
    items.sort(key=lambda item: not item.on)
    return ListResult(kind="speedups", note=note, items=items)


COMMAND = Command(list_entries, example="flatout list speedups")
