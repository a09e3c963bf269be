"""The tables about results: what each run reached, where its time went, and how runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flatout.measure.report.reading import RunData
from flatout.measure.report.values import UNKNOWN, escape, number, plain, table, time

Cell = Callable[[RunData], str]


def results(runs: Sequence[RunData]) -> str:
    """Return the results: a tile for each of a single run, a column for each of several.

    What no run has is left out.
    """
    rows = [(label, *(cell(run) for run in runs)) for label, cell in ROWS]
    known = [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]
    if len(runs) == 1:
        tiles = (f"<div><dt>{label}</dt><dd>{cell}</dd></div>" for label, cell in known)
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    return table(["", *(escape(run.name) for run in runs)], known, kind="figures")


def time_of_steps(runs: Sequence[RunData]) -> str:
    """Return where the time of a step went, on average over the records; empty when unknown."""
    parts = {
        "step": "perf/step_ms",
        "device": "perf/device_ms",
        "host": "perf/host_ms",
        "waiting for data": "perf/data_wait_ms",
    }
    rows = []
    for run in runs:
        means = {label: _mean(run, figure) for label, figure in parts.items()}
        if means["step"]:
            rows.append(
                (escape(run.name), *(_with_share(mean, means["step"]) for mean in means.values()))
            )
    if not rows:
        return ""
    note = (
        "<p>Means over the records. On a GPU, device and host work at the same time, so their "
        "parts can add up to more than the step.</p>"
    )
    return table(["", *parts], rows, kind="figures") + note


def differences(runs: Sequence[RunData]) -> str:
    """Return the settings in which the runs differ, and what that means for their losses."""
    names = list(dict.fromkeys(key for run in runs for key in run.settings))
    rows = [
        (escape(name), *(escape(_setting(run, name)) for run in runs))
        for name in names
        if len({_setting(run, name) for run in runs}) > 1
    ]
    shown = (
        table(["", *(escape(run.name) for run in runs)], rows)
        if rows
        else "<p>The settings of these runs are the same.</p>"
    )
    return "".join(f'<p class="note">{line}</p>' for line in comparability(runs)) + shown


def comparability(runs: Sequence[RunData]) -> Iterator[str]:
    """Yield why the losses of these runs cannot be compared directly."""
    sizes = {run.settings.get("model.vocab_size") for run in runs} - {None}
    if len(sizes) > 1:
        shown = ", ".join(sorted(map(escape, map(plain, sizes))))
        yield (
            f"The runs have vocabularies of different sizes ({shown}): a loss per token means "
            "something else in each. Compare bits per byte."
        )
    data = {_data(run) for run in runs if run.settings}
    if len(data) > 1:
        shown = ", ".join(sorted(map(escape, data)))
        yield f"The runs were trained and evaluated on different datasets ({shown})."


def settings(runs: Sequence[RunData]) -> str:
    """Return every setting of every run."""
    names = list(dict.fromkeys(key for run in runs for key in run.settings))
    if not names:
        return "<p>These directories have no config.yaml.</p>"
    rows = [(escape(name), *(escape(_setting(run, name)) for run in runs)) for name in names]
    return table(["", *(escape(run.name) for run in runs)], rows)


def _setting(run: RunData, name: str) -> str:
    return plain(run.settings.get(name))


def _data(run: RunData) -> str:
    return plain(run.settings.get("data.path") or run.settings.get("data.mix"))


def _values(run: RunData, figure: str) -> Any:
    """Return the finite values of a figure."""
    curve = run.curves.get(figure)
    return np.array([]) if curve is None else curve.value[np.isfinite(curve.value)]


def _mean(run: RunData, figure: str) -> float | None:
    values = _values(run, figure)
    return float(values.mean()) if len(values) else None


def _with_share(mean: float | None, step: float | None) -> str:
    if mean is None or not step:
        return UNKNOWN
    share = "" if mean == step else f" ({mean / step:.0%})"
    return f"{number(mean)} ms{share}"


def _reached(name: str, form: str, *, figure: str | None = None, reduce: Any = None) -> Cell:
    """Return a cell: the field of the summary; of an unfinished run, what its records say."""

    def cell(run: RunData) -> str:
        known = number(run.summary.get(name), form)
        if known != UNKNOWN or figure is None:
            return known
        values = _values(run, figure)
        return number(float(reduce(values)), form) if len(values) else UNKNOWN

    return cell


def _position(name: str, form: Callable[[object], str]) -> Cell:
    """Return a cell: a position of the last record."""

    def cell(run: RunData) -> str:
        known = run.longest
        return UNKNOWN if known is None else form(float(getattr(known, name)[-1]))

    return cell


def _last(values: Any) -> Any:
    return values[-1]


def _whole(value: object) -> str:
    return number(value, ",.0f")


def _steps(run: RunData) -> str:
    total = run.settings.get("train.steps")
    done = _position("step", _whole)(run)
    return f"{done} of {total:,}" if isinstance(total, int) and run.state != "finished" else done


def _events(*kinds: str) -> Cell:
    """Return a cell: how many events of these kinds there are, if any."""

    def cell(run: RunData) -> str:
        count = sum(event.get("event") in kinds for event in run.events)
        return f"{count:,}" if count else UNKNOWN

    return cell


def _mfu(run: RunData) -> str:
    known = _reached("mfu", ".1%", figure="perf/mfu", reduce=np.median)(run)
    source = run.summary.get("mfu_of")
    return f"{known} <small>{escape(source)}</small>" if source else known


ROWS: tuple[tuple[str, Cell], ...] = (
    ("state", lambda run: escape(run.state)),
    ("steps", _steps),
    ("tokens", _position("tokens", _whole)),
    ("training loss", _reached("train_loss", ".4f", figure="train/loss", reduce=_last)),
    ("validation loss", _reached("val_loss", ".4f", figure="val/loss", reduce=_last)),
    ("best validation loss", _reached("best_val_loss", ".4f", figure="val/loss", reduce=np.min)),
    ("bits per byte", _reached("bits_per_byte", ".4f")),
    (
        "tokens/s",
        _reached("tokens_per_s", ",.0f", figure="perf/tokens_per_s", reduce=np.median),
    ),
    ("model FLOPs utilisation", _mfu),
    ("peak memory, GiB", _reached("peak_gib", ".2f", figure="mem/peak_gib", reduce=np.max)),
    ("time of compiling", lambda run: time(run.summary.get("compile_s"))),
    ("time in total", _position("elapsed_s", time)),
    ("resumed", _events("resume")),
    ("skipped steps", _events("skip", "bad_step")),
    ("recompilations", _events("recompiled")),
    ("alarms", _events("alarm")),
)
"""The rows of the table of results: a label, and the cell of a run."""
