"""Validation loss, in the run's own precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.data.loader import WindowReader, evaluation_batches
from flatout.data.shards import Split
from flatout.parallel.mesh import Mesh
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

    def bits_per_byte(self, text_bytes: int) -> float | None:
        """Return the loss as bits a byte of the split's text, which compares between tokenizers; None unless the whole split was scored."""
        return self.loss * self.tokens / math.log(2) / text_bytes if self.whole and text_bytes else None


@dataclass(frozen=True)
class Judge:
    """What scoring a split takes, besides the split."""

    model: nn.Module
    """What is called; put into evaluation mode and back."""
    mesh: Mesh
    windows: WindowReader
    autocast: Callable[[], AbstractContextManager[Any]]
    """The context the model is called in: the run's own precision."""
    seq_len: int
    rows: int
    document_mask: bool

    @torch.no_grad()
    def score(self, split: Split, *, max_tokens: int | None = None, progress: Progress = SILENT) -> Evaluation:
        """Score a split, or its first `max_tokens` targets, shared over the ranks.

        Every token but the split's first is a target once. Cost: one forward pass a token.
        """
        device, world_size = self.mesh.device, self.mesh.world_size
        batches = evaluation_batches(
            split,
            self.seq_len,
            self.rows,
            device=str(device),
            rank=self.mesh.rank,
            world_size=world_size,
            max_tokens=max_tokens,
            document_mask=self.document_mask,
            windows=self.windows,
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_valid = torch.zeros((), dtype=torch.int64, device=device)
        total = min(max_tokens or split.num_tokens, split.num_tokens)
        was_training = self.model.training
        self.model.eval()
        with progress.task("Evaluating", total=total, unit="tokens") as task:
            for micro in batches:
                with self.autocast():
                    loss, valid = self.model(micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT)
                loss_sum += loss
                num_valid += valid
                task.advance(self.rows * self.seq_len * world_size)
        self.model.train(was_training)
        loss_sum, num_valid = self.mesh.sum(loss_sum, num_valid)
        mean = float(loss_sum / num_valid.clamp(min=1))
        return Evaluation(mean, int(num_valid), whole=max_tokens is None or max_tokens >= split.num_tokens)


def evaluate(run: Run, *, max_tokens: int | None = None, progress: Progress = SILENT) -> Evaluation:
    """Score the validation split, or its first `max_tokens` targets, with the model as it stands."""
    data = run.config.data
    judge = Judge(run.model, run.mesh, run.windows, run.autocast, data.seq_len, run.rows_per_device, data.document_mask)
    return judge.score(run.dataset.split("val"), max_tokens=max_tokens, progress=progress)
