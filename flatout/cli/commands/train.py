"""Train a recipe. A run that has a checkpoint resumes from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import ValidationError

from flatout.assembly import preflight
from flatout.assembly.batch import for_world_size, with_batch
from flatout.cli.commands import Command, Overrides, RecipeName, TrustCode
from flatout.cli.commands.eval import DatasetScore
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Option, checked
from flatout.display import Display, Show, amount, displayed, duration, gib, loss, quoted, rate
from flatout.distributed.launch import num_processes
from flatout.distributed.layout import layout_of
from flatout.errors import CheckpointError, in_shell
from flatout.hardware.machine import probe
from flatout.progress import SILENT, Progress, counted
from flatout.storage.cache import default_cache
from flatout.storage.json_io import Result
from flatout.storage.recognised import require_local
from flatout.training.metrics.observers import Observer
from flatout.training.run_dir.layout import EVENTS, read_config
from flatout.training.run_dir.lookup import RUNS, resume_path
from flatout.training.run_dir.resume import run_name
from flatout.training.run_dir.runlog import RunLog

SAMPLE_LINES = 12
"""Most lines of a sample that are shown at the end: all of it is in events.jsonl."""


class TrainResult(Result):
    """The summary of a run."""

    run: Annotated[str, Show("Run")]
    """The run directory."""
    steps: Annotated[int, Show("Trained", record=lambda result: result.length())]
    """Optimizer steps."""
    tokens: int
    """Tokens trained on, over all resumes."""
    train_loss: Annotated[float | None, Show("Loss", record=lambda result: result.losses())]
    """Loss of the last recorded step, in nats per token."""
    val_loss: float | None
    """Loss on the whole validation split, in nats per token. For a mix, weighted by its shares."""
    best_val_loss: float | None
    """Lowest loss of the evaluations during the run, on the validation tokens that they score.

    `generate --checkpoint best` uses that step."""
    best_step: int | None
    """The step of that loss."""
    bits_per_byte: float | None
    """Validation loss in bits per byte of text."""
    by_dataset: Annotated[tuple[DatasetScore, ...], Show("By dataset")] = ()
    """The score on each dataset of a mix, as `eval` shows it."""
    stopped_early: bool = False
    """Whether train.patience ended it before its last step."""
    stopped_because: str | None = None
    """Why it ended before its last step."""
    tokens_per_s: Annotated[float | None, Show("Speed", record=lambda result: result.rates())]
    """Steady rate of training: the median after the warm-up."""
    wall_tokens_per_s: float | None
    """Tokens per second of this process's whole time, including evaluation and saving."""
    mfu: Annotated[float | None, Show("MFU", record=lambda result: result.utilization())]
    """Share of the peak that `mfu_of` names. Null if it is unknown."""
    mfu_of: str | None
    """The peak that `mfu` is a share of, or why it is unknown."""
    peak_gib: float | None
    """Peak memory."""
    compile_s: float | None = None
    """Seconds spent compiling, before the first step and after. Null when nothing was compiled."""
    recompiles: int | None = None
    """Graphs compiled after the warm-up. The reason for each is in events.jsonl."""
    skipped_steps: Annotated[int | None, Show("Events", record=lambda result: result.bad())] = None
    """Steps of the whole run whose update was skipped because the loss or the gradient norm was
    bad. Null in runs of earlier versions. Overflows of float16 do not count."""
    alarms: int | None = None
    """Alarms that this process raised. Each is in events.jsonl."""
    wall_s: float
    """Seconds of this process, from the first step to the summary."""
    elapsed_s: float
    """Seconds over all resumes."""
    resumed_from: str | None
    """Checkpoint that this process resumed from."""
    weights_sha256: str
    """Digest of the files of the final weights: equal runs of as many processes have equal ones."""

    @property
    def headline(self) -> str:
        """The last sample."""
        events = RunLog(Path(self.run)).events
        samples = [str(event.get("text")) for event in events if event["event"] == "sample"]
        lines = quoted(samples[-1]).split("\n")[:SAMPLE_LINES] if samples else []
        return "\n".join(["A sample:", *lines, ""]) if lines else ""

    @property
    def notes(self) -> list[str]:
        """Why it ended early."""
        return [self.stopped_because] if self.stopped_because else []

    def display(self) -> Display:
        """Return what is declared above, with a table of several datasets only."""
        shown = displayed(self)
        return shown if len(self.by_dataset) > 1 else replace(shown, tables=())

    def bad(self) -> str:
        """Return the number of bad steps and of alarms."""
        counts = (("bad step", self.skipped_steps), ("alarm", self.alarms))
        found = [counted(count, name) for name, count in counts if count]
        return f"{', '.join(found)}: see events.jsonl" if found else ""

    def length(self) -> str:
        """Return the steps, tokens, time and memory."""
        total = f" ({duration(self.elapsed_s)} in total)" if self.resumed_from else ""
        memory = f", {gib(self.peak_gib)} peak" if self.peak_gib else ""
        tokens = f"{amount(self.tokens, 'tokens')} in {duration(self.wall_s)}"
        return f"{counted(self.steps, 'step')}, {tokens}{total}{memory}"

    def losses(self) -> str:
        """Return the losses that are known."""
        found = []
        if self.train_loss is not None:
            found.append(f"training {loss(self.train_loss)}")
        if self.val_loss is not None:
            perplexity = math.exp(min(self.val_loss, 700))
            found.append(f"validation {loss(self.val_loss)} (perplexity {perplexity:.1f})")
        if self.best_val_loss is not None and self.best_step not in {None, self.steps}:
            found.append(f"best in the run {loss(self.best_val_loss)} at step {self.best_step:,}")
        if self.bits_per_byte is not None:
            found.append(f"{self.bits_per_byte:.3f} bits per byte")
        return ", ".join(found)

    def rates(self) -> str:
        """Return the steady rate, and the one over the whole time."""
        rates = {"steady": self.tokens_per_s, "in all": self.wall_tokens_per_s}
        return ", ".join(f"{rate(value)} {name}" for name, value in rates.items() if value)

    def utilization(self) -> str:
        """Return the share of the peak, or why it is unknown."""
        if self.mfu is not None:
            return f"{self.mfu:.1%} of the peak ({self.mfu_of})"
        return self.mfu_of or "unknown: no peak rate is known for this device"


@checked
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    run: Annotated[
        Path | str | None,
        Option(
            "Run directory (default: runs/RECIPE-DIGEST). torchrun rejects the short form --run.",
            "--run-dir",
            "--run",
        ),
    ] = None,
    resume: Annotated[
        str | Path, Option("auto, never, or the path of a checkpoint or a run directory.")
    ] = "auto",
    trust_code: TrustCode = False,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> TrainResult:
    """Train a recipe. A run directory with a checkpoint resumes from it.

    Returns: the run's summary. For a finished run, its stored summary. In Python, the recipe may
             also be a `RunConfig`, as in the other commands that take one.
    Raises: UsageError, including UntrustedCode, before anything is changed; Stopped when a signal
            ended the run after a save.
    """
    require_paths(run, resume)
    config = load_checked(recipe, overrides, trust_code=trust_code)
    from flatout.inference.chat import sample_text
    from flatout.training.run import run_training

    run_dir = RUNS / run_name(recipe, overrides) if run is None else Path(run)
    summary = run_training(
        config,
        run_dir,
        resume=str(resume),
        trust_code=trust_code,
        observers=observers,
        sample=sample_text,
        cache=default_cache(),
        progress=progress,
    )
    fields = {
        name: summary.get(name)
        for name, field in TrainResult.model_fields.items()
        if name in summary or field.is_required()
    }
    try:
        return TrainResult(**fields)
    except ValidationError as error:
        raise CheckpointError(
            f"The summary in {run_dir / EVENTS} is damaged.",
            fix=f"Restore it from a copy. `flatout eval {in_shell(run_dir)}` evaluates the run.",
        ) from error


def require_paths(run: Path | str | None, resume: Path | str) -> None:
    """Check that a run is written to, and resumed from, paths on this machine.

    Raises: UsageError.
    """
    require_local(run or "", "--run-dir ")
    resume_path(str(resume))


def load_checked(
    recipe: str | Path | RunConfig,
    overrides: Sequence[str] | None,
    *,
    trust_code: bool = False,
) -> RunConfig:
    """Return a recipe's configuration, checked as far as possible without torch.

    Raises: UsageError.
    """
    config = load_config(recipe, overrides, trust_code=trust_code)
    preflight.check(config)
    return config


def processes(
    recipe: str,
    overrides: list[str] | None,
    run: Path | str | None = None,
    resume: str = "auto",
    trust_code: bool = False,
) -> int:
    """Return the number of processes that `train.devices` asks for.

    Raises: UsageError, also when they cannot divide a step of a new run, or of a stored one.
    """
    config = load_config(recipe, overrides, trust_code=trust_code)
    wanted = config.train
    if not wanted.devices:
        return 1
    require_paths(run, resume)
    preflight.check(config)
    count = num_processes(wanted.devices, wanted.device, probe())
    if count > 1:
        stored = read_config(Path(run or RUNS / run_name(recipe, overrides)))
        if stored is None:
            with_batch(config, layout_of(config.parallel, count))
        else:
            for_world_size(stored.model_copy(update={"parallel": config.parallel}), count)
    return count


COMMAND = Command(
    train,
    example="flatout train shakespeare-char data.path=data/book",
    processes=processes,
    writes_files=True,
    is_timed=True,
)
