"""Starts `flatout`; `python -m flatout` imports nothing from the current directory."""

import gc
import os
import signal
import sys

WHILE_STARTING = 50_000
"""New objects between two runs of Python's garbage collector: imports create a million, and leave
no garbage. While a run trains, the usual number counts.
"""


def leave_current_folder(path: list[str]) -> list[str]:
    """Return Python's search path without the current directory, which `python -m` puts first.

    Otherwise a file in it named like a package, such as `torchao.py`, would be imported instead of
    the package. If flatout itself is in that directory, it moves to the end of the path.
    """
    try:
        here = os.path.realpath(os.curdir)
    except OSError:  # the directory was deleted
        return path
    if sys.flags.safe_path or not path or os.path.realpath(path[0]) != here:
        return path
    is_checkout = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir)) == here
    return [*path[1:], *path[:1]] if is_checkout else path[1:]


def main() -> None:
    """Run the command line and exit with its code.

    Ctrl+C while its modules are imported ends it at once, with one line and exit code 130. Python's
    own handler would show a traceback, or raise in a callback that drops the exception.
    """
    handled = signal.getsignal(signal.SIGINT)
    if handled is signal.default_int_handler:  # not where SIGINT is ignored, as after nohup
        signal.signal(signal.SIGINT, _quit)
    gc.set_threshold(WHILE_STARTING)
    from flatout.cli import main as cli

    signal.signal(signal.SIGINT, handled)
    cli.main()


def _quit(number: int, _frame: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.path[:] = leave_current_folder(sys.path)
    main()
