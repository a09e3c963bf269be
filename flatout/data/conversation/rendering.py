"""Writes a conversation as text with a chat template, and finds the text that the loss counts.

The text of an assistant turn starts where the prompt that generation gives to the model ends, and
ends after the text or special token that ends the turn. The rendered text is encoded as a whole, as
other tools encode it, and the loss counts every token with a character in these places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress
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
    from flatout.data.conversation.jinja import Asked, Rendered

_MARKS = re.compile(f"[{START}{STOP}{GUARD}]")
_PROBE = "flatout asks"
"""The content of a turn whose end is searched for."""
_LONGEST_END = 1 << 12
"""Characters of the end of a turn, which every text of a turn is searched for."""
_REASON_CHARACTERS = 100
"""Characters of a template's own sentence under which rows are counted."""
_TAG = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")
"""The start of a thought at the end of a prompt. The model's own text closes it."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """A text that is encoded as a whole: of a conversation, or a prompt with its answer."""

    text: str
    targets: tuple[Span, ...] = ()
    """Where the loss counts tokens, in ascending order."""
    names: tuple[Span, ...] | None = None
    """Where the template wrote the names of special tokens. Without a template, all is text."""

    def texts(self, start: int, stop: int) -> Iterator[str]:
        """Yield the texts between the names of special tokens, from `start` to `stop`."""
        for first, last in (*(self.names or ()), (stop, stop)):
            if start < min(first, stop):
                yield self.text[start : min(first, stop)]
            start = max(start, last)

    @property
    def answers(self) -> str:
        """The text that the loss counts, without special tokens."""
        return "".join(chain.from_iterable(self.texts(*span) for span in self.targets))


Examples = tuple[Example, ...]
"""The examples of a conversation."""


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
            ((found, _),) = self._rendered(turns, None, ((None, False), []))
        except BadConversation as error:
            raise DataError(
                f"A question with its answer {error.what}.", fix="Use --chat chatml or plain."
            ) from error
        text = _MARKS.sub("", found)
        tail = text[text.rfind(_PROBE) + len(_PROBE) :] if _PROBE in text else ""
        special = self._specials.search(tail)
        end = tail[: special.end()] if special else tail.rstrip()
        length = len(end.strip())
        if not 2 <= length <= _LONGEST_END:
            what = f"{length:,} characters" if length else "nothing"
            what = f"only {end.strip()!r}" if length == 1 else what
            raise DataError(
                f"The chat template {self.template.name} writes {what} after an assistant's turn, "
                "so a model could not learn to end one.",
                fix="Write {{ eos_token }} or another text there, or use --chat chatml or plain.",
            )
        return end

    @property
    def end_token(self) -> str | None:
        """The special token that ends an assistant turn. None when text ends it."""
        found = self._specials.search(self.end)
        return found[0] if found else None

    def examples(self, conversation: Conversation) -> Examples:
        """Return the examples to train on of a conversation.

        It is one example. When the template renders a turn differently once later ones follow, each
        assistant turn that counts has its own example, which starts with the prompt for that turn.

        Raises: BadConversation when a turn contains one of our marks, or the template rejects the
                conversation or does not write a turn after its prompt; DataError when the template
                fails.
        """
        turns, tools = self._guarded(conversation.messages), self._guarded(conversation.tools)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        others = [(count, count == index) for index in answers for count in (index, index + 1)]
        ((text, shared),) = self._rendered(turns, tools, ((len(turns), False), others))
        counts = [conversation.targets[index] for index in answers]
        together = self._together(text, shared, counts)
        return together or self._apart(turns, tools, list(compress(answers, counts)))

    def prompt(self, messages: Sequence[JsonObject]) -> Example:
        """Return the text that asks for the next assistant turn.

        The text of any example that continues with an assistant turn starts with it.

        Raises: BadConversation; DataError when the template fails.
        """
        ((found, _),) = self._rendered(self._guarded(messages), None, ((None, True), []))
        return self._example(_without_marks(found)[0])

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        return any_of(name for name in self.special if len(name) > 1)

    @cached_property
    def _unwritable(self) -> re.Pattern[str]:
        """Names that the text of a turn must not contain: special tokens, and what ends a turn."""
        return re.compile(f"{self._specials.pattern}|{re.escape(self.end.strip())}")

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

    def _rendered(
        self, turns: Sequence[JsonObject], tools: list[Any] | None, *asked: Asked
    ) -> list[Rendered]:
        """Return some texts of a conversation.

        Raises: BadConversation when the template rejects it; DataError when the template fails.
        """
        from flatout.data.conversation.jinja import Refused, render

        values = {"messages": list(turns), "tools": tools, "documents": None}
        try:
            return render(self.template, values, asked)
        except Refused as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise BadConversation(
                f"is rejected by the chat template {self.template.name}: {why}",
                reason=f"rejected by the chat template: {why[:_REASON_CHARACTERS]}",
            ) from error

    def _together(
        self, text: str, shared: Sequence[tuple[int, int]], counts: list[bool]
    ) -> Examples | None:
        """Return all turns as one example. None when some are rendered differently later.

        `shared` is what the text has in common with the prompt for each assistant turn, and with
        the text that ends after it, and `counts` is whether the loss counts that turn.
        """
        if START in text:
            text, spans = _without_marks(text)
            if len(counts) != len(spans):
                if not all(counts):
                    raise BadConversation(
                        "has turns that the loss must not count, and the chat template "
                        f"{self.template.name} does not write one {{% generation %}} block for "
                        "each assistant turn",
                        fix="Use a template that does, or --chat chatml or plain.",
                        reason="not one generation block for each turn",
                    )
                counts = [True] * len(spans)
        else:
            spans = [
                (start, at + len(self.end))
                for start, _ in shared[::2]
                if (at := text.find(self.end, start)) >= 0
            ]
            if len(spans) != len(counts):
                return None
            for (_, stop), (length, before), (_, after) in zip(
                spans, shared[::2], shared[1::2], strict=True
            ):
                if before < length or after < stop:
                    return None
        return (self._example(text, list(compress(spans, counts))),)

    def _apart(
        self, turns: Sequence[JsonObject], tools: list[Any] | None, counted: Sequence[int]
    ) -> Examples:
        """Return an example for each assistant turn that counts, given their indices.

        Raises: BadConversation when the template does not write a turn after its prompt.
        """
        asked: list[Asked] = [
            (text, []) for index in counted for text in ((index, True), (index + 1, False))
        ]
        found = [text for text, _ in self._rendered(turns, tools, *asked)]
        return tuple(
            self._answer(turns[index], index, _without_marks(prompt)[0], after)
            for index, prompt, after in zip(counted, found[::2], found[1::2], strict=True)
        )

    def _answer(self, turn: JsonObject, index: int, prompt: str, after: str) -> Example:
        """Return the example of a prompt and of the turn that answers it."""
        answer = after[len(prompt) :] if after.startswith(prompt) else self._after_tag(prompt, turn)
        if answer is None or self.end not in answer:
            raise BadConversation(
                f"has a turn {index + 1} that the chat template {self.template.name} does not "
                "write after the prompt for it, so its text cannot be told from the rest",
                fix="Use a template with {% generation %} blocks, or --chat chatml or plain.",
                reason="written differently from its prompt",
            )
        text = prompt + answer[: answer.index(self.end) + len(self.end)]
        return self._example(text, [(len(prompt), len(text))])

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

    def _example(self, text: str, targets: Sequence[Span] = ()) -> Example:
        """Return a text without guards, the spans in it, and those of special tokens."""
        names = [match.span() for match in self._specials.finditer(text)]
        if GUARD not in text:
            return Example(text, tuple(targets), tuple(names))
        before = [0, *accumulate(int(character == GUARD) for character in text)]
        targets, names = (
            [(start - before[start], stop - before[stop]) for start, stop in spans]
            for spans in (targets, names)
        )
        return Example(text.replace(GUARD, ""), tuple(targets), tuple(names))


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return what matches any of some names, of several the longest. Without names, nothing."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


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
