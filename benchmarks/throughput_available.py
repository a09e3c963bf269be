"""Which entries, speedups and peers of throughput.py this machine can measure."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

from throughput_entries import Entry

from flatout.assembly.selection import speedup_named
from flatout.config.schema import RunConfig
from flatout.hardware import Machine
from flatout.measure.trials.resolving import with_needs
from flatout.registry import SPEEDUPS

ADD = {
    "nanogpt": "git clone https://github.com/karpathy/nanoGPT, then --nanogpt nanoGPT",
    "huggingface": "pip install transformers",
    "litgpt": "pip install litgpt, or --litgpt FOLDER",
    "nanochat": "git clone https://github.com/karpathy/nanochat, then --nanochat nanochat",
}
"""How to add each peer."""
PACKAGES = {"huggingface": "transformers", "litgpt": "litgpt", "nanochat": "nanochat"}


@dataclass
class Availability:
    """What can be measured with a command's arguments on its machine."""

    arguments: argparse.Namespace
    machine: Machine
    say: Callable[[str], None]
    printed: set[str] = field(default_factory=set)

    def config(self, entry: Entry, config: RunConfig) -> RunConfig | None:
        """Return the config of an entry; None, with a message, if it cannot be measured here."""
        name = f"{entry.work}/{entry.name}"
        config = config.with_values(dict(entry.values))
        if entry.kind != "flatout":
            if self.is_missing(entry.kind):
                self.say(
                    f"{name} is skipped: {entry.kind} is missing. To add it: {ADD[entry.kind]}."
                )
                return None
            return config
        if entry.plain:
            return config.with_values({"speedups": "none"})
        if not entry.adds:
            return config
        able, reasons = self.addable(entry, config)
        for reason in reasons:
            self.say_once(f"{reason[0].upper()}{reason[1:]}")
        if entry.about and entry.about not in able:
            self.say(f"{name} is skipped: it tests {entry.about}.")
            return None
        if entry.without and self.why_not(entry.without, config):
            self.say(
                f"{name} is skipped: it is the set without {entry.without}, which cannot be used"
                " here."
            )
            return None
        dropped = [name for name in entry.drops if name in SPEEDUPS.names()]
        return config.with_values(
            {
                "speedups": ",".join(
                    ["auto", *(f"+{name}" for name in able), *(f"-{name}" for name in dropped)]
                )
            }
        )

    def addable(self, entry: Entry, config: RunConfig) -> tuple[list[str], list[str]]:
        """Return the speedups to add for an entry, with their needs, and why others are skipped."""
        able: list[str] = []
        reasons: list[str] = []
        for added in entry.adds:
            if ":" not in added and added not in SPEEDUPS.names():
                reasons.append(f"there is no speedup {added}: it is omitted.")
                continue
            parts = with_needs(added)
            why_not = next(
                (reason for part in parts if (reason := self.why_not(part, config))), None
            )
            if why_not:
                reasons.append(f"{added} is omitted: {why_not.rstrip('.')}.")
            else:
                able += [part for part in parts if part not in able]
        return able, reasons

    def why_not(self, name: str, config: RunConfig) -> str | None:
        """Return why a speedup cannot be added here, or None."""
        speedup = speedup_named(name)
        if self.arguments.tiny and "compilation" in speedup.fills:
            return "toy shapes are not compiled"
        return speedup.why_not(self.machine, config)

    def is_missing(self, kind: str) -> bool:
        """Return whether a peer is neither installed nor given as a folder."""
        if kind == "people" or self.folder(kind):
            return False
        return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind]) is None

    def folder(self, kind: str) -> str | None:
        """Return the folder given for a peer."""
        given = getattr(self.arguments, kind, None)
        return str(given.resolve()) if given else None

    def say_once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self.printed:
            self.printed.add(line)
            self.say(line)


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
