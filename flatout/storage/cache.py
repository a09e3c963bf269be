"""The user's cache directory: downloads, copies of remote datasets and measured results."""

from __future__ import annotations

import os
from pathlib import Path

from flatout.errors import ConfigError
from flatout.storage.recognised import require_local

VARIABLE = "FLATOUT_CACHE"
"""The environment variable that names a different directory."""
DEFAULT = Path("~/.cache/flatout")
ELSEWHERE = f"name a different cache directory with the environment variable {VARIABLE}"
"""How to continue when the cache cannot be written."""


def default_cache() -> Path:
    """Return the directory that FLATOUT_CACHE names, or else ~/.cache/flatout.

    The variable is read at every call, so that it also holds in Python and in the processes that a
    command starts. Callers expand the `~` when they read or write.
    Raises: ConfigError when it does not name a directory from the root or the home directory.
    """
    stated = os.environ.get(VARIABLE, "")
    if not stated:
        return DEFAULT
    require_local(stated, f"{VARIABLE}=", error=ConfigError)
    path = Path(stated)
    if not path.is_absolute() and not stated.startswith("~"):
        raise ConfigError(
            f"{VARIABLE}={stated} depends on the current directory.",
            fix="Write the full path, starting with / or ~.",
        )
    if Path(os.path.expanduser(stated)).is_file():
        raise ConfigError(
            f"{VARIABLE}={stated} is a file, not a directory.",
            fix=f"Name a directory, or unset {VARIABLE} for {DEFAULT}.",
        )
    return path
