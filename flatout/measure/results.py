"""What a bench writes down: every trial's figures, and what they come to. bench.json holds one
`Report`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, RunFailed
from flatout.files import sync, unless_broken, write_text
from flatout.json_io import append_line, read_lines
from flatout.measure.spec import TrialResult
from flatout.measure.statistics import Figure
from flatout.recognised import read_regular
from flatout.registry import PACKAGE_DIR
from flatout.training.run_dir.layout import run_name

FORMAT_VERSION = 2
JSON, TABLE, PICTURE, TRIALS = "bench.json", "table.md", "bench.svg", "trials.jsonl"
BENCHES = Path("bench")
"""Where results lie unless --out says otherwise."""
TIME_WAS_UP, INTERRUPTED = "the time was up", "it was interrupted"
"""Why a point had no trial."""


class Written(BaseModel):
    """Base of what bench.json holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Trial(Written):
    """One measurement in one process."""

    point: str
    """Which set of speedups, or which size."""
    round: int
    """Counted from 0; every point is measured once a round."""
    seed: int
    """train.seed, the same for all points of a round."""
    result: TrialResult
    """What came of it."""
    deterministic: bool = False
    """Whether it ran with train.deterministic=true to judge an exact promise: its losses count, and
    no figure of it is in a row.
    """


class Row(Written):
    """One line of the table: a rung of the ladder, a size of a sweep, or what could not be
    measured.
    """

    name: str
    """What the line is about."""
    kind: str
    """baseline, added, left-out, put-in, point; absent: never measured."""
    speedup: str | None = None
    """The speedup it is about."""
    speedups: list[str] = []
    """All that were on."""
    replaced: list[str] = []
    """Speedups of the full set that gave way, because this one takes their place."""
    against: str | None = None
    """The line it is compared with."""
    status: str = "ok"
    """ok, out-of-memory, failed, timed-out, not-measured."""
    reason: str | None = None
    """Why it is not ok, or has fewer repeats than others."""
    repeats: int = 0
    """Trials that gave figures."""
    tokens_per_s: Figure | None = None
    """Tokens of a measured second."""
    gain: Figure | None = None
    """How many times faster this speedup makes it, from the paired repeats; of `left-out`, faster
    than without it.
    """
    verdict: str = ""
    """The gain in words."""
    loss_difference: float | None = None
    """Largest relative difference of a loss from that of `against` on the same batches."""
    compared_losses: int | None = None
    """First steps whose losses were compared."""
    deterministic: bool = False
    """Whether those are losses of runs with train.deterministic=true, because those of the timed
    runs do not repeat to the bit.
    """
    promise: str | None = None
    """exact, rounding or statistical."""
    promise_kept: bool | None = None
    """null: not judged."""
    promise_reason: str | None = None
    """How the promise was judged, or why not."""
    step_ms: float | None = None
    """Median of the repeats' mean step."""
    data_ms: float | None = None
    """Of it, waiting for data."""
    host_ms: float | None = None
    """Of it, the host's own."""
    device_ms: float | None = None
    """Of it, the device's work."""
    peak_gib: float | None = None
    """Most memory of any repeat."""
    rows_per_device: int | None = None
    """Windows of a micro-batch."""
    accumulate: int | None = None
    """Micro-batches of a step."""
    warmup_steps: int | None = None
    """Median of the steps before the measured ones."""

    @property
    def short_name(self) -> str:
        """The name for where there is little room: `batched-muon for bf16-products`."""
        return self.name.removeprefix("all, with ")

    @property
    def is_unreached(self) -> bool:
        """Whether it could have been measured, and its turn never came."""
        return self.status == "not-measured" and self.kind != "absent"


class Report(Written):
    """One bench: bench.json."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    kind: str
    """ladder, or what was swept."""
    recipe: str
    """Its name."""
    config: dict[str, Any]
    """The configuration as it was asked for."""
    config_digest: str
    """SHA-256 of it."""
    machine: str
    """Processor, memory, GPUs."""
    environment: dict[str, str | int]
    """Device, threads, versions."""
    commit: str | None
    """Of flatout, where it runs from a checkout; with + when that was changed."""
    began: str
    """Date and time."""
    wall_s: float
    """Seconds of the whole bench."""
    minutes: float | None
    """The limit that was set."""
    repeats: int
    """Rounds that were begun."""
    complete: bool
    """Whether it was not interrupted."""
    ended_by_signal: int | None = None
    """The signal that interrupted it; null: none."""
    notes: list[str]
    """What a reader of the figures has to know."""
    rows: list[Row]
    """The table."""
    total_speedup: Figure | None
    """The full set against the baseline."""
    trials: list[Trial]
    """Every measurement."""


def commit_of_package() -> str | None:
    """Return the commit that the package runs from, with + when files were changed since; None when
    it is not from a checkout.
    """

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


def place_for(config: RunConfig, kind: str, out: Path | None) -> Path:
    """Return the folder of a bench's results: `out`, or the next free bench/RECIPE-DIGEST. Nothing
    is made yet.

    Raises: ConfigError when `out` holds something else: other files, or the bench of another
            configuration or of another kind.
    """
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{out} is a file.", fix="Choose a folder with --out DIR.")
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
    """Do nothing when a bench of `config` and `kind` may take the place of the one that `out`
    holds, ended or killed.

    Raises: ConfigError when that is another one, or something else.
    """
    held = (
        label(read(out))
        if (out / JSON).exists()
        else next(read_lines(out / TRIALS), {}).get("bench")
    )
    if not (
        isinstance(held, list) and len(held) == 3 and all(isinstance(part, str) for part in held)
    ):
        raise ConfigError(
            f"{out} holds other files, and no bench.", fix="Choose a new folder with --out DIR."
        )
    asked = [config.name, kind, config.digest()]
    if held[1:] != asked[1:]:
        one, other = (
            f"{name} ({what}, configuration {digest[:8]})" for name, what, digest in (held, asked)
        )
        raise ConfigError(
            f"{out} holds the bench of {one}; this one is of {other}.",
            fix="Choose another folder with --out DIR.",
        )


def label(report: Report) -> list[str]:
    """Return which bench a report is of: the recipe's name, the kind, the configuration's digest."""
    return [report.recipe, report.kind, report.config_digest]


def claim(place: Path) -> None:
    """Make the folder of the results, before anything is measured.

    Raises: ConfigError when it cannot be made or written.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write {place}: {error.strerror or error}.",
            fix="Choose a folder that you may write with --out DIR.",
        ) from error


def keep(trial: Trial, bench: Sequence[str], began: str, place: Path) -> None:
    """Add a trial that has just ended to trials.jsonl, so that nothing that happens to this process
    loses it.

    The file only grows: `bench`, its label, and `began` say which bench a line is of.

    Raises: RunFailed when the disk refuses.
    """
    try:
        append_line(
            place / TRIALS, {"bench": list(bench), "began": began, **trial.model_dump(mode="json")}
        )
        sync(place / TRIALS)
        sync(place)
    except OSError as error:
        raise RunFailed(
            f"Cannot write {place / TRIALS}: {error.strerror or error}.",
            fix=unless_broken(error, "Make room, and run it again."),
        ) from error


def is_less(report: Report, place: Path) -> bool:
    """Say whether the folder holds more trials of this bench than a report that was interrupted,
    which then does not take its place.
    """
    return (
        not report.complete
        and (place / JSON).exists()
        and len(read(place).trials) > len(report.trials)
    )


def write(report: Report, table: str, picture: str, place: Path) -> None:
    """Write bench.json, table.md and bench.svg, each whole or not at all."""
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / JSON, json.dumps(report.model_dump(mode="json"), indent=1) + "\n")
    write_text(place / TABLE, table)
    write_text(place / PICTURE, picture)


def read(place: Path) -> Report:
    """Return the report in a bench's folder.

    Raises: ConfigError when there is none, or it was written by a newer flatout.
    """
    path = place / JSON
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read {path} as a bench.", fix="Name a folder that `flatout bench` wrote."
        ) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(f"{path} was written by a newer flatout.", fix="Install that one.")
    try:
        return Report.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is no bench that this flatout can read.",
            fix="Name a folder that `flatout bench` wrote.",
        ) from error
