"""Where measurements are written, and which version of flatout made them. No torch."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from flatout.config.registry import PACKAGE_DIR
from flatout.distributed.launch import own_environment
from flatout.errors import ConfigError


def claim(out: Path) -> None:
    """Create a directory for results before anything is measured.

    Raises: ConfigError when it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write {out}: {error.strerror or error}.",
            fix="Choose a writable directory with --out DIR.",
        ) from error


def require_own(out: Path, *, is_own: bool, option: str = "--out") -> None:
    """Check that results may be written to a path, and create its parent directory.

    Raises: ConfigError when something else is there, or the parent cannot be written.
    """
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_own and not is_empty:
        raise ConfigError(
            f"{out} exists, and this command did not write it.",
            fix=f"Choose a different path with {option}.",
        )
    claim(out.parent)


def git(folder: Path, *words: str, **variables: str) -> str | None:
    """Return what a git command prints. None when it fails."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
            env=own_environment() | variables,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_of_package() -> str | None:
    """Return the commit of the checkout, with + if files were changed. None without a checkout."""
    if git(PACKAGE_DIR, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git(PACKAGE_DIR, "rev-parse", "--short", "HEAD")
    is_changed = git(PACKAGE_DIR, "status", "--porcelain", "--", ".")
    return commit and commit + "+" * bool(is_changed)
