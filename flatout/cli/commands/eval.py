"""Score a trained model on validation text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cli.commands import CheckpointName, Command, RunName, TrustCode
from flatout.config.signature import Option, checked, texts
from flatout.display import Display, Show, loss, table_of
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.storage.json_io import Result
from flatout.training.run_dir.lookup import run_or_newest

Loss = Annotated[float, Show("loss", loss)]
Perplexity = Annotated[
    float, Show("perplexity", lambda value: format(value, ".2f" if value < 1e9 else ".2g"))
]
BitsPerByte = Annotated[float | None, Show("bits per byte", ".4f", unknown="unknown")]
Tokens = Annotated[int, Show("tokens")]
BITS_UNKNOWN = (
    "Bits per byte are unknown: only a part was scored, or a dataset does not record its bytes."
)


class DatasetScore(Stored):
    """A model's score on the validation text of one dataset."""

    name: Annotated[str, Show("dataset")]
    """The end of its path, long enough to be unique."""
    path: str
    """Its directory."""
    val_loss: Loss
    """Mean loss per token, in nats."""
    perplexity: Perplexity
    """exp(val_loss)."""
    bits_per_byte: BitsPerByte
    """Bits per byte of its text."""
    tokens: Tokens
    """Tokens that were predicted."""


class EvalResult(Result):
    """A model's score on validation text."""

    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint that was scored."""
    val_loss: Loss
    """Mean loss per token, in nats. For a mix, the datasets' losses weighted by their shares."""
    perplexity: Perplexity
    """exp(val_loss)."""
    bits_per_byte: BitsPerByte
    """Bits per byte of text, comparable between tokenizers. Null when only a part was scored, or a
    dataset does not record its bytes."""
    tokens: Tokens
    """Tokens that were predicted."""
    by_dataset: tuple[DatasetScore, ...]
    """The score on each dataset, even if there is only one."""

    def display(self) -> Display:
        """Return the scores: a row for each dataset, and a total of several."""
        scores = [*self.by_dataset]
        if len(scores) > 1:
            whole = self.model_dump(exclude={"run", "checkpoint", "by_dataset"})
            scores.append(DatasetScore(name="total", path="", **whole))
        notes = [BITS_UNKNOWN] if self.bits_per_byte is None else []
        return Display(self.checkpoint, (), [table_of(scores)], notes)


@checked
def evaluate(
    run: RunName = None,
    checkpoint: CheckpointName = None,
    data: Annotated[
        list[str] | list[Path] | str | Path | None,
        Option(
            "Score on this dataset, a directory or a URL, instead of the run's own (repeatable). "
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
    folder = run_or_newest(run, progress=progress)
    from flatout.inference.load import load_run
    from flatout.inference.scoring import score_run

    loaded = load_run(
        folder, checkpoint, precision="trained", trust_code=trust_code, progress=progress
    )
    found = score_run(loaded, data=texts(data), max_tokens=max_tokens, progress=progress)
    return EvalResult(
        run=str(loaded.folder),
        checkpoint=str(loaded.checkpoint),
        val_loss=found.loss,
        perplexity=found.perplexity,
        bits_per_byte=found.bits_per_byte,
        tokens=found.tokens,
        by_dataset=tuple(DatasetScore(**one.to_dict()) for one in found.by_dataset),
    )


COMMAND = Command(evaluate, example="flatout eval runs/demo")
