"""Try it: prepare, train, evaluate and sample in a few minutes."""

from __future__ import annotations

import hashlib
import math
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import TrainResult, train
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.data.sources.listing import missing
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, in_shell
from flatout.hardware.machine import pick_device, probe
from flatout.progress import SILENT, Progress
from flatout.storage.recognised import require_local
from flatout.training.metrics.observers import Observer, Quiet
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import RUNS
from flatout.training.run_dir.runlog import RunLog

MINUTES = 2.0
LARGE_TEXT = 1_500_000
"""Bytes from which a text gets a trained vocabulary. A shorter one is tokenised by character."""
MAX_TEXT = {"cpu": 16_000_000, "cuda": 200_000_000}
"""Maximum bytes that a demo reads from a user's file: more than it can train on."""
MAX_EPOCHS = 15
"""Passes over the text after which more training only memorises it."""
MIN_TOKENS = 16
"""Minimum number of training tokens."""
MIN_STEPS = 20
TRAINING_SHARE = 0.85
"""Share of the time for steps. The rest is for evaluations, saves and samples."""
SAMPLES = 3
"""Number of samples in a demo, the last at the end."""
EVALUATIONS = 5
"""Number of evaluations in a demo, the last at the end."""
WARM_UP, TIMED, TIMED_S = 2, 20, 3.0
"""Steps before the timed ones, and of these the number and the seconds after which they end."""


class DemoResult(TrainResult):
    """The summary of a demo's run."""

    @property
    def notes(self) -> list[str]:
        """What to try next."""
        run = in_shell(self.run)
        return [
            f"More samples: `flatout generate {run} --num-samples 3`",
            f"All curves: `flatout report {run}`",
            "Your own text: `flatout prepare FILE --out DATA`, then `flatout inspect DATA`",
        ]


@checked
def demo(
    file: Annotated[
        Path | str | None, Argument("A text file (default: Python's own standard library).")
    ] = None,
    minutes: Annotated[
        float | None, Option("Approximate training time (default: 2).", min=0.001)
    ] = None,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> DemoResult:
    """Try it: prepare, train, evaluate and sample in a few minutes, offline, on any machine.

    A second call resumes an interrupted demo, or shows the result of a finished one.

    Raises: DataError when FILE cannot be read; Stopped when a signal ended the run after a save.
    """
    name, recipe, tokenizer, split = "demo", "demo", "train:4096", "hash 0.02"
    source, data = "python_stdlib", f"python-{platform.python_version()}"
    if file is not None:
        require_local(file, error=DataError)
        if not Path(file).exists():
            raise missing(Path(file))
        if not Path(file).is_file():
            raise DataError(
                f"{file} is not a file. `demo` takes one text file.",
                fix="Name one text file. `flatout prepare` takes directories and several files.",
            )
        source, size = str(file), Path(file).stat().st_size
        # A text that changed has a dataset and a run of its own.
        with Path(file).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()[:8]
        name = data = f"demo-{Path(file).stem}-{digest}"
        split = "tail 0.02"
        if size < LARGE_TEXT:
            recipe, tokenizer, split = "demo-char", "char", "tail 0.1"
    device, _ = pick_device("auto", probe())
    if recipe == "demo" and device.startswith("cuda"):
        recipe = "demo-gpu"
    run, dataset = RUNS / name, Path("data") / data
    config, how_long = trusted_config(run), f" for {minutes:g} minutes" if minutes else ""
    if config is None:
        limit = MAX_TEXT[device.partition(":")[0]]
        try:
            prepare(
                [source],
                dataset,
                tokenizer=tokenizer,
                split=split,
                max_bytes=limit,
                progress=progress,
            )
        except DataError as error:
            if "--" not in error.fix:
                raise
            raise DataError(error.what, fix=f"With `flatout prepare`: {error.fix}") from error
        config = load_config(recipe, [f"data.path={dataset}", f"name={name}"])
        config = fitted(config, Dataset.open(dataset), device, minutes or MINUTES, progress)
    elif RunLog(run).summary is not None:
        progress.say(f"{run} is finished. See below. Delete it to train again{how_long}.")
    else:
        progress.say(f"Resuming {run}.{how_long and ' Delete it to train' + how_long + '.'}")
    return DemoResult(**dict(train(config, run=run, observers=observers, progress=progress)))


def fitted(
    config: RunConfig, dataset: Dataset, device: str, minutes: float, progress: Progress
) -> RunConfig:
    """Return the configuration with sequences that the text fills, and the steps for `minutes`.

    Raises: DataError when there is too little text.
    """
    tokens, seq_len = dataset.split("train").num_tokens, config.data.seq_len
    if tokens < MIN_TOKENS:
        raise DataError(
            f"{dataset.path} has only {tokens} training tokens.",
            fix="Use a text of a few kilobytes or more.",
        )
    rows = (config.batch.tokens_per_step or 0) // seq_len
    while seq_len > 8 and tokens < 8 * seq_len:
        seq_len //= 2
    config = config.with_values({"data.seq_len": seq_len, "batch.tokens_per_step": rows * seq_len})
    with progress.task("Timing a few steps, to see how many fit"):
        step_s = seconds_per_step(config.with_values({"train.device": device}))
    most = MAX_EPOCHS * tokens // (rows * seq_len)
    steps = max(min(int(TRAINING_SHARE * minutes * 60 / step_s), most), MIN_STEPS)
    return config.with_values(
        {
            "train.steps": steps,
            "train.eval_every": math.ceil(steps / EVALUATIONS),
            "train.sample_every": math.ceil(steps / SAMPLES),
            "log.every": max(min(config.log.every, steps // 20), 1),
        }
    )


class Timed(Exception):
    """Ends a run whose steps were timed."""


class FirstSteps(Quiet):
    """Notes when each step of a run ends, and ends the run after enough of them."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_tick(self, step: int, last_step: int) -> None:
        """Raise Timed after enough steps."""
        self.ends_s.append(time.monotonic())
        timed = self.ends_s[WARM_UP:]
        if len(timed) > TIMED or (len(timed) > 1 and timed[-1] - timed[0] >= TIMED_S):
            raise Timed


def seconds_per_step(config: RunConfig) -> float:
    """Return the time of an optimizer step, measured on the first steps of a run without files."""
    timer = FirstSteps()
    config = config.with_values({"train.steps": 1000, "train.eval_every": 0, "log.to": []})
    with tempfile.TemporaryDirectory() as folder, suppress(Timed):
        train(config, run=Path(folder) / "run", observers=[timer])
    first, *_, last = timer.ends_s[WARM_UP:]
    return (last - first) / (len(timer.ends_s) - WARM_UP - 1)


COMMAND = Command(demo, example="flatout demo book.txt", writes_files=True, is_timed=True)
