"""Sample text from a model, token by token.

Letters: B rows, V vocabulary, K candidate tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.inference.text import DecodedText, StoppedText
from flatout.models.language_model import LanguageModel
from flatout.ops import float64_device, in_float64
from flatout.training.evaluation import evaluating

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are chosen."""

    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Sample from this many tokens only."""
    top_p: float | None = None
    """Sample from the most likely tokens that together reach this probability."""
    seed: int = 0
    """Seed of the random numbers. Those of a chat continue from one reply to the next."""
    max_tokens: int = 256
    """Maximum tokens of a text or a reply."""


def sample(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    sampling: Sampling | None = None,
    *,
    stop: Sequence[str] = (),
    max_context: int | None = None,
    opening: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the text after `prompt` in pieces of whole characters. "" starts a new document.

    The model sees the tokens of `opening` before the prompt.

    Stops at the end of the document, before a `stop` string, or after `sampling.max_tokens`. Its
    random generator is its own, so it does not affect a run in training. The model sees at most
    `max_context` tokens (see `Context`): pass the `seq_len` it was trained with.
    Raises: DataError when the prompt cannot be encoded.
    """
    sampling, ids = sampling or Sampling(), tokenizer.encode(prompt)
    yield from written(
        Context(model, max_context),
        [*opening, *ids] or [tokenizer.eot_id],
        tokenizer,
        sampling,
        generator_of(model, sampling.seed),
        {tokenizer.eot_id},
        stop=stop,
        before=ids,
    )


def written(
    context: Context,
    ids: Sequence[int],
    tokenizer: Tokenizer,
    sampling: Sampling,
    generator: torch.Generator,
    ends: Collection[int],
    *,
    stop: Sequence[str],
    before: Sequence[int] = (),
    unseen: Collection[int] = (),
) -> Iterator[str]:
    """Yield what the model writes after `ids` in pieces of whole characters.

    It ends before one of `ends` or a `stop` string. Its text continues that of the ids `before`.
    Tokens in `unseen` have no text.
    """
    decoded, text = DecodedText(tokenizer, before), StoppedText(stop)
    choose = partial(
        draw_token, sampling=sampling, vocab_size=tokenizer.vocab_size, generator=generator
    )
    with evaluating(context.model):
        tokens = tokens_after(context, ids, choose)
        for _, token in zip(range(sampling.max_tokens), tokens, strict=False):
            if token in ends:
                break
            piece = "" if token in unseen else text.push(decoded.push(token))
            if piece:
                yield piece
            if text.stopped:
                return
    if rest := text.push(decoded.rest()) + text.rest():
        yield rest


def tokens_after(
    context: Context, ids: Sequence[int], choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield the tokens that follow `ids`, endlessly. `choose` picks each from its logits (V,)."""
    token = choose(context.read_text(ids))
    while True:
        yield token
        token = choose(context.read_token(token))


class Context:
    """The tokens that a model has read, and the decoder that keeps its state of them.

    The model sees the text from the start, or the last `max_context` tokens of a longer one. None
    is the model's own limit. When the context is full, its second half is read again from position
    0 and becomes the new context. Each token therefore costs the forward pass of one token, or of
    two on average for long texts. A model without a limit, such as a recurrent one, never restarts
    its context.
    """

    def __init__(self, model: LanguageModel, max_context: int | None = None) -> None:
        self.model, self._max_context = model, max_context
        self._device = next(model.parameters()).device
        self._decoder = model.decoder(max_context)
        self._seen: list[int] = []

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens that the model sees. None means no limit."""
        return self._decoder.max_tokens

    def read_text(self, ids: Sequence[int]) -> Tensor:
        """Return the logits after a text. Only the part after what was already read is computed.

        A text longer than the context loses its beginning.

        Shapes:  returns logits_V (V,).
        """
        limit = self.max_tokens
        text = list(ids if limit is None else ids[-limit:])
        read = len(self._seen)
        if not 0 < read < len(text) or text[:read] != self._seen:
            if read:
                self._decoder = self.model.decoder(self._max_context)
            read = 0
        self._seen = text
        return self._read(text[read:])

    def read_token(self, token: int) -> Tensor:
        """Return the logits after one more token.

        When the context is full, its second half is read again and becomes the new context.

        Shapes:  returns logits_V (V,).
        """
        self._seen.append(token)
        limit = self.max_tokens
        if limit is None or self._decoder.has_room(1):
            return self._read([token])
        self._decoder = self.model.decoder(self._max_context)
        self._seen = self._seen[-max(limit // 2, 1) :]
        return self._read(self._seen)

    def _read(self, ids: list[int]) -> Tensor:
        logits_BV = self._decoder.read(torch.tensor([ids], dtype=torch.int64, device=self._device))
        return logits_BV[0]


def generator_of(model: LanguageModel, seed: int) -> torch.Generator:
    """Return random numbers for `draw_token`, on the device where it draws."""
    return torch.Generator(float64_device(next(model.parameters()).device)).manual_seed(seed)


def draw_token(
    logits_V: Tensor, sampling: Sampling, *, vocab_size: int, generator: torch.Generator
) -> int:
    """Sample one token below `vocab_size`. The padding of a vocabulary is never sampled.

    Shapes:  logits_V (V,).
    """
    logits_V = in_float64(logits_V[:vocab_size])
    vocab_size = len(logits_V)  # a tokenizer may have more tokens than the model
    top_k, top_p = sampling.top_k, sampling.top_p
    if sampling.temperature == 0 or top_k == 1:
        return int(logits_V.argmax())
    shares_V = ((logits_V - logits_V.max()) / sampling.temperature).softmax(-1)
    if top_k is None and top_p is None:
        return int(torch.multinomial(shares_V, 1, generator=generator))
    shares_K, ids_K = shares_V.topk(min(top_k or vocab_size, vocab_size))
    if top_p is not None:
        # on the CPU: a GPU has no deterministic cumsum
        before_K = shares_K.cpu().cumsum(-1).to(shares_K.device) - shares_K
        ids_K = ids_K[before_K < top_p]
    # sort by id: two shares that rounding swaps must not affect any other token
    ids_K = ids_K.sort().values
    return int(ids_K[torch.multinomial(shares_V[ids_K], 1, generator=generator)])
