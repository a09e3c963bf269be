"""Builds the parser of a command from its function's signature.

A parameter annotated with `commands.Argument` or `commands.Option` becomes a click parameter of its
type; of a union (`Path | str`), the first type is used. The other parameters exist in Python only,
and `cli.py` fills them in. Parsing does not call the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click

from flatout.commands import Argument, Command, Option
from flatout.config.messages import all_keys, same_key
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.registry import COMMANDS, nearest, unknown_name

JSON = Option("Print the result as one JSON object, the last line of standard output.")
VERBOSE = Option("Show each optimisation, on or off, with the reason.", "-v")


def build(name: str) -> click.Command:
    """Return the parser of `flatout NAME`.

    Raises: ConfigError with the nearest name when there is no such command.
    """
    if name not in COMMANDS.names():
        raise unknown_name("command", name, COMMANDS.names())
    command: Command = COMMANDS.get(name)
    signature = inspect.signature(command.call, eval_str=True)
    params = [
        _click_parameter(parameter.name, kind, parameter.default, metadata)
        for parameter in signature.parameters.values()
        if hasattr(parameter.annotation, "__metadata__")
        for kind, metadata in [get_args(parameter.annotation)]
    ]
    params.append(_click_parameter("json", bool, False, JSON))
    if "observers" in signature.parameters:
        params.append(_click_parameter("verbose", bool, False, VERBOSE))
    return click.Command(
        name,
        params=params,
        help=help_text(command),
        epilog=f"Example: {command.example}",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _click_parameter(
    name: str, annotation: Any, default: Any, metadata: Argument | Option
) -> click.Parameter:
    """Return the click parameter of one annotated parameter."""
    kind = _first_type(annotation)
    multiple = get_origin(kind) is list
    if multiple:
        (kind,) = get_args(kind)
    required = default is inspect.Parameter.empty
    shared: dict[str, Any] = {"required": required, "type": kind}
    if not required and not multiple:
        shared["default"] = default
    if get_origin(kind) is Literal:
        shared["type"] = click.Choice(get_args(kind))
    if isinstance(metadata, Argument):
        return click.Argument([name], help=metadata.help, nargs=-1 if multiple else 1, **shared)
    if metadata.min is not None:
        number: Any = click.IntRange if kind is int else click.FloatRange
        shared["type"] = number(min=metadata.min)
    words = [word for word in metadata.names if word.startswith("--")]
    return click.Option(
        [name, *(words or [f"--{name.replace('_', '-')}"]), *(metadata.names[len(words) :])],
        help=metadata.help,
        is_flag=True if kind is bool else None,
        multiple=multiple,
        show_default=default not in (None, False, ""),
        **shared,
    )


def _first_type(kind: Any) -> Any:
    """Return the first type of a union that is not None."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return next(one for one in get_args(kind) if one is not NoneType)


def help_text(command: Command) -> str:
    """Return a command's docstring up to `Returns:` or `Raises:`."""
    text = inspect.getdoc(command.call) or ""
    return text.split("\nRaises:")[0].split("\nReturns:")[0].strip()


def parse(name: str, words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a command line by parameter name, or None after printing the help.

    Raises: ConfigError naming the mistake and the fix.
    """
    parser = build(name)
    try:
        values = parser.make_context(f"flatout {name}", list(words)).params
    except click.exceptions.Exit:
        return None
    except click.ClickException as error:
        raise _explained(error, name, parser) from error
    return {
        key: (list(value) or None) if isinstance(value, tuple) else value
        for key, value in values.items()
    }


def _explained(error: click.ClickException, name: str, parser: click.Command) -> ConfigError:
    """Return a click error as a ConfigError: one sentence and its fix."""
    see = f"`flatout {name} --help` shows how; for example `{COMMANDS.get(name).example}`."
    if not isinstance(error, click.NoSuchOption):
        message = error.format_message().rstrip(".")
        return ConfigError(f"`flatout {name}`: {message[:1].lower()}{message[1:]}.", fix=see)
    what = f"`flatout {name}` has no option {error.option_name!r}."
    key = _key_meant(error.option_name, parser)
    if key is not None:
        return ConfigError(what, fix=f"Keys of a recipe take no dashes: write {key}=VALUE.")
    spelled = ([word for word in param.opts if word.startswith("--")] for param in parser.params)
    known = [*(words[0] for words in spelled if words), "--help"]  # without aliases such as --run
    guess = nearest(error.option_name, known)
    fix = f"Did you mean {guess!r}?" if guess else f"Known: {', '.join(known)}; {see}"
    return ConfigError(what, fix=fix)


def _key_meant(option: str, parser: click.Command) -> str | None:
    """Return the configuration key that was mistakenly written as an option, or None.

    Only commands that take overrides have such keys.
    """
    if "overrides" not in {parameter.name for parameter in parser.params}:
        return None
    known, name = all_keys(RunConfig), option.lstrip("-").partition("=")[0]
    return name if name in known else same_key(name.rpartition(".")[2], known)
