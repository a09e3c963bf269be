"""A table in RUN/metrics.csv: a row per record and a column per metric, for spreadsheets."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flatout.storage.files import open_own, write_text
from flatout.storage.json_io import read_lines
from flatout.training.metrics.loggers import Logger
from flatout.training.run_dir.layout import METRICS, TABLE
from flatout.training.run_dir.lookup import columns

if TYPE_CHECKING:
    from flatout.assembly.run import Run


class Csv(Logger):
    """Copies metrics.jsonl. Cells are empty where nothing was measured."""

    def on_start(self, run: Run) -> None:
        """Copy the records before a resume."""
        self._source, self._path = run.folder / METRICS, run.folder / TABLE
        self._names: list[str] = []
        self._copy()

    def on_record(self, record: Mapping[str, float]) -> None:
        """Append a row. A new metric needs a new column, and so the whole file again."""
        if not record.keys() <= set(self._names):
            self._copy()
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_own(self._path, flags), "a", encoding="utf-8", newline="") as file:
            file.write(_lines([[record.get(name) for name in self._names]]))

    def _copy(self) -> None:
        """Write metrics.jsonl, which has the newest record already, as a table."""
        table = columns(read_lines(self._source))
        self._names = list(table)
        if self._names:
            rows = zip(*table.values(), strict=True)
            write_text(self._path, _lines([self._names, *rows]))


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


LOGGER = Csv
