"""How flatout's docstrings become API pages: contracts and options as lists, types without options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

LABELS = "Shapes|Returns|Units|Cost|Raises|Source"
CONTRACT = re.compile(rf"^({LABELS}):[ ]+(.*?)(?=^(?:{LABELS}):|^\S|\n\n|\Z)", re.DOTALL | re.M)


class Contracts(griffe.Extension):
    """Rewrites docstrings and signatures before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn contracts into list items, and describe a command's parameters by their help."""
        text = with_contract_items(obj.docstring.value) if obj.docstring else ""
        if isinstance(obj, griffe.Function):
            options = "\n".join(f"- `{name}`: {help}" for name, help in plain_options(obj))
            text = "\n\n".join(filter(None, [text, options]))
        if obj.docstring:
            obj.docstring.value = text


def with_contract_items(text: str) -> str:
    """Return a docstring with a list item for each contract line and its continuation."""
    items = CONTRACT.sub(lambda found: f"\n- **{found[1]}**: {' '.join(found[2].split())}\n", text)
    return re.sub(r"(?m)^(- \*\*.*)\n\n(?=- \*\*)", r"\1\n", re.sub(r"\n{3,}", "\n\n", items))


def plain_options(function: griffe.Function) -> Iterator[tuple[str, str]]:
    """Replace each `Annotated[type, Option(help=...)]` by its type; yield the parameter and its help."""
    for parameter in function.parameters:
        annotation = parameter.annotation
        if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Annotated":
            continue
        parameter.annotation, *options = annotation.slice.elements
        for option in options:
            for argument in getattr(option, "arguments", ()):
                if getattr(argument, "name", None) == "help" and str(argument.value)[0] in "'\"":
                    yield parameter.name, ast.literal_eval(str(argument.value))
