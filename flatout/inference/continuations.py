"""Log-likelihoods of given text, and greedy completions: what benchmarks with tasks ask for.

Letters: B rows, T tokens, N scored positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.inference.generate import sample
from flatout.inference.load import LoadedRun
from flatout.progress import SILENT, Progress
from flatout.training.evaluation import evaluating

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

MOST_LOGITS = 1 << 26
"""Logits that exist at once: 256 MiB in fp32."""
DEFAULT_MAX_TOKENS = 256


class Pair(NamedTuple):
    """A context, and the continuation that is scored after it."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation."""

    log_likelihood: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one at its position."""


class Window(NamedTuple):
    """Tokens that fit into the model's context; the last `num_scored` of them are targets."""

    tokens: list[int]
    num_scored: int


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Return the tokens of a context and its continuation, split where the context ends.

    White space at the end of the context belongs to the continuation, because tokenizers attach it
    to the next word. An empty context is the start of a document.
    """
    stripped = context.rstrip()
    if not stripped:
        return Pair([tokenizer.eot_id], tokenizer.encode(context + continuation))
    context, continuation = stripped, context[len(stripped) :] + continuation
    whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return Pair(before, whole[len(before) :])


def windows(pair: Pair, size: int) -> Iterator[Window]:
    """Yield windows in which each token of the continuation is a target once.

    A window has at most `size` inputs. Later windows of a long continuation start as early as
    possible, so that every target has as much context as fits.
    """
    tokens, start = [*pair.context, *pair.continuation], len(pair.context)
    while start < len(tokens):
        end = min(start + size, len(tokens))
        yield Window(tokens[max(end - 1 - size, 0) : end], end - start)
        start = end


def score_pairs(
    loaded: LoadedRun, pairs: Sequence[Pair], *, progress: Progress = SILENT
) -> list[Score]:
    """Return the score of each continuation, computed in batches of similar length.

    The model sees at most `data.seq_len` tokens, and computes in the precision it was loaded with.
    Cost: one forward pass per token of each pair.
    """
    size = loaded.config.data.seq_len
    queue = [(number, one) for number, pair in enumerate(pairs) for one in windows(pair, size)]
    queue.sort(key=lambda item: -len(item[1].tokens))
    totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
    task = progress.task("Scoring", total=len(queue), unit="texts")
    with evaluating(loaded.model), task as done:
        for batch in _batches(queue, int(loaded.config.batch.rows_per_device) * size):
            scores = _score_windows(loaded, [window for _, window in batch])
            for (number, _), score in zip(batch, scores, strict=True):
                totals[number] += score.log_likelihood
                greedy[number] = greedy[number] and score.is_greedy
            done.advance(len(batch))
    return [Score(*both) for both in zip(totals, greedy, strict=True)]


def _batches(
    queue: Sequence[tuple[int, Window]], most_tokens: int
) -> Iterator[list[tuple[int, Window]]]:
    """Yield pieces of a queue that starts with the longest windows, padding included."""
    rest = iter(queue)
    while first := next(rest, None):
        rows = max(most_tokens // max(len(first[1].tokens) - 1, 1), 1)
        yield [first, *islice(rest, rows - 1)]


@torch.no_grad()
def _score_windows(loaded: LoadedRun, batch: Sequence[Window]) -> list[Score]:
    """Return the scores of windows in one forward pass; padding comes after what is scored."""
    model = loaded.model
    device = next(model.parameters()).device
    longest = max(len(window.tokens) for window in batch) - 1
    tokens_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, -1)
    for row, (tokens, num_scored) in enumerate(batch):
        tokens_BT[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets_BT[row, len(tokens) - 1 - num_scored : len(tokens) - 1] = torch.tensor(
            tokens[-num_scored:]
        )
    scored_BT = (targets_BT >= 0).to(device)
    with loaded.recipe.precision.context(device.type):
        hidden_BTD = model.embed(tokens_BT.to(device))
        for block in model.blocks:
            hidden_BTD = block(hidden_BTD, None)
        logps_N, best_N = _at_positions(
            loaded, hidden_BTD[scored_BT], targets_BT[targets_BT >= 0].to(device)
        )
    scores, start = [], 0
    for window in batch:
        own = slice(start, start + window.num_scored)
        scores.append(Score(float(logps_N[own].sum()), bool(best_N[own].all())))
        start = own.stop
    return scores


def _at_positions(loaded: LoadedRun, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and whether it is the most likely token.

    Shapes:  hidden_ND (N, D); targets_N (N,).
    """
    model, vocab_size = loaded.model, loaded.tokenizer.vocab_size
    rows = max(MOST_LOGITS // model.config.vocab_size, 1)
    logps, best = [], []
    for start in range(0, len(targets_N), rows):
        piece_N = targets_N[start : start + rows]
        logits_NV = model.last_logits(hidden_ND[start : start + rows].unsqueeze(1)).float()
        logps_NV = logits_NV.log_softmax(-1)
        logps.append(logps_NV.gather(-1, piece_N.unsqueeze(-1)).squeeze(-1).double())
        best.append(logits_NV[:, :vocab_size].argmax(-1) == piece_N)
    return torch.cat(logps), torch.cat(best)


def complete(loaded: LoadedRun, prompt: str, settings: dict[str, Any]) -> str:
    """Return the text that follows a prompt, up to one of `until`, the end, or `max_gen_toks`.

    `settings` has the names that lm-evaluation-harness uses; without `do_sample`, the most likely
    token is chosen each time.
    Raises: ConfigError when a setting is out of range.
    """
    until = settings.get("until") or ()
    stop = [until] if isinstance(until, str) else [word for word in until if word]
    draws = bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
    try:
        max_tokens = int(settings.get("max_gen_toks", DEFAULT_MAX_TOKENS))
        temperature = float(settings.get("temperature", 1.0)) if draws else 0.0
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A task asks for {settings}, which is no number of tokens or no temperature.",
            fix="Correct the task's generation_kwargs.",
        ) from error
    pieces = sample(
        loaded.model,
        loaded.tokenizer,
        prompt,
        temperature=temperature,
        top_k=settings.get("top_k") if draws else None,
        top_p=settings.get("top_p") if draws else None,
        max_tokens=max_tokens,
        stop=stop,
        max_context=loaded.config.data.seq_len,
    )
    return "".join(pieces)


def score_texts(
    loaded: LoadedRun, texts: Iterable[str], *, progress: Progress = SILENT
) -> list[float]:
    """Return the log-likelihood of whole texts, each from the start of a document."""
    start = [loaded.tokenizer.eot_id]
    pairs = [Pair(start, loaded.tokenizer.encode(text)) for text in texts]
    return [score.log_likelihood for score in score_pairs(loaded, pairs, progress=progress)]
