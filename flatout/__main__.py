"""`python -m flatout` is the program `flatout`, and like it does not import from the current folder
what only happens to lie there.
"""

import os
import sys


def leave_current_folder(path: list[str]) -> list[str]:
    """Return Python's search path without the current folder, which `python -m` puts first; last,
    where flatout itself lies there.

    Else any file in it named like a package, `torchao.py` or `yaml.py`, would be imported in its
    place.
    """
    try:
        here = os.path.realpath(os.curdir)
    except OSError:  # it was deleted
        return path
    if sys.flags.safe_path or not path or os.path.realpath(path[0]) != here:
        return path
    is_checkout = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir)) == here
    return [*path[1:], *path[:1]] if is_checkout else path[1:]


if __name__ == "__main__":
    sys.path[:] = leave_current_folder(sys.path)
    from flatout.cli import main

    main()
