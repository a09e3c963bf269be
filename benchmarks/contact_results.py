"""The results folder of first_contact.py: a few small files, each replaced atomically."""

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
    """Results besides throughput.json: contact.json, and the summary in contact.md."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in folder.glob(f"*{PART}"):
            path.unlink()  # left by a call that was killed while it wrote the file
        path = folder / f"{NAME}.json"
        empty: dict[str, Any] = {"spent": [], "profiles": {}, "calls": [], "begun": None}
        self._held: dict[str, Any] = read_document(path, *empty) if path.exists() else empty

    @property
    def spent(self) -> list[dict[str, Any]]:
        """Every finished step with its duration."""
        return list(self._held["spent"])

    @property
    def profiles(self) -> dict[str, Any]:
        """Profiles by entry."""
        return dict(self._held["profiles"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that have finished."""
        return list(self._held["calls"])

    def of(self, kind: str) -> dict[str, Any]:
        """Return the result of a step other than a measurement, or an empty dict."""
        return dict(self._held.get(kind, {}))

    def keep(self, kind: str, found: dict[str, Any]) -> None:
        """Store the result of a step other than a measurement."""
        self._held[kind] = found
        self._write()

    def profile(self, entry: Entry) -> dict[str, Any]:
        """Return an entry's profile, or an empty dict."""
        return dict(self._held["profiles"].get(f"{entry.work}/{entry.name}", {}))

    def keep_profile(self, entry: Entry, found: dict[str, Any]) -> None:
        """Store a profile."""
        self._held["profiles"][f"{entry.work}/{entry.name}"] = found
        self._write()

    def begin(self, step: str, call: int) -> None:
        """Record the running step, to show what a killed call was doing."""
        self._held["begun"] = {"step": step, "call": call}
        self._write()

    def end(self, spent: dict[str, Any]) -> None:
        """Record that the running step finished, and its duration."""
        self._held["begun"] = None
        self._held["spent"].append(spent)
        self._write()

    def end_call(self, number: int, seconds: float) -> None:
        """Record that a call finished."""
        self._held["calls"].append(
            {
                "call": number,
                "seconds": round(seconds, 1),
                "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
        )
        self._write()

    def write_table(self, lines: list[str]) -> None:
        """Write the summary."""
        write_text(self.folder / f"{NAME}.md", "\n".join(lines) + "\n")

    def _write(self) -> None:
        write_text(self.folder / f"{NAME}.json", json.dumps(self._held, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
