"""Validation loss, in the run's own precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flatout.data.loader import evaluation_batches
from flatout.progress import SILENT, Progress

if TYPE_CHECKING:
    from flatout.run import Run


@dataclass(frozen=True)
class Evaluation:
    """Loss over the validation split, or over its beginning."""

    loss: float
    """Mean loss a token, in nats."""
    tokens: int
    """Targets that were scored."""
    whole: bool
    """Whether that was the whole split."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(run: Run, *, max_tokens: int | None = None, progress: Progress = SILENT) -> Evaluation:
    """Score the validation split, or its first `max_tokens` targets, shared over the ranks.

    Every token but the split's first is a target once. The model is put back into training mode.
    Cost: one forward pass a token.
    """
    split = run.dataset.split("val")
    rows, seq_len = run.rows_per_device, run.config.data.seq_len
    batches = evaluation_batches(
        split,
        seq_len,
        rows,
        device=str(run.mesh.device),
        rank=run.mesh.rank,
        world_size=run.mesh.world_size,
        max_tokens=max_tokens,
        document_mask=run.config.data.document_mask,
        windows=run.windows,
    )
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    num_valid = torch.zeros((), dtype=torch.int64, device=run.mesh.device)
    scored = min(max_tokens or split.num_tokens, split.num_tokens)
    was_training = run.core.training
    run.core.eval()
    with progress.task("Evaluating", total=scored, unit="tokens") as task:
        for micro in batches:
            with run.autocast():
                loss, valid = run.model(micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT)
            loss_sum += loss
            num_valid += valid
            task.advance(rows * seq_len * run.mesh.world_size)
    run.core.train(was_training)
    loss_sum, num_valid = run.mesh.sum(loss_sum, num_valid)
    return Evaluation(
        loss=float(loss_sum / num_valid.clamp(min=1)), tokens=int(num_valid), whole=max_tokens is None or max_tokens >= split.num_tokens
    )
