"""Rewrites docstrings and signatures for the API page: contracts and options become lists."""

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
        """Turn the contracts of a docstring into list items."""
        if obj.docstring:
            obj.docstring.value = with_contract_items(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show the types of a command's parameters in its signature, and their help below it."""
        for module in (*pkg["cli.commands"].modules.values(), pkg["measure.watch"]):
            for function in module.functions.values():
                options = [f"- `{name}`: {help}" for name, help in plain_options(function)]
                if options and function.docstring:
                    function.docstring.value += "\n\n" + "\n".join(options)


def with_contract_items(text: str) -> str:
    """Return a docstring with a list item for each contract line and its continuation."""
    items = CONTRACT.sub(lambda found: f"\n- **{found[1]}**: {' '.join(found[2].split())}\n", text)
    return re.sub(r"(?m)^(- \*\*.*)\n\n(?=- \*\*)", r"\1\n", re.sub(r"\n{3,}", "\n\n", items))


def plain_options(function: griffe.Function) -> Iterator[tuple[str, str]]:
    """Replace each `Annotated[type, Option(help)]` by its type; yield the parameter and its help.

    The annotation may be an alias of one, defined or imported in the function's module.
    """
    for parameter in function.parameters:
        annotation = parameter.annotation
        if isinstance(annotation, griffe.ExprName):
            alias = function.module.members.get(annotation.name)
            if isinstance(alias, griffe.Alias):
                own = alias.target_path.startswith(f"{function.package.name}.")
                alias = alias.final_target if own else None
            annotation = getattr(alias, "value", None)
        if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Annotated":
            continue
        parameter.annotation, *marks = annotation.slice.elements
        for mark in marks:
            if isinstance(mark, griffe.ExprCall) and str(mark.arguments[0])[0] in "'\"":
                yield parameter.name, ast.literal_eval(str(mark.arguments[0]))
