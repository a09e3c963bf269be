"""Write one HTML page about a run, or about several side by side; or follow a live one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.commands import Argument, Command, Option
from flatout.errors import CheckpointError, ConfigError, DataError, OutputInUse, in_shell
from flatout.files import write_whole
from flatout.json_io import Result
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import RUNS, find_run

DEFAULT_PORT = 7007
FILE_NAME = "report.html"


class ReportResult(Result):
    """The page that was written, or the address at which it was served."""

    path: str | None
    """The HTML file; null with --serve."""
    url: str | None
    """Where the page was served; null without --serve."""
    runs: list[str]
    """The run directories on the page."""
    records: int | None
    """Records of all runs that the page is about; null with --serve."""
    bytes: int | None
    """Size of the file; null with --serve."""
    notes: list[str]
    """What was missing or damaged in the run directories."""
    wall_s: float
    """Seconds that reading and writing took."""

    def summary(self) -> str:
        """Return the path of the page and its size; nothing after serving."""
        if self.path is None or self.bytes is None:
            return ""
        size = f"{self.bytes / 1e6:.1f} MB, {self.records:,} records"
        return f"{self.path}  ({size}; open it in a browser)"


def report(
    runs: Annotated[
        list[str] | None,
        Argument("Run directories, or their names under runs/; the newest run there by default."),
    ] = None,
    out: Annotated[
        Path | str | None,
        Option("The HTML file; report.html in the run directory (of several runs: here)."),
    ] = None,
    serve: Annotated[
        bool, Option("Follow the runs at a local address instead of writing a file.")
    ] = False,
    port: Annotated[int, Option("Port of --serve; 0 takes a free one.", min=0)] = DEFAULT_PORT,
    *,
    progress: Progress = SILENT,
) -> ReportResult:
    """Write one HTML page about a run, or about several side by side; or follow a live one.

    The page has the curves (against steps, tokens or time), the events, the results, where the time
    of a step went, samples and settings, and for several runs their differences. It is one file
    that opens offline. A directory with a metrics.jsonl of another training loop works too.
    With --serve the page follows its runs at an address on this machine, until Ctrl+C.

    Raises: CheckpointError when a run does not exist; MissingPackage without bokeh.
    """
    from flatout.measure.report.page import render
    from flatout.measure.report.reading import RunReader, names_of
    from flatout.measure.report.serve import LivePage
    from flatout.measure.report.serve import serve as serve_page

    began_s = time.perf_counter()
    folders = check(runs, out, serve, port)
    readers = [RunReader(*pair) for pair in zip(folders, names_of(folders), strict=True)]
    named = [str(folder) for folder in folders]
    if serve:
        url = serve_page(LivePage(readers), port, progress=progress)
        wall_s = round(time.perf_counter() - began_s, 2)
        return ReportResult(
            path=None, url=url, runs=named, records=None, bytes=None, notes=[], wall_s=wall_s
        )
    with progress.task("Reading the records"):
        read = [reader.read() for reader in readers]
    notes = [f"{run.name}: {note}" for run in read for note in run.notes]
    for note in notes:
        progress.say(note)
    with progress.task("Drawing"):
        html = render(read)
    path = _destination(folders, out)
    _write(path, html)
    return ReportResult(
        path=str(path),
        url=None,
        runs=named,
        records=sum(run.num_records for run in read),
        bytes=len(html.encode()),
        notes=notes,
        wall_s=round(time.perf_counter() - began_s, 2),
    )


def check(
    runs: list[str] | None, out: Path | str | None, serve: bool, port: int = DEFAULT_PORT
) -> list[Path]:
    """Return the run directories, each once, after checking the command line.

    Raises: UsageError.
    """
    from flatout.measure.report.figures import require_bokeh

    if serve and out is not None:
        raise ConfigError(
            "--serve writes no file, so --out has no effect.",
            fix="Leave out one of them.",
        )
    if port > 65_535:
        raise ConfigError(f"--port {port} is not a port.", fix="Ports are 0 to 65535.")
    folders = [_folder(run) for run in runs] if runs else [_newest()]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    if not serve:
        _require_ours(_destination(folders, out))
    require_bokeh()
    return folders


def _folder(run: str) -> Path:
    """Return the run directory; also one with the records of another training loop.

    Raises: CheckpointError.
    """
    path = Path(run)
    if run and (path / layout.METRICS).is_file():
        return path
    return find_run(run)


def _newest() -> Path:
    """Return the newest run.

    Raises: CheckpointError when there is none.
    """
    known = layout.list_runs(RUNS) if RUNS.is_dir() else []
    if not known:
        raise CheckpointError(
            f"There is no run under {RUNS}/.",
            fix="Name a run directory, or train a run: `flatout demo` takes a few minutes.",
        )
    return known[-1]


def _destination(folders: Sequence[Path], out: Path | str | None) -> Path:
    if out is None:
        return folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME)
    require_local(out, "--out ")
    path = Path(out)
    return path / FILE_NAME if path.is_dir() else path


def _require_ours(path: Path) -> None:
    """Check that `path` can be replaced: it does not exist, or is a report.

    Raises: OutputInUse; DataError.
    """
    from flatout.measure.report.page import MARK

    if not path.parent.is_dir():
        raise DataError(
            f"There is no directory {path.parent}.", fix="Create it, or choose another --out."
        )
    if not path.exists():
        return
    if not path.is_file() or _head(path, len(MARK)) != MARK.encode():
        raise OutputInUse(
            f"{path} exists and is not a report.",
            fix="Choose another file with --out, or move that one away.",
        )


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _write(path: Path, html: str) -> None:
    """Write the page, atomically.

    Raises: DataError when the disk refuses.
    """
    try:
        write_whole(path, html)
    except OSError as error:
        raise DataError(
            f"Cannot write {path}: {error.strerror or error}.",
            fix=f"Choose another file: --out {in_shell(Path.home() / FILE_NAME)}.",
        ) from error


COMMAND = Command(report, example="flatout report runs/demo", check=check, writes_files=True)
