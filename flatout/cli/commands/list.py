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
from flatout.display import Column, Display, Table, amount
from flatout.hardware.machine import ASSUMED_MFU, Machine, probe
from flatout.measure.scripts.changes import CHANGES
from flatout.storage.cache import default_cache
from flatout.storage.json_io import JsonObject, Result

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
LABELS = {True: "measured", False: "not measured", None: ""}
"""Whether the choice of `auto` for a speedup rests on a measurement.

None: there is nothing to measure, the speedup is not for this device.
"""
PARAMETERS = re.compile(r"([\d,]+) parameters")
"""The size of a recipe's model, in its description."""


class ListResult(Result):
    """The entries of one kind."""

    kind: str
    """A kind of entry, such as speedups."""
    note: str | None = None
    """For speedups: whether the recipe's GPU is missing here."""
    items: list[JsonObject]
    """One object per entry, with its `name` and its `description`.

    A recipe also has the `parameters` of its model, null if they are those of its base model. The
    smallest come first.

    A speedup also has `on` with the `reason`; whether that was `measured` on such a device (null:
    it is not for this device); the `gain` that bench measured on this hardware; and the `predicted`
    gain, as text or null."""

    shows_all: bool = Field(default=False, exclude=True, repr=False)
    """Whether `summary` has every reason."""

    def display(self) -> Display:
        """Return one row per entry. Of speedups, those that are on, and the names of the others.

        With --all, every speedup has the reason why it is on or off.
        """
        if not self.items:
            return Display(f"There are no {self.kind}.")
        if self.kind == "speedups":
            return self._speedups()
        sizes = [item.get("parameters", 0) for item in self.items]
        rows: list[tuple[str, ...]] = [
            (item["name"], amount(size).replace("G", "B") if size else "", item["description"])
            for item, size in zip(self.items, sizes, strict=True)
        ]
        if not any(sizes):
            rows = [(row[0], row[2]) for row in rows]
        return Display(self.note or "", (), [Table([*map(Column, [""] * len(rows[0]))], rows)])

    def _speedups(self) -> Display:
        rows: list[tuple[str, ...]] = []
        off: dict[str, list[str]] = {label: [] for label in LABELS.values()}
        for item in self.items:
            label, reason, gain = LABELS[item["measured"]], item["reason"], item["gain"]
            if gain and gain not in reason:
                reason += f"  (measured here: {gain})"
            elif item["predicted"] and not gain:  # docs/speedups.md has the rest
                first = re.split(r"[.:;] ", item["predicted"], maxsplit=1)[0]
                reason += f"  (predicted: {first})"
            if self.shows_all:
                rows.append(("on" if item["on"] else "off", label, item["name"], reason))
            elif item["on"]:
                rows.append(("on", item["name"], reason))
            else:
                off[label].append(item["name"])
        notes = [
            f"off, {label or 'not for this run'}: {', '.join(names)}"
            for label, names in off.items()
            if names
        ]
        notes += ["--all shows the reason for each."] if notes else []
        tables = [Table([*map(Column, [""] * len(rows[0]))], rows)] if rows else []
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
    listed: list[JsonObject] = [{"name": name, "description": text} for name, text in items.items()]
    if kind == "recipes":
        for item in listed:
            size = PARAMETERS.search(item["description"])
            item["parameters"] = int(size[1].replace(",", "")) if size else None
        listed.sort(key=lambda item: item["parameters"] or math.inf)
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
            {
                "name": decision.name,
                "description": speedup.saves,
                "on": decision.on,
                "reason": decision.reason,
                "tolerance": speedup.tolerance.kind,
                "measured": True if gain else is_measured(speedup, config, machine, device),
                "gain": gain and gain.describe(),
                "predicted": speedup.predicted,
            }
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
