"""List architectures, datasets, machines, models and the other kinds of entries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from flatout.assembly.prediction import gains_here
from flatout.assembly.recipe import On
from flatout.assembly.selection import all_speedups, is_measured, select, speedup_named
from flatout.cache import default_cache
from flatout.commands import Argument, Command, Option
from flatout.config.schema import RunConfig, load_config
from flatout.hardware import ASSUMED_MFU, Machine, probe
from flatout.json_io import JsonObject, Result
from flatout.progress import SILENT, Progress
from flatout.registry import (
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
from flatout.terminal import duration

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


LABELS = {True: "measured", False: "not measured", None: ""}
"""Whether the choice of `auto` for a speedup rests on a measurement.

None: there is nothing to measure, the speedup is not for this device.
"""
LABEL_WIDTH = max(map(len, LABELS.values()))


class ListResult(Result):
    """The entries of one kind."""

    kind: str
    """A kind of entry, such as speedups."""
    note: str | None = None
    """For speedups: the assumed length of the run, and whether its GPU is missing here."""
    items: list[JsonObject]
    """One object per entry, with its `name` and its `description`.

    A speedup also has `on` with the `reason`; whether that was `measured` on such a device (null:
    it is not for this device); the `gain` that bench measured on this hardware; and the `predicted`
    gain, as text or null."""

    def summary(self) -> str:
        """Return one line per entry, and more lines for a speedup with figures."""
        width = max((len(item["name"]) for item in self.items), default=0)
        lines = [self._line(item, width) for item in self.items]
        return (
            "\n".join([*([self.note] if self.note else []), *lines])
            if lines
            else f"There are no {self.kind}."
        )

    def _line(self, item: JsonObject, width: int) -> str:
        if "on" not in item:
            return f"{item['name']:<{width}}  {item['description']}"
        gain = item["gain"]
        under = [item["reason"]]
        if item["reason"] != item["description"]:
            under.append(f"saves {item['description']}")
        if gain and gain not in item["reason"]:
            under.append(f"measured here: {gain}")
        if item["predicted"] and not gain:
            under.append(f"predicted: {gain_alone(item['predicted'])}")
        state, label = "on" if item["on"] else "off", LABELS[item["measured"]]
        start = f"{state:<3}  {label:<{LABEL_WIDTH}}  {item['name']}"
        return "\n".join([start, *(f"     {line}" for line in under)])


def gain_alone(predicted: str) -> str:
    """Return a predicted gain up to its first colon or full stop; docs/speedups.md has the rest."""
    return re.split(r"[.:;] ", predicted, maxsplit=1)[0]


def list_entries(
    kind: Annotated[
        str,
        Argument(
            "architectures, datasets, loggers, machines, models, optimizers, recipes, sources, "
            "speedups, token-formats or tokenizers."
        ),
    ],
    recipe: Annotated[
        str | Path | None, Option("For speedups: decide for this recipe, not the defaults.")
    ] = None,
    *,
    progress: Progress = SILENT,
) -> ListResult:
    """List the entries of one kind, such as models, recipes or speedups.

    Speedups are shown as a run on this machine would use them: on or off, the reason, and whether
    that was measured.

    Raises: ConfigError for an unknown kind or recipe, with the nearest name.
    """
    if kind == "speedups":
        return _speedups(recipe, progress)
    if kind == "tokenizers":
        return ListResult(kind=kind, items=_tokenizers())
    if kind == "machines":
        return ListResult(kind=kind, items=_machines(probe()))
    if kind not in FOLDERS:
        raise unknown_name("kind of entry", kind, [*FOLDERS, "machines", "speedups", "tokenizers"])
    folder = FOLDERS[kind]
    return ListResult(
        kind=kind,
        items=[{"name": name, "description": folder.describe(name)} for name in folder.names()],
    )


def _speedups(recipe: str | Path | None, progress: Progress) -> ListResult:
    machine = probe()
    config = load_config(recipe)
    device = (
        config.train.device if config.train.device != "auto" else "cuda" if machine.gpus else "cpu"
    )
    minutes, length = (
        _expected_length(config, machine, progress) if device.startswith("cuda") else (None, None)
    )
    gains = gains_here(machine, device, default_cache())
    items = []
    for decision in select(config, machine, device=device, minutes=minutes, measured=gains):
        speedup, gain = speedup_named(decision.name), gains.get(decision.name)
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
    notes = [length] if length else []
    if device.startswith("cuda") and not machine.gpus:
        notes.insert(
            0,
            f"This recipe needs a GPU (train.device={device}), and there is none here; on a GPU it "
            "would use:",
        )
    return ListResult(kind="speedups", note=" ".join(notes) or None, items=items)


def _expected_length(
    config: RunConfig, machine: Machine, progress: Progress
) -> tuple[float | None, str | None]:
    """Return the expected minutes of a run on one GPU, and a sentence on how they were estimated.

    Both are None when they are unknown. On a GPU that is present, `train` uses the same estimate.
    Without one, no run is shorter than on the fastest known GPU at its peak rate; if even that is
    long enough for every speedup that pays off only in long runs, it is returned, otherwise None.
    """
    if config.train.steps is None and config.train.tokens is None:
        return None, None
    if machine.gpus and (machine.row is None or "bf16" not in machine.row.peak_tflops):
        return None, None
    with progress.task("Loading torch"):
        from flatout.assembly.resolve import expected_minutes
    if machine.row is not None:
        minutes = expected_minutes(config, machine.row.peak_tflops["bf16"].value * ASSUMED_MFU)
        how = f"at {ASSUMED_MFU:.0%} of the peak of one {machine.gpus[0].name}"
        return minutes, f"Estimated length of a run: {duration((minutes or 0) * 60)}, {how}."
    tflops, fastest = max(
        (row["peak_tflops"].get("bf16", {}).get("value", 0), name)
        for name in MACHINES.names()
        for row in [MACHINES.get(name)]
    )
    least = expected_minutes(config, tflops)
    defaults = [default for speedup in all_speedups() for default in speedup.auto.values()]
    longest = max(default.from_minutes for default in defaults if isinstance(default, On))
    if least is None or least < longest:
        return None, None
    return (
        least,
        f"A run takes at least {duration(least * 60)}, on one {fastest}, the fastest known GPU, "
        "at its peak rate.",
    )


def _tokenizers() -> list[JsonObject]:
    """Return the kinds of tokenizers, each as it is written after `--tokenizer`."""
    stated = TOKENIZERS.stated
    return [
        {
            "name": stated(kind, "LISTED_AS") or stated(kind, "SPEC") or kind,
            "description": TOKENIZERS.describe(kind),
        }
        for kind in TOKENIZERS.names()
    ]


def _machines(machine: Machine) -> list[JsonObject]:
    """Return this machine, and the data sheet of each known GPU."""
    here = machine.row.name if machine.row else None
    items = [{"name": "(this machine)", "description": machine.describe()}]
    for name in MACHINES.names():
        mark = "; this machine's GPU" if name == here else ""
        items.append({"name": name, "description": MACHINES.describe(name) + mark})
    return items


COMMAND = Command(list_entries, example="flatout list speedups")
