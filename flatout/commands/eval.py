"""Score a trained model on validation text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.commands import CheckpointName, Command, Option, Result, RunName, TrustCode
from flatout.json_io import Stored
from flatout.progress import SILENT, Progress
from flatout.terminal.figures import aligned
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import run_or_newest


class DatasetScore(Stored):
    """A model's score on the validation text of one dataset."""

    name: str
    """The end of its path, long enough to be unique."""
    path: str
    """Its directory."""
    val_loss: float
    """Mean loss per token, in nats."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits per byte of its text."""
    tokens: int
    """Tokens that were predicted."""


class EvalResult(Result):
    """A model's score on validation text."""

    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint that was scored."""
    val_loss: float
    """Mean loss per token, in nats; for a mix, the datasets' losses weighted by their shares."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits per byte of text, comparable between tokenizers."""
    tokens: int
    """Tokens that were predicted."""
    by_dataset: list[DatasetScore]
    """The score on each dataset, even if there is only one."""

    def summary(self) -> str:
        """Return the scores, one per line; for several datasets, a table with a total."""
        head = f"{self.checkpoint}, {self.tokens:,} validation tokens"
        if len(self.by_dataset) > 1:
            return f"{head}\n{score_table(self.by_dataset, self)}"
        unknown = "unknown: only a part was scored, or the dataset does not state its bytes"
        bits = unknown if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        return "\n".join(
            [
                head,
                f"Loss           {self.val_loss:.4f} nats per token",
                f"Perplexity     {perplexity_text(self.perplexity)}",
                f"Bits per byte  {bits}",
            ]
        )


def perplexity_text(perplexity: float) -> str:
    """Return a perplexity with two decimals, or in short form from 1e9 up."""
    return f"{perplexity:.2f}" if perplexity < 1e9 else f"{perplexity:.2g}"


def score_table(scores: Sequence[DatasetScore], total: EvalResult | None = None) -> str:
    """Return a table with one line per dataset, and one for the total if given."""
    named: list[tuple[str, DatasetScore | EvalResult]] = [(score.name, score) for score in scores]
    named += [("total", total)] if total else []
    rows = [("dataset", "loss", "perplexity", "bits per byte", "tokens")]
    for name, score in named:
        bits = "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        loss, perplexity = f"{score.val_loss:.4f}", perplexity_text(score.perplexity)
        rows.append((name, loss, perplexity, bits, f"{score.tokens:,}"))
    return "\n".join(aligned(rows))


def evaluate(
    run: RunName = None,
    checkpoint: CheckpointName = "best",
    data: Annotated[
        list[str] | list[Path] | None,
        Option(
            "Score on this dataset, a directory or a URL, instead of the run's own; repeatable. "
            "It must have the run's tokenizer."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(
            "Score only the first tokens of the validation text, divided among the datasets of a "
            "mix.",
            min=1,
        ),
    ] = None,
    trust_code: TrustCode = False,
    *,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a trained model on its validation text, in the precision that it was trained in.

    Each dataset of a mix is also scored by itself.

    Raises: CheckpointError when the run has no such checkpoint; DataError when a dataset cannot be
            read; UntrustedCode.
    """
    from flatout.inference.load import load_run
    from flatout.inference.scoring import score_run

    loaded = load_run(
        run_or_newest(run, progress=progress),
        checkpoint,
        precision="trained",
        trust_code=trust_code,
        progress=progress,
    )
    evaluation = score_run(loaded, data=data or (), max_tokens=max_tokens, progress=progress)
    return EvalResult(
        run=str(loaded.folder),
        checkpoint=str(loaded.checkpoint),
        val_loss=evaluation.loss,
        perplexity=evaluation.perplexity,
        bits_per_byte=evaluation.bits_per_byte,
        tokens=evaluation.tokens,
        by_dataset=[DatasetScore(**one.to_dict()) for one in evaluation.by_dataset],
    )


def check(run: RunName, trust_code: bool = False) -> None:
    """Check that the run exists, and that any code it names may be imported.

    Raises: CheckpointError with the nearest run; UntrustedCode.
    """
    trusted_config(run_or_newest(run), trust_code=trust_code)


COMMAND = Command(evaluate, example="flatout eval runs/demo", check=check, needs_torch=True)
