"""Talk to a model turn by turn: each prompt is what the chat template made of it in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import ChatTemplate
from flatout.data.conversation.turns import ASSISTANT
from flatout.errors import ConfigError, DataError
from flatout.inference.generate import Context, draw_token, generator_of, text_of, tokens_after
from flatout.inference.text import DecodedText, StoppedText
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject
from flatout.training.evaluation import evaluating

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer
    from flatout.models.language_model import LanguageModel


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
    """Seed of the first reply of a session. Later ones continue its random numbers."""
    max_tokens: int = 256
    """Maximum tokens of a reply."""


class ChatSession:
    """A conversation with a model, which keeps its state of all turns so far.

    When the conversation does not fit the context, the oldest turns are omitted, except the system
    prompt, so that a quarter of the context, or `max_tokens` if that is less, is free for the
    reply. `progress` is told the first time. What does not fit on its own is rejected, never cut.

    Raises: ConfigError when the system prompt does not fit; BadConversation when the template
            rejects it; DataError when the template fails.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        max_context: int,
        template: ChatTemplate,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._sampling = sampling or Sampling()
        self._renderer = Renderer(template, tuple(self._tokenizer.special_tokens()))
        self._max_context = max_context
        self._generator = generator_of(self._model, self._sampling.seed)
        self._progress, self._has_left_out = progress, False
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        if self._opening:
            self._require_room_for_opening()

    def reset(self) -> None:
        """Start a new conversation, with the same system prompt."""
        self.messages: list[JsonObject] = list(self._opening)
        """All turns so far, in the form of chat data."""
        self._first = len(self._opening)
        """The first turn after the system prompt that the model still sees."""
        self._context = Context(self._model, self._max_context)

    def reply(self, content: str) -> Iterator[str]:
        """Yield the reply to a user's turn in pieces of whole characters. Both join the messages.

        Raises: BadConversation when the template rejects the turn; DataError when it fails, when
                the tokenizer cannot encode the turn, or when the turn does not fit the context. The
                conversation is then as before.
        """
        first = self._first
        self.messages.append({"role": "user", "content": content})
        try:
            ids = self._prompt()
        except BaseException:
            self.messages.pop()
            self._first = first
            raise
        if self._first > first and not self._has_left_out:
            self._has_left_out = True
            self._progress.say(
                "The conversation no longer fits the model's context, so the model does not see "
                "its oldest turns from here on."
            )
        text = ""
        try:
            for piece in self._generate(ids):
                text += piece
                yield piece
        finally:
            self.messages.append({"role": ASSISTANT, "content": text})

    def sample(self, question: str, prompt: list[int]) -> str:
        """Return an answer to a question, or to the tokens of a prompt, after what was asked.

        Raises: as `reply`.
        """
        ids = self._encoded([{"role": "user", "content": question}]) if question else prompt
        return self._tokenizer.decode(ids) + "".join(self._generate(ids))

    @property
    def _room(self) -> int | None:
        """The maximum number of tokens of a prompt. None means no limit."""
        limit = self._context.max_tokens
        return limit and limit - min(self._sampling.max_tokens, limit // 4)

    def _require_room_for_opening(self) -> None:
        """Check that a short turn fits after the system prompt."""
        ids, room = self._encoded([*self._opening, {"role": "user", "content": "?"}]), self._room
        if room is not None and len(ids) > room:
            raise ConfigError(
                f"The system prompt does not fit: with one short turn it has {len(ids):,} tokens, "
                f"and {self._room_in_words()}.",
                fix="Shorten the system prompt, or train with a larger data.seq_len.",
            )

    def _prompt(self) -> list[int]:
        """Return the ids of the prompt, without the oldest turns if it is too long.

        Raises: DataError when the newest turn does not fit; BadConversation.
        """
        room = self._room
        while True:
            ids = self._encoded([*self._opening, *self.messages[self._first :]])
            if room is None or len(ids) <= room:
                return ids
            if self._first >= len(self.messages) - 1:
                after = " after the system prompt" if self._opening else ""
                raise DataError(
                    f"The turn does not fit{after}: the prompt has {len(ids):,} tokens, and "
                    f"{self._room_in_words()}.",
                    fix="Shorten the turn, or train with a larger data.seq_len.",
                )
            self._first += 2  # a user's turn and its reply

    def _encoded(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the ids of the text that asks for a reply to the last of these turns."""
        ids, _ = self._tokenizer.encode_example(self._renderer.prompt(messages))
        return [int(index) for index in ids]

    def _room_in_words(self) -> str:
        limit, room = self._context.max_tokens or 0, self._room or 0
        return (
            f"the model's context of {limit:,} has room for {room:,}, with {limit - room:,} kept "
            "for the reply"
        )

    def _generate(self, ids: list[int]) -> Iterator[str]:
        tokenizer, sampling, end = self._tokenizer, self._sampling, self._renderer.end_token
        special = tokenizer.special_tokens()
        ends = {tokenizer.eot_id} | ({special[end]} if end else set())
        unseen = {*special.values()} - ends
        text = StoppedText(() if end else (self._renderer.end,))
        choose = partial(
            draw_token,
            vocab_size=tokenizer.vocab_size,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=self._generator,
        )
        with evaluating(self._model):
            drawn = islice(tokens_after(self._context, ids, choose), sampling.max_tokens)
            tokens = (token for token in drawn if token not in unseen)
            yield from text_of(tokens, ends, DecodedText(tokenizer, []), text)
