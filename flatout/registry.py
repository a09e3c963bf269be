"""Finds objects by name. A plural folder is an open list: drop in a file and it exists.

An entry is a file, or a folder if it is large. In Python folders each entry assigns one object to
the folder's attribute name (`models/transformer.py` assigns `MODEL`, `speedups/fp8.py`
`SPEEDUP`); in YAML folders each file is one document. Names are file names with `-` for `_`.
Listing parses the files and imports nothing, so it is fast and never loads torch; `get` imports
only the requested file. Wherever a Python entry's name is accepted, `package.module:attribute`
refers to an object of the user.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from flatout.documents import read_document
from flatout.errors import ConfigError
from flatout.recognised import require_local
from flatout.words import name_for

PACKAGE_DIR = Path(__file__).parent
SHORTEST_PART = 3
"""Minimum length of a name that is matched as a prefix of another."""


@cache
def is_user_code(file: str) -> bool:
    """Return whether a file is neither part of Python, nor installed, nor part of flatout."""
    if file.startswith("<"):
        return file.startswith(("<ipython-input", "<stdin"))
    path = Path(file)
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    library = sysconfig.get_path("stdlib")
    return not any(path.is_relative_to(folder) for folder in (PACKAGE_DIR, library))


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is with a typing error or two, or None.

    It shares more than four fifths of the letters, or differs by one slip. Case, leading dashes,
    and the difference between - and _ are ignored.
    """
    by_word = {_word(k): k for k in known}
    word = _word(name)
    found = difflib.get_close_matches(word, by_word, n=1, cutoff=0.81)
    if not found and len(word) >= SHORTEST_PART:
        found = [other for other in by_word if _one_slip(word, other)]
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
        or difflib.get_close_matches(word, by_word, n=1, cutoff=0.67)
        or (longer if len(longer) == 1 else [])
    )
    return by_word[found[0]] if found else None


def _word(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def _one_slip(word: str, other: str) -> bool:
    """Return whether the words differ by one inserted, deleted, changed or swapped letter."""
    start = _shared(word, other)
    word, other = word[start:], other[start:]
    end = _shared(word[::-1], other[::-1])
    word, other = word[: len(word) - end], other[: len(other) - end]
    return max(len(word), len(other)) <= 1 or (len(word) == 2 and word == other[::-1])


def _shared(word: str, other: str) -> int:
    pairs = enumerate(zip(word, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(word), len(other)))


def unknown_name(noun: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the name that was meant and a list of all."""
    names = sorted(known)
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
        """Entries by name: the file, or the folder's `__init__.py`. import_.py is `import`, a
        Python keyword.
        """
        root, files = PACKAGE_DIR / self.folder, {}
        for path in [*root.glob("*.py"), *root.glob("*/__init__.py")]:
            name = _module(path)
            if not name.startswith("_") and self.attribute in _assigned(path):
                files[name.rstrip("_").replace("_", "-")] = path
        return dict(sorted(files.items()))

    def names(self) -> list[str]:
        """Return the sorted names of all entries without importing any."""
        return list(self._files)

    def describe(self, name: str) -> str:
        """Return the first line of the entry's module docstring, without importing it."""
        docstring = (
            ast.get_docstring(ast.parse(self._files[name].read_text(encoding="utf-8"))) or ""
        )
        return docstring.split("\n", 1)[0]

    def stated(self, name: str, constant: str) -> Any:
        """Return the literal that the entry's file assigns to `constant`, without importing it.

        None when the file assigns none. A `package.module:attribute` is imported for this.
        """
        if ":" in name:
            found = load_reference(name)
            return getattr(found, constant, getattr(sys.modules[found.__module__], constant, None))
        self.require(name)
        value = _assigned(self._files[name.replace("_", "-")]).get(constant)
        return value and ast.literal_eval(value)

    def unstated(self, name: str, fields: Iterable[str]) -> set[str]:
        """Return the `fields` that no class in the entry's file declares, without importing it.

        A class elsewhere may declare them; of a `package.module:attribute`, nothing is known.
        """
        path = self._files.get(name.replace("_", "-"))
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path else ()
        return set(fields) - {ast.unparse(n.target) for n in tree if isinstance(n, ast.AnnAssign)}

    def require(self, name: str) -> None:
        """Check that the entry exists; a `package.module:attribute` is checked when it is imported.

        Raises: ConfigError with the nearest name.
        """
        if ":" not in name and name.replace("_", "-") not in self._files:
            raise unknown_name(self.noun, name, self._files)

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
        self.require(name)
        module = _module(self._files[name.replace("_", "-")])
        package = "flatout." + self.folder.replace("/", ".")
        return getattr(importlib.import_module(f"{package}.{module}"), self.attribute)


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
        """Return the entry's parsed document; errors as for `path`."""
        return read_document(self.path(name))


def _module(path: Path) -> str:
    """Return the name of an entry's module within its folder."""
    return path.parent.name if path.name == "__init__.py" else path.stem


@cache
def _assigned(path: Path) -> dict[str, ast.expr | None]:
    """Return what a file assigns to each name at its top level."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


COMMANDS = Folder("commands", "COMMAND", "command")
ARCHITECTURES = Folder("architectures", "ARCHITECTURE", "architecture", has=("keys", "tensors"))
LOGGERS = Folder(
    "loggers",
    "LOGGER",
    "logger",
    has=("on_start", "on_record", "on_event", "on_end", "close"),
    otherwise="; an observer belongs in log.observers",
)
MODELS = Folder(
    "models",
    "MODEL",
    "model",
    has=("check", "count_flops"),
    otherwise=", and how to adapt a torch module: MODEL = adapt(build)",
)
OPTIMIZERS = Folder("optimizers", "OPTIMIZER", "optimizer", has=("__call__",))
SOURCES = Folder("sources", "SOURCE", "source", has=("__call__",))
SPEEDUPS = Folder("speedups", "SPEEDUP", "speedup", has=("fills", "promise"))
TOKEN_FORMATS = Folder("token_formats", "FORMAT", "token format", has=("takes", "files", "open"))
TOKENIZERS = Folder("data/tokenizers", "TOKENIZER", "tokenizer")
DATASETS = YamlFolder("datasets", "dataset")
MACHINES = YamlFolder("machines", "machine")
RECIPES = YamlFolder("recipes", "recipe")
SUFFIXES = {".yaml", ".yml"}
"""A recipe name that ends in one of these is a path."""
_SETTING = re.compile(r"[a-z_]\w*(\.\w+)*=")


def _require_no_dataset(name: str) -> None:
    """Check that a recipe's name is not that of a dataset.

    Raises: ConfigError with the commands that prepare and use it.
    """
    known = DATASETS.names()
    dataset = name if name in known else name_for("dataset", name, known)
    if dataset is None or name_for("recipe", name, RECIPES.names()):
        return
    here = f"data/{dataset}"
    what = "a dataset" if name == dataset else f"the dataset {dataset}"
    raise ConfigError(
        f"There is no recipe named {name!r}: it is {what}.",
        fix=f"Prepare it with `flatout prepare {dataset} --out {here}`, then train a recipe on it: "
        f"`flatout train RECIPE data.path={here}`; `flatout list recipes` shows the recipes.",
    )


def recipe_path(recipe: str | Path) -> Path:
    """Return the path of a recipe: a YAML file, or the name of a built-in recipe.

    Raises: ConfigError with the nearest file or name.
    """
    require_local(recipe, error=ConfigError)
    if _SETTING.match(str(recipe)) and not Path(recipe).exists():
        raise ConfigError(
            f"{recipe} is a setting, and there is no recipe before it.",
            fix=f"Name a recipe first, as in `demo {recipe}`: a YAML file, or one of `flatout list "
            "recipes`.",
        )
    path = Path(recipe)
    is_file = path.suffix.lower() in SUFFIXES
    if path.is_dir() and (is_file or str(recipe) not in RECIPES.names()):
        raise ConfigError(
            f"{path} is a directory, not a recipe.",
            fix="Name a YAML file, or one of `flatout list recipes`.",
        )
    if not is_file:
        files = [
            file
            for file in (path.with_name(path.name + suffix) for suffix in sorted(SUFFIXES))
            if path.name and file.is_file()
        ]
        if files and str(recipe) not in RECIPES.names():
            raise ConfigError(
                f"There is no recipe named {str(recipe)!r}, but there is a file {files[0]}.",
                fix=f"Name the file: {str(files[0])!r}.",
            )
        if str(recipe) not in RECIPES.names():
            _require_no_dataset(str(recipe))
        return RECIPES.path(str(recipe))
    if not path.exists():
        here = path.parent.iterdir() if path.parent.is_dir() else ()
        guess = nearest(path.name, [file.name for file in here if file.suffix.lower() in SUFFIXES])
        built_in = "`flatout list recipes` shows the built-in recipes."
        raise ConfigError(
            f"There is no file {path}.",
            fix=f"Did you mean {str(path.with_name(guess))!r}?"
            if guess
            else f"Check the path; {built_in}",
        )
    return path
