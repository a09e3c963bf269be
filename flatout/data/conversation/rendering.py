"""Writes a conversation as text with a chat template, and finds the text that the loss counts.

The text of an assistant turn starts where the prompt that generation gives to the model ends, and
ends after the text or special token that ends the turn. The rendered text is cut at both places,
and around special tokens, and every piece is encoded on its own. So no token spans a boundary, and
the tokens of a prompt in training are those of the same prompt in `flatout chat`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, pairwise
from typing import TYPE_CHECKING, Any

from flatout.data.conversation.templates import ChatTemplate
from flatout.data.conversation.turns import (
    ASSISTANT,
    GUARD,
    START,
    STOP,
    BadConversation,
    Conversation,
)
from flatout.errors import DataError
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    from flatout.data.conversation.jinja import Asked
    from flatout.data.conversation.rendering_process import Rendered

_MARKS = re.compile(f"[{START}{STOP}{GUARD}]")
_PROBE = "flatout asks"
"""The content of a turn whose end is searched for."""
_LONGEST_END = 1 << 12
"""Characters of the end of a turn, which every text of a turn is searched for."""
_TAG = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")
"""The start of a thought at the end of a prompt. The model's own text closes it."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation's text that is encoded on its own."""

    text: str
    is_special: bool
    """Whether it is the name of one special token."""
    is_target: bool
    """Whether the loss counts its tokens."""


Examples = tuple[tuple[Piece, ...], ...]
"""The pieces of each example."""


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation that is to be rendered: a template renders many at a time."""

    renderer: Renderer
    turns: list[JsonObject]
    tools: list[Any] | None
    answers: list[int]
    """The indices of the assistant's turns."""
    targets: tuple[bool, ...]
    """Whether the loss counts a turn."""
    message: bytes
    """What the process that renders is asked."""


@dataclass(frozen=True)
class Renderer:
    """A chat template together with the special tokens of a tokenizer."""

    template: ChatTemplate
    special: tuple[str, ...]
    """Names of special tokens. In the text of a turn they are text."""

    @cached_property
    def end(self) -> str:
        """The text that ends an assistant turn, up to its special token if it has one.

        Raises: DataError when the template writes nothing or very much after the content of a turn.
        """
        turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": _PROBE}]
        try:
            ((found, _),) = self._rendered(self._message(turns, None, ((None, False), [])))
        except BadConversation as error:
            raise DataError(
                f"A question with its answer {error.what}.", fix="Use --chat chatml or plain."
            ) from error
        text = _MARKS.sub("", found)
        tail = text[text.rfind(_PROBE) + len(_PROBE) :] if _PROBE in text else ""
        special = self._specials.search(tail) if self._specials else None
        end = tail[: special.end()] if special else tail.rstrip()
        length = len(end.strip())
        if not 2 <= length <= _LONGEST_END:
            what = "nothing" if length < 2 else f"{length:,} characters"
            raise DataError(
                f"The chat template {self.template.name} writes {what} after an assistant's turn, "
                "so a model could not learn to end one.",
                fix="Write {{ eos_token }} or another text there, or use --chat chatml or plain.",
            )
        return end

    @property
    def end_token(self) -> str | None:
        """The special token that ends an assistant turn. None when text ends it."""
        found = self._specials.search(self.end) if self._specials else None
        return found[0] if found else None

    def request(self, conversation: Conversation) -> Request:
        """Return a conversation as `examples` takes it.

        Raises: BadConversation when a turn contains one of our marks.
        """
        turns, tools = self._guarded(conversation.messages), self._guarded(conversation.tools)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        others = [(count, count == index) for index in answers for count in (index, index + 1)]
        message = self._message(turns, tools, ((len(turns), False), others))
        return Request(self, turns, tools, answers, conversation.targets, message)

    def examples(self, requests: Sequence[Request]) -> Iterator[Examples | DataError]:
        """Yield the examples to train on of each conversation, or its error.

        A conversation is one example. When the template renders a turn differently once later ones
        follow, each assistant turn that counts has its own example, which starts with the prompt
        for that turn.

        The error is BadConversation when the template rejects the conversation, or does not write
        a turn after its prompt, and DataError when the template fails.
        """
        rendered = self._render([one.message for one in requests])
        for one, found in zip(requests, rendered, strict=True):
            if isinstance(found, DataError):
                yield found
                continue
            try:
                yield self._together(one, *found[0]) or self._apart(one)
            except DataError as error:
                yield error

    def prompt(self, messages: Sequence[JsonObject]) -> tuple[Piece, ...]:
        """Return the pieces of the text that asks for the next assistant turn.

        They are the first pieces of any example that continues with an assistant turn.

        Raises: BadConversation; DataError when the template fails.
        """
        turns = self._guarded(messages)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        asked = (None, True), [(index, True) for index in answers]
        (found,) = self._rendered(self._message(turns, None, asked))
        text, spans = self._prompt(found)
        return self._cut(text, spans, [])

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        names = sorted({name for name in self.special if len(name) > 1}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _unwritable(self) -> re.Pattern[str]:
        """Names that the text of a turn must not contain: special tokens, and what ends a turn."""
        names = sorted({*(n for n in self.special if len(n) > 1), self.end.strip()}, key=len)
        return re.compile("|".join(map(re.escape, reversed(names))))

    def _guarded(self, value: Any) -> Any:
        """Return a value whose texts contain no name of a special token in one piece."""
        if isinstance(value, str):
            if _MARKS.search(value):
                raise BadConversation(
                    "contains one of the noncharacters U+FDD0 to U+FDD2", reason="noncharacters"
                )
            return self._unwritable.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(inner) for inner in value]
        return value

    def _message(
        self, turns: Sequence[JsonObject], tools: list[Any] | None, *asked: Asked
    ) -> bytes:
        """Return a request for some texts of a conversation."""
        from flatout.data.conversation.rendering_process import message

        values = {"messages": list(turns), "tools": tools, "documents": None}
        return message(self.template.variables | values, asked)

    def _render(self, messages: Sequence[bytes]) -> Iterator[list[Rendered] | DataError]:
        """Yield the texts that each request asks for, or why there are none."""
        from flatout.data.conversation.rendering_process import Refused, render

        for found in render(self.template.name, self.template.text, messages):
            if not isinstance(found, Refused):
                yield found
                continue
            why = " ".join(str(found).split()).rstrip(".")
            yield BadConversation(
                f"is rejected by the chat template {self.template.name}: {why}",
                reason="rejected by the chat template",
            )

    def _rendered(self, message: bytes) -> list[Rendered]:
        """Return the texts that one request asks for.

        Raises: BadConversation; DataError when the template fails.
        """
        (found,) = self._render([message])
        if isinstance(found, DataError):
            raise found
        return found

    def _together(
        self, one: Request, text: str, shared: Sequence[tuple[int, int]]
    ) -> Examples | None:
        """Return all turns as one example. None when some are rendered differently later.

        `shared` is what the text has in common with the prompt for each assistant turn, and with
        the text that ends after it.
        """
        if START in text:
            text, spans = _without_marks(text)
            counts = [one.targets[index] for index in one.answers]
            if len(counts) != len(spans):
                counts = [True] * len(spans)
        else:
            spans = self._ends(text, [length for length, _ in shared[::2]])
            counts = [one.targets[index] for index in one.answers]
            if len(spans) != len(counts):
                return None
            for (_, stop), (length, before), (_, after) in zip(
                spans, shared[::2], shared[1::2], strict=True
            ):
                if before < length or after < stop:
                    return None
        return (self._cut(text, spans, list(compress(spans, counts))),)

    def _apart(self, one: Request) -> Examples:
        """Return an example for each assistant turn that counts.

        Raises: BadConversation when the template does not write a turn after its prompt.
        """
        counted = [index for index in one.answers if one.targets[index]]
        asked: list[Asked] = []
        for index in counted:
            asked.append(
                ((index, True), [(before, True) for before in one.answers if before < index])
            )
            asked.append(((index + 1, False), []))
        found = self._rendered(self._message(one.turns, one.tools, *asked))
        return tuple(
            self._example(one.turns[index], index, prompt, after.text)
            for index, prompt, after in zip(counted, found[::2], found[1::2], strict=True)
        )

    def _prompt(self, found: Rendered) -> tuple[str, list[Span]]:
        """Return a prompt, and the spans of earlier assistant turns in it.

        A turn that the template now writes differently has none.
        """
        if START in found.text:
            return _without_marks(found.text)
        starts = [length for length, common in found.shared if common == length]
        return found.text, self._ends(found.text, starts)

    def _ends(self, text: str, starts: Sequence[int]) -> list[Span]:
        """Return the spans of turns that start at some positions, with what ends them."""
        return [
            (start, at + len(self.end))
            for start in starts
            if (at := text.find(self.end, start)) >= 0
        ]

    def _example(
        self, turn: JsonObject, index: int, found: Rendered, after: str
    ) -> tuple[Piece, ...]:
        """Return the pieces of a prompt and of the turn that answers it."""
        prompt, spans = self._prompt(found)
        answer = after[len(prompt) :] if after.startswith(prompt) else self._after_tag(prompt, turn)
        if answer is None or self.end not in answer:
            raise BadConversation(
                f"has a turn {index + 1} that the chat template {self.template.name} does not "
                "write after the prompt for it, so its text cannot be told from the rest",
                fix="Use a template with {% generation %} blocks, or --chat chatml or plain.",
                reason="written differently from its prompt",
            )
        text = prompt + answer[: answer.index(self.end) + len(self.end)]
        target = (len(prompt), len(text))
        return self._cut(text, [*spans, target], [target])

    def _after_tag(self, prompt: str, turn: JsonObject) -> str | None:
        """Return a turn after a prompt that ends with a tag such as <think>. None after others.

        The template itself drops thoughts, so the text of the turn is taken as the row states it.
        A turn without a thought has an empty one.
        """
        tag = _TAG.search(prompt)
        if tag is None or "tool_calls" in turn:
            return None
        opening, closing, content = tag[0].strip(), f"</{tag[1]}>", turn["content"]
        if content.lstrip().startswith(opening):
            content = content.lstrip().removeprefix(opening).removeprefix("\n")
        elif closing not in content:
            content = f"{turn.get('reasoning_content') or ''}\n{closing}\n\n{content}"
        return f"{content}{self.end}"

    def _cut(self, text: str, cuts: Sequence[Span], targets: Sequence[Span]) -> tuple[Piece, ...]:
        """Return the pieces between the edges of `cuts` and of special tokens."""
        found = self._specials.finditer(text) if self._specials else ()
        special = {match.span() for match in found}
        edges = sorted({0, len(text), *chain.from_iterable((*special, *cuts))})
        return tuple(
            Piece(
                part,
                (start, stop) in special,
                any(first <= start < last for first, last in targets),
            )
            for start, stop in pairwise(edges)
            if (part := text[start:stop].replace(GUARD, ""))
        )


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return a text without the marks of `{% generation %}` blocks, and the spans of these."""
    spans: list[Span] = []
    parts: list[str] = []
    length = start = 0
    for part in re.split(f"([{START}{STOP}])", text):
        if part == START:
            start = length
        elif part == STOP:
            spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans
