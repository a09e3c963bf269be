"""Talk to a model turn by turn: each prompt is what the chat template made of it in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import ChatTemplate, stored_template
from flatout.data.conversation.turns import ASSISTANT
from flatout.data.store.mix import members_of
from flatout.errors import ConfigError, DataError
from flatout.inference.generate import Context, Sampling, generator_of, sample, written
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.data.tokenizers import Tokenizer
    from flatout.models.language_model import LanguageModel


SAMPLE_TOKENS, MOST_DOCUMENTS = 160, 8
"""Length of a sample during a run, and the most documents in it."""


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
            ids = self._encoded([*self._opening, {"role": "user", "content": "?"}])
            if self._room is not None and len(ids) > self._room:
                raise ConfigError(
                    self._too_long("The system prompt does not fit: with one short turn it", ids),
                    fix="Shorten the system prompt, or train with a larger data.seq_len.",
                )

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

    def _too_long(self, start: str, ids: list[int]) -> str:
        limit, room = self._context.max_tokens or 0, self._room or 0
        return (
            f"{start} has {len(ids):,} tokens, and the model's context of {limit:,} has room for "
            f"{room:,}, with {limit - room:,} kept for the reply."
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
                    self._too_long(f"The turn does not fit{after}: the prompt", ids),
                    fix="Shorten the turn, or train with a larger data.seq_len.",
                )
            self._first += 2  # a user's turn and its reply

    def _encoded(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the ids of the text that asks for a reply to the last of these turns."""
        ids, _ = self._tokenizer.encode_example(self._renderer.prompt(messages))
        return [int(index) for index in ids]

    def _generate(self, ids: list[int]) -> Iterator[str]:
        tokenizer, end = self._tokenizer, self._renderer.end_token
        special = tokenizer.special_tokens()
        ends = {tokenizer.eot_id} | ({special[end]} if end else set())
        yield from written(
            self._context,
            ids,
            tokenizer,
            self._sampling,
            self._generator,
            ends,
            stop=() if end else (self._renderer.end,),
            unseen={*special.values()} - ends,
        )


def sample_text(run: Run) -> str:
    """Return a short text generated by the model in its current state, of several documents if
    they are short.

    A chat model answers train.sample_prompt or the first validation conversation.
    """
    prompt, max_context = run.config.train.sample_prompt, run.config.data.seq_len
    data = members_of(run.dataset)[0].dataset
    sampling = Sampling(top_k=200, seed=run.step, max_tokens=SAMPLE_TOKENS)
    if template := stored_template(data.manifest.source):
        session = ChatSession(run.core, data.tokenizer, max_context, template, sampling=sampling)
        split = data.split("val" if data.split("val").num_tokens else "train")
        answer = split.read_mask_range(0, int(split.document_ends[0])).argmax()
        return session.sample(prompt, split.read_tokens(0, int(answer)).tolist())
    text, prompt = "", prompt or data.opening
    for number in range(MOST_DOCUMENTS):
        own = replace(sampling, seed=run.step + number)
        pieces = sample(run.core, data.tokenizer, prompt, own, max_context=max_context)
        text += "\n" * bool(text) + prompt + "".join(pieces)
        if len(text) >= SAMPLE_TOKENS:
            break
    return text
