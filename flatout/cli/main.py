"""The command line: finds the command, prints its result, and maps errors to exit codes.

Standard output carries results only. Progress and errors go to standard error. With `--json` the
last line of standard output is one JSON object. Exit codes: 0 done, 1 failed, 2 wrong usage, 75
stopped and saved, 130, 138 or 143 (128 + signal) interrupted before anything was saved.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import inspect
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from flatout.config.registry import COMMANDS, unknown_name
from flatout.errors import (
    ConfigError,
    FlatoutError,
    Interrupted,
    OutOfMemory,
    RunFailed,
    Stopped,
    Terminated,
    UntrustedCode,
    kind_of,
    on_one_line,
    require_posix,
    signal_of,
    without_secrets,
)
from flatout.progress import SILENT
from flatout.storage.streams import (
    columns,
    drop_output,
    open_streams,
    printable,
    wrapped,
    write_output,
)

if TYPE_CHECKING:
    from flatout.storage.json_io import Result

NO_MEMORY = re.compile(
    r"out of memory|can('t|not) allocate memory|can't start new thread|failed to map segment"
    r"|_ALLOC_FAILED|could not (create|execute) a (primitive|memory object)$",
    re.IGNORECASE | re.MULTILINE,
)
"""Messages of torch, its libraries, threads and the loader of libraries when memory runs out."""
ANSWER = "FLATOUT_ANSWER"
"""The environment variable with the file for rank 0's error as JSON, which the launcher prints."""
HELP = """\
Usage: flatout COMMAND [ARGUMENTS] [section.key=value ...]

Train language models and speed up PyTorch scripts, with each gain measured.

Get started:
  flatout demo book.txt                  train a small model on your text
  flatout diagnose -- python train.py    see what slows your own script down

Commands:
{commands}

Options:
  --version  Show the version.
  --help     Show this text; `flatout COMMAND --help` explains a command.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_streams()
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # shows the Python stack when native code crashes
    try:
        code = execute(words)
    except BrokenPipeError:  # the reader of standard output has closed the pipe
        drop_output()
        code = 1
    gc.freeze()  # Python's last collections would take half a second, to free what exit frees
    raise SystemExit(code if write_output(sys.stdout.flush) else code or 1)


def execute(words: list[str]) -> int:
    """Run the command line, return its exit code, and print a `FlatoutError` without traceback."""
    # Words after `--` are a script's. A `--json` in front belongs to the command.
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    if words[:1] == ["--json"]:
        words = [*words[1:2], "--json", *words[2:]]
    display = contextlib.ExitStack()

    def stop(number: int, frame: FrameType | None) -> None:
        """Unwind the process, so that partial files are removed; while it imports, end it at once.

        Native code that is imported may turn the exception into a different one.
        """
        what = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                display.close()
                os._exit(_fail(_interrupted(what), as_json))
            frame = frame.f_back
        raise what

    try:
        with contextlib.ExitStack() as handlers, display:
            for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # a run installs its own
                number = getattr(signal, name, signal.SIGTERM)  # Windows lacks SIGUSR1
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handlers.callback(signal.signal, number, signal.signal(number, stop))
            return call(words, display, as_json)
    except UntrustedCode as error:
        return _fail(_with_command(error, *words), as_json)
    except (FlatoutError, MemoryError, RuntimeError, OSError, ImportError) as error:
        if isinstance(error, FlatoutError) and not isinstance(error, OutOfMemory):
            return _fail(error, as_json)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            what = f"The path {str(error.filename)[:40]}... or a name in it is too long."
            return _fail(ConfigError(what, fix="Choose a shorter one."), as_json)
        if not isinstance(error, FlatoutError | MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        return _fail(_out_of_memory(error), as_json)
    except KeyboardInterrupt as interruption:
        return _fail(_interrupted(interruption), as_json)


def call(words: list[str], display: contextlib.ExitStack, as_json: bool) -> int:
    """Call the command of a command line, print its result, and return its exit code.

    What it shows while it runs is taken away by closing `display`.
    """
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    name, *rest = words or ["--help"]
    if name in {"--help", "-h", "--version"}:
        version = f"flatout {importlib.import_module('flatout').__version__}\n"
        return _print(version if name == "--version" else _help())
    require_posix()
    if name not in COMMANDS.names():
        raise unknown_name("command", name, [*COMMANDS.names(), "--help", "--version"])
    from flatout.cli.parser import help_of, parse

    if {"--help", "-h"} & {*rest[: rest.index("--") if "--" in rest else None]}:
        return _print(help_of(name))
    values, command = parse(name, rest), COMMANDS.get(name)
    from flatout.cli.terminal import RunReport, Terminal
    from flatout.distributed.launch import launch, program
    from flatout.distributed.spinning import spin_less_beside_others
    from flatout.hardware.machine import usable_cores

    is_main = os.environ.get("RANK", "0") == "0"
    terminal = Terminal()
    display.callback(terminal.close)
    progress = terminal if is_main else SILENT
    if command.processes is not None and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        count = command.processes(**_wanted(command.processes, values))
        if count > 1:
            import tempfile

            with tempfile.TemporaryDirectory() as folder:
                answer = Path(folder) / "answer"
                own = os.environ | {ANSWER: str(answer)}
                code = launch(program(words), count, own, usable_cores())
                text = answer.read_text() if code and answer.exists() else ""
            return code if write_output(lambda: print(text, end="")) else 1
    is_recipe = command.is_timed and not values.get("script")  # a script says so itself
    spin_less_beside_others(progress if is_recipe else SILENT)
    report = RunReport(terminal, verbose=values.get("verbose", False))
    stream = sys.stderr if as_json else sys.stdout
    values |= {
        "progress": progress,
        "as_json": as_json,
        "observers": (report,) if is_main else (),
        "write": partial(_write, stream) if is_main else None,
    }
    result = command.call(**_wanted(command.call, values))
    display.close()
    is_shown = not is_main or write_output(lambda: _show(result, as_json))
    code = result.exit_code
    return code if is_shown or command.writes_files else code or 1


def _wanted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}


def _help() -> str:
    names = COMMANDS.names()
    width = max(map(len, names))
    commands = (f"  {name:<{width}}  {COMMANDS.describe(name)}" for name in names)
    return HELP.format(commands="\n".join(commands))


def _print(text: str) -> int:
    return 0 if write_output(lambda: print(text, end="")) else 1


def _write(stream: TextIO, text: str) -> None:
    """Show text as a model writes it."""
    try:
        print(printable(text) if stream.isatty() else text, end="", flush=True, file=stream)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise RunFailed(
            f"Standard output cannot be written: {error.strerror or error}.",
            fix="Redirect it to another file or disk.",
        ) from error


def _with_command(error: UntrustedCode, name: str, *rest: str) -> UntrustedCode:
    """Return an error with the command that trusts the code.

    A command without the flag takes recipes, and a copy of a recipe counts as the user's own.
    """
    from flatout.config.trust import BY_ARGUMENT

    line = shlex.join(["flatout", name, "--trust-code", *rest])
    has_flag = "trust_code" in inspect.signature(COMMANDS.get(name).call).parameters
    copy = "copy the recipe out of the run directory, and name the copy"
    fix = error.fix.replace(BY_ARGUMENT, f"run `{line}`" if has_flag else copy)
    return UntrustedCode(error.what, fix=fix)


def _interrupted(interruption: KeyboardInterrupt) -> Interrupted:
    what = "Terminated." if isinstance(interruption, Terminated) else "Interrupted."
    number = signal_of(interruption)
    return Interrupted(what, fix="Run the same command again.", signal_number=number)


def _out_of_memory(error: Exception) -> OutOfMemory:
    """Return an error of any type that means that memory ran out, with the process's own limit."""
    import resource  # not on Windows, which `require_posix` rejects

    if not isinstance(error, OutOfMemory):
        said = (str(error).splitlines() or [""])[0].rpartition("DefaultCPUAllocator: ")[2]
        error = OutOfMemory(
            f"Out of memory: {said.rstrip('.')}." if said else "Out of memory.",
            fix="End other processes that use memory, or set fewer rows, a shorter sequence or a "
            "smaller model.",
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        error.fix = (
            f"Raise the limit of address space, which is {limit / 2**20:,.0f} MiB: `ulimit -v "
            f"unlimited`, or in the job script that sets it. Otherwise: {error.fix}"
        )
    return error


def _show(result: Result, as_json: bool) -> None:
    from flatout.display import terminal_text  # which `flatout --help` does not need

    stream = sys.stderr if as_json else sys.stdout
    if text := terminal_text(result.display(), columns() if stream.isatty() else None):
        text = printable(text)  # it may quote files of a run from elsewhere
        if stream.isatty():
            from rich.console import Console

            from flatout.cli.terminal.lines import coloured

            Console(file=stream).print(coloured(text), soft_wrap=True)
        else:
            print(text, file=stream)
    if as_json:  # pydantic writes NaN as null. Plain ASCII passes every terminal and pipe
        print(json.dumps(json.loads(result.model_dump_json())))


def _fail(error: FlatoutError, as_json: bool) -> int:
    sys.last_value = error  # as Python sets it for what nobody catches: `flatout diagnose` reads it
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, Stopped):  # all stop together, and rank 0 reports it
        return error.exit_code
    prefix = "" if rank == "0" else f"[rank {rank}] "
    for note in getattr(error, "__notes__", []):
        lines = without_secrets(note.rstrip()).split("\n")
        print("\n".join(map(on_one_line, lines)), file=sys.stderr)
    text = f"{prefix}{error.what}\n{error.advice}: {error.fix}"
    print(wrapped(text, columns()) if sys.stderr.isatty() else text, file=sys.stderr)
    if as_json and rank == "0":
        answer = {"error": error.what, "fix": error.fix, "exit_code": error.exit_code}
        answer["kind"] = kind_of(error)
        text = json.dumps(answer) + "\n"
        if ANSWER in os.environ:  # another rank may have failed before
            Path(os.environ[ANSWER]).write_text(text)
        else:
            write_output(lambda: print(text, end=""))
    return error.exit_code
