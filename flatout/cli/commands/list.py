"""List models, recipes, speedups and the other kinds of entries."""

from __future__ import annotations

import math
import re
from pathlib import Path
from textwrap import fill
from typing import Annotated

from pydantic import Field

from flatout.assembly.prediction import gains_here
from flatout.assembly.recipe import On
from flatout.assembly.selection import (
    all_speedups,
    default_of,
    is_measured,
    select,
    speedup_named,
)
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
from flatout.display import amount, duration
from flatout.hardware.machine import ASSUMED_MFU, Machine, machine_rows, probe
from flatout.measure.scripts.changes import CHANGES
from flatout.progress import SILENT, Progress
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
SCREEN = 80
"""Columns of a screen."""
LABEL_WIDTH = max(map(len, LABELS.values()))


class ListResult(Result):
    """The entries of one kind."""

    kind: str
    """A kind of entry, such as speedups."""
    note: str | None = None
    """For speedups: the assumed length of the run, and whether its GPU is missing here."""
    items: list[JsonObject]
    """One object per entry, with its `name` and its `description`.

    A recipe also has the `parameters` of its model, null if they are those of its base model. The
    smallest come first.

    A speedup also has `on` with the `reason`; whether that was `measured` on such a device (null:
    it is not for this device); the `gain` that bench measured on this hardware; and the `predicted`
    gain, as text or null."""

    shows_all: bool = Field(default=False, exclude=True, repr=False)
    """Whether `summary` has every reason."""

    def summary(self) -> str:
        """Return one line per entry. Of speedups, it shows those that are on, and the other names.

        With --all, every speedup has the reason why it is on or off below it.
        """
        if not self.items:
            return f"There are no {self.kind}."
        width = max((len(item["name"]) for item in self.items if item.get("on", True)), default=0)
        lines = [_wrapped(self.note)] if self.note else []
        off: dict[str, list[str]] = {label: [] for label in LABELS.values()}
        for item in self.items:
            if "on" not in item:
                start = f"{item['name']:<{width}}  "
                if "parameters" in item:
                    size = item["parameters"]
                    start += f"{amount(size).replace('G', 'B') if size else '':>7}  "
                lines.append(_wrapped(f"{start}{item['description']}", len(start)))
                continue
            state, label = "on" if item["on"] else "off", LABELS[item["measured"]]
            gain, reason, about = item["gain"], item["reason"], ""
            if gain and gain not in reason:
                about = f"  (measured here: {gain})"
            elif item["predicted"] and not gain:  # docs/speedups.md has the rest
                first = re.split(r"[.:;] ", item["predicted"], maxsplit=1)[0]
                about = f"  (predicted: {first})"
            if self.shows_all:
                name = f"{item['name']}{about}"
                lines.append(f"{state:<3}  {label:<{LABEL_WIDTH}}  {name}")
                lines.append(_wrapped(f"     {reason}", 5))
            elif item["on"]:
                start = f"on   {item['name']:<{width}}  "
                lines.append(_wrapped(f"{start}{reason}{about}", len(start)))
            else:
                off[label].append(item["name"])
        for label, names in off.items():
            if names:
                text = f"off, {label or 'not for this run'}: {', '.join(names)}"
                lines.append(_wrapped(text, 5))
        if any(off.values()):
            lines.append("--all shows the reason for each.")
        return "\n".join(lines)


def _wrapped(text: str, indent: int = 0) -> str:
    """Return text in lines of a screen. Those after the first are indented."""
    return fill(text, SCREEN, subsequent_indent=" " * indent, break_on_hyphens=False)


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
    *,
    progress: Progress = SILENT,
) -> ListResult:
    """List the entries of one kind, such as models, recipes or speedups.

    Speedups are shown as a run on this machine would use them: those that are on, and the others by
    whether that rests on a measurement. `--all` shows the reason for each.

    Raises: ConfigError for an unknown kind or recipe, with the nearest name.
    """
    if kind == "speedups":
        return _speedups(recipe, progress).model_copy(update={"shows_all": all})
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


def _speedups(recipe: str | Path | None, progress: Progress) -> ListResult:
    machine, config = probe(), load_config(recipe)
    device = config.train.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    minutes, notes = None, []
    if device.startswith("cuda"):
        minutes, length = _expected_length(config, machine, progress)
        notes += [length] if length else []
        if not machine.gpus:
            notes.append(
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
    return ListResult(kind="speedups", note=" ".join(notes) or None, items=items)


def _expected_length(
    config: RunConfig, machine: Machine, progress: Progress
) -> tuple[float | None, str | None]:
    """Return the expected minutes of a run on one GPU, and a sentence on how they were estimated.

    Both are None when they are unknown. On a GPU that is present, `train` uses the same estimate.
    Without one, no run is shorter than on the fastest known GPU at its peak rate. If even that is
    long enough for every speedup that pays off only in long runs, it is returned, otherwise None.
    """
    if config.train.steps is None and config.train.tokens is None:
        return None, None
    here = machine.row
    if machine.gpus and (here is None or machine.gpu_dtype not in here.peak_tflops):
        return None, None
    from flatout.assembly.resolve import expected_minutes

    if here is not None:
        minutes = expected_minutes(config, here.peak_tflops[machine.gpu_dtype].value * ASSUMED_MFU)
        how = f"at {ASSUMED_MFU:.0%} of the peak of one {machine.gpus[0].name}"
        return minutes, f"Estimated length of a run: {duration((minutes or 0) * 60)}, {how}."
    tflops = {
        row.name: row.peak_tflops["bf16"].value
        for row in machine_rows()
        if "bf16" in row.peak_tflops
    }
    fastest = max(tflops, key=lambda name: tflops[name])
    least = expected_minutes(config, tflops[fastest])
    defaults = [default_of(speedup, "cuda") for speedup in all_speedups()]
    if least is None or least < max(one.from_minutes for one in defaults if isinstance(one, On)):
        return None, None
    how = f"on one {fastest}, the fastest known GPU, at its peak rate"
    return least, f"A run takes at least {duration(least * 60)}, {how}."


COMMAND = Command(list_entries, example="flatout list speedups")
