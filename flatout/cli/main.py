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
import importlib.util
import inspect
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.config.registry import COMMANDS, nearest, unknown_name
from flatout.errors import (
    ConfigError,
    FlatoutError,
    Interrupted,
    OutOfMemory,
    RunFailed,
    Stopped,
    Terminated,
    UntrustedCode,
    UsageError,
    kind_of,
    on_one_line,
    require_posix,
    signal_of,
    without_secrets,
)
from flatout.progress import SILENT, Progress
from flatout.storage.streams import (
    columns,
    drop_output,
    open_streams,
    printable,
    wrapped,
    write_output,
)

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from flatout.cli.commands import Command
    from flatout.cli.terminal import Terminal
    from flatout.storage.json_io import Result

MAX_NAME_BYTES = 255
"""The longest file name that nearly all file systems allow."""
NO_MEMORY = re.compile(
    r"out of memory|can('t|not) allocate memory|can't start new thread|failed to map segment"
    r"|_ALLOC_FAILED|could not (create|execute) a (primitive|memory object)$",
    re.IGNORECASE | re.MULTILINE,
)
"""Messages of torch, its libraries, threads and the loader of libraries when memory runs out."""
OTHER_RANKS_WAIT_S = 3.0
"""Seconds that other ranks hold back a usage error, and twice that all but the first of a machine.

Rank 0 usually has the same error. When it exits, torchrun ends the others of its machine. An
error on one rank alone is still reported."""
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
    try:
        with _handled(_terminate, "SIGTERM", "SIGUSR1"):  # a run installs its own handlers
            return call(words)
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
            path = str(error.filename or "A name")
            kind, shown = "path", path
            if len(os.fsencode(name := max(path.split("/"), key=len))) > MAX_NAME_BYTES:
                kind, shown = "name", name
            long = (
                f"The {kind} {shown[:40]}... is too long: it has {len(os.fsencode(shown))} bytes."
            )
            return _fail(ConfigError(long, fix=f"Choose a shorter {kind}."), as_json)
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        return _fail(_out_of_memory(error), as_json)
    except KeyboardInterrupt as interruption:
        return _fail(_interrupted(interruption), as_json)


def asks_for_json(words: list[str]) -> bool:
    """Return whether `--json` is among the words of flatout: those after `--` are a script's."""
    return "--json" in words[: words.index("--") if "--" in words else None]


def call(words: list[str]) -> int:
    """Parse the command line, call the command, print its result, and return its exit code."""
    refuse_undecodable(words)
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
    if name.startswith("-"):
        guess = nearest(name, ["--help", "--version"])
        raise ConfigError(
            f"flatout has no option {name!r}.",
            fix=f"Did you mean {guess!r}?" if guess else "`flatout --help` shows the commands.",
        )
    require_posix()
    if name not in COMMANDS.names():
        raise unknown_name("command", name, COMMANDS.names())
    as_json, is_main = asks_for_json(words), os.environ.get("RANK", "0") == "0"
    with _signals_exit(lambda: None, as_json):
        from flatout.cli.parser import parse
        from flatout.hardware.machine import CpuTimes, usable_cores

        began = CpuTimes.read()
        command = COMMANDS.get(name)
    parsed: list[dict[str, Any] | None] = []
    if not write_output(lambda: parsed.append(parse(name, rest))):  # it prints the help
        return 1
    values = parsed[0] if parsed else None
    if values is None:
        return 0
    from flatout.cli.terminal import Terminal
    from flatout.distributed.launch import launch, program

    as_json, verbose = values.pop("json"), values.pop("verbose", False)
    terminal = Terminal()
    progress: Progress = terminal if is_main else SILENT

    @contextlib.contextmanager
    def loading_torch() -> Iterator[None]:
        gc.disable()  # modules stay: the collector would look at them again and again
        try:
            with progress.task("Loading torch"), _signals_exit(terminal.close, as_json):
                yield
            from flatout.distributed.spinning import spin_less_beside_others

            spin_less_beside_others(progress if command.is_timed else SILENT, began)
        finally:
            gc.freeze()
            gc.enable()

    finder = _TorchFinder(loading_torch)
    sys.meta_path.insert(0, finder)
    try:
        if command.processes is not None and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
            wanted = inspect.signature(command.processes).parameters
            offered = values | {"progress": progress}
            count = command.processes(**{name: offered[name] for name in wanted})
            if count > 1:
                return launch(program(words), count, os.environ, usable_cores())
        result = command.call(
            **values, **_python_parameters(command, terminal, is_main, as_json, verbose)
        )
    finally:
        terminal.close()
        sys.meta_path[:] = [one for one in sys.meta_path if one is not finder]
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


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Unwind the process as Ctrl+C does, so that partial files are removed."""
    raise Terminated(number)


def _signals_exit(
    close: Callable[[], object], as_json: bool
) -> contextlib.AbstractContextManager[None]:
    """Let signals end the process at once, after `close`, while there is nothing to clean up.

    Native code that is imported may turn the exception of an interruption into a different one.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        close()
        what = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
        os._exit(_fail(_interrupted(what), as_json))

    return _handled(stop, "SIGINT", "SIGTERM", "SIGUSR1")


def refuse_undecodable(words: list[str]) -> None:
    """Reject arguments whose bytes could not be decoded: they could not be stored either."""
    bad = next((w for w in words if any("\ud800" <= c <= "\udfff" for c in w)), None)
    if bad is None:
        return
    shown = ascii(os.fsencode(bad).decode("utf-8", errors="replace"))
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        raise ConfigError(
            f"{shown} is not UTF-8.",
            fix="Write it in UTF-8. If it is a file name, rename the file.",
        )
    raise ConfigError(
        f"{shown} cannot be decoded: the locale's encoding is {encoding}.",
        fix="Set PYTHONUTF8=1.",
    )


class _TorchFinder:
    """Finds torch as Python does, and runs its import, which takes seconds, inside a context.

    Commands check what they can, and then import torch: this shows it wherever it happens.
    """

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._context = context

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_inside(module: ModuleType) -> None:
                with self._context():
                    execute(module)

            spec.loader.exec_module = execute_inside  # type: ignore[method-assign]
        return spec


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
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, Stopped):  # all stop together, and rank 0 reports it
        return error.exit_code
    if rank != "0" and isinstance(error, UsageError):
        is_first = os.environ.get("LOCAL_RANK") == "0"
        time.sleep(OTHER_RANKS_WAIT_S if is_first else 2 * OTHER_RANKS_WAIT_S)
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
