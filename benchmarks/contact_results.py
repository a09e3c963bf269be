"""The folder of results of first_contact.py: a few small files, each written whole after every
step, which can be carried.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from throughput_entries import Entry
from throughput_report import read_document

from flatout.files import PART, write_text

NAME = "contact"


class Results:
    """What is known beside the measurements of throughput.json: contact.json, and the table,
    contact.md.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in folder.glob(f"*{PART}"):
            path.unlink()  # a file that was being written when its call was killed
        path = folder / f"{NAME}.json"
        empty: dict[str, Any] = {"spent": [], "profiles": {}, "calls": [], "begun": None}
        self._held: dict[str, Any] = read_document(path, *empty) if path.exists() else empty

    @property
    def spent(self) -> list[dict[str, Any]]:
        """Every step that has ended, with its seconds."""
        return list(self._held["spent"])

    @property
    def profiles(self) -> dict[str, Any]:
        """Where the time of a step goes, by entry."""
        return dict(self._held["profiles"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that have ended."""
        return list(self._held["calls"])

    def of(self, kind: str) -> dict[str, Any]:
        """Return what a step that is no measurement found, empty when it has not been taken."""
        return dict(self._held.get(kind, {}))

    def keep(self, kind: str, found: dict[str, Any]) -> None:
        """Write down what a step that is no measurement found."""
        self._held[kind] = found
        self._write()

    def profile(self, entry: Entry) -> dict[str, Any]:
        """Return an entry's profile, empty when it has none."""
        return dict(self._held["profiles"].get(f"{entry.work}/{entry.name}", {}))

    def keep_profile(self, entry: Entry, found: dict[str, Any]) -> None:
        """Write down a profile."""
        self._held["profiles"][f"{entry.work}/{entry.name}"] = found
        self._write()

    def begin(self, step: str, call: int) -> None:
        """Write down what is being done, so that it is known what a killed call was at."""
        self._held["begun"] = {"step": step, "call": call}
        self._write()

    def end(self, spent: dict[str, Any]) -> None:
        """Write down that it has ended, and how long it took."""
        self._held["begun"] = None
        self._held["spent"].append(spent)
        self._write()

    def end_call(self, number: int, seconds: float) -> None:
        """Write down that a call has ended."""
        self._held["calls"].append(
            {
                "call": number,
                "seconds": round(seconds, 1),
                "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
        )
        self._write()

    def write_table(self, lines: list[str]) -> None:
        """Write the table."""
        write_text(self.folder / f"{NAME}.md", "\n".join(lines) + "\n")

    def _write(self) -> None:
        write_text(self.folder / f"{NAME}.json", json.dumps(self._held, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(
        "It is a part of benchmarks/first_contact.py, which is the command: python benchmarks/first_contact.py --help"
    )
