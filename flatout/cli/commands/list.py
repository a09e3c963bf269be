"""List models, recipes, speedups and the other kinds of entries."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flatout.assembly.prediction import gains_here
from flatout.assembly.selection import is_measured, select, speedup_named
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
    TOKEN_FORMATS,
    TOKENIZERS,
    Folder,
    YamlFolder,
    unknown_name,
)
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.display import Display, Show, amount, table_of
from flatout.hardware.machine import ASSUMED_MFU, Machine, probe
from flatout.measure.scripts.changes import CHANGES
from flatout.storage.cache import default_cache
from flatout.storage.files import Stored
from flatout.storage.json_io import Result

FOLDERS: dict[str, Folder | YamlFolder] = {
    "architectures": ARCHITECTURES,
    "datasets": DATASETS,
    "loggers": LOGGERS,
    "models": MODELS,
    "optimizers": OPTIMIZERS,
    "recipes": RECIPES,
    "sources": SOURCES,
    "token-formats": TOKEN_FORMATS,
}


OTHERS = ("changes", "machines", "speedups", "tokenizers")
LABELS = {True: "measured", False: "not measured"}
"""Whether the choice of `auto` for a speedup rests on a measurement."""
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
    measured: Annotated[bool | None, Show(form=LABELS.__getitem__, unknown="")]
    """Whether that rests on a measurement on such a device. Null: it is not for this device."""
    name: Annotated[str, Show()]
    """Its name."""
    reason: Annotated[str, Show(record=lambda entry: entry.why())]
    """Why it is on or off."""
    description: str
    """What it saves."""
    tolerance: str
    """How much it may change the losses."""
    gain: str | None
    """The gain that bench measured on this hardware."""
    predicted: str | None
    """The predicted gain."""

    def why(self) -> str:
        """Return the reason, with a gain that it does not state."""
        if self.gain and self.gain not in self.reason:
            return f"{self.reason}  (measured here: {self.gain})"
        if self.predicted and not self.gain:  # docs/speedups.md has the rest
            return f"{self.reason}  (predicted: {re.split(r'[.:;] ', self.predicted)[0]})"
        return self.reason


class ListResult(Result):
    """The entries of one kind."""

    kind: str
    """A kind of entry, such as speedups."""
    note: str | None = None
    """For speedups: whether the recipe's GPU is missing here."""
    items: list[Listed] | list[ListedSpeedup]
    """One object per entry. Of recipes, the smallest come first."""
    shows_all: bool = Field(default=False, exclude=True, repr=False)
    """Whether every speedup is shown with its reason."""

    def display(self) -> Display:
        """Return one row per entry. Of speedups, those that are on, and the names of the others.

        With --all, every speedup has the reason why it is on or off.
        """
        if not self.items:
            return Display(f"There are no {self.kind}.")
        shown, off = [*self.items], dict[str, list[str]]()
        for item in self.items:
            if isinstance(item, ListedSpeedup) and not item.on and not self.shows_all:
                shown.remove(item)
                label = "not for this run" if item.measured is None else LABELS[item.measured]
                off.setdefault(label, []).append(item.name)
        notes = [f"off, {label}: {', '.join(names)}" for label, names in off.items()]
        notes += ["--all shows the reason for each."] if off else []
        tables = [table_of(shown)] if shown else []
        return Display(self.note or "", (), tables, notes)


@checked
def list_entries(
    kind: Annotated[
        str,
        Argument(
            "architectures, changes (of scripts), datasets, loggers, machines, models, "
            "optimizers, recipes, sources, speedups, token-formats or tokenizers."
        ),
    ],
    recipe: Annotated[
        str | Path | None, Option("For speedups: decide for this recipe, not the defaults.")
    ] = None,
    all: Annotated[bool, Option("For speedups: show each with the reason why.")] = False,
) -> ListResult:
    """List the entries of one kind, such as models, recipes or speedups.

    Speedups are shown as a run on this machine would use them: those that are on, and the others by
    whether that rests on a measurement. `--all` shows the reason for each.

    Raises: ConfigError for an unknown kind or recipe, with the nearest name.
    """
    if kind == "speedups":
        return _speedups(recipe).model_copy(update={"shows_all": all})
    if kind == "tokenizers":
        stated = TOKENIZERS.stated  # each as it is written after --tokenizer
        items = {
            stated(name, "LISTED_AS") or stated(name, "SPEC") or name: TOKENIZERS.describe(name)
            for name in TOKENIZERS.names()
        }
    elif kind == "changes":
        items = {name: change.does for name, change in CHANGES.items()}
    elif kind == "machines":
        machine = probe()
        items = {"(this machine)": machine.describe()}
        items |= {name: MACHINES.describe(name) for name in MACHINES.names()}
        if machine.row:
            items[machine.row.name] += ", this machine's GPU"
    elif kind in FOLDERS:
        items = {name: FOLDERS[kind].describe(name) for name in FOLDERS[kind].names()}
    else:
        raise unknown_name("kind of entry", kind, [*FOLDERS, *OTHERS])
    listed = [Listed(name=name, description=text) for name, text in items.items()]
    if kind == "recipes":
        for at, one in enumerate(listed):
            if size := PARAMETERS.search(one.description):
                count = int(size[1].replace(",", ""))
                listed[at] = one.model_copy(update={"parameters": count})
        listed.sort(key=lambda one: one.parameters or math.inf)
    return ListResult(kind=kind, items=listed)


def _speedups(recipe: str | Path | None) -> ListResult:
    machine, config = probe(), load_config(recipe)
    device = config.train.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    minutes = note = None
    if device.startswith("cuda"):
        minutes = _minutes(config, machine)
        if not machine.gpus:
            note = (
                f"This recipe needs a GPU (train.device={device}), and there is none here. On a "
                "GPU it would use:"
            )

    def flops() -> float:
        from flatout.assembly.resolve import flops_per_token  # imports torch

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
                predicted=speedup.predicted,
            )
        )
    return ListResult(kind="speedups", note=note, items=items)


def _minutes(config: RunConfig, machine: Machine) -> float | None:
    """Return the minutes of a run on this machine's GPU that `train` expects, or None."""
    peak = machine.row and machine.row.peak_tflops.get(machine.gpu_dtype)
    if not peak or (config.train.steps is None and config.train.tokens is None):
        return None
    from flatout.assembly.resolve import expected_minutes  # imports torch

    return expected_minutes(config, peak.value * ASSUMED_MFU)


COMMAND = Command(list_entries, example="flatout list speedups")
