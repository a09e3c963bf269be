"""Train a recipe; a run folder that holds a checkpoint goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from flatout.assembly import preflight
from flatout.cache import CACHE
from flatout.commands import TRUST_CODE, Command, Result
from flatout.commands.eval import DatasetScore, score_table
from flatout.config.schema import RunConfig, load_config
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local
from flatout.training.run_dir.lookup import RUNS

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.training.metrics.observers import Observer


class TrainResult(Result):
    """What a run came to."""

    run: str
    """The run folder."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Tokens trained on, over all resumes."""
    train_loss: float | None
    """Loss of the last recorded step, in nats a token."""
    val_loss: float | None
    """Loss on the whole validation split, in nats a token; of a mix, each set's loss in its share.
    """
    best_val_loss: float | None
    """Lowest loss on the validation tokens that evaluations inside the run score; `generate
    --checkpoint best` takes that step.
    """
    best_step: int | None
    """The step of that loss."""
    bits_per_byte: float | None
    """Validation loss as bits a byte of text."""
    by_dataset: tuple[DatasetScore, ...] = ()
    """Each data set of a mix by itself, as `eval` shows it."""
    stopped_early: bool = False
    """Whether train.patience ended it before its last step."""
    stopped_because: str | None = None
    """Why it ended before its last step."""
    tokens_per_s: float | None
    """Steady rate of training: median after the warm-up."""
    wall_tokens_per_s: float | None
    """Tokens over this process's whole time, evaluation and saving included."""
    mfu: float | None
    """Share of the peak that `mfu_of` names; null where it is unknown."""
    mfu_of: str | None
    """What 100% of `mfu` is, or why that is unknown."""
    peak_gib: float | None
    """Most memory used."""
    compile_s: float | None = None
    """Seconds that compiling took, before the first step and after; None when nothing was compiled.
    """
    recompiles: int | None = None
    """Graphs compiled after the warm-up: each held training up, and events.jsonl says why."""
    wall_s: float
    """Seconds of this process, from the first step to the summary."""
    elapsed_s: float
    """Seconds over all resumes."""
    resumed_from: str | None
    """Checkpoint this process went on from."""
    weights_sha256: str
    """Digest of the final weights: equal runs have equal digests."""

    def summary(self) -> str:
        """Return what the run came to, its curve and its last sample."""
        from flatout.terminal import closing

        parts = [closing(self.model_dump())]
        parts += [score_table(self.by_dataset)] if len(self.by_dataset) > 1 else []
        parts += [self.stopped_because] if self.stopped_because else []
        return "\n\n".join(parts)


def train(
    recipe: Annotated[str | Path, typer.Argument(help="A recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, over the recipe.")
    ] = None,
    run: Annotated[
        Path | str | None,
        typer.Option(
            "--run-dir",
            "--run",
            help="Run directory; runs/RECIPE-DIGEST by default. torchrun rejects the short form --run.",
        ),
    ] = None,
    resume: Annotated[
        str | Path, typer.Option(help="auto, never, or a checkpoint's or run's folder.")
    ] = "auto",
    trust_code: Annotated[bool, TRUST_CODE] = False,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> TrainResult:
    """Train a recipe; a run folder that holds a checkpoint goes on from it.

    Returns: the run's summary; of a finished run, the one it already has.
    Raises: UsageError before anything was changed, UntrustedCode among them; Stopped when a signal
            ended the run after a save.
    """
    config = load_config(recipe, overrides or (), trust_code=trust_code)
    return train_config(
        config,
        run=run,
        resume=resume,
        trust_code=trust_code,
        observers=observers,
        progress=progress,
    )


def check(
    recipe: str,
    overrides: list[str] | None,
    run: Path | None = None,
    resume: str = "auto",
    progress: Progress = SILENT,
    trust_code: bool = False,
) -> None:
    """Do nothing when nothing is wrong with the words of a command line that can be told without
    torch; data at an address is fetched.

    Raises: UsageError.
    """
    require_local_run(run, str(resume))
    preflight.check(load_config(recipe, overrides or (), trust_code=trust_code), progress=progress)


def require_local_run(run: Path | str | None, resume: str) -> None:
    """Do nothing when the folders that a run is written to and resumed from are of this machine.

    Raises: UsageError.
    """
    require_local(run or "", "--run-dir ")
    require_local(resume, "--resume ")


def train_config(
    config: RunConfig,
    *,
    run: Path | str | None = None,
    resume: str | Path = "auto",
    trust_code: bool = False,
    observers: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> TrainResult:
    """Train a configuration made in Python. Arguments, result and errors as `train`."""
    from flatout.training.run import run_training
    from flatout.training.run_dir.layout import damaged_summary, run_name

    require_local_run(run, str(resume))
    place = RUNS / run_name(config) if run is None else Path(run)
    summary = run_training(
        config,
        place,
        resume=str(resume),
        trust_code=trust_code,
        observers=observers,
        sample=sample_text,
        cache=CACHE,
        progress=progress,
    )
    fields = TrainResult.model_fields.items()
    try:
        return TrainResult(
            **{
                name: summary.get(name)
                for name, field in fields
                if name in summary or field.is_required()
            }
        )
    except ValidationError as error:
        raise damaged_summary(place) from error


def sample_text(run: Run) -> str:
    """Return a few lines in the model's own words."""
    from flatout.inference.generate import sample

    core: Any = run.core
    prompt = run.config.train.sample_prompt
    pieces = sample(
        core,
        run.dataset.tokenizer,
        prompt,
        temperature=0.8,
        top_k=200,
        seed=run.step,
        max_tokens=SAMPLE_TOKENS,
        max_context=run.config.data.seq_len,
    )
    return prompt + "".join(pieces)


SAMPLE_TOKENS = 160
"""Length of a sample inside a run."""

COMMAND = Command(
    train,
    example="flatout train shakespeare-char data.path=data/s --json",
    check=check,
    needs_torch=True,
    writes_files=True,
)
