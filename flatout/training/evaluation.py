"""Validation loss, in the run's own precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.data.load.batches import WindowReader
from flatout.data.load.feed import evaluation_batches
from flatout.data.store.mix import Part, parts_of
from flatout.ops.attention import most_documents
from flatout.parallel.mesh import Mesh
from flatout.progress import SILENT, Progress

if TYPE_CHECKING:
    from flatout.assembly.run import Run


@dataclass(frozen=True)
class SetScore:
    """Loss over the validation split of one data set, or over its beginning."""

    name: str
    path: str
    share: float
    """Its weight in the mean over all sets."""
    loss: float
    """Mean loss a token, in nats."""
    tokens: int
    """Targets that were scored."""
    text_bytes: int
    """Bytes of the text these targets came from; 0 when a part was scored, or the data set does not
    say.
    """

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss as bits a byte of text, which compares between tokenizers; None unless the whole
        split was scored.
        """
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, named as everywhere."""
        figures = {
            "val_loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }
        return {"name": self.name, "path": self.path} | figures


@dataclass(frozen=True)
class Evaluation:
    """Validation loss, by data set and in the mean by their shares; one set is the special case."""

    by_dataset: tuple[SetScore, ...]

    @property
    def loss(self) -> float:
        """Mean loss a token, in nats: what a token of the mix costs, each set's loss weighted by
        its share.
        """
        return sum(score.share * score.loss for score in self.by_dataset) / sum(
            score.share for score in self.by_dataset
        )

    @property
    def tokens(self) -> int:
        """Targets that were scored."""
        return sum(score.tokens for score in self.by_dataset)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss as bits a byte of the mix's text; None unless every set was scored whole and
        says its bytes.
        """
        if not all(score.text_bytes and score.tokens for score in self.by_dataset):
            return None
        bytes_per_token = sum(
            score.share * score.text_bytes / score.tokens for score in self.by_dataset
        )
        return (
            self.loss
            * sum(score.share for score in self.by_dataset)
            / math.log(2)
            / bytes_per_token
        )

    def record(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl: `val/loss`, and of a mix `val/loss/NAME` for each
        set.
        """
        sets = {f"val/loss/{score.name}": score.loss for score in self.by_dataset}
        return {"val/loss": self.loss} | (sets if len(sets) > 1 else {})


def perplexity(loss: float) -> float:
    """Return exp(loss), of a loss in nats; as much as a float holds where it would be more."""
    return math.exp(min(loss, 700.0))


class EvaluationDropped(Exception):
    """An evaluation was given up between two batches."""


@dataclass(frozen=True)
class Judge:
    """What scoring takes, besides the text."""

    model: nn.Module
    """What is called; put into evaluation mode and back."""
    mesh: Mesh
    windows: WindowReader
    autocast: Callable[[], AbstractContextManager[Any]]
    """The context the model is called in: the run's own precision."""
    seq_len: int
    rows: int
    document_mask: bool
    most_documents: Callable[[int, int], int] | None = None
    """As in `flatout.data.load.batches.FeedPlan`."""
    drop: Callable[[int], bool] | None = None
    """Asked before every batch but a split's first, with its number counted from 1: whether to
    raise EvaluationDropped.
    """

    def score(
        self, parts: Sequence[Part], *, max_tokens: int | None = None, progress: Progress = SILENT
    ) -> Evaluation | None:
        """Score each data set's validation split, or its share of `max_tokens` from its beginning;
        None where there is no validation text.

        Sets without validation text have no part in the mean.
        """
        scored = [part for part in parts if part.dataset.split("val").num_tokens > 1]
        total = sum(part.share for part in scored)
        limits = [
            None if max_tokens is None else max(round(max_tokens * part.share / total), 1)
            for part in scored
        ]
        scores = [
            self._score(part, limit, progress) for part, limit in zip(scored, limits, strict=True)
        ]
        return Evaluation(tuple(scores)) if scores else None

    @torch.no_grad()
    def _score(self, part: Part, max_tokens: int | None, progress: Progress) -> SetScore:
        """Score one split, or its first `max_tokens` targets, shared over the ranks.

        Every token but the split's first is a target once. Cost: one forward pass a token.
        """
        split, device, world_size = (
            part.dataset.split("val"),
            self.mesh.device,
            self.mesh.world_size,
        )
        batches = evaluation_batches(
            split,
            self.seq_len,
            self.rows,
            device=str(device),
            rank=self.mesh.rank,
            world_size=world_size,
            max_tokens=max_tokens,
            document_mask=self.document_mask,
            most_documents=self.most_documents,
            windows=self.windows,
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_valid = torch.zeros((), dtype=torch.int64, device=device)
        total = min(max_tokens or split.num_tokens, split.num_tokens)
        was_training = self.model.training
        self.model.eval()
        what = "Evaluating" if part.share == 1 else f"Evaluating {part.name}"
        with progress.task(what, total=total, unit="tokens") as task:
            for number, micro in enumerate(batches, 1):
                if number > 1 and self.drop is not None and self.drop(number):
                    raise EvaluationDropped
                with self.autocast():
                    loss, valid = self.model(micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT)
                loss_sum += loss
                num_valid += valid
                task.advance(self.rows * self.seq_len * world_size)
        self.model.train(was_training)
        loss_sum, num_valid = self.mesh.sum(loss_sum, num_valid)
        mean = float(loss_sum / num_valid.clamp(min=1))
        whole = max_tokens is None or max_tokens >= split.num_tokens - 1
        return SetScore(
            part.name,
            part.dataset.place,
            part.share,
            mean,
            int(num_valid),
            split.text_bytes if whole else 0,
        )


def evaluate(
    run: Run,
    *,
    max_tokens: int | None = None,
    drop: Callable[[Run, int], bool] | None = None,
    progress: Progress = SILENT,
) -> Evaluation | None:
    """Score the validation text of the run's data, or `max_tokens` of it, with the model as it
    stands; None where there is none.

    Raises: EvaluationDropped when `drop`, asked between batches, says yes; the model is then still
            in evaluation mode.
    """
    data = run.config.data
    judge = Judge(
        run.model,
        run.mesh,
        run.windows,
        run.autocast,
        data.seq_len,
        run.rows_per_device,
        data.document_mask,
        most_documents(run.core.ops.attention),
        drop and functools.partial(drop, run),
    )
    return judge.score(parts_of(run.dataset), max_tokens=max_tokens, progress=progress)


def batch_shapes(run: Run) -> list[tuple[int, int]]:
    """Return rows and tokens of the micro-batches in which `evaluate` calls the model; none where
    there is no validation text.
    """
    is_scored = any(part.dataset.split("val").num_tokens > 1 for part in parts_of(run.dataset))
    return [(run.rows_per_device, run.config.data.seq_len)] if is_scored else []


def say_unscored(parts: Sequence[Part], progress: Progress) -> None:
    """Say of which data sets of a mix there is no validation text."""
    for part in parts:
        if len(parts) > 1 and part.dataset.split("val").num_tokens < 2:
            progress.say(
                f"{part.name} has no validation text: its loss is not measured, and has no part in the validation loss."
            )
