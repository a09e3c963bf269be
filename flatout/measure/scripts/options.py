"""Reads the options of a script, so that a patch can use them, or add one like them. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
OTHERS = r"add_subparsers|REMAINDER|parents=|(\*\*|= |return )(vars\(({0})|({0})\.__dict__)"
"""What a parser has, or what is done with what it parsed, if options are not plain attributes."""
EVALUATION = r"(?:^|_)(?:eval|evaluation|val|valid|validation|test)(?:_|$)"
"""Names of options that are not about training."""


@dataclass(frozen=True)
class Option:
    """An option of the script under which an edit is made where a script has options."""

    name: str
    """Without dashes: one word."""
    does: str
    """Its help."""
    own: str
    """Regular expression for the words of options with which scripts do the same themselves."""
    values: Mapping[str, str] = field(default_factory=dict)
    """What arguments of a library get then, by their names. `{flag}` becomes whether it is on."""

    def is_done_by(self, name: str) -> bool:
        """Return whether an option or argument of this name does the same."""
        return bool(re.search(rf"(?:^|_)(?:{self.own})(?:_|$)", name))


@dataclass(frozen=True)
class Parser:
    """The `argparse.ArgumentParser` of a script, whose options are attributes of a variable."""

    name: str
    """Its own variable."""
    last: ast.Expr
    """The last statement that adds an option."""
    options: Mapping[str, ast.Call]
    """The calls that add options, by the attributes of what is parsed."""
    names: frozenset[str]
    """Variables of what is parsed."""

    def words(self, read: ast.expr, value: str) -> tuple[str, ...] | None:
        """Return with which words of a command an expression has a value, both as source text.

        None: the expression is not an option, or the option does not take that value.
        """
        owner, _, option = ast.unparse(read).rpartition(".")
        call = self.options.get(option)
        is_plain = isinstance(read, ast.Attribute) and re.fullmatch(r"[\w.]+", owner)
        if not is_plain or call is None or owner.rpartition(".")[2] not in self.names:
            return None
        stated = {one.arg: ast.unparse(one.value) for one in call.keywords}
        try:
            meant, choices = ast.literal_eval(value), ast.literal_eval(stated.get("choices", "()"))
        except ValueError:
            return None
        flag, action = flag_of(call), stated.get("action", "")
        if isinstance(meant, bool):
            return (flag,) if meant and ("store_true" in action or "Boolean" in action) else None
        kind = stated.get("type", "str")
        if action or "nargs" in stated or kind != type(meant).__name__:
            return None
        return (flag, str(meant)) if not choices or meant in choices else None


def options_in(tree: ast.AST) -> dict[str, ast.Call] | None:
    """Return the calls that add options, by the attributes that they set. None: not all known."""
    found = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _called(call).endswith(".add_argument"):
            if not call.args or not all(isinstance(one, ast.Constant) for one in call.args):
                return None
            stated = [ast.unparse(one.value) for one in call.keywords if one.arg == "dest"]
            found[(stated or [flag_of(call)])[0].strip("-'").replace("-", "_")] = call
    return found


def flag_of(call: ast.Call) -> str:
    """Return how a command names an option: by its first long name."""
    names = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
    return next((name for name in names if name.startswith("--")), names[0])


def parser_in(tree: ast.AST) -> Parser | None:
    """Return the parser of a file. None: it has none, or not one with plain attributes."""
    made = [n for n in ast.walk(tree) if _called(n).endswith("ArgumentParser")]
    sets = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value in made]
    options = options_in(tree)
    if len(made) != 1 or len(sets) != 1 or not options:
        return None
    name, scopes = ast.unparse(sets[0].targets[0]), scopes_at(tree, sets[0].lineno)
    parsed, others = _parsed(tree, name)
    if re.search(OTHERS.format("|".join([*parsed, name])), ast.unparse(tree)):
        return None
    added = [
        node
        for node in nodes_of(scopes[-1])
        if isinstance(node, ast.Expr) and _called(node.value) == f"{name}.add_argument"
    ]
    last = [one for one in added if one.col_offset == sets[0].col_offset]
    return (
        Parser(name, max(last, key=lambda one: one.lineno), options, frozenset(parsed - others))
        if last
        else None
    )


def _parsed(tree: ast.AST, parser: str) -> tuple[set[str], set[str]]:
    """Return the variables that what is parsed is assigned to, and those that anything else is."""
    parsing, kinds = [f"{parser}.parse_args"], {True: set[str](), False: set[str]()}
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        returned = [
            one.value for one in nodes_of(function) if isinstance(one, ast.Return) and one.value
        ]
        own = {
            ast.unparse(one.targets[0])
            for one in nodes_of(function)
            if isinstance(one, ast.Assign) and _called(one.value) in parsing
        }
        is_maker = returned and all(
            _called(one) in parsing or ast.unparse(one) in own for one in returned
        )
        if is_maker:
            parsing.append(function.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            kinds[_called(node.value) in parsing].add(ast.unparse(node.targets[0]))
    return kinds[True], kinds[False]


def namespace_at(tree: ast.AST, line: int, parser: Parser) -> str | None:
    """Return the expression at a line for what is parsed. None: it is not sure to see it."""
    scopes = scopes_at(tree, line)
    for scope in scopes[::-1]:
        bound = set[str]()
        if isinstance(scope, ast.ClassDef):
            made = [one for one in scope.body if getattr(one, "name", "") == "__init__"]
            if _first_parameter(scopes[-1]) == "self":
                for node in (each for one in made for each in nodes_of(one)):
                    if isinstance(node, ast.Assign) and ast.unparse(node.value) in parser.names:
                        bound.add(ast.unparse(node.targets[0]))
            bound = {name for name in bound if name.startswith("self.")}
        else:
            if isinstance(scope, Function):
                bound = {one.arg for one in _plain_parameters(scope)} & parser.names
            for node in nodes_of(scope):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    if node.id not in parser.names:
                        continue
                    is_own = scope is scopes[-1]
                    if node.lineno < line if is_own else not _guarded(tree, node):
                        bound.add(node.id)
        wanted = {f"{name}.{option}": name for name in bound for option in parser.options}
        attributes = (one for one in ast.walk(scope) if isinstance(one, ast.Attribute) and bound)
        reads = {wanted[text] for one in attributes if (text := ast.unparse(one)) in wanted}
        if reads:
            return min(reads)
    return None


def entry_at(tree: ast.AST, line: int) -> tuple[str, ast.FunctionDef] | None:
    """Return what is called before a line runs, by name: a function, or a class's constructor.

    None: that is not plain Python.
    """
    inside = scopes_at(tree, line)[1:]
    outer = inside[0] if inside else None
    made = outer
    if isinstance(outer, ast.ClassDef):
        own = [one for one in outer.body if getattr(one, "name", "") == "__init__"]
        made = own[0] if own and _first_parameter(inside[-1]) == "self" else None
        if "cls(" in ast.unparse(outer) or (made and _first_parameter(made) != "self"):
            return None
    if not isinstance(made, ast.FunctionDef) or made.decorator_list or not made.args.args:
        return None
    return (outer if isinstance(outer, ast.ClassDef) else made).name, made


def scopes_at(tree: ast.AST, line: int) -> list[ast.AST]:
    """Return the module, the classes and the functions around a line, from the outside in."""
    return [tree] + [
        node
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]


def nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a scope, without the scopes in it."""
    left = [*ast.iter_child_nodes(scope)]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def _plain_parameters(function: Function) -> list[ast.arg]:
    """Return the parameters that have no default and no type of their own."""
    given = function.args
    every = [*given.posonlyargs, *given.args]
    every = every[: len(every) - len(given.defaults)]
    every += [a for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None]
    kinds = (ast.unparse(one.annotation) if one.annotation else "Namespace" for one in every)
    return [one for one, kind in zip(every, kinds, strict=True) if "Namespace" in kind]


def _first_parameter(node: ast.AST) -> str:
    """Return the name of the first parameter of a function. "" means none."""
    given = node.args.args if isinstance(node, Function) else []
    return given[0].arg if given else ""


def _guarded(tree: ast.AST, node: ast.Name) -> bool:
    """Return whether a statement of a module does not run where the module is imported."""
    blocks = (one for one in ast.iter_child_nodes(tree) if isinstance(one, ast.If))
    return any("__name__" in ast.unparse(one.test) and node in ast.walk(one) for one in blocks)


def _called(node: ast.AST) -> str:
    """Return what an expression calls. "" means nothing."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""
