"""Score a trained model on its validation text."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.commands import Command, Result
from flatout.progress import SILENT, Progress


class EvalResult(Result):
    """How well a model predicts the validation text."""

    run: str
    """The run folder."""
    checkpoint: str
    """The checkpoint that was scored."""
    val_loss: float
    """Mean loss a token, in nats."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits a byte of text, comparable between tokenizers."""
    tokens: int
    """Tokens that were predicted."""

    def summary(self) -> str:
        """Return the scores, a line each."""
        bits = (
            f"{self.bits_per_byte:.4f}"
            if self.bits_per_byte is not None
            else "unknown: not the whole text was scored, or the data set does not say its bytes"
        )
        return (
            f"{self.checkpoint}, {self.tokens:,} validation tokens\n"
            f"Loss           {self.val_loss:.4f} nats a token\nPerplexity     {self.perplexity:.2f}\nBits a byte    {bits}"
        )


def evaluate(
    run: Annotated[str, typer.Argument(help="A run folder, or its name under runs/.")],
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first tokens of the validation text.", min=1)] = None,
    *,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a trained model on its validation text.

    Raises: CheckpointError when the run has no such checkpoint; DataError when its data set cannot be read.
    """
    from flatout import loading, scoring

    loaded = loading.load_run(run, checkpoint, progress=progress)
    score = scoring.evaluate(loaded, max_tokens=max_tokens, progress=progress)
    return EvalResult(
        run=str(loaded.folder),
        checkpoint=str(loaded.checkpoint),
        val_loss=score.val_loss,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
        tokens=score.tokens,
    )


COMMAND = Command(evaluate, example="flatout eval runs/demo", needs_torch=True)
