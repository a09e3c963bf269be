"""Runs a chat template in Jinja's sandbox, with the names that Hugging Face's templates use.

A template can read the conversation and nothing else: it cannot call Python's functions, change
what it was given, or read a file. `strftime_now` is not defined, so that a template that would
write today's date writes its own fixed one, and equal conversations are equal text on any day.

`rendering_process` beside it starts this module in a separate process, which it ends when the
template takes too much time or memory. It imports little, so that it starts quickly.
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flatout.data.conversation.turns import START, STOP
from flatout.storage.process_limits import bound_memory, cpu_bounded

MOST_EXPLAINED = 500
"""Characters of a template's own error message that are shown."""
Text = tuple[int | None, bool]
"""How many of the turns to render, None for all, and whether to ask for the next one."""
Asked = tuple[Text, Sequence[Text]]
"""A text, and others whose starts are compared with it."""


class _Refusal(TemplateError):
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


def serve(descriptor: int) -> None:
    """Render with the first template that the socket sends, until it closes.

    A message is a list of pickled requests, each the variables of a rendering and what is asked.
    """
    connection = Connection(descriptor)
    try:
        template, memory_bytes, cpu_s, most_characters = connection.recv()
        bound_memory(memory_bytes)
        while True:
            requests = connection.recv()
            room, answers = most_characters, []
            with cpu_bounded(cpu_s):
                for request in requests:
                    values, asked = pickle.loads(request)
                    answers.append(_answer(template, values, asked, room))
                    room -= sum(len(text) for text, _ in answers[-1].get("rendered", ()))
            answer = json.dumps(answers, ensure_ascii=False)
            connection.send_bytes(answer.encode(errors="surrogatepass"))
    except EOFError:
        return


def _answer(
    template: str, values: dict[str, Any], asked: Sequence[Asked], room: int
) -> dict[str, Any]:
    """Return the texts that are asked for, or why there are none.

    A template is a program, so it can raise anything.
    """
    turns, rendered = values.get("messages", ()), []

    def render(count: int | None, prompting: bool) -> str:
        nonlocal room
        some = {"messages": turns[:count], "add_generation_prompt": prompting}
        text = _compiled(template).render(values | some)
        if len(text) > room:
            raise MemoryError("it writes too much text")
        return text

    try:
        for text, others in asked:
            found = render(*text)
            room -= len(found)
            shared = [_shared(found, found if o == text else render(*o)) for o in others]
            rendered.append((found, shared))
    except _Refusal as error:
        return {"refuses": str(error)[:MOST_EXPLAINED]}
    except MemoryError as error:
        return {"fails": str(error) or "it takes too much memory"}
    except Exception as error:
        why = " ".join(str(getattr(error, "msg", None) or error)[:MOST_EXPLAINED].split())
        line = getattr(error, "lineno", None) if isinstance(error, TemplateError) else None
        return {"fails": why.rstrip(".") or type(error).__name__, "line": line}
    return {"rendered": rendered}


def _shared(one: str, other: str) -> tuple[int, int]:
    """Return the length of `other`, and of what is at the start of both."""
    if one.startswith(other):
        return len(other), len(other)
    positions = range(len(other))
    return len(other), bisect_left(positions, True, key=lambda n: one[: n + 1] != other[: n + 1])


@lru_cache(maxsize=1)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


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
