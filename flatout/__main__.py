"""Runs `flatout` for `python -m flatout`, without imports from the current directory."""

import os
import sys


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


if __name__ == "__main__":
    sys.path[:] = leave_current_folder(sys.path)
    from flatout.cli import main

    main()
