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
from itertools import chain, pairwise
from typing import Any

from flatout.conversation.templates import ChatTemplate
from flatout.conversation.turns import ASSISTANT, GUARD, START, STOP, BadConversation, Conversation
from flatout.errors import DataError
from flatout.json_io import JsonObject

_MARKS = re.compile(f"[{START}{STOP}{GUARD}]")
_PROBE = "flatout asks"
"""The content of a turn whose end is searched for."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation's text that is encoded on its own."""

    text: str
    is_special: bool
    """Whether it is the name of one special token."""
    is_target: bool
    """Whether the loss counts its tokens."""


@dataclass(frozen=True)
class Renderer:
    """A chat template together with the special tokens of a tokenizer."""

    template: ChatTemplate
    special: tuple[str, ...]
    """Names of special tokens. In the text of a turn they are text."""

    @cached_property
    def end(self) -> str:
        """The text that ends an assistant turn, up to its special token if it has one.

        Raises: DataError when the template writes nothing after the content of a turn.
        """
        turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": _PROBE}]
        try:
            text = _MARKS.sub("", self._render(turns))
        except BadConversation as error:
            raise DataError(
                f"A question with its answer {error.what}.", fix="Use --chat chatml or plain."
            ) from error
        tail = text[text.rfind(_PROBE) + len(_PROBE) :] if _PROBE in text else ""
        found = self._specials.search(tail) if self._specials else None
        end = tail[: found.end()] if found else tail.rstrip()
        if len(end.strip()) < 2:
            raise DataError(
                f"The chat template {self.template.name} writes nothing after an assistant's turn, "
                "so a model could not learn to end one.",
                fix="Write {{ eos_token }} or another text there, or use --chat chatml or plain.",
            )
        return end

    @property
    def end_token(self) -> str | None:
        """The special token that ends an assistant turn; None when text ends it."""
        found = self._specials.search(self.end) if self._specials else None
        return found[0] if found else None

    def pieces(self, conversation: Conversation) -> tuple[Piece, ...]:
        """Return the pieces of a whole conversation.

        Raises: BadConversation when the template refuses it, or renders an earlier turn otherwise
                once later ones follow; DataError when the template fails.
        """
        turns, tools = self._guarded(conversation.messages), self._guarded(conversation.tools)
        text, found = self._located(turns, tools)
        targets = [span for index, span in found if index is None or conversation.targets[index]]
        return tuple(self._cut(text, [span for _, span in found], targets))

    def prompt(self, messages: Sequence[JsonObject]) -> tuple[Piece, ...]:
        """Return the pieces of the text that asks for the next assistant turn.

        They are the first pieces of any conversation that continues with an assistant turn.

        Raises: BadConversation; DataError when the template fails.
        """
        text, found = self._located(self._guarded(messages), None, prompting=True)
        return tuple(self._cut(text, [span for _, span in found], []))

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

    def _render(
        self,
        turns: Sequence[JsonObject],
        tools: list[Any] | None = None,
        *,
        prompting: bool = False,
    ) -> str:
        from flatout.conversation.jinja import Refused, render  # not needed to read other rows

        values = self.template.variables | {
            "messages": list(turns),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompting,
        }
        try:
            return render(self.template.name, self.template.text, values)
        except Refused as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise BadConversation(
                f"is refused by the chat template {self.template.name}: {why}",
                reason="refused by the chat template",
            ) from error

    def _located(
        self, turns: Sequence[JsonObject], tools: list[Any] | None, *, prompting: bool = False
    ) -> tuple[str, list[tuple[int | None, Span]]]:
        """Return the rendered text, and the span of each assistant turn with the turn's index.

        The index is None when `{% generation %}` blocks are not one per turn.
        """
        text = self._render(turns, tools, prompting=prompting)
        if START not in text:
            return text, list(self._assistant_spans(text, turns, tools))
        text, spans = _without_marks(text)
        indices = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        if len(indices) != len(spans):
            return text, [(None, span) for span in spans]
        return text, list(zip(indices, spans, strict=True))

    def _assistant_spans(
        self, text: str, turns: Sequence[JsonObject], tools: list[Any] | None
    ) -> Iterator[tuple[int, Span]]:
        """Yield the index of each assistant turn with its span: its text and what ends it."""
        previous = 0
        for index, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            before = self._render(turns[:index], tools, prompting=True)
            start, at = len(before), text.find(self.end, len(before))
            if not text.startswith(before) or at < 0 or start < previous:
                raise BadConversation(
                    f"is rendered by the chat template {self.template.name} in a way that depends "
                    f"on later turns, so the text of turn {index + 1} cannot be told from the rest",
                    fix="Use a template with {% generation %} blocks, or --chat chatml or plain.",
                    reason="rendered differently with later turns",
                )
            previous = at + len(self.end)
            yield index, (start, previous)

    def _cut(self, text: str, cuts: Sequence[Span], targets: Sequence[Span]) -> Iterator[Piece]:
        """Yield the pieces between the edges of `cuts` and of special tokens."""
        found = self._specials.finditer(text) if self._specials else ()
        special = {match.span() for match in found}
        edges = sorted({0, len(text), *chain.from_iterable((*special, *cuts))})
        for start, stop in pairwise(edges):
            is_target = any(first <= start < last for first, last in targets)
            if part := text[start:stop].replace(GUARD, ""):
                yield Piece(part, (start, stop) in special, is_target)


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
