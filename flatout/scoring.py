"""How well a trained model predicts text it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flatout.config import ParallelConfig
from flatout.data.loader import ShardWindows
from flatout.errors import DataError
from flatout.loading import LoadedRun
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import Ranks
from flatout.progress import SILENT, Progress
from flatout.training.evaluation import Judge


@dataclass(frozen=True)
class Score:
    """How well a model predicts a validation split."""

    val_loss: float
    """Mean loss a token, in nats."""
    perplexity: float
    bits_per_byte: float | None
    """Bits a byte of text; comparable between tokenizers. None when the data set does not say how many bytes its text has."""
    tokens: int


def evaluate(loaded: LoadedRun, *, max_tokens: int | None = None, progress: Progress = SILENT) -> Score:
    """Return loss, perplexity and bits a byte on the validation split, as the run itself evaluates.

    Raises: DataError when the data set has no validation text.
    """
    split = loaded.dataset.split("val")
    if split.num_tokens < 2:
        raise DataError(f"{loaded.dataset.path} has no validation text.", fix="Prepare it with a larger share, for example --split 'tail 0.1'.")
    mesh = make_mesh(ParallelConfig(), str(next(loaded.model.parameters()).device), Ranks())
    data, precision = loaded.config.data, loaded.recipe.part("precision")
    rows = int(loaded.config.batch.rows_per_device)
    judge = Judge(loaded.model, mesh, ShardWindows(), partial(precision.context, mesh.device.type), data.seq_len, rows, data.document_mask)
    result = judge.score(split, max_tokens=max_tokens, progress=progress)
    return Score(result.loss, result.perplexity, result.bits_per_byte(split.text_bytes), result.tokens)
