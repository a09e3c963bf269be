"""The results of a bench: the figures of every trial, and the report on them (bench.json)."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, RunFailed
from flatout.files import sync, unless_broken, write_text
from flatout.json_io import Stored, append_line, read_lines
from flatout.measure.trials.spec import TrialResult
from flatout.measure.trials.statistics import Figure
from flatout.recognised import read_regular
from flatout.registry import PACKAGE_DIR
from flatout.training.run_dir.layout import run_name

FORMAT_VERSION = 2
JSON, TABLE, PICTURE, TRIALS = "bench.json", "table.md", "bench.svg", "trials.jsonl"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
TIME_WAS_UP, INTERRUPTED = "the time was up", "it was interrupted"
"""Why a point has no trial."""


class Trial(Stored):
    """One measurement in one process."""

    point: str
    """The set of speedups, or the value of a sweep."""
    round: int
    """Counted from 0; every point is measured once per round."""
    seed: int
    """train.seed, the same for all points of a round."""
    result: TrialResult
    """Its figures, or why there are none."""
    deterministic: bool = False
    """Whether it ran with train.deterministic=true to check an exact promise.

    Only its losses are used; its other figures are in no row."""


class Row(Stored):
    """One line of the table: a rung of the ladder, a value of a sweep, or an unmeasured entry."""

    name: str
    """Name of the rung or the value."""
    kind: str
    """baseline, added (one more), left-out or put-in (ablations of the full set), point (of a
    sweep), or absent (never measured)."""
    speedup: str | None = None
    """The speedup that it measures."""
    speedups: list[str] = Field([])
    """All speedups that were on."""
    replaced: list[str] = Field([])
    """Speedups of the full set that this one replaces."""
    against: str | None = None
    """The line that it is compared with."""
    status: str = "ok"
    """ok, out-of-memory, failed, timed-out or not-measured."""
    reason: str | None = None
    """Why it is not ok, or why it has fewer repeats."""
    repeats: int = 0
    """Trials with figures."""
    tokens_per_s: Figure | None = None
    """Tokens per second of measured time."""
    gain: Figure | None = None
    """How many times faster with this speedup than without it, from paired repeats."""
    verdict: str = ""
    """The gain in words."""
    loss_difference: float | None = None
    """Largest relative difference of a loss from that of `against`, on the same batches."""
    compared_losses: int | None = None
    """Number of first steps whose losses were compared."""
    deterministic: bool = False
    """Whether the losses are from runs with train.deterministic=true.

    They are used where timed runs do not repeat bit for bit."""
    promise: str | None = None
    """exact, rounding or statistical."""
    promise_kept: bool | None = None
    """null if it was not checked."""
    promise_reason: str | None = None
    """How the promise was checked, or why not."""
    step_ms: float | None = None
    """Median over repeats of the mean step."""
    data_ms: float | None = None
    """Part of it spent waiting for data."""
    host_ms: float | None = None
    """Part of it spent on the host's work."""
    device_ms: float | None = None
    """Part of it spent on the device's work."""
    peak_gib: float | None = None
    """Peak memory of any repeat."""
    rows_per_device: int | None = None
    """Sequences in a micro-batch."""
    accumulate: int | None = None
    """Micro-batches per step."""
    warmup_steps: int | None = None
    """Median number of steps before the measured ones."""

    @property
    def short_name(self) -> str:
        """A short form of the name, such as `batched-muon for bf16-products`."""
        return self.name.removeprefix("all, with ")

    @property
    def is_unreached(self) -> bool:
        """Whether the bench ended before its turn."""
        return self.status == "not-measured" and self.kind != "absent"


class Report(Stored):
    """The report of one bench: bench.json."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    kind: str
    """ladder, or the setting that was swept."""
    recipe: str
    """Name of the recipe."""
    config: dict[str, Any]
    """The requested configuration."""
    config_digest: str
    """Its SHA-256."""
    machine: str
    """Processor, memory, GPUs."""
    environment: dict[str, str | int]
    """Device, threads, versions."""
    commit: str | None
    """Commit of flatout in a checkout, with + if files were changed."""
    began: str
    """Date and time of the start."""
    wall_s: float
    """Seconds of the whole bench."""
    minutes: float | None
    """The time limit."""
    repeats: int
    """Rounds that were started."""
    complete: bool
    """False after an interruption."""
    ended_by_signal: int | None = None
    """The signal that interrupted it, if any."""
    notes: list[str]
    """Notes for the reader on how the figures were measured."""
    rows: list[Row]
    """The table."""
    total_speedup: Figure | None
    """The full set compared with the baseline."""
    trials: list[Trial]
    """All measurements."""


def commit_of_package() -> str | None:
    """Return the commit of the checkout, with + if files were changed; None without a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-c", "core.fsmonitor=false", "-C", str(PACKAGE_DIR), *words],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if git("status", "--porcelain", "--", ".") else "") if commit else None


def results_dir(config: RunConfig, kind: str, out: Path | None) -> Path:
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST; it is not created.

    Raises: ConfigError when `out` contains other files, or the bench of another configuration or
            kind.
    """
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{out} is a file.", fix="Choose a directory with --out DIR.")
        if out.is_dir() and any(out.iterdir()):
            require_same(out, config, kind)
        return out
    stem = run_name(config) + ("" if kind == "ladder" else f"-{kind}")
    taken = {path.name for path in BENCHES.iterdir()} if BENCHES.is_dir() else set()
    numbers = [
        int(found[1])
        for name in taken
        if (found := re.fullmatch(rf"{re.escape(stem)}-(\d+)", name))
    ]
    return BENCHES / (stem if stem not in taken else f"{stem}-{max(numbers, default=1) + 1}")


def require_same(out: Path, config: RunConfig, kind: str) -> None:
    """Check that `out` has a bench of this configuration and kind, which may be replaced.

    Raises: ConfigError when it has another bench, or something else.
    """
    existing = (
        label(read(out))
        if (out / JSON).exists()
        else next(read_lines(out / TRIALS), {}).get("bench")
    )
    if not (
        isinstance(existing, list)
        and len(existing) == 3
        and all(isinstance(part, str) for part in existing)
    ):
        raise ConfigError(
            f"{out} contains other files, but no bench.",
            fix="Choose a new directory with --out DIR.",
        )
    requested = [config.name, kind, config.digest()]
    if existing[1:] != requested[1:]:
        one, other = (
            f"{name} ({what}, configuration {digest[:8]})"
            for name, what, digest in (existing, requested)
        )
        raise ConfigError(
            f"{out} contains the bench of {one}; this one is of {other}.",
            fix="Choose another directory with --out DIR.",
        )


def label(report: Report) -> list[str]:
    """Return the label of a bench: recipe name, kind and digest of the configuration."""
    return [report.recipe, report.kind, report.config_digest]


def claim(out: Path) -> None:
    """Create the results directory before anything is measured.

    Raises: ConfigError when it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write {out}: {error.strerror or error}.",
            fix="Choose a writable directory with --out DIR.",
        ) from error


def keep(trial: Trial, bench: list[str], began: str, out: Path) -> None:
    """Append a finished trial to trials.jsonl, so that it survives if this process is killed.

    The file is append-only; the label `bench` and `began` identify the bench of each line.

    Raises: RunFailed when it cannot be written.
    """
    try:
        append_line(out / TRIALS, {"bench": bench, "began": began, **trial.model_dump(mode="json")})
        sync(out / TRIALS)
        sync(out)
    except OSError as error:
        raise RunFailed(
            f"Cannot write {out / TRIALS}: {error.strerror or error}.",
            fix=unless_broken(error, "Free some space, and run it again."),
        ) from error


def is_less(report: Report, out: Path) -> bool:
    """Return whether an interrupted report has fewer trials than the one already in `out`."""
    return (
        not report.complete and (out / JSON).exists() and len(read(out).trials) > len(report.trials)
    )


def write(report: Report, table: str, picture: str | None, out: Path) -> None:
    """Write bench.json, table.md and, if there is a picture, bench.svg, each atomically."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / JSON, json.dumps(report.model_dump(mode="json"), indent=1) + "\n")
    write_text(out / TABLE, table)
    if picture is not None:
        write_text(out / PICTURE, picture)


def read(out: Path) -> Report:
    """Return the report in a results directory.

    Raises: ConfigError when there is none, or a newer version of flatout wrote it.
    """
    path = out / JSON
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read {path} as a bench.", fix="Name a directory that `flatout bench` wrote."
        ) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} was written by a newer version of flatout.", fix="Install that version."
        )
    try:
        return Report.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a bench report that this version of flatout can read.",
            fix="Name a directory that `flatout bench` wrote.",
        ) from error
