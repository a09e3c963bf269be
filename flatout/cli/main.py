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
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

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
    from flatout.cli.commands import Command
    from flatout.cli.terminal import Terminal
    from flatout.storage.json_io import Result

NO_MEMORY = re.compile(
    r"out of memory|can('t|not) allocate memory|can't start new thread|failed to map segment"
    r"|_ALLOC_FAILED|could not (create|execute) a (primitive|memory object)$",
    re.IGNORECASE | re.MULTILINE,
)
"""Messages of torch, its libraries, threads and the loader of libraries when memory runs out."""
HELP = """\
Usage: flatout COMMAND [ARGUMENTS] [section.key=value ...]

Train language models and speed up PyTorch scripts, with each gain measured.

Commands:
{commands}

Options:
  --version  Show the version.
  --help     Show this text; `flatout COMMAND --help` explains a command.

Get started: flatout demo
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
    as_json = asks_for_json(words)
    if words[:1] == ["--json"] and len(words) > 1:  # it belongs to the command, if there is one
        words = [words[1], words[0], *words[2:]]
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
        with display, _handled(stop, "SIGINT", "SIGTERM", "SIGUSR1"):  # a run installs its own
            return call(words, display)
    except UntrustedCode as error:
        from flatout.config.trust import BY_ARGUMENT

        name, *rest = words
        # A command without the flag takes recipes, and a copy of a recipe counts as the user's own.
        has_flag = "trust_code" in inspect.signature(COMMANDS.get(name).call).parameters
        line = shlex.join(["flatout", name, "--trust-code", *rest])
        copy = "copy the recipe out of the run directory, and name the copy"
        fix = error.fix.replace(BY_ARGUMENT, f"run `{line}`" if has_flag else copy)
        return _fail(UntrustedCode(error.what, fix=fix), as_json)
    except OutOfMemory as error:
        return _fail(_out_of_memory(error), as_json)
    except FlatoutError as error:
        return _fail(error, as_json)
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            what = f"The path {str(error.filename)[:40]}... or a name in it is too long."
            return _fail(ConfigError(what, fix="Choose a shorter one."), as_json)
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        return _fail(_out_of_memory(error), as_json)
    except KeyboardInterrupt as interruption:
        return _fail(_interrupted(interruption), as_json)


def asks_for_json(words: list[str]) -> bool:
    """Return whether `--json` is among the words of flatout: those after `--` are a script's."""
    return "--json" in words[: words.index("--") if "--" in words else None]


def call(words: list[str], display: contextlib.ExitStack) -> int:
    """Parse the command line, call the command, print its result, and return its exit code.

    What it shows while it runs is taken away by closing `display`.
    """
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in {"--help", "-h", "help"}:
        names = COMMANDS.names()
        width = max(map(len, names))
        commands = (f"  {name:<{width}}  {COMMANDS.describe(name)}" for name in names)
        text = HELP.format(commands="\n".join(commands))
        return 0 if write_output(lambda: print(text, end="")) else 1
    if words[0] == "--version":
        version = importlib.import_module("flatout").__version__
        return 0 if write_output(lambda: print(f"flatout {version}")) else 1
    name, *rest = words
    require_posix()
    if name not in COMMANDS.names():
        raise unknown_name("command", name, [*COMMANDS.names(), "--help", "--version"])
    from flatout.cli.parser import parse

    command = COMMANDS.get(name)
    parsed: list[dict[str, Any] | None] = []
    if not write_output(lambda: parsed.append(parse(name, rest))):  # it prints the help
        return 1
    values = parsed[0] if parsed else None
    if values is None:
        return 0
    from flatout.cli.terminal import Terminal
    from flatout.distributed.launch import launch, program
    from flatout.distributed.spinning import spin_less_beside_others
    from flatout.hardware.machine import usable_cores

    is_main = os.environ.get("RANK", "0") == "0"
    as_json, verbose = values.pop("json"), values.pop("verbose", False)
    terminal = Terminal()
    display.callback(terminal.close)
    progress = terminal if is_main else SILENT
    if command.processes is not None and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        wanted = inspect.signature(command.processes).parameters
        offered = values | {"progress": progress}
        count = command.processes(**{name: offered[name] for name in wanted})
        if count > 1:
            return launch(program(words), count, os.environ, usable_cores())
    spin_less_beside_others(progress if command.is_timed else SILENT)
    parameters = _python_parameters(command, terminal, is_main, as_json, verbose)
    result = command.call(**values, **parameters)
    display.close()
    is_shown = not is_main or write_output(lambda: _show(result, as_json))
    code: int = result.exit_code
    return code if is_shown or command.writes_files else code or 1


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


@contextlib.contextmanager
def _handled(stop: Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    """Let `stop` handle signals, except those that are ignored."""
    # Windows, which `require_posix` rejects, lacks SIGUSR1.
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {number: one for number, one in handlers.items() if one is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _python_parameters(
    command: Command, terminal: Terminal, is_main: bool, as_json: bool, verbose: bool
) -> dict[str, Any]:
    """Return the values of a command's Python-only parameters. Other ranks are silent."""
    from flatout.cli.terminal import RunReport

    stream = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
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

    values = {
        "progress": terminal if is_main else SILENT,
        "as_json": as_json,
        "observers": (RunReport(terminal, verbose=verbose),) if is_main else (),
        "write": write if is_main else None,
    }
    wanted = inspect.signature(command.call).parameters
    return {name: value for name, value in values.items() if name in wanted}


def _show(result: Result, as_json: bool) -> None:
    from flatout.display import terminal_text  # which `flatout --help` does not need

    stream = sys.stderr if as_json else sys.stdout
    width = columns() if stream.isatty() else None
    text = terminal_text(result.display(), width)
    if not text:
        text = wrapped(result.summary(), width) if width else result.summary()
    if text:
        print(printable(text), file=stream)  # it may quote files of a run from elsewhere
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
        write_output(lambda: print(json.dumps(answer)))
    return error.exit_code
