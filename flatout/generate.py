"""From a model to text: draws it token by token, and shows it as whole characters.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.models.language_model import LanguageModel

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer


@torch.no_grad()
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
    """Yield the text that follows `prompt` (empty: a new document), piece by piece, never half a character.

    Ends at the end of the document, before a `stop` string, or after `max_tokens`. It draws from a generator of its own, so
    a run that samples trains on as if it had not. The model sees the last `window` tokens, as many as it takes when None: give
    the length of the windows it was trained on, where it could take more than it has learned to.
    Raises: ConfigError when a setting is out of range; DataError when the prompt cannot be encoded.
    """
    check_settings(temperature, top_k, top_p, max_tokens)
    known = min(window or model.max_seq_len, model.max_seq_len)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.eot_id]
    context_BT = torch.tensor([ids[-known:]], dtype=torch.int64, device=device)
    text, written = _StoppedText(stop), _WrittenText(tokenizer, ids if prompt else [])
    with _evaluating(model):
        for _ in range(max_tokens):
            token = _next_token(model.next_logits(context_BT)[0], tokenizer.vocab_size, temperature, top_k, top_p, generator)
            if token == tokenizer.eot_id:
                break
            context_BT = torch.cat([context_BT, torch.tensor([[token]], device=device)], dim=1)[:, -known:]
            piece = text.take(written.take(token))
            if piece:
                yield piece
            if text.stopped:
                return
    rest = text.take(written.rest()) + text.rest()
    if rest:
        yield rest


def check_settings(temperature: float, top_k: int | None, top_p: float | None, max_tokens: int) -> None:
    """Do nothing when the settings of a sample make sense.

    Raises: ConfigError naming the one that does not.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"A temperature of {temperature} cannot be used.", fix="Use 0 (always the likeliest token) to about 1.5.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top-k {top_k} leaves no token to draw.", fix="Use 1 or more, or leave it out.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top-p {top_p} is not a share of the probability.", fix="Use a number above 0 and at most 1, or leave it out.")
    if max_tokens < 1:
        raise ConfigError(f"max-tokens {max_tokens} asks for no text.", fix="Use 1 or more.")


def _next_token(logits_V: Tensor, vocab_size: int, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    """Draw one token. A padded vocabulary has rows no token stands for: they are never drawn."""
    scores_V = logits_V[:vocab_size].float()
    if temperature == 0:
        return int(scores_V.argmax())
    sorted_V, order_V = (scores_V / temperature).softmax(-1).sort(descending=True, stable=True)
    if top_k is not None:
        sorted_V[top_k:] = 0
    if top_p is not None:
        before_V = sorted_V.cumsum(-1) - sorted_V
        sorted_V[before_V >= top_p] = 0
    return int(order_V[torch.multinomial(sorted_V, 1, generator=generator)])


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

    What an id stands for can depend on its neighbours: a word's space is left out at the beginning of a text, bytes make a
    character only together. So all ids are decoded each time, and what could still change is held back: U+FFFD at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)

    def take(self, token: int) -> str:
        """Return what is certain now that `token` has come."""
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids)
        return self._show(len(self._text.rstrip("\ufffd")))

    def rest(self) -> str:
        """Return what was held back."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start:end]


class _StoppedText:
    """Text that ends before a stop string, which may arrive in several pieces: what could be its beginning is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [s for s in stop if s]
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
        keep = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held
