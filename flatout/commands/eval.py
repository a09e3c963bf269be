"""Score a trained model on its validation text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, ConfigDict

from flatout.commands import TRUST_CODE, Command, Result
from flatout.progress import SILENT, Progress
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import run_or_newest

if TYPE_CHECKING:
    from flatout.training.evaluation import Evaluation


class DatasetScore(BaseModel):
    """How well a model predicts the validation text of one data set."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """The end of its path, as much of it as tells it from the others."""
    path: str
    """Its folder."""
    val_loss: float
    """Mean loss a token, in nats."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits a byte of its text."""
    tokens: int
    """Tokens that were predicted."""


class EvalResult(Result):
    """How well a model predicts the validation text."""

    run: str
    """The run folder."""
    checkpoint: str
    """The checkpoint that was scored."""
    val_loss: float
    """Mean loss a token, in nats; of a mix, each set's loss in its share."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits a byte of text, comparable between tokenizers."""
    tokens: int
    """Tokens that were predicted."""
    by_dataset: list[DatasetScore]
    """Each data set by itself; a single one too."""

    def summary(self) -> str:
        """Return the scores, a line each; of several data sets, a table with a line for each above
        the total.
        """
        head = f"{self.checkpoint}, {self.tokens:,} validation tokens"
        if len(self.by_dataset) > 1:
            return f"{head}\n{score_table(self.by_dataset, self)}"
        bits = (
            f"{self.bits_per_byte:.4f}"
            if self.bits_per_byte is not None
            else "unknown: not the whole text was scored, or the data set does not say its bytes"
        )
        return f"{head}\nLoss           {self.val_loss:.4f} nats a token\nPerplexity     {perplexity_words(self.perplexity)}\nBits a byte    {bits}"


def perplexity_words(perplexity: float) -> str:
    """Return the perplexity with two decimals, or in short where it is beyond all vocabularies."""
    return f"{perplexity:.2f}" if perplexity < 1e9 else f"{perplexity:.2g}"


def score_table(scores: Sequence[DatasetScore], total: EvalResult | None = None) -> str:
    """Return one line a data set, and one for the total where it is given."""
    named: list[tuple[str, DatasetScore | EvalResult]] = [(score.name, score) for score in scores]
    named += [("total", total)] if total else []
    rows = [("data set", "loss", "perplexity", "bits a byte", "tokens")]
    for name, score in named:
        bits = "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        rows.append(
            (
                name,
                f"{score.val_loss:.4f}",
                f"{perplexity_words(score.perplexity)}",
                bits,
                f"{score.tokens:,}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )


def evaluate(
    run: Annotated[
        str | Path | None,
        typer.Argument(
            help="A run folder, or its name under runs/; by default the newest run there."
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    data: Annotated[
        list[str] | list[Path] | None,
        typer.Option(
            help="Score on this data set, a folder or an address, instead of the run's own; may be given several times. It needs the run's tokenizer."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Score only the first tokens of the validation text, shared out over the sets of a mix.",
            min=1,
        ),
    ] = None,
    trust_code: Annotated[bool, TRUST_CODE] = False,
    *,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a trained model on its validation text, each data set of a mix by itself, in the
    precision that it was trained in.

    Raises: CheckpointError when the run has no such checkpoint; DataError when a data set cannot be
            read; UntrustedCode.
    """
    from flatout.inference.load import load_run
    from flatout.inference.scoring import score

    loaded = load_run(
        run_or_newest(run, progress=progress),
        checkpoint,
        precision="trained",
        trust_code=trust_code,
        progress=progress,
    )
    found = score(loaded, data=data or (), max_tokens=max_tokens, progress=progress)
    return _result(loaded.folder, loaded.checkpoint, found)


def check(run: str | Path | None, trust_code: bool = False) -> None:
    """Do nothing when there is such a run, and it names no code of its own or may import it.

    Raises: CheckpointError with the nearest one; UntrustedCode.
    """
    trusted_config(run_or_newest(run), trust_code=trust_code)


def _result(run_folder: Path, checkpoint: Path, found: Evaluation) -> EvalResult:
    return EvalResult(
        run=str(run_folder),
        checkpoint=str(checkpoint),
        val_loss=found.loss,
        perplexity=found.perplexity,
        bits_per_byte=found.bits_per_byte,
        tokens=found.tokens,
        by_dataset=[DatasetScore(**one.to_dict()) for one in found.by_dataset],
    )


COMMAND = Command(evaluate, example="flatout eval runs/demo", check=check, needs_torch=True)
