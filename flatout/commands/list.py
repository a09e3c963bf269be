"""Show what there is: data sets, models, speedups, recipes, machines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from flatout.commands import Command, Result
from flatout.config import load_config
from flatout.data.corpus import CACHE
from flatout.hardware import Machine, probe
from flatout.measured import gpu_name, read
from flatout.registry import DATASETS, MACHINES, MODELS, OPTIMIZERS, RECIPES, SOURCES, Folder, YamlFolder, unknown_name
from flatout.selection import all_speedups, is_measured, select

FOLDERS: dict[str, Folder | YamlFolder] = {
    "datasets": DATASETS,
    "models": MODELS,
    "optimizers": OPTIMIZERS,
    "recipes": RECIPES,
    "sources": SOURCES,
}


LABELS = {True: "measured", False: "not measured", None: ""}
"""Whether a measurement stands behind what `auto` does with a speedup; None: nothing is to be measured, it is not for this device."""
LABEL_WIDTH = max(map(len, LABELS.values()))


class ListResult(Result):
    """What there is of one kind."""

    kind: str
    """datasets, models, speedups, recipes, machines, sources or optimizers."""
    note: str | None = None
    """Of speedups: that they are decided for a GPU which is not here; None where they are decided for this machine."""
    items: list[dict[str, Any]]
    """One object an entry: its `name` and its `description`.

    For speedups also whether it is `on` here and the `reason`; whether that is `measured` on such a device (null: it is not for
    this device); the `gain` that bench measured on this very GPU, and the one that was `predicted`, in words or null."""

    def summary(self) -> str:
        """Return a line an entry."""
        width = max((len(item["name"]) for item in self.items), default=0)
        lines = [self._line(item, width) for item in self.items]
        return "\n".join([*([self.note] if self.note else []), *lines]) if lines else f"There are no {self.kind}."

    def _line(self, item: dict[str, Any], width: int) -> str:
        if "on" not in item:
            return f"{item['name']:<{width}}  {item['description']}"
        label = LABELS[item["measured"]]
        under = [] if item["reason"] == item["description"] else [f"saves {item['description']}"]
        under += [f"measured on this GPU: {item['gain']}"] if item["gain"] else []
        under += [f"predicted: {gain_alone(item['predicted'])}"] if item["predicted"] and not item["gain"] else []
        start = f"{'on' if item['on'] else 'off':<3}  {label:<{LABEL_WIDTH}}  {item['name']:<{width}}  "
        return "\n".join([start + item["reason"], *(" " * len(start) + line for line in under)])


def gain_alone(predicted: str) -> str:
    """Return a predicted gain without the arithmetic that follows its first colon or full stop; docs/speedups.md has both."""
    return re.split(r"[.:;] ", predicted, maxsplit=1)[0]


def list_entries(
    kind: Annotated[str, typer.Argument(help="datasets, models, speedups, recipes, machines, sources or optimizers.")],
    recipe: Annotated[str | Path | None, typer.Option(help="Speedups: decide for this recipe instead of the defaults.")] = None,
) -> ListResult:
    """Show what there is: data sets, models, speedups, recipes, machines.

    Speedups are shown on or off as a run on this machine would have them, with the reason, and whether that was measured.

    Raises: ConfigError for an unknown kind or recipe, with the nearest name.
    """
    if kind == "speedups":
        return _speedups(recipe)
    if kind == "machines":
        return ListResult(kind=kind, items=_machines(probe()))
    if kind not in FOLDERS:
        raise unknown_name("kind of entry", kind, [*FOLDERS, "machines", "speedups"])
    folder = FOLDERS[kind]
    return ListResult(kind=kind, items=[{"name": name, "description": folder.describe(name)} for name in folder.names()])


def _speedups(recipe: str | Path | None) -> ListResult:
    machine = probe()
    config = load_config(recipe)
    device = config.train.device if config.train.device != "auto" else "cuda" if machine.gpus else "cpu"
    speedups = {speedup.name: speedup for speedup in all_speedups()}
    gpu = gpu_name(machine, device)
    kept = read(gpu, CACHE) if gpu else None
    items = []
    for decision in select(config, machine, device=device):
        speedup, gain = speedups[decision.name], kept.speedups.get(decision.name) if kept else None
        items.append(
            {
                "name": decision.name,
                "description": speedup.saves,
                "on": decision.on,
                "reason": decision.reason,
                "promise": speedup.promise.kind,
                "measured": True if gain else is_measured(speedup, config, machine, device),
                "gain": gain and gain.describe(),
                "predicted": speedup.predicted,
            }
        )
    elsewhere = device.startswith("cuda") and not machine.gpus
    note = f"This recipe asks for a GPU (train.device={device}), which is not here; this is what it would use on one." if elsewhere else None
    return ListResult(kind="speedups", note=note, items=items)


def _machines(machine: Machine) -> list[dict[str, Any]]:
    """Every data sheet, this machine's first."""
    here = machine.row.name if machine.row else None
    items = [{"name": "(this machine)", "description": machine.describe()}]
    for name in MACHINES.names():
        mark = "; this machine's GPU" if name == here else ""
        items.append({"name": name, "description": MACHINES.describe(name) + mark})
    return items


COMMAND = Command(list_entries, example="flatout list speedups")
