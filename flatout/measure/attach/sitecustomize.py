"""What Python imports first in a script that flatout measures: attaches when torch is imported.

A copy of this file is in a temporary directory at the front of PYTHONPATH. It needs nothing but
Python, steps back for the `sitecustomize` that it hides, and never keeps the script from running.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

REQUEST = os.environ.get("FLATOUT_ATTACH", "")


class _Finder(MetaPathFinder):
    """Attaches once torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, plain: Any, finder: _Finder) -> None:
        self._plain, self._finder = plain, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._plain.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if self._finder in sys.meta_path:  # not before: a spec may only be asked for
            sys.meta_path.remove(self._finder)
        module.__loader__ = self._plain
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        self._plain.exec_module(module)
        try:
            from flatout.measure.attach.attach import attach

            attach(REQUEST)
        except Exception as error:
            _answer(_problem(error))


def _problem(error: Exception) -> str:
    """Return why flatout cannot attach here, and what to do."""
    where = f"the environment of the script, {sys.executable} (Python {sys.version.split()[0]})"
    if sys.version_info < (3, 11):  # noqa: UP036
        fix = "Run the script with Python 3.11 or newer."
        return f"flatout needs a newer Python than {where}. Fix: {fix}"
    missing = getattr(error, "name", None)
    if isinstance(error, ImportError) and missing:
        fix = f"Install flatout there: {sys.executable} -m pip install flatout"
        return f"The package {missing.partition('.')[0]} is missing in {where}. Fix: {fix}"
    return f"flatout cannot be used in {where}: {type(error).__name__}: {error}"


def _answer(problem: str) -> None:
    with open(REQUEST, encoding="utf-8") as file:
        path = json.load(file)["answer"]
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump({"problem": problem}, file)
    os.replace(path + ".part", path)


def _step_back() -> None:
    """Import the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own


if os.path.isfile(REQUEST):
    sys.meta_path.insert(0, _Finder())
_step_back()
