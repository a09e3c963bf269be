"""Runs a chat template in Jinja's sandbox, with the names that Hugging Face's templates use.

A template can read the conversation and nothing else: it cannot call Python's functions, change
what it was given, or read a file. `strftime_now` is not defined, so that a template that would
write today's date writes its own fixed one, and equal conversations are equal text on any day.

It is a program all the same, in which text of any length is a short expression: rendering a
conversation has limits of CPU time and memory.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flatout.data.conversation.templates import ChatTemplate
from flatout.data.conversation.turns import START, STOP
from flatout.errors import DataError
from flatout.storage.json_io import JsonObject
from flatout.storage.process_limits import limited

CPU_S = 10
"""CPU time of one conversation. Most take less than a millisecond."""
MEMORY_BYTES = 1 << 30
"""Memory of one conversation, beyond what the process has before."""
MOST_CHARACTERS = 1 << 24
"""Characters of a text: twice as many as the longest row has."""
MOST_EXPLAINED = 500
"""Characters of a template's own error message that are shown."""
Text = tuple[int | None, bool]
"""How many of the turns to render, None for all, and whether to ask for the next one."""
Asked = tuple[Text, Sequence[Text]]
"""A text, and others whose starts are compared with it."""


class Rendered(NamedTuple):
    """A text, and how others compare with it."""

    text: str
    shared: list[tuple[int, int]]
    """Of each other text, its length and the number of characters at the start of both."""


class Refused(TemplateError):
    """The template itself rejects a conversation, by calling `raise_exception`."""


class _Generation(Extension):
    """The block `{% generation %}`, around the text that an assistant writes."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_marked` with the content of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{START}{caller()}{STOP}"


def render(template: ChatTemplate, values: JsonObject, asked: Sequence[Asked]) -> list[Rendered]:
    """Return the texts of `values["messages"]` that are asked for.

    Raises: Refused, with the template's own words; DataError when the template cannot be parsed,
            fails, or exceeds a limit.
    """
    turns = values["messages"]

    def write(count: int | None, prompting: bool) -> str:
        some = {"messages": turns[:count], "add_generation_prompt": prompting}
        text = _compiled(template.text).render(template.variables | values | some)
        if len(text) > MOST_CHARACTERS:
            raise MemoryError("it writes too much text")
        return text

    line = None
    try:
        with limited(CPU_S, MEMORY_BYTES):
            rendered = []
            for text, others in asked:
                found = write(*text)
                shared = [_shared(found, found if o == text else write(*o)) for o in others]
                rendered.append(Rendered(found, shared))
            return rendered
    except Refused as error:
        raise Refused(str(error)[:MOST_EXPLAINED]) from error
    except MemoryError as error:
        why = str(error) or "it takes too much memory"
    except Exception as error:  # a template is a program, so it can raise anything
        why = " ".join(str(getattr(error, "msg", None) or error)[:MOST_EXPLAINED].split())
        why = why.rstrip(".") or type(error).__name__
        line = getattr(error, "lineno", None) if isinstance(error, TemplateError) else None
    where = f", line {line}," if line else ""
    raise DataError(
        f"The chat template {template.name}{where} fails: {why}.",
        fix="Correct it, or use a different one: --chat chatml, --chat plain or --chat FILE.",
    )


def _shared(one: str, other: str) -> tuple[int, int]:
    """Return the length of `other`, and of what is at the start of both."""
    if one.startswith(other):
        return len(other), len(other)
    positions = range(len(other))
    return len(other), bisect_left(positions, True, key=lambda n: one[: n + 1] != other[: n + 1])


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


def _refuse(message: object) -> None:
    raise Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
