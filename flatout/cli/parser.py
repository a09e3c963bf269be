"""Builds the parser of a command from its function's signature.

A parameter annotated with `commands.Argument` or `commands.Option` becomes a click parameter of its
type. For a union (`Path | str`), the first type is used. The other parameters exist in Python only,
and `cli.py` fills them in. Parsing does not call the command.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from flatout.cli.commands import Command
from flatout.config.messages import all_keys, by_last
from flatout.config.registry import COMMANDS, nearest
from flatout.config.schema import RunConfig
from flatout.config.signature import Argument, Option, kinds_in
from flatout.config.words import prepare_word_for, removed, word_for
from flatout.errors import ConfigError

JSON = Option("Print the result as one JSON object, the last line of standard output.")
VERBOSE = Option("Show each speedup, on or off, with the reason.", "-v")

STARTS = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed|[^=]+\.py)")
"""The first word of a script's command."""


def kept(text: str) -> str:
    """Return the path or URL in a text, one that is still there when this process has ended.

    A shell does not replace the `~` in `--out=~/x`.

    Raises: click.BadParameter.
    """
    if not text:
        raise click.BadParameter("it is empty")
    if text.startswith("memory:"):
        raise click.BadParameter(
            "it is lost with this process. A directory or a URL such as s3://BUCKET/NAME stays"
        )
    return os.path.expanduser(text)


def build(name: str) -> click.Command:
    """Return the parser of `flatout NAME`.

    Raises: ConfigError with the nearest name when there is no such command.
    """
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
    usage = "[OPTIONS]"
    if "script" in signature.parameters:
        usage += " -- COMMAND" * max(command.example.count(" -- "), 1)
        usage += " | [OPTIONS]" if any(isinstance(one, click.Argument) for one in params) else ""
    return click.Command(
        name,
        params=params,
        help=f"Example: {command.example}\n\n{help_text(command)}",
        options_metavar=usage,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _click_parameter(
    name: str, annotation: Any, default: Any, metadata: Argument | Option
) -> click.Parameter:
    """Return the click parameter of one annotated parameter."""
    kinds = kinds_in(annotation)
    kind = next(one for one in kinds if one is not NoneType)
    is_list = get_origin(kind) is list
    if is_list:
        (kind,) = get_args(kind)
    is_required = default is inspect.Parameter.empty
    as_text = str if str in kinds else kind
    shared: dict[str, Any] = {"required": is_required, "help": metadata.help, "type": as_text}
    if not is_required and not is_list:
        shared["default"] = default
    if get_origin(kind) is Literal:
        shared["type"] = click.Choice(get_args(kind))
    if isinstance(metadata, Argument):
        return click.Argument([name], nargs=-1 if is_list else 1, **shared)
    if Path in kinds:
        shared |= {"type": kept, "metavar": "PATH"}
    if metadata.min is not None:  # `checked` rejects what is not finite
        number: Any = click.IntRange if kind is int else click.FloatRange
        shared["type"] = number(min=metadata.min)
    long = any(word.startswith("--") for word in metadata.names)
    return click.Option(
        [name, *([] if long else [f"--{name.replace('_', '-')}"]), *metadata.names],
        is_flag=True if kind is bool else None,
        multiple=is_list,
        show_default=default not in (None, False, ""),
        **shared,
    )


def help_text(command: Command) -> str:
    """Return a command's docstring up to `Returns:` or `Raises:`."""
    text = inspect.getdoc(command.call) or ""
    return text.split("\nRaises:")[0].split("\nReturns:")[0].strip()


def help_of(name: str) -> str:
    """Return what `flatout NAME --help` prints."""
    context = build(name).make_context(f"flatout {name}", [], resilient_parsing=True)
    return f"{context.get_help()}\n"


def parse(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command line by parameter name.

    Raises: ConfigError naming the mistake and the fix.
    """
    parser, script = build(name), []
    if "script" in inspect.signature(COMMANDS.get(name).call).parameters:
        starts = (at for at, word in enumerate(words) if word == "--" or STARTS.fullmatch(word))
        at = next(starts, len(words))
        words, script = words[:at], list(words[at:])
        if script and script[0] != "--":
            meant = shlex.join(["flatout", name, *words, "--", *script])
            what = "The command of a script comes after `--`."
            raise ConfigError(what, fix=f"Did you mean `{meant}`?")
        if script == ["--"]:
            raise ConfigError(
                "There is no command after --.", fix=f"Write `flatout {name} -- python train.py`."
            )
    options = [param for param in parser.params if isinstance(param, click.Option)]
    known = {word: option for option in options for word in option.opts}
    try:
        for word, value in pairwise(words):
            if word in known and not known[word].is_flag and value in known:
                raise click.BadOptionUsage(word, f"Option {word!r} requires an argument.")
        values = parser.make_context(f"flatout {name}", list(words)).params
    except click.ClickException as error:
        raise _explained(error, name, parser) from error
    given = {
        key: (list(value) or None) if isinstance(value, tuple) else value
        for key, value in values.items()
    }
    return given | ({"script": script[1:]} if script else {})


def _explained(error: click.ClickException, name: str, parser: click.Command) -> ConfigError:
    """Return a click error as a ConfigError: one sentence and its fix."""
    see = f"`flatout {name} --help` shows how. Example: `{COMMANDS.get(name).example}`."
    if isinstance(error, click.NoSuchOption):
        option = error.option_name
        fix = removed(f"{name} {option}") or _meant(option, name, parser)
        if not fix:  # of an option's names, only the first is suggested: not --run
            known = [param.opts[0] for param in parser.params if param.opts[0].startswith("--")]
            guess = nearest(option, [*known, "--help"])
            fix = f"Did you mean {guess!r}?" if guess else f"Known: {', '.join(known)}. {see}"
        return ConfigError(f"`flatout {name}` has no option {option!r}.", fix=fix)
    message = error.format_message().rstrip(".")
    lacking = getattr(error, "option_name", None)  # one without its value
    of_name = (each for each in parser.params if lacking in each.opts)
    param = getattr(error, "param", None) or next(of_name, None)
    value = error.message.partition(" is not one of ")[0].strip("'")
    if isinstance(param, click.Option) and (fix := removed(f"{name} {param.opts[0]} {value}")):
        see = fix
    elif isinstance(param, click.Option) and not param.required:
        default = f" for the default, {param.default}" if param.show_default else ""
        see = f"Remove {param.opts[0]}{default}, or correct it: {param.help}"
    elif isinstance(param, click.Argument):
        see = f"{param.make_metavar(click.Context(parser))}: {param.help} {see}"
    return ConfigError(f"`flatout {name}`: {message[:1].lower()}{message[1:]}.", fix=see)


def _meant(option: str, command: str, parser: click.Command) -> str | None:
    """Return the fix for a config key, or another tool's word, written as an option, or None."""
    name = option.lstrip("-")
    if command == "prepare":
        found = prepare_word_for(name)
        return found.advice if found else None
    if all(param.name != "overrides" for param in parser.params):
        return None
    keys = all_keys(RunConfig)
    word = None if name in keys else word_for(name)
    if word and not word.key:
        return word.advice
    key = (
        word.key
        if word
        else name
        if name in keys
        else by_last(keys).get(name.rpartition(".")[2].lower().replace("-", "_"))
    )
    note = f" {word.note}" if word and word.note else ""
    return f"Keys of a recipe take no dashes: write {key}=VALUE.{note}" if key else None
