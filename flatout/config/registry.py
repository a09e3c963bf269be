"""Finds objects by name. A plural directory is an open list: drop in a file and it exists.

An entry is a file, or a directory if it is large. In Python directories each entry assigns one
object to the directory's attribute name (`models/transformer.py` assigns `MODEL`, `speedups/fp8.py`
`SPEEDUP`). In YAML directories each file is one document, and machines are rows of one file. Names
are file names with `-` for `_`. Listing parses the files and imports nothing, so it is fast and
never loads torch. `get` imports only the requested file. Wherever a Python entry's name is
accepted, `package.module:attribute` refers to an object of the user.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from flatout.config.words import name_for, removed
from flatout.errors import ConfigError
from flatout.storage.recognised import require_local

PACKAGE_DIR = Path(__file__).parents[1]
CLOSE = 0.78
"""Share of the letters by which a name counts as misspelt."""
SHORTEST_PART = 3
"""Minimum length of a name that is matched as a prefix of another."""


@cache
def is_user_code(file: str) -> bool:
    """Return whether a file is neither part of Python, nor installed, nor part of flatout."""
    if file.startswith("<"):
        return file.startswith(("<ipython-input", "<stdin"))
    path = Path(file)
    if {"site-packages", "dist-packages"} & {*path.parts} or "/torchinductor_" in file:
        return False
    library = sysconfig.get_path("stdlib")
    if any(path.is_relative_to(folder) for folder in (PACKAGE_DIR, library)):
        return False
    return not any(f"{path.relative_to(one)}," in _installed_in(one) for one in path.parents)


@cache
def _installed_in(folder: Path) -> str:
    """Return the lists of the files that were installed into a directory, wherever it is."""
    with suppress(OSError, UnicodeDecodeError):
        return "\n".join(one.read_text("utf-8") for one in folder.glob("*.dist-info/RECORD"))
    return ""


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is with a typing error or two, or None.

    It shares nearly four fifths of the letters. Case, leading dashes, and the difference
    between - and _ are ignored.
    """
    by_word = {_word(k): k for k in known}
    found = difflib.get_close_matches(_word(name), by_word, n=1, cutoff=CLOSE)
    return by_word[found[0]] if found else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely meant, or None when no name is similar.

    In this order: one that it misspells, the longest name that `name` starts with, one that shares
    more than two thirds of the letters, or the only one that starts with `name`.
    """
    by_word = {_word(k): k for k in known}
    word = _word(name)
    if (guess := misspelt(name, by_word.values())) or len(word) < SHORTEST_PART:
        return guess
    longer = [other for other in by_word if other.startswith(word)]
    shorter = [o for o in by_word if len(o) >= SHORTEST_PART and word.startswith(o)]
    found = (
        sorted(shorter, key=len, reverse=True)
        or difflib.get_close_matches(word, by_word, n=1, cutoff=0.66)
        or (longer if len(longer) == 1 else [])
    )
    return by_word[found[0]] if found else None


def _word(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def unknown_name(noun: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the name that was meant and a list of all."""
    names = sorted(known)
    if instead := removed(name if noun == "command" else f"{noun} {name}"):
        return ConfigError(f"There is no {noun} named {name!r} any more.", fix=instead)
    guess = name_for(noun, name, names) or nearest(name, names)
    listing = ", ".join(names) or "none"
    hint = f"Did you mean {guess!r}? " if guess else ""
    return ConfigError(f"There is no {noun} named {name!r}.", fix=f"{hint}Known: {listing}.")


def load_reference(reference: str) -> Any:
    """Import and return `package.module:attribute`.

    A module of the user may also be in the current directory, which is searched last. References
    inside flatout never add the current directory to the search path, because a file there could
    shadow an optional package that is missing.

    Raises: ConfigError when the module or the attribute does not exist.
    """
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(
            f"{reference!r} does not name an object in a Python module.",
            fix="Write package.module:attribute.",
        )
    if module_name.partition(".")[0] != "flatout" and "" not in sys.path:
        sys.path.append("")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ConfigError(
            f"There is no Python module {module_name!r} (wanted for {reference!r}).",
            fix="Check the spelling, install it, or run from the directory that contains it.",
        ) from error
    if not hasattr(module, attribute):
        guess = nearest(attribute, vars(module))
        raise ConfigError(
            f"The module {module_name!r} has no {attribute!r}.",
            fix=f"Did you mean {guess!r}?" if guess else f"Define {attribute!r} there.",
        )
    return getattr(module, attribute)


@dataclass(frozen=True)
class Folder:
    """An open list of Python entries: what assigns `attribute` in `flatout/FOLDER`."""

    folder: str
    attribute: str
    noun: str
    has: tuple[str, ...] = ()
    """Attributes that a user's object must have to count as an entry."""
    otherwise: str = ""
    """Advice added to the pointer to docs/extend.md when an object is not an entry."""

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Entries by name: the file, or the directory's `__init__.py`. import_.py is `import`, a
        Python keyword.
        """
        root, files = PACKAGE_DIR / self.folder, {}
        for path in [*root.glob("*.py"), *root.glob("*/__init__.py")]:
            name = _module(path)
            if not name.startswith("_") and re.search(rf"^{self.attribute}\b", _text(path), re.M):
                files[name.rstrip("_").replace("_", "-")] = path
        return dict(sorted(files.items()))

    def names(self) -> list[str]:
        """Return the sorted names of all entries without importing any."""
        return list(self._files)

    def describe(self, name: str) -> str:
        """Return the first line of the entry's module docstring, without importing it."""
        first = re.match(r'"""(.*?)(?:"""|\n)', _text(self._files[name]))
        return first[1] if first else ""

    def stated(self, name: str, constant: str) -> Any:
        """Return the literal that the entry's file assigns to `constant`, without importing it.

        None when the file assigns none. A `package.module:attribute` is imported for this.
        """
        if ":" in name:
            found = load_reference(name)
            return getattr(found, constant, getattr(sys.modules[found.__module__], constant, None))
        value = _assigned(self._file(name)).get(constant)
        return value and ast.literal_eval(value)

    def unstated(self, name: str, fields: Iterable[str]) -> set[str]:
        """Return the `fields` that no class in the entry's file declares, without importing it.

        A class elsewhere may declare them. Of a `package.module:attribute`, nothing is known.
        """
        path = self._files.get(name.replace("_", "-"))
        nodes = ast.walk(_parsed(path)) if path else ()
        return set(fields) - {ast.unparse(n.target) for n in nodes if isinstance(n, ast.AnnAssign)}

    def require(self, name: str) -> None:
        """Check that the entry exists. A `package.module:attribute` is checked when it is imported.

        Raises: ConfigError with the nearest name.
        """
        if ":" not in name:
            self._file(name)

    def _file(self, name: str) -> Path:
        file = self._files.get(name.replace("_", "-"))
        if file is None:
            raise unknown_name(self.noun, name, self._files)
        return file

    def get(self, name: str) -> Any:
        """Import and return the entry `name`, or the object `package.module:attribute`.

        Raises: ConfigError with the nearest name when the entry does not exist, or when the object
                is something else.
        """
        if ":" in name:
            found = load_reference(name)
            lacking = [attribute for attribute in self.has if not hasattr(found, attribute)]
            if lacking:
                raise ConfigError(
                    f"{name} is not a {self.noun}: it has no {lacking[0]!r}.",
                    fix=f"docs/extend.md shows how to write a {self.noun}{self.otherwise}.",
                )
            return found
        module = f"flatout.{self.folder.replace('/', '.')}.{_module(self._file(name))}"
        return getattr(importlib.import_module(module), self.attribute)


@dataclass(frozen=True)
class YamlFolder:
    """An open list of YAML entries: every `flatout/FOLDER/*.yaml`."""

    folder: str
    noun: str

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted((PACKAGE_DIR / self.folder).glob("*.yaml"))}

    def names(self) -> list[str]:
        """Return the sorted names of all entries."""
        return list(self._files)

    def describe(self, name: str) -> str:
        """Return the entry's description, its first comment line."""
        first = self._files[name].read_text(encoding="utf-8").split("\n", 1)[0]
        return first.lstrip("# ").strip() if first.startswith("#") else ""

    def path(self, name: str) -> Path:
        """Return the entry's file.

        Raises: ConfigError with the nearest name when the entry does not exist.
        """
        if name not in self._files:
            raise unknown_name(self.noun, name, self._files)
        return self._files[name]

    def get(self, name: str) -> dict[str, Any]:
        """Return the entry's parsed document. Errors as for `path`."""
        from flatout.config.documents import read_document  # imports yaml

        return read_document(self.path(name))


@dataclass(frozen=True)
class YamlTable:
    """An open list of YAML entries in one file: the rows of `flatout/FILE`."""

    file: str

    @cached_property
    def rows(self) -> dict[str, Any]:
        """The rows by name, in the order of the file."""
        from flatout.config.documents import read_document  # imports yaml

        return read_document(PACKAGE_DIR / self.file)

    def names(self) -> list[str]:
        """Return the names of all rows."""
        return list(self.rows)

    def describe(self, name: str) -> str:
        """Return the row's description."""
        return str(self.rows[name]["description"])


def _module(path: Path) -> str:
    """Return the name of an entry's module within its directory."""
    return path.parent.name if path.name == "__init__.py" else path.stem


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(_text(path))


@cache
def _assigned(path: Path) -> dict[str, ast.expr | None]:
    """Return what a file assigns to each name at its top level."""
    return {
        target.id: node.value
        for node in _parsed(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


COMMANDS = Folder("cli/commands", "COMMAND", "command")
ARCHITECTURES = Folder("models/families", "ARCHITECTURE", "architecture", has=("keys", "tensors"))
LOGGERS = Folder(
    "training/loggers",
    "LOGGER",
    "logger",
    has=("on_start", "on_record", "on_event", "on_end", "close"),
    otherwise=". An observer belongs in log.observers",
)
MODELS = Folder(
    "models",
    "MODEL",
    "model",
    has=("check", "count_flops"),
    otherwise=", and how to adapt a torch module: MODEL = adapt(build)",
)
OPTIMIZERS = Folder("optim", "OPTIMIZER", "optimizer", has=("__call__",))
SOURCES = Folder("data/sources", "SOURCE", "source", has=("__call__",))
SPEEDUPS = Folder("speedups", "SPEEDUP", "speedup", has=("apply", "tolerance"))
DATASETS = YamlFolder("data/datasets", "dataset")
MACHINES = YamlTable("hardware/machines.yaml")
RECIPES = YamlFolder("config/recipes", "recipe")
SUFFIXES = {".yaml", ".yml"}
"""A recipe name that ends in one of these is a path."""
_SETTING = re.compile(r"[a-z_]\w*(\.\w+)*=")


def recipe_path(recipe: str | Path) -> Path:
    """Return the path of a recipe: a YAML file, or the name of a built-in recipe.

    Raises: ConfigError with the nearest file or name, or with the commands that prepare and use the
            dataset of that name.
    """
    require_local(recipe, error=ConfigError)
    name, path = str(recipe), Path(recipe)
    if name in RECIPES.names():
        return RECIPES.path(name)
    if _SETTING.match(name) and not path.exists():
        raise ConfigError(
            f"{name} is a setting, and there is no recipe before it.",
            fix=f"Name a recipe first, as in `demo {name}`: a YAML file, or one of `flatout list "
            "recipes`.",
        )
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a recipe.",
            fix="Name a YAML file, or one of `flatout list recipes`.",
        )
    if path.suffix.lower() not in SUFFIXES:
        files = [path.with_name(path.name + suffix) for suffix in sorted(SUFFIXES)]
        if file := next(filter(Path.is_file, files), None):
            raise ConfigError(
                f"There is no recipe named {name!r}, but there is a file {file}.",
                fix=f"Name the file: {str(file)!r}.",
            )
        known = DATASETS.names()
        dataset = name if name in known else name_for("dataset", name, known)
        if dataset is None or name_for("recipe", name, RECIPES.names()):
            return RECIPES.path(name)
        here = f"data/{dataset}"
        what = "a dataset" if name == dataset else f"the dataset {dataset}"
        raise ConfigError(
            f"There is no recipe named {name!r}: it is {what}.",
            fix=f"Prepare it with `flatout prepare {dataset} --out {here}`, then train a recipe on "
            f"it: `flatout train RECIPE data.path={here}`. `flatout list recipes` shows the "
            "recipes.",
        )
    if not path.exists():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        guess = nearest(
            path.name, [file.name for file in beside if file.suffix.lower() in SUFFIXES]
        )
        raise ConfigError(
            f"There is no file {path}.",
            fix=f"Did you mean {str(path.with_name(guess))!r}?"
            if guess
            else "Check the path. `flatout list recipes` shows the built-in recipes.",
        )
    return path
