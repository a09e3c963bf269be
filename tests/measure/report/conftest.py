"""Run directories as training writes them, in a few lines each."""

import json
from textwrap import indent

import pytest

from flatout.measure.report.curves import read_runs

CONFIG = "name: tiny\nmodel: {vocab_size: 257}\ndata: {path: data/book}\ntrain: {steps: 40}\n"

STARTED = [{"event": "start", "step": 0}]


def record(step, **figures):
    """A line of metrics.jsonl."""
    place = {"step": step, "tokens": 100 * step, "wall_s": 0.5 * step, "elapsed_s": 0.5 * step}
    return place | {name.replace("__", "/"): value for name, value in figures.items()}


def training(step):
    """A line with the metrics of a CPU."""
    return record(
        step,
        train__loss=4.0 / step,
        train__lr=1e-3,
        train__grad_norm=1.0,
        perf__tokens_per_s=1000.0 + step,
        perf__step_ms=10.0,
        perf__device_ms=8.0,
        perf__host_ms=1.0,
        perf__data_wait_ms=1.0,
        mem__peak_gib=0.5,
    )


@pytest.fixture
def make_run(tmp_path):
    """Write a run directory: `make_run("name", records=..., events=..., summary=...)`."""

    def make(name="run", *, records=None, events=STARTED, summary=None, config=CONFIG):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if records is None:
            records = [training(step) for step in range(1, 21)]
        if config is not None:
            section = indent(config, "  ")
            text = f"requested:\n{section}\nresolved:\n{section}\n...\n"
            (folder / "config.yaml").write_text(text)
        if summary is not None:
            events = [*events, {"event": "end", **summary}]
        for file, lines in (("metrics.jsonl", records), ("events.jsonl", events)):
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


@pytest.fixture
def read():
    """Read run directories as a report does."""

    def read(*folders):
        return read_runs(list(folders))

    return read
