"""Try it: prepare, train, evaluate and sample in a few minutes."""

from __future__ import annotations

import hashlib
import math
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import TrainResult, train
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.data.sources.local import missing
from flatout.data.store.shards import Dataset
from flatout.display import value_lines
from flatout.errors import CheckpointError, DataError, UntrustedCode, in_shell
from flatout.hardware.machine import pick_device, probe
from flatout.progress import SILENT, Progress
from flatout.storage.recognised import require_local
from flatout.training.metrics.observers import Observer, Quiet
from flatout.training.run_dir.layout import read_summary, trusted_config

LARGE_TEXT = 1_500_000
"""Bytes from which a text gets a trained vocabulary. A shorter one is tokenised by character."""
MAX_TEXT = {"cpu": 16_000_000, "cuda": 200_000_000}
"""Maximum bytes that a demo reads from a user's file: more than it can train on."""
MAX_EPOCHS = 15
"""Passes over the text after which more training only memorises it."""
MIN_TOKENS = 16
"""Minimum number of training tokens."""
MIN_STEPS = 20
TRAINING_SHARE = 0.95
"""Share of the time for steps and evaluations. The rest is for saves and samples."""
SAMPLES = 3
"""Number of samples in a demo, the last at the end."""
EVALUATIONS = 5
"""Number of evaluations in a demo, the last at the end."""
FORWARD_SHARE = 0.4
"""Approximate share of a training step's time that evaluating the same number of tokens takes."""
WARM_UP, TIMED, TIMED_S = 3, 20, 3.0
"""Steps before the timed ones, and of these the number and the seconds after which they end."""


class DemoResult(TrainResult):
    """The summary of a demo's run."""

    def summary(self) -> str:
        """Return a sample and the metrics of the run, and what to try next."""
        from flatout.cli.terminal import closing
        from flatout.storage.streams import columns

        run = in_shell(self.run)
        steps = [
            ("  more samples", f"flatout generate {run} --num-samples 3"),
            ("  its scores", f"flatout eval {run}"),
            ("  all curves", f"flatout report {run}"),
            ("  your own text", "flatout prepare FILE --out DATA; flatout inspect DATA"),
        ]
        lines = value_lines(steps, columns())
        return closing(self.model_dump(), next_steps="\n".join(["Try next:", *lines]))


@dataclass(frozen=True)
class Subject:
    """The text of a demo, and the paths of its dataset and its run."""

    source: str
    tokenizer: str
    split: str
    data: Path
    run: Path
    recipe: str


@checked
def demo(
    file: Annotated[
        Path | str | None, Argument("A text file (default: Python's own standard library).")
    ] = None,
    minutes: Annotated[float, Option("Approximate training time.", min=0.001)] = 2.0,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> DemoResult:
    """Try it: prepare, train, evaluate and sample in a few minutes, offline, on any machine.

    A second call resumes an interrupted demo, or shows the result of a finished one.

    Raises: DataError when FILE cannot be read; Stopped when a signal ended the run after a save.
    """
    if file is not None:
        require_local(file, error=DataError)
        if not Path(file).exists():
            raise missing(Path(file))
        if not Path(file).is_file():
            raise DataError(
                f"{file} is not a file. `demo` takes one text file.",
                fix="Name one text file. `flatout prepare` takes directories and several files.",
            )
    device, _ = pick_device("auto", probe())
    subject = subject_of(Path(file) if file else None, device)
    try:
        config = trusted_config(subject.run)
    except UntrustedCode as error:
        raise CheckpointError(
            error.what,
            fix=f"A demo uses only flatout's own code, so {subject.run} is not a demo: move it "
            "away.",
        ) from error
    if config is None:
        config = _new_config(subject, device, minutes, progress)
    elif read_summary(subject.run) is not None:
        progress.say(f"{subject.run} is finished. See below. Delete it to train again.")
    else:
        progress.say(f"Resuming {subject.run}.")
    result = train(config, run=subject.run, observers=observers, progress=progress)
    return DemoResult(**dict(result))


def subject_of(file: Path | None, device: str) -> Subject:
    """Return what a demo trains on. A text that changed has a dataset and a run of its own."""
    source, is_large, split = "python_stdlib", True, "hash 0.02"
    data, run = f"python-{platform.python_version()}", "demo"
    if file is not None:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()[:8]
        source, is_large = str(file), file.stat().st_size >= LARGE_TEXT
        split = "tail 0.02" if is_large else "tail 0.1"
        data = run = f"demo-{file.stem}-{digest}"
    recipe = "demo-gpu" if device.startswith("cuda") else "demo"
    return Subject(
        source=source,
        tokenizer="train:4096" if is_large else "char",
        split=split,
        data=Path("data") / data,
        run=Path("runs") / run,
        recipe=recipe if is_large else "demo-char",
    )


def _new_config(subject: Subject, device: str, minutes: float, progress: Progress) -> RunConfig:
    """Prepare the text, and return a configuration that trains for about `minutes`."""
    try:
        prepare(
            [subject.source],
            str(subject.data),
            tokenizer=subject.tokenizer,
            split=subject.split,
            max_bytes=MAX_TEXT[device.partition(":")[0]],
            progress=progress,
        )
    except DataError as error:
        if "--" not in error.fix:
            raise
        raise DataError(error.what, fix=f"With `flatout prepare`: {error.fix}") from error
    dataset = Dataset.open(subject.data)
    config = fit_text(
        load_config(subject.recipe, [f"data.path={subject.data}", f"name={subject.run.name}"]),
        dataset,
    )
    with progress.task("Timing a few steps, to see how many fit"):
        step_s = seconds_per_step(config.with_values({"train.device": device}))
    return with_length(config, dataset, step_s, minutes)


def fit_text(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the configuration with sequences and steps that a short text can fill.

    Raises: DataError when there is too little text.
    """
    tokens = dataset.split("train").num_tokens
    if tokens < MIN_TOKENS:
        raise DataError(
            f"{dataset.path} has only {tokens} training tokens.",
            fix="Use a text of a few kilobytes or more.",
        )
    seq_len, rows = config.data.seq_len, (config.batch.tokens_per_step or 0) // config.data.seq_len
    while seq_len > 8 and tokens < 8 * seq_len:
        seq_len //= 2
    return config.with_values({"data.seq_len": seq_len, "batch.tokens_per_step": rows * seq_len})


def with_length(config: RunConfig, dataset: Dataset, step_s: float, minutes: float) -> RunConfig:
    """Return the configuration with as many steps as fit into `minutes`."""
    tokens_per_step = config.batch.tokens_per_step or 1
    evaluation_s = FORWARD_SHARE * step_s * dataset.split("val").num_tokens / tokens_per_step
    by_time = int((TRAINING_SHARE * minutes * 60 - EVALUATIONS * evaluation_s) / step_s)
    by_text = MAX_EPOCHS * dataset.split("train").num_tokens // tokens_per_step
    steps = max(min(by_time, by_text), MIN_STEPS)
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
    """Times the steps of a run after its warm-up, and then ends it."""

    step_s = 0.0
    """Seconds of one step."""

    def on_tick(self, step: int, last_step: int) -> None:
        """Raise Timed after enough steps."""
        now_s = time.monotonic()
        if step == WARM_UP:
            self._began_s = now_s
        elif step > WARM_UP:
            steps, passed_s = step - WARM_UP, now_s - self._began_s
            self.step_s = passed_s / steps
            if steps >= TIMED or passed_s >= TIMED_S:
                raise Timed


def seconds_per_step(config: RunConfig) -> float:
    """Return the time of an optimizer step, measured on the first steps of a run without files."""
    timer = FirstSteps()
    config = config.with_values({"train.steps": 1000, "train.eval_every": 0, "log.to": []})
    with tempfile.TemporaryDirectory() as folder, suppress(Timed):
        train(config, run=Path(folder) / "run", observers=[timer])
    return timer.step_s


COMMAND = Command(demo, example="flatout demo book.txt", writes_files=True, is_timed=True)
