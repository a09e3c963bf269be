"""Talk to a model turn by turn: each prompt is what the chat template made of it in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from flatout.conversation.rendering import Renderer
from flatout.conversation.templates import ChatTemplate
from flatout.conversation.turns import ASSISTANT
from flatout.data.tokenizers.conversation import encode_pieces
from flatout.inference.generate import Context, draw_token
from flatout.inference.load import LoadedRun
from flatout.inference.text import DecodedText, StoppedText
from flatout.json_io import JsonObject
from flatout.training.evaluation import evaluating

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a reply are chosen."""

    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Sample from this many tokens only."""
    top_p: float | None = None
    """Sample from the most likely tokens that together reach this probability."""
    seed: int = 0
    """Seed of the first reply of a session; later ones continue its random numbers."""
    max_tokens: int = 256
    """Maximum tokens of a reply."""


class ChatSession:
    """A conversation with a model, which keeps its state of all turns so far.

    When the conversation does not fit the context, the oldest turns are left out, except the system
    prompt, so that a quarter of the context, or `max_tokens`, is free for the reply.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        template: ChatTemplate,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._sampling = sampling or Sampling()
        self._renderer = Renderer(template, tuple(self._tokenizer.special_tokens()))
        self._max_context = loaded.config.data.seq_len
        device = next(self._model.parameters()).device
        self._generator = torch.Generator(device).manual_seed(self._sampling.seed)
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Start a new conversation, with the same system prompt."""
        self.messages: list[JsonObject] = list(self._opening)
        """All turns so far, in the form of chat data."""
        self._first = len(self._opening)
        """The first turn after the system prompt that the model still sees."""
        self._context = Context(self._model, self._max_context)

    def reply(self, content: str) -> Iterator[str]:
        """Yield the reply to a user's turn in pieces of whole characters; both join the messages.

        Raises: BadConversation when the template refuses the turn; DataError when it fails, or when
                the tokenizer cannot encode the turn. The conversation is then as before.
        """
        first = self._first
        self.messages.append({"role": "user", "content": content})
        try:
            ids = self._prompt()
        except BaseException:
            self.messages.pop()
            self._first = first
            raise
        text = ""
        try:
            for piece in self._generate(ids):
                text += piece
                yield piece
        finally:
            self.messages.append({"role": ASSISTANT, "content": text})

    def _prompt(self) -> list[int]:
        """Return the ids of the prompt, without the oldest turns if it is too long."""
        limit = self._context.max_tokens
        room = limit and limit - min(self._sampling.max_tokens, limit // 4)
        while True:
            seen = [*self._opening, *self.messages[self._first :]]
            pieces = encode_pieces(self._tokenizer, self._renderer.prompt(seen))
            ids = [index for found, _ in pieces for index in found.tolist()]
            if room is None or len(ids) <= room or self._first >= len(self.messages) - 1:
                return ids
            self._first += 2  # a user's turn and its reply

    def _generate(self, ids: list[int]) -> Iterator[str]:
        tokenizer, sampling, end = self._tokenizer, self._sampling, self._renderer.end_token
        ends = {tokenizer.eot_id} | ({tokenizer.special_tokens()[end]} if end else set())
        decoded = DecodedText(tokenizer, [])
        text = StoppedText(() if end else (self._renderer.end,))
        choose = self._choose(tokenizer)
        with evaluating(self._model):
            token = choose(self._context.read_text(ids))
            for number in range(1, sampling.max_tokens + 1):
                if token in ends:
                    break
                if piece := text.push(decoded.push(token)):
                    yield piece
                if text.stopped:
                    return
                if number < sampling.max_tokens:
                    token = choose(self._context.read_token(token))
        if rest := text.push(decoded.rest()) + text.rest():
            yield rest

    def _choose(self, tokenizer: Tokenizer) -> partial[int]:
        sampling = self._sampling
        return partial(
            draw_token,
            vocab_size=tokenizer.vocab_size,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=self._generator,
        )
