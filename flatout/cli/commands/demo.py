"""Try it: prepare, train, evaluate and sample in a few minutes."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import TrainResult, train
from flatout.cli.recommended import MAX_EPOCHS
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.data.sources.encodings import OR_SKIP
from flatout.data.sources.local import missing
from flatout.data.store.shards import Dataset
from flatout.errors import (
    CheckpointError,
    DataError,
    OutputInUse,
    RunFailed,
    TooLittleText,
    UntrustedCode,
    in_shell,
)
from flatout.hardware.machine import pick_device, probe
from flatout.progress import SILENT, Progress
from flatout.storage.recognised import recognise, require_local
from flatout.training.metrics.observers import Observer, Quiet
from flatout.training.run_dir.layout import read_summary, trusted_config

LARGE_TEXT = 1_500_000
"""Bytes from which a text gets a trained vocabulary. A shorter one is tokenised by character."""
MAX_TEXT = {"cpu": 16_000_000, "cuda": 200_000_000}
"""Maximum bytes that a demo reads from a user's file: more than it can train on."""
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
LONGEST_TIMING_S = 120.0
"""Longest trial for the time of a step."""
TIMING_S = 2.0
"""Seconds of warm-up, and of the timed steps that determine the length of the run."""
MIN_CHECKED = 5
"""Fewest steps from whose time the length is determined again: a twentieth of all steps."""
APART = 1.25
"""Ratio of the two lengths from which the demo starts again with the second one."""
MORE_TEXT = "Use a text of a few kilobytes or more."


class DemoResult(TrainResult):
    """The summary of a demo's run."""

    def summary(self) -> str:
        """Return a sample, the loss curve and the metrics of the run, and what to try next."""
        from flatout.cli.terminal import closing
        from flatout.storage.streams import columns

        return closing(
            self.model_dump(),
            next_steps=f"Try next:\n{_next_steps(in_shell(self.run), columns())}",
        )


def _next_steps(run: str, width: int) -> str:
    """Return commands to try next, ready to copy: each beside its purpose, or below it if long."""
    steps = {
        "more samples": f"flatout generate {run} --num-samples 3",
        "its scores": f"flatout eval {run}",
        "all curves": f"flatout report {run}",
        "your own text": "flatout prepare FILE --out DATA; flatout inspect DATA",
    }
    lines = [f"  {what:<22}{command}" for what, command in steps.items()]
    if max(map(len, lines)) > width:  # the terminal wraps longer ones, which can then be copied
        lines = [f"  {what}\n    {command}" for what, command in steps.items()]
    return "\n".join(lines)


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
    file = Path(file) if file else None
    if file is not None:
        require_text_file(file)
    device, _ = pick_device("auto", probe())
    subject = subject_of(file, device)
    config, is_finished = _stored_config(subject.run), read_summary(subject.run) is not None
    watching = [*observers]
    if config is None:
        config = _new_config(subject, device, minutes, progress)
        fit = partial(with_length, config, Dataset.open(subject.data), minutes=minutes)
        watching.append(LengthCheck(fit))
    elif is_finished:
        progress.say(f"{subject.run} is finished. See below. Delete it to train again.")
    else:
        progress.say(f"Resuming {subject.run}.")
    try:
        result = train(config, run=subject.run, observers=watching, progress=progress)
    except OtherLength as found:
        (config,) = found.args
        for observer in observers:
            observer.on_event({"event": "stop"})
        progress.say(
            "The first steps took another time than expected. Starting again with "
            f"{config.train.steps:,} steps."
        )
        shutil.rmtree(subject.run)
        result = train(config, run=subject.run, observers=observers, progress=progress)
    return DemoResult(**dict(result))


def _stored_config(run: Path) -> RunConfig | None:
    """Return the configuration of a demo that was started here, None when there is none.

    Raises: CheckpointError, also when it names code to import.
    """
    try:
        return trusted_config(run)
    except UntrustedCode as error:
        raise CheckpointError(
            error.what,
            fix=f"A demo uses only flatout's own code, so {run} is not a demo: move it away.",
        ) from error


class OtherLength(Exception):
    """Ends a demo after its first steps, for one with this configuration, which fits the time."""


class LengthCheck(Quiet):
    """Checks the length of a demo once, by the time of its first steps after the warm-up."""

    def __init__(self, fit: Callable[[float], RunConfig]) -> None:
        self._fit, self._began_s = fit, 0.0

    def on_tick(self, step: int, last_step: int) -> None:
        """Raise OtherLength if another number of steps fits the time."""
        counted = max(last_step // 20, MIN_CHECKED)
        if step == 1:  # it includes the warm-up
            self._began_s = time.monotonic()
        elif step == 1 + counted:
            config = self._fit((time.monotonic() - self._began_s) / counted)
            if not 1 / APART < (config.train.steps or last_step) / last_step < APART:
                raise OtherLength(config)


def require_text_file(file: Path) -> None:
    """Check that the file exists, is a regular file of text, and is not empty.

    Raises: DataError.
    """
    if str(file).startswith(("http:/", "https:/")):
        url = str(file).replace(":/", "://", 1)
        raise DataError(
            f"{url} is a URL. `demo` takes one text file.",
            fix=f"Download it with `curl -LO {in_shell(url)}`. `flatout prepare` reads URLs.",
        )
    require_local(file, error=DataError)
    known = recognise(file)
    if known is not None:
        raise DataError(known.instead_of("text"), fix=known.fix)
    if file.is_dir():
        raise DataError(
            f"{file} is a directory. `demo` takes one text file.",
            fix="Name one file in it. `flatout prepare` takes directories.",
        )
    if not file.exists():
        raise missing(file)
    if not file.is_file():
        raise DataError(
            f"{file} is not a regular file.",
            fix="Name one text file. `flatout prepare` takes directories and several files.",
        )
    if not file.stat().st_size:
        raise DataError(f"{file} is empty.", fix=MORE_TEXT)


def subject_of(file: Path | None, device: str) -> Subject:
    """Return the subject of a user's text, or of this Python's standard library without one.

    The directories of a text are named after file and content.
    """
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
        raise _without_options(error) from error
    dataset = Dataset.open(subject.data)
    config = fit_text(
        load_config(subject.recipe, [f"data.path={subject.data}", f"name={subject.run.name}"]),
        dataset,
    )
    with progress.task("Timing a few steps, to see how many fit"):
        step_s = seconds_per_step(config.with_values({"train.device": device}))
    return with_length(config, dataset, step_s, minutes)


def _without_options(error: DataError) -> DataError:
    """Return the error with a fix that demo supports: it lacks the options of prepare."""
    if isinstance(error, TooLittleText):
        return DataError(error.what, fix=MORE_TEXT)
    if isinstance(error, OutputInUse):
        return DataError(error.what, fix="Remove that directory, or move it away.")
    fix = error.fix.replace(OR_SKIP, "")
    return DataError(error.what, fix=f"Use `flatout prepare`: {fix}" if "--" in fix else fix)


def fit_text(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the configuration with sequences and steps that a short text can fill.

    Raises: DataError when there is too little text.
    """
    tokens = dataset.split("train").num_tokens
    if tokens < MIN_TOKENS:
        raise DataError(f"{dataset.path} has only {tokens} training tokens.", fix=MORE_TEXT)
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


def seconds_per_step(config: RunConfig) -> float:
    """Return the time of one optimizer step of this model, measured on a run that is discarded."""
    from flatout.measure.scripts.request import Timing
    from flatout.measure.trial import try_recipe

    with tempfile.TemporaryDirectory() as folder:
        timing = Timing(seconds=TIMING_S, warmup_s=TIMING_S)
        result = try_recipe(config, timing, LONGEST_TIMING_S, Path(folder) / "run")
        if not result.is_ok:
            raise RunFailed(f"It cannot train: {result.reason}", fix="Run `flatout diagnose`.")
        return result.step_ms / 1e3


COMMAND = Command(demo, example="flatout demo book.txt", writes_files=True, is_timed=True)
