"""The validation loss, computed in the run's precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from flatout.assembly.parts import Precision
from flatout.config.schema import RunConfig
from flatout.data.load.batches import SequenceReader
from flatout.data.load.loader import evaluation_batches
from flatout.data.store.mix import Member, members_of
from flatout.distributed.mesh import Mesh
from flatout.ops import float64_device
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import shortened
from flatout.training.step import Dropped

if TYPE_CHECKING:
    from flatout.assembly.run import Run

SAMPLED = 1024
"""Sequences of a dataset that tell how many have a target."""


@dataclass(frozen=True)
class SplitScore:
    """The loss on the validation split of one dataset, or on the start of it."""

    name: str
    path: str
    share: float
    """Its weight in the mean over all datasets."""
    loss: float
    """Mean loss per token, in nats."""
    tokens: int
    """Targets that were scored."""
    text_bytes: int
    """Bytes of text behind these targets, 0 when unknown or when only part was scored."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text, comparable between tokenizers. None when unknown."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_dict(self) -> JsonObject:
        """Return the metrics under the names used by commands with --json."""
        return {
            "name": self.name,
            "path": self.path,
            "val_loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }


@dataclass(frozen=True)
class Evaluation:
    """The validation loss, per dataset and as the mean weighted by their shares."""

    by_dataset: tuple[SplitScore, ...]

    @property
    def loss(self) -> float:
        """Mean loss per token of the mix, in nats."""
        return sum(score.share * score.loss for score in self.by_dataset) / self._total_share

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
        """The loss in bits per byte of the mix's text. None if unknown for any dataset."""
        if not all(score.text_bytes and score.tokens for score in self.by_dataset):
            return None
        bytes_per_token = sum(
            score.share * score.text_bytes / score.tokens for score in self.by_dataset
        )
        return self.loss * self._total_share / math.log(2) / bytes_per_token

    def record(self) -> dict[str, float]:
        """Return the metrics for metrics.jsonl: `val/loss`, and `val/loss/NAME` in a mix."""
        by_name = {f"val/loss/{score.name}": score.loss for score in self.by_dataset}
        return {"val/loss": self.loss} | (by_name if len(by_name) > 1 else {})

    @property
    def _total_share(self) -> float:
        return sum(score.share for score in self.by_dataset)


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss in nats, capped where a float would overflow."""
    return math.exp(min(loss, 700.0))


@dataclass(frozen=True)
class Evaluator:
    """Scores datasets with one model, in batches of the run's micro-batch size."""

    config: RunConfig
    """Sets the batch shape, and whether attention is masked by document."""
    model: nn.Module
    """The wrapped model to call. Its training mode is restored afterwards."""
    mesh: Mesh
    reader: SequenceReader
    precision: Precision
    drop: Callable[[int], bool] | None = None
    """Called with the batch number, counted from 1, before each batch of a split but the first.
    Dropped is raised when it returns True.
    """

    def score(
        self,
        members: Sequence[Member],
        *,
        max_tokens: int | None = None,
        progress: Progress = SILENT,
    ) -> Evaluation | None:
        """Score each dataset's validation split, or its first share of `max_tokens`.

        Datasets without validation text are skipped. None when no dataset has any.
        """
        scored = with_validation(members)
        total = sum(member.share for member in scored)
        scores = []
        for member in scored:
            limit = max_tokens and max(round(max_tokens * member.share / total), 1)
            scores.append(self._score_split(member, limit, progress))
        return Evaluation(tuple(scores)) if scores else None

    @torch.no_grad()
    def _score_split(
        self, member: Member, max_tokens: int | None, progress: Progress
    ) -> SplitScore:
        """Score a split, or its first `max_tokens` targets, together with the other ranks.

        Every token but the split's first is a target exactly once. Cost: one forward pass per
        token.
        """
        split, mesh = member.dataset.split("val"), self.mesh
        data, rows = self.config.data, int(self.config.batch.rows_per_device)
        batches = evaluation_batches(
            split,
            data.seq_len,
            rows,
            device=str(mesh.device),
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            max_tokens=max_tokens,
            document_mask=data.document_mask,
            reader=self.reader,
        )
        exact = float64_device(mesh.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=exact)
        num_valid = torch.zeros((), dtype=torch.int64, device=mesh.device)
        total = min(max_tokens or split.num_tokens, split.num_tokens)
        title = "Evaluating" if member.share == 1 else f"Evaluating {member.name}"
        task = progress.task(title, total=total, unit="tokens")
        with evaluating(self.model), task as done:
            for number, micro in enumerate(batches, 1):
                if number > 1 and self.drop is not None and self.drop(number):
                    raise Dropped
                with self.precision.context(mesh.device.type):
                    loss, valid = self.model(micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT)
                loss_sum += loss.to(exact)
                num_valid += valid
                done.advance(rows * data.seq_len * mesh.dp_size)
        loss_sum, num_valid = mesh.sum(loss_sum, num_valid)
        is_whole = max_tokens is None or max_tokens >= split.num_tokens - 1
        return SplitScore(
            member.name,
            str(member.dataset.path),
            member.share,
            loss=float(loss_sum) / max(int(num_valid), 1),
            tokens=int(num_valid),
            text_bytes=split.text_bytes if is_whole else 0,
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its mode on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def score(
    run: Run,
    *,
    max_tokens: int | None = None,
    drop: Callable[[Run, int], bool] | None = None,
    progress: Progress = SILENT,
) -> Evaluation | None:
    """Score the run's validation text, or the first `max_tokens`. None when there is none.

    Raises: Dropped when `drop`, called between batches, returns True.
    """

    def between_batches(number: int) -> bool:
        run.pulse.beat()
        return drop is not None and drop(run, number)

    evaluator = Evaluator(
        run.config,
        run.model,
        run.mesh,
        run.reader,
        run.parts.precision,
        between_batches,
    )
    with run.pulse.during("evaluating"):
        return evaluator.score(members_of(run.dataset), max_tokens=max_tokens, progress=progress)


def batch_shapes(run: Run) -> list[tuple[int, int]]:
    """Return the (rows, tokens) of `score`'s batches. Empty when there is no validation text."""
    is_scored = with_validation(members_of(run.dataset))
    return [(run.rows_per_device, run.config.data.seq_len)] if is_scored else []


def with_validation(members: Sequence[Member]) -> list[Member]:
    """Return the datasets whose validation split has at least one target that counts."""
    splits = ((member, member.dataset.split("val")) for member in members)
    return [m for m, split in splits if len(split.sequences_with_targets(1024, most=1))]


def warn_of_empty_steps(run: Run, progress: Progress) -> None:
    """Report a run in which most steps have no target, as with long prompts and short rows.

    Cost: reads the mask of at most SAMPLED sequences per dataset.
    """
    seq_len, share = run.config.data.seq_len, 0.0
    if run.config.batch.by_tokens or len(run.loader.shapes) > 1:  # rows are whole documents
        return
    for member in members_of(run.dataset):
        split = member.dataset.split("train")
        count = split.num_sequences(seq_len)
        mask_NT = np.ones((min(SAMPLED, count), seq_len), np.bool_)
        if split.has_mask:
            split.read_mask(np.linspace(0, count - 1, len(mask_NT)).astype(int), seq_len, mask_NT)
        share += member.share * float(mask_NT.any(axis=1).mean())
    empty = (1 - share) ** (run.tokens_per_step // seq_len)
    if empty > 0.5:
        progress.say(
            f"{empty:.0%} of the steps will have no target, and change nothing: only {share:.1%} "
            f"of the sequences of {seq_len:,} tokens have one. Raise batch.tokens_per_step or "
            "data.seq_len, or add +length-buckets to speedups: its rows are whole documents."
        )


def warn_of_unscored(members: Sequence[Member], progress: Progress) -> None:
    """Report the datasets of a mix that have no validation text."""
    scored = with_validation(members)
    others = [member.name for member in members if member not in scored]
    if others and len(members) > 1:
        progress.say(f"Without validation text, and not in the loss: {shortened(others)}.")
