"""Write one HTML page about a run, or about several together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.signature import Argument, Option, checked, texts
from flatout.errors import OutputInUse
from flatout.progress import SILENT, Progress
from flatout.storage.files import write_whole, writing
from flatout.storage.json_io import Result
from flatout.storage.recognised import require_local
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import RUNS, find_run, run_names

FILE_NAME = "report.html"


class ReportResult(Result):
    """The page that was written."""

    path: str
    """The HTML file."""
    runs: list[str]
    """The run directories on the page."""
    records: int
    """Records of all runs that the page is about."""
    bytes: int
    """Size of the file."""
    notes: list[str]
    """What was missing or damaged in the run directories."""
    wall_s: float
    """Seconds that reading and writing took."""

    @property
    def headline(self) -> str:
        """The path of the page and its size."""
        size = f"{self.bytes / 1e6:.1f} MB, {self.records:,} records"
        return f"{self.path}  ({size}; open it in a browser)"


@checked
def report(
    runs: Annotated[
        list[str] | str | Path | None,
        Argument("Run directories, or their names under runs/ (default: the newest run there)."),
    ] = None,
    out: Annotated[
        Path | str | None,
        Option(
            "The HTML file (default: report.html in the run directory, or here for several runs)."
        ),
    ] = None,
    *,
    progress: Progress = SILENT,
) -> ReportResult:
    """Write one HTML page about a run, or about several side by side.

    The page has the settings in which several runs differ, the results, the curves (against steps,
    tokens or time), findings, events and settings. It is one file that opens offline. A
    directory with a metrics.jsonl of another training loop works too.

    Raises: CheckpointError when a run does not exist; OutputInUse when `out` is a different file;
            MissingPackage without bokeh.
    """
    from flatout.measure.report.curves import read_runs
    from flatout.measure.report.page import MARK, render, require_packages

    began_s = time.perf_counter()
    named = map(_folder, texts(runs) or run_names()[:1] or [str(RUNS / "NAME")])
    folders = list({folder.resolve(): folder for folder in named}.values())
    require_local(out or "", "--out ")
    path = Path(out or (folders[0] / FILE_NAME if len(folders) == 1 else FILE_NAME))
    path = path / FILE_NAME if path.is_dir() else path
    if path.exists() and not path.read_bytes().startswith(MARK.encode()):
        raise OutputInUse(
            f"{path} exists and is not a report.",
            fix="Choose a different file with --out, or move that one away.",
        )
    require_packages()
    with progress.task("Reading the records"):
        read = read_runs(folders)
    notes = [f"{run.name}: {note}" for run in read for note in run.notes]
    for note in notes:
        progress.say(note)
    with progress.task("Drawing"):
        html = render(read)
    with writing(path):
        write_whole(path, html)
    return ReportResult(
        path=str(path),
        runs=list(map(str, folders)),
        records=sum(run.num_records for run in read),
        bytes=len(html.encode()),
        notes=notes,
        wall_s=round(time.perf_counter() - began_s, 2),
    )


def _folder(run: str | Path) -> Path:
    """Return the run directory, or a directory with the records of another training loop.

    Raises: CheckpointError.
    """
    path = Path(run)
    return path if str(run) and (path / layout.METRICS).is_file() else find_run(run)


COMMAND = Command(report, example="flatout report runs/demo", writes_files=True)
