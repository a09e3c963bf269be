"""From a model to text: draws it token by token, and shows it as whole characters.

Letters: B rows, V vocabulary, K tokens that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.assembly.preflight import check_sampling
from flatout.models.language_model import LanguageModel

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

KEPT_IDS = 64
"""Ids that are decoded again with each new one."""


def sample(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    window: int | None = None,
) -> Iterator[str]:
    """Yield the text that follows `prompt` (empty: a new document), piece by piece, never half a
    character.

    Ends at the end of the document, before a `stop` string, or after `max_tokens`. It draws from a
    generator of its own, so a run that samples trains on as if it had not. The model sees at most
    `window` tokens, as `tokens_after` says: give the length of the windows it was trained on, where
    it could take more than it has learned to.
    Raises: ConfigError when a setting is out of range; DataError when the prompt cannot be encoded.
    """
    check_sampling(temperature, top_k, top_p, max_tokens, stop)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    choose = partial(
        _chosen,
        vocab_size=tokenizer.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )
    prompt_ids = tokenizer.encode(prompt)
    text, written = _StoppedText(stop), _WrittenText(tokenizer, prompt_ids)
    with _evaluating(model):
        for token in islice(
            tokens_after(model, prompt_ids or [tokenizer.eot_id], choose, window=window), max_tokens
        ):
            if token == tokenizer.eot_id:
                break
            piece = text.take(written.take(token))
            if piece:
                yield piece
            if text.stopped:
                return
    rest = text.take(written.rest()) + text.rest()
    if rest:
        yield rest


def tokens_after(
    model: LanguageModel,
    ids: Sequence[int],
    choose: Callable[[Tensor], int],
    *,
    window: int | None = None,
) -> Iterator[int]:
    """Yield token after token, without end, each as `choose` picks it from the scores (V,) of what
    follows all those before.

    The model sees the text from its beginning, or the last `window` tokens of a longer `ids`; None
    is as many as it takes. Once it has seen that many, it goes on from the second half of them,
    read anew from position 0: so a token costs that of one token, and two on average when the text
    is long. A model without a limit of its own, such as a recurrent one, never starts anew.
    """
    device = next(model.parameters()).device
    decoder = model.decoder(window)
    limit = decoder.max_tokens
    unread = seen = list(ids if limit is None else ids[-limit:])
    while True:
        if limit is not None and not decoder.has_room(len(unread)):
            decoder = model.decoder(window)
            unread = seen = seen[-max(limit // 2, 1) :]
        logits_BV = decoder.read(torch.tensor([unread], dtype=torch.int64, device=device))
        token = choose(logits_BV[0])
        unread = [token]
        seen.append(token)
        yield token


def _chosen(
    logits_V: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """Draw one token. A padded vocabulary has rows no token stands for: they are never drawn."""
    scores_V = logits_V[:vocab_size].double()
    if temperature == 0 or top_k == 1:
        return int(scores_V.argmax())
    shares_V = ((scores_V - scores_V.max()) / temperature).softmax(-1)
    if top_k is None and top_p is None:
        return int(torch.multinomial(shares_V, 1, generator=generator))
    shares_K, ids_K = shares_V.topk(min(top_k or vocab_size, vocab_size))
    if top_p is not None:
        before_K = (
            shares_K.cpu().cumsum(-1).to(shares_K.device) - shares_K
        )  # a GPU has no deterministic sum of this kind
        ids_K = ids_K[before_K < top_p]
    ids_K = (
        ids_K.sort().values
    )  # by id: that two shares change places by rounding then moves no other token's chance
    return int(ids_K[torch.multinomial(shares_V[ids_K], 1, generator=generator)])


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _WrittenText:
    """The text of ids that come one by one, after those of a prompt.

    What an id stands for can depend on its neighbours: a word's space is left out at the beginning
    of a text, bytes make a character only together. So an id is decoded with those before it, and
    what could still change is held back: U+FFFD at the end. Ids long past are forgotten, once the
    text of the rest is known to be the same without them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)
        self._most_ids = 2 * KEPT_IDS

    def take(self, token: int) -> str:
        """Return what is certain now that `token` has come."""
        if len(self._ids) >= self._most_ids and self._shown == len(self._text):
            self._forget()
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids)
        return self._show(len(self._text.rstrip("\ufffd")))

    def rest(self) -> str:
        """Return what was held back."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start:end]

    def _forget(self) -> None:
        for kept in range(KEPT_IDS, KEPT_IDS // 2, -1):
            ids = self._ids[-kept:]
            text = self._tokenizer.decode(ids)
            if text and "\ufffd" not in text and self._text.endswith(text):
                self._ids, self._text, self._shown, self._most_ids = (
                    ids,
                    text,
                    len(text),
                    2 * KEPT_IDS,
                )
                return
        self._most_ids = 2 * len(self._ids)


class _StoppedText:
    """Text that ends before a stop string, which may arrive in several pieces: what could be its
    beginning is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def take(self, piece: str) -> str:
        """Return what can be shown now that `piece` has come."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(s) for s in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(
            (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held
