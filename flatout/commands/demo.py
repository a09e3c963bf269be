"""Try it: prepare, train, evaluate and sample in a few minutes, offline, on any machine."""

from __future__ import annotations

import hashlib
import math
import platform
import re
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.commands import Command, Result
from flatout.config.schema import RunConfig, load_config
from flatout.errors import CheckpointError, ConfigError, DataError, UntrustedCode, in_shell
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise, require_local
from flatout.recommended import MOST_EPOCHS
from flatout.sources.encodings import OR_SKIP
from flatout.sources.local import missing

if TYPE_CHECKING:
    from flatout.data.store.shards import Dataset
    from flatout.hardware import Machine
    from flatout.training.metrics.observers import Observer

LARGE_TEXT = 1_500_000
"""Bytes from which a vocabulary is trained; a shorter text is read by characters."""
MOST_TEXT = {"cpu": 16_000_000, "cuda": 200_000_000}
"""Bytes of a user's file that a demo reads: more than it can train on."""
LEAST_STEPS = 20
USED_SHARE = 0.95
"""Share of the time that steps and evaluations may take; the rest is for saves and samples."""
SAMPLES = 3
"""Times a demo shows what the model writes, the last at the end."""
EVALUATIONS = 5
"""Times a demo scores the validation text while it trains, the last at the end."""
FORWARD_SHARE = 0.4
"""Part of a training step's time that evaluating as many tokens takes, about."""
FIXES = {
    "cannot be split": "Give a text of a few kilobytes or more.",
    "holds no document": "Give a text of a few kilobytes or more.",
    "holds another data set": "Remove that folder.",
    "is not a data set": "Remove that folder, or move it away.",
}
"""What repairs an error of prepare where its options are not at hand, by a few words of the error.
"""
TRY_S = 4.0
"""How long steps are timed."""


class DemoResult(Result):
    """What the demo came to."""

    run: str
    """The run folder."""
    val_loss: float | None
    """Loss on the validation text, in nats a token."""
    tokens_per_s: float | None
    """Steady rate of training."""
    wall_s: float
    """Seconds of the whole demo, preparing included."""

    def summary(self) -> str:
        """Return a sample, what to try next, the curve, and what the run came to."""
        from flatout.terminal import closing, columns
        from flatout.training.run_dir.layout import read_summary

        return closing(
            read_summary(Path(self.run)) or {},
            next_steps=f"Try next:\n{_next(in_shell(self.run), columns())}",
        )


def _next(run: str, width: int) -> str:
    """Return what to try next, as lines that can be copied: commands beside what they show, or
    below it where they are too long.
    """
    steps = {
        "more of its writing": f"flatout generate {run} --num-samples 3",
        "its scores": f"flatout eval {run}",
        "every curve": f"tensorboard --logdir {run}",
        "a recipe for a text": "flatout prepare FILE --out DATA; flatout inspect DATA",
    }
    beside = [f"  {what:<22}{command}" for what, command in steps.items()]
    if max(map(len, beside)) <= width:
        return "\n".join(beside)
    return "\n".join(
        f"  {what}\n    {_folded(command, width - 4)}" for what, command in steps.items()
    )


def _folded(command: str, width: int) -> str:
    """Return a command on several lines of a shell when it is too long for one; a quoted path stays
    as it is.
    """
    if len(command) <= width or "'" in command:
        return command
    return " \\\n      ".join(
        textwrap.wrap(command, max(width - 4, 1), break_long_words=False, break_on_hyphens=False)
    )


@dataclass(frozen=True)
class Subject:
    """What a demo is about: which text, and where its data set and its run lie."""

    source: str
    tokenizer: str
    split: str
    data: Path
    run: Path
    recipe: str


def demo(
    file: Annotated[
        Path | str | None,
        typer.Argument(help="A text file of your own; by default Python's own standard library."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long to train, about.")] = 2.0,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> DemoResult:
    """Try it: prepare, train, evaluate and sample in a few minutes, offline, on any machine.

    Run again, it goes on where it was stopped, or shows what it came to.

    Raises: DataError when FILE cannot be read; Stopped when a signal ended it after a save.
    """
    from flatout.commands.train import train_config
    from flatout.hardware import pick_device, probe
    from flatout.training.run_dir.layout import read_summary

    began = time.perf_counter()
    file = Path(file) if file else None
    check(file, minutes)
    machine = probe()
    device, _ = pick_device("auto", machine)
    subject = about_file(file, device) if file else about_python(device)
    config = _own_config(subject.run)
    if config is None:
        config = _fresh(subject, device, machine, minutes, progress)
    elif read_summary(subject.run) is not None:
        progress.say(
            f"{subject.run} is finished; its results are below. Delete that folder to train anew."
        )
    else:
        progress.say(f"Resuming {subject.run}.")
    result = train_config(config, run=subject.run, observers=observers, progress=progress)
    return DemoResult(
        run=str(subject.run),
        val_loss=result.val_loss,
        tokens_per_s=result.tokens_per_s,
        wall_s=round(time.perf_counter() - began, 2),
    )


def _own_config(run: Path) -> RunConfig | None:
    """Return the configuration of a demo that was begun here; one that names code of its own is
    none.

    Raises: CheckpointError.
    """
    from flatout.training.run_dir.layout import trusted_config

    try:
        return trusted_config(run)
    except UntrustedCode as error:
        raise CheckpointError(
            error.what, fix=f"A demo uses flatout's own code alone, so {run} is none: move it away."
        ) from error


def check(file: Path | None, minutes: float) -> None:
    """Do nothing when nothing is wrong with the words of a command line that can be told without
    torch.

    Raises: ConfigError or DataError.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes {minutes:g} is no time to train.", fix="Use --minutes 2.")
    if file is not None:
        require_text_file(file)


def require_text_file(file: Path) -> None:
    """Do nothing when there is such a file and something in it.

    Raises: DataError.
    """
    if str(file).startswith(("http:/", "https:/")):
        address = str(file).replace(":/", "://", 1)
        raise DataError(
            f"{address} is an address; demo takes one text file.",
            fix=f"Download it, `curl -LO {in_shell(address)}`; `flatout prepare` reads addresses.",
        )
    require_local(file, error=DataError)
    known = recognise(file)
    if known is not None:
        raise DataError(known.instead_of("text"), fix=known.fix)
    if file.is_dir():
        raise DataError(
            f"{file} is a folder; demo takes one text file.",
            fix="Name one file in it; `flatout prepare` takes folders.",
        )
    if not file.exists():
        raise missing(file)
    if not file.is_file():
        raise DataError(
            f"{file} is not a regular file.",
            fix="Name one text file; `flatout prepare` takes folders and several files.",
        )
    if not file.stat().st_size:
        raise DataError(f"{file} is empty.", fix="Name a text file of a few kilobytes or more.")


def about_python(device: str) -> Subject:
    """Return the demo's own subject: the standard library of this Python, which is on every
    machine.
    """
    name = f"python-{platform.python_version()}"
    recipe = "demo-gpu" if device.startswith("cuda") else "demo"
    return Subject(
        "python_stdlib",
        "train:4096",
        "hash 0.02",
        Path("data") / name,
        Path("runs") / "demo",
        recipe,
    )


def about_file(file: Path, device: str) -> Subject:
    """Return the subject of a user's own text, its folders named after the file and its content.

    Raises: DataError when there is no such file, or nothing in it.
    """
    require_text_file(file)
    size = file.stat().st_size
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()[:8]
    name = f"demo-{file.stem}-{digest}"
    large = size >= LARGE_TEXT
    on_gpu = device.startswith("cuda")
    return Subject(
        source=str(file),
        tokenizer="train:4096" if large else "char",
        split="tail 0.1" if size < LARGE_TEXT else "tail 0.02",
        data=Path("data") / name,
        run=Path("runs") / name,
        recipe="demo-gpu" if on_gpu and large else "demo" if large else "demo-char",
    )


def _fresh(
    subject: Subject, device: str, machine: Machine, minutes: float, progress: Progress
) -> RunConfig:
    """Prepare the text, and return a configuration whose training takes about `minutes`."""
    from flatout.commands.prepare import prepare
    from flatout.data.store.shards import Dataset

    try:
        prepare(
            [subject.source],
            str(subject.data),
            tokenizer=subject.tokenizer,
            split=subject.split,
            max_bytes=MOST_TEXT[device.partition(":")[0]],
            progress=progress,
        )
    except DataError as error:
        raise _without_options(error, subject.source) from error
    dataset = Dataset.open(subject.data)
    config = fit_text(
        load_config(subject.recipe, [f"data.path={subject.data}", f"name={subject.run.name}"]),
        dataset,
    )
    with progress.task("Timing a few steps, to see how many fit"):
        step_s = seconds_per_step(config.with_values({"train.device": device}), dataset, machine)
    return with_length(config, dataset, step_s, minutes)


def _without_options(error: DataError, source: str) -> DataError:
    """Return the error with a fix that demo has: it does not take the options of prepare."""
    for sign, fix in FIXES.items():
        if sign in error.what:
            return DataError(error.what, fix=fix)
    fix = error.fix.replace(OR_SKIP, "")
    if match := re.match(r"Add --encoding ([\w-]+)", fix):
        converted = Path(source).with_suffix(f".utf8{Path(source).suffix}")
        command = f"iconv -f {match[1]} -t UTF-8 {in_shell(source)} > {in_shell(converted)}"
        return DataError(error.what, fix=f"Convert it, `{command}`, and name that.")
    return DataError(
        error.what,
        fix=f"`flatout prepare` can do more with it. There: {fix}" if "--" in fix else fix,
    )


def fit_text(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the configuration with windows and steps that a short text can fill.

    Raises: DataError when there is hardly any text.
    """
    tokens = dataset.split("train").num_tokens
    if tokens < 16:
        raise DataError(
            f"{dataset.path} holds {tokens} training tokens.",
            fix="Give a text of a few kilobytes or more.",
        )
    seq_len, rows = config.data.seq_len, (config.batch.tokens_per_step or 0) // config.data.seq_len
    while seq_len > 8 and tokens < 8 * seq_len:
        seq_len //= 2
    return config.with_values({"data.seq_len": seq_len, "batch.tokens_per_step": rows * seq_len})


def with_length(config: RunConfig, dataset: Dataset, step_s: float, minutes: float) -> RunConfig:
    """Return the configuration with as many steps as fit into `minutes`, its schedule ending with
    the last one.
    """
    tokens_per_step = config.batch.tokens_per_step or 1
    evaluation_s = FORWARD_SHARE * step_s * dataset.split("val").num_tokens / tokens_per_step
    by_time = int((USED_SHARE * minutes * 60 - EVALUATIONS * evaluation_s) / step_s)
    by_text = MOST_EPOCHS * dataset.split("train").num_tokens // tokens_per_step
    steps = max(min(by_time, by_text), LEAST_STEPS)
    rhythm = {
        "train.eval_every": math.ceil(steps / EVALUATIONS),
        "train.sample_every": math.ceil(steps / SAMPLES),
    }
    return config.with_values(
        {"train.steps": steps, "log.every": max(min(config.log.every, steps // 20), 1), **rhythm}
    )


def seconds_per_step(config: RunConfig, dataset: Dataset, machine: Machine) -> float:
    """Return the time of one optimiser step of this very model, measured on a copy of the run that
    is thrown away.
    """
    import torch

    from flatout.assembly.build import build
    from flatout.assembly.resolve import resolve
    from flatout.parallel.mesh import make_mesh
    from flatout.training.step import train_step

    settled, decisions = resolve(
        config.with_values({"train.steps": 1000}), machine=machine, dataset=dataset, world_size=1
    )
    mesh = make_mesh(settled.parallel, settled.train.device)
    run = build(
        settled, machine=machine, mesh=mesh, dataset=dataset, folder=Path(), decisions=decisions
    )
    times: list[float] = []
    began = time.perf_counter()
    try:
        while len(times) < 4 or (time.perf_counter() - began < TRY_S and len(times) < 60):
            start = time.perf_counter()
            train_step(run, next(run.feed))
            run.step += 1
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    finally:
        run.feed.close()
    return statistics.quantiles(times[2:], n=4)[0]  # what else runs on the machine only adds


COMMAND = Command(
    demo, example="flatout demo book.txt", check=check, needs_torch=True, writes_files=True
)
