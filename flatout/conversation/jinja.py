"""Runs chat templates in Jinja's sandbox, with the names that Hugging Face's templates use.

A template can read the conversation and nothing else: it cannot call Python's functions, change
what it was given, or read a file. `strftime_now` is not defined, so that a template that would
write today's date writes its own fixed one, and equal conversations are equal text on any day.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flatout.conversation.turns import START, STOP
from flatout.errors import DataError

MAX_FACTOR = 1000
"""Templates repeat short texts a few times, if at all."""
_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise: it is a program."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a product cannot fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power, if it is small.

        Raises: SecurityError when it could be large.
        """
        repeated = [one for one in (left, right) if hasattr(one, "__len__")]
        if operator == "**" or any(len(one) for one in repeated):
            counts = [abs(one) for one in (left, right) if isinstance(one, int | float)]
            if max([*counts, *map(len, repeated)], default=0) > MAX_FACTOR:
                raise SecurityError(f"a factor or exponent is larger than {MAX_FACTOR:,}")
        return super().call_binop(context, operator, left, right)


class Refused(TemplateError):
    """The template itself refuses a conversation, by calling `raise_exception`."""


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


def render(name: str, text: str, values: dict[str, Any]) -> str:
    """Return the text that a template makes of some values; messages call it `name`.

    Raises: Refused with the template's own words; DataError when it cannot be parsed, or fails.
    """
    try:
        return _compiled(text).render(values)
    except Refused:
        raise
    except _FAILURES as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}," if line else ""
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(
            f"The chat template {name}{where} fails: {why}.",
            fix="Correct it, or use another: --chat chatml, --chat plain or --chat FILE.",
        ) from error


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = _Sandbox(
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
