"""The command line: finds the commands, prints what they return, turns errors into one sentence, a
fix and an exit code.

Standard output holds results alone; progress and errors go to standard error. With `--json` the
last line of standard output is one JSON object. Exit codes: 0 done, 1 failed, 2 wrong usage, 75
stopped and saved, 130 or 143 interrupted before a save.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import inspect
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from flatout.errors import (
    ConfigError,
    FlatoutError,
    Interrupted,
    RunFailed,
    UntrustedCode,
    UsageError,
    on_one_line,
    require_posix,
    without_secrets,
)
from flatout.progress import SILENT, Progress
from flatout.registry import COMMANDS, nearest, unknown_name
from flatout.trust import BY_ARGUMENT

if TYPE_CHECKING:
    from flatout.commands import Command, Result
    from flatout.terminal import Terminal

MOST_NAME_BYTES = 255
"""The longest file name of nearly all file systems."""
OTHER_RANKS_WAIT_S = 3.0
"""How long other processes than the main one keep a wrong command or input to themselves: it is
mostly the main one's too, and once that
has said so and ended, torchrun ends the others. What is wrong with one of them alone, in another folder, is said."""
HELP = """\
Usage: flatout COMMAND [ARGUMENTS] [section.key=value ...]

flatout trains language models at the limit of the hardware, and proves it.

Commands:
{commands}

Options:
  --version  Show the version.
  --help     Show this text; `flatout COMMAND --help` explains one command.

Begin with: flatout demo
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(
            sys.__stderr__
        )  # a crash below Python, as of a mapped file that a disk no longer gives, says where it was
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a model may write what the terminal cannot show
    try:
        code = _guarded(words)
    except BrokenPipeError:  # the reader has left in the middle of a command's own output
        _drop_output()
        code = 1
    raise SystemExit(code if _written(sys.stdout.flush) else code or 1)


class _Tolerant(io.FileIO):
    """Standard error that drops what it cannot take, so that a full disk or a reader that has left
    ends no run.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _open_streams() -> None:
    """Open what was closed (`2>&-`) on nothing: else the next file to be opened would be standard
    error to every library.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(
                os.devnull, os.O_RDWR
            )  # takes the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Tolerant(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            raw, getattr(sys.stderr, "encoding", "utf-8"), "backslashreplace", line_buffering=True
        )


def _written(write: Callable[[], object]) -> bool:
    """Write to standard output, and return whether it was written; if not, standard error says why."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        _drop_output()
        if not isinstance(error, BrokenPipeError):  # `flatout ... | head` means it
            print(
                f"The result could not be written to standard output: {error.strerror or error}.",
                file=sys.stderr,
            )
            return False
    return True


def _drop_output() -> None:
    """Let standard output go nowhere from here on: Python would complain once more when it closes
    it.
    """
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def build(name: str, finish: Callable[[Command, dict[str, Any]], object] | None = None) -> Any:
    """Return the typer command of `flatout NAME`; parsing alone runs nothing, invoking it calls
    `finish`.

    Raises: ConfigError with the nearest name when there is no such command.
    """
    import typer

    if name not in COMMANDS.names():
        raise unknown_name("command", name, COMMANDS.names())
    command: Command = COMMANDS.get(name)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(
        name,
        context_settings={"help_option_names": ["--help", "-h"]},
        epilog=f"Example: {command.example}",
        help=_help_text(command),
    )(_typed_for_typer(command, finish))
    return typer.main.get_command(app)


def _guarded(words: list[str]) -> int:
    """Run the program; every error of ours becomes a sentence and its exit code, never a traceback."""
    as_json = "--json" in words
    try:
        with _terminated_like_interrupted():
            return _run(words)
    except UntrustedCode as error:
        return _fail(_with_flag(error, *words), as_json)
    except FlatoutError as error:
        return _fail(error, as_json)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _fail(_too_long(str(error.filename or "A name")), as_json)
    except KeyboardInterrupt:
        return _fail(
            Interrupted(
                "Interrupted.", fix="Run the same command again.", signal_number=signal.SIGINT
            ),
            as_json,
        )


def _too_long(path: str) -> ConfigError:
    """Return the error for a name or a path that no disk takes, shortened so that it can be read."""
    name = max(path.split("/"), key=len)
    kind, shown = ("name", name) if len(os.fsencode(name)) > MOST_NAME_BYTES else ("path", path)
    return ConfigError(
        f"The {kind} {shown[:40]}... is too long: it has {len(os.fsencode(shown))} bytes.",
        fix=f"Choose a shorter {kind}.",
    )


def _with_flag(error: UntrustedCode, name: str, *words: str) -> UntrustedCode:
    """Return the error with the very command that allows the code; a command without the flag takes
    recipes, which a copy makes one's own.
    """
    has_flag = "trust_code" in inspect.signature(COMMANDS.get(name).call).parameters
    line = shlex.join(["flatout", name, "--trust-code", *words])
    way = (
        f"run `{line}`"
        if has_flag
        else "copy the recipe out of the run's folder, and name the copy"
    )
    return UntrustedCode(error.what, fix=error.fix.replace(BY_ARGUMENT, way))


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the program as Ctrl+C does, so that what is half written is taken away; a
    run has its own handlers.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted(
            "Terminated.", fix="Run the same command again.", signal_number=signal.SIGTERM
        )

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(words: list[str]) -> int:
    _refuse_broken(words)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in {"--help", "-h", "help"}:
        width = max(len(name) for name in COMMANDS.names())
        text = HELP.format(
            commands="\n".join(
                f"  {name:<{width}}  {COMMANDS.describe(name)}" for name in COMMANDS.names()
            )
        )
        return 0 if _written(lambda: print(text, end="")) else 1
    if words[0] == "--version":
        from flatout import __version__

        return 0 if _written(lambda: print(f"flatout {__version__}")) else 1
    name, *rest = words
    if name.startswith("-"):
        guess = nearest(name, ["--help", "--version"])
        raise ConfigError(
            f"flatout has no option {name!r}.",
            fix=f"Did you mean {guess!r}?" if guess else "`flatout --help` shows the commands.",
        )
    require_posix()
    return _parse_and_call(name, rest)


def _refuse_broken(words: list[str]) -> None:
    """Refuse words whose bytes could not be read as text: they could not be written down either."""
    broken = next(
        (word for word in words if any("\ud800" <= character <= "\udfff" for character in word)),
        None,
    )
    if broken is None:
        return
    shown = ascii(os.fsencode(broken).decode("utf-8", errors="replace"))
    if sys.getfilesystemencoding() == "utf-8":
        raise ConfigError(
            f"{shown} is not UTF-8.",
            fix="Write it in UTF-8; a file of that name has to be renamed.",
        )
    raise ConfigError(
        f"{shown} cannot be read where this locale says that text is {sys.getfilesystemencoding()}.",
        fix="Set PYTHONUTF8=1.",
    )


def _parse_and_call(name: str, words: list[str]) -> int:
    """Parse first and call afterwards, outside the parser: it has habits of its own with
    exceptions.
    """
    import typer

    parsed: list[tuple[Command, dict[str, Any]]] = []
    parser = build(name, lambda command, values: parsed.append((command, values)))
    try:
        if not _written(
            lambda: parser.main(args=words, prog_name=f"flatout {name}", standalone_mode=False)
        ):  # it prints help
            return 1
    except Exception as error:
        if not isinstance(error, _click_exception(typer.BadParameter)):
            raise
        raise _explained(error, name, parser) from error
    return max((_call(command, values) for command, values in parsed), default=0)


def _click_exception(known: type) -> type:
    """Return the base of the parser's errors: typer carries its own copy of click in some versions
    and imports it in others.
    """
    return next(base for base in known.__mro__ if base.__name__ == "ClickException")


def _explained(error: Any, name: str, parser: Any) -> ConfigError:
    """Turn the parser's complaint into one sentence and the fix."""
    wrong = getattr(error, "option_name", None)
    options = [
        option
        for parameter in parser.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    ]
    see = f"`flatout {name} --help` shows how; for example `{COMMANDS.get(name).example}`."
    if wrong is not None and wrong not in options:
        key = _key_meant(wrong, parser)
        if key is not None:
            return ConfigError(
                f"`flatout {name}` has no option {wrong!r}.",
                fix=f"Keys of a recipe take no dashes: write {key}=VALUE.",
            )
        options = list(dict.fromkeys([*options, "--help"]))
        guess = nearest(wrong, options)
        return ConfigError(
            f"`flatout {name}` has no option {wrong!r}.",
            fix=f"Did you mean {guess!r}?" if guess else f"Known: {', '.join(options)}; {see}",
        )
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    return ConfigError(f"`flatout {name}`: {message[:1].lower()}{message[1:]}.", fix=see)


def _key_meant(option: str, parser: Any) -> str | None:
    """Return the configuration key that was written as an option, where the command takes
    overrides; None when it is none.
    """
    if "overrides" not in {parameter.name for parameter in parser.params}:
        return None
    from flatout.config.messages import all_keys, same_key
    from flatout.config.schema import RunConfig

    known, name = all_keys(RunConfig), option.lstrip("-").partition("=")[0]
    return name if name in known else same_key(name.rpartition(".")[2], known)


def _help_text(command: Command) -> str:
    """Return the part of the function's docstring that is for a person: what comes before `Raises:`
    and its like.
    """
    text = inspect.getdoc(command.call) or ""
    return text.split("\nRaises:")[0].split("\nReturns:")[0].strip()


def _typed_for_typer(
    command: Command, finish: Callable[[Command, dict[str, Any]], object] | None
) -> Callable[..., Any]:
    """Return a function with the command's typer parameters, `--json` and for runs `--verbose`,
    which hands the parsed values to `finish`.
    """
    import typer

    def parsed(**values: Any) -> Any:
        return finish(command, values) if finish else values

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _line_parameters(command.call)
    ]
    options = {
        "as_json": typer.Option(
            "--json", help="Print the result as one JSON object, the last line of standard output."
        )
    }
    if "observers" in inspect.signature(command.call).parameters:
        options["verbose"] = typer.Option(
            "--verbose", "-v", help="Show each optimisation, on or off, with the reason."
        )
    for name, option in options.items():
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False,
                annotation=Annotated[bool, option],
            )
        )
    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {p.name: p.annotation for p in parameters}
    return parsed


def _line_parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters that carry typer's metadata, their annotations evaluated; the others
    exist in Python only.
    """
    for parameter in inspect.signature(function).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            if "Annotated" not in annotation:
                continue
            annotation = eval(annotation, function.__globals__)
        if hasattr(annotation, "__metadata__"):
            yield parameter.replace(
                annotation=Annotated[_on_the_line(annotation.__origin__), *annotation.__metadata__]
            )


def _on_the_line(kind: Any) -> Any:
    """Return the type that typer makes of a word: of those that Python may give, as `Path | str`,
    the first; None stays.
    """
    if get_origin(kind) not in (Union, UnionType):
        return kind
    first, *others = get_args(kind)
    return first | None if NoneType in others else first


def _call(command: Command, values: dict[str, Any]) -> int:
    """Call the command with the terminal's own progress, print its result, and return its exit
    code.
    """
    from flatout.terminal import Terminal

    as_json, verbose = values.pop("as_json"), values.pop("verbose", False)
    terminal = Terminal()
    speaks = os.environ.get("RANK", "0") == "0"
    progress: Progress = terminal if speaks else SILENT
    try:
        if command.check is not None:
            known = values | {"progress": progress}
            command.check(
                **{name: known[name] for name in inspect.signature(command.check).parameters}
            )
        if command.needs_torch:
            with progress.task("Loading torch"):
                importlib.import_module("torch")
        result = command.call(
            **values, **_python_parameters(command, terminal, speaks, as_json, verbose)
        )
    finally:
        terminal.close()
    if speaks and not _written(lambda: _show(result, as_json)) and not command.writes_files:
        return result.exit_code or 1
    return result.exit_code


def _python_parameters(
    command: Command, terminal: Terminal, speaks: bool, as_json: bool, verbose: bool
) -> dict[str, Any]:
    """Return what a command's Python-only parameters are on the command line: the terminal's own,
    or nothing on other ranks.
    """
    from flatout.terminal import RunReport, printable

    stream = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
        try:
            print(printable(text) if stream.isatty() else text, end="", flush=True, file=stream)
        except BrokenPipeError:
            raise
        except OSError as error:
            _drop_output()
            raise RunFailed(
                f"Standard output cannot be written: {error.strerror or error}.",
                fix="Write it to another place.",
            ) from error

    given = {
        "progress": terminal if speaks else SILENT,
        "observers": (RunReport(terminal, verbose=verbose),) if speaks else (),
        "write": write if speaks else None,
    }
    return {
        name: value
        for name, value in given.items()
        if name in inspect.signature(command.call).parameters
    }


def _show(result: Result, as_json: bool) -> None:
    from flatout.terminal import columns, wrapped

    summary = result.summary()
    stream = sys.stderr if as_json else sys.stdout
    if summary:
        print(wrapped(summary, columns()) if stream.isatty() else summary, file=stream)
    if as_json:
        print(
            json.dumps(json.loads(result.model_dump_json()))
        )  # NaN is null, and ASCII alone passes every terminal and pipe


def _fail(error: FlatoutError, as_json: bool) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, UsageError):
        time.sleep(OTHER_RANKS_WAIT_S)
    prefix = "" if rank == "0" else f"[rank {rank}] "
    for note in getattr(error, "__notes__", []):
        print(
            "\n".join(map(on_one_line, without_secrets(note.rstrip()).split("\n"))), file=sys.stderr
        )
    print(f"{prefix}{error.what}\n{error.advice}: {error.fix}", file=sys.stderr)
    if as_json and rank == "0":
        _written(
            lambda: print(
                json.dumps({"error": error.what, "fix": error.fix, "exit_code": error.exit_code})
            )
        )
    return error.exit_code
