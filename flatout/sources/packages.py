"""Imports the optional packages that sources need."""

from __future__ import annotations

import importlib
from typing import Any

from flatout.errors import MissingPackage


def import_package(module: str, path: str, *, extra: str) -> Any:
    """Import and return a module that is needed to read `path`.

    Raises: MissingPackage with the install line.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"Reading {path} needs the package {module.partition('.')[0]}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{extra}]"`.',
        ) from error
