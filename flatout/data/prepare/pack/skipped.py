"""Rows that are left out of a dataset: counted by reason, with the locations of the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote, unquote

from pydantic import BeforeValidator, PlainSerializer

from flatout.data.prepare.request.options import OnBadRow
from flatout.data.store.manifest import SkippedEntry
from flatout.errors import TooLittleText, without_secrets
from flatout.sources import FIRST_NAMED, BadRow, RowLocation


def _to_json(location: RowLocation) -> tuple[str, int | None]:
    """Return a location as JSON values, even if the file name is not UTF-8."""
    return quote(
        without_secrets(location.name), safe="/:, ", errors="surrogateescape"
    ), location.offset


def _from_json(stored: Any) -> Any:
    if isinstance(stored, RowLocation):
        return stored
    return RowLocation(unquote(stored[0], errors="surrogateescape"), stored[1])


StoredLocation = Annotated[RowLocation, BeforeValidator(_from_json), PlainSerializer(_to_json)]
"""A row's location by byte offset; its line number is looked up only to show it to a user."""


@dataclass
class SkippedRows:
    """Rows left out for one reason."""

    reason: str
    count: int = 0
    first: tuple[StoredLocation, ...] = ()
    """Locations of the first of them."""


@dataclass
class Skipped:
    """All rows left out."""

    rows: dict[str, SkippedRows] = field(default_factory=dict)
    """By reason."""
    bad: int = 0
    """Number of bad rows among them; a source left out the others by its own rule."""
    first_bad: BadRow | None = None
    unread_bytes: int = 0
    """Approximate bytes of text lost with rows that stand for damaged data."""
    cut_documents: int = 0
    """Documents cut where validation begins: not left out, but counted once in each split."""

    def add(self, reason: str, locations: Sequence[RowLocation], count: int = 1) -> None:
        """Count rows; `locations` are those of the first."""
        rows = self.rows.setdefault(reason, SkippedRows(reason))
        rows.count += count
        if len(rows.first) < FIRST_NAMED:
            rows.first = (*rows.first, *locations)[:FIRST_NAMED]

    def add_bad(self, row: BadRow, on_bad_row: OnBadRow) -> None:
        """Count a bad row, or raise its error."""
        if on_bad_row == "raise":
            raise row.error
        self.bad += 1
        self.first_bad = self.first_bad or row
        self.unread_bytes += row.unread_bytes
        self.add(row.reason, [row.location])

    def entries(self) -> tuple[SkippedEntry, ...]:
        """Return the manifest's entries; files are read again to name rows by line."""
        return tuple(
            SkippedEntry(
                reason=rows.reason,
                count=rows.count,
                first=tuple(storable(location.where()) for location in rows.first),
            )
            for rows in self.rows.values()
        )


def storable(name: str) -> str:
    """Return a name as valid UTF-8, and a URL without its secrets."""
    return without_secrets(
        name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    )


def no_documents(names: str, skipped: Iterable[SkippedRows] = ()) -> TooLittleText:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{rows.count:,} {rows.reason}" for rows in skipped)
    return TooLittleText(
        f"{names} contains no documents{f' ({reasons})' if reasons else ''}.",
        fix="Name a file or directory with text in it.",
    )
