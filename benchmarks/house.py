"""Measure the code itself: size, import layers, and the functions that a config and a token visit.

`python benchmarks/house.py` measures the package that Python imports, so
`PYTHONPATH=CHECKOUT python benchmarks/house.py` measures another commit the same way.

- Code tokens, in all and by room (the folders of flatout; `top` has the files beside them):
  Python's own tokens without comments, docstrings, layout and trailing commas, so
  that line length and documentation do not count.
- Frames: functions of flatout on the stack from `main` to the call of `backward`, both counted.
- Import layers: the longest chain of modules in which each imports the next.
- Config: the functions of flatout that `train` calls before the first step with a config, a section
  of it, a recipe of slots, or an object that holds one: how many functions, in how many files,
  under how many parameter names, and how often a call goes back up to a higher import layer.
- Token: the files of flatout that run while text is prepared, and during one later step.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch

import flatout
from flatout import cli

PACKAGE = Path(flatout.__file__).parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
RECIPE = """
model: {num_layers: 1, d_model: 16, num_heads: 2}
data: {path: DATA, seq_len: 32}
batch: {tokens_per_step: 256}
train: {steps: 3, eval_tokens: 256, device: cpu}
"""


def code_tokens(text: str) -> int:
    """Return the number of code tokens in `text`."""
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for parent in ast.walk(ast.parse(text))
        if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for node in parent.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.start not in docstrings
    ]
    trailing_commas = sum(a.string == "," and b.string in ")]}" for a, b in pairwise(tokens))
    return len(tokens) - trailing_commas


def rooms(package: Path) -> dict[str, int]:
    """Return the code tokens of each folder in a package, and of the files beside them."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        found[parts[0] if len(parts) > 1 else "top"] += code_tokens(path.read_text("utf-8"))
    return dict(found.most_common())


def frames_to_backward(words: list[str]) -> list[str]:
    """Run a command line, and return the functions of flatout above its last `backward`."""
    plain, found = torch.Tensor.backward, list[str]()

    def backward(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        stack = [frame.f_code for frame, _ in walk_stack(sys._getframe(1))]
        ours = [code for code in stack if PACKAGE in Path(code.co_filename).parents]
        found[:] = [code.co_name for code in reversed(ours)]
        plain(self, *arguments, **options)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        with suppress(SystemExit):
            cli.main(words)
    finally:
        torch.Tensor.backward = plain  # type: ignore[method-assign]
    return found


def imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the imports of each module within the package, at any level."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                base = node.module or ""
                inner = [f"{base}.{alias.name}" for alias in node.names]
                wanted = [module if module in modules else base for module in inner]
            else:
                continue
            found[name] |= {module for module in wanted if module in modules and module != name}
    return found


def import_layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return each module's layer: 1 without imports, else one above its highest import."""

    @cache
    def layer(module: str) -> int:
        return 1 + max((layer(other) for other in graph[module]), default=0)

    return {module: layer(module) for module in graph}


@dataclass
class Journey:
    """Functions of flatout that ran, and those that received a config."""

    files: set[str] = field(default_factory=set)
    """Files in which a function ran."""
    stops: list[tuple[str, str]] = field(default_factory=list)
    """File and function of each first call with a config."""
    names: set[str] = field(default_factory=set)
    """Names of parameters that received a config."""
    seen: set[CodeType] = field(default_factory=set)
    ended: bool = False

    def called(self, frame: FrameType) -> None:
        """Record one call."""
        code = frame.f_code
        path = Path(code.co_filename)
        if self.ended or PACKAGE not in path.parents:
            return
        if code.co_name == "train_step":
            self.ended = True
            return
        file = path.relative_to(PACKAGE).as_posix()
        self.files.add(file)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = {name for name in given if carries_config(frame.f_locals.get(name))}
        self.names |= names
        if names and code not in self.seen:
            self.seen.add(code)
            self.stops.append((file, code.co_name))


def carries_config(value: Any) -> bool:
    """Return whether `value` is or holds a config, a section of one or a recipe."""
    if is_config(value):
        return True
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and any(is_config(item) for item in held.values())


def is_config(value: Any) -> bool:
    name = type(value).__name__
    return name == "Recipe" or name.endswith("Config")


@contextmanager
def watched(journey: Journey, *, threads: bool = False) -> Iterator[None]:
    """Record the calls of this thread and of threads started inside."""

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            journey.called(frame)

    if threads:
        threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class FilesOfLaterSteps(Journey):
    """Files that run from the second to the third training step, in any thread."""

    steps = 0

    def called(self, frame: FrameType) -> None:
        """Record one call."""
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            return
        self.steps += frame.f_code.co_name == "train_step"
        if self.steps == 2:
            self.files.add(path.relative_to(PACKAGE).as_posix())


def measure(folder: Path) -> dict[str, Any]:
    """Return every figure; works in an empty directory."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): text
        for path, text in texts.items()
    }
    layers = import_layers(imports({name: ast.parse(text) for name, text in names.items()}))

    (folder / "text.txt").write_text("All happy families are alike. " * 400, encoding="utf-8")
    data = folder / "data"
    preparing = Journey()
    with watched(preparing, threads=True):
        flatout.prepare([folder / "text.txt"], data, tokenizer="byte", workers=1)

    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(data)), encoding="utf-8")
    starting = Journey()
    with watched(starting):
        flatout.train(recipe, run=folder / "first")
    stepping = FilesOfLaterSteps()
    with watched(stepping, threads=True):
        flatout.train(recipe, run=folder / "second")

    def layer_of(file: str) -> int:
        parts = ("flatout", *Path(file).with_suffix("").parts)
        return layers[".".join(parts).removesuffix(".__init__")]

    frames = frames_to_backward(["train", str(recipe), "--run-dir", str(folder / "third")])
    heights = [layer_of(file) for file, _ in starting.stops]
    return {
        "files": len(texts),
        "longest_file_lines": max(len(text.splitlines()) for text in texts.values()),
        "code_tokens": sum(code_tokens(text) for text in texts.values()),
        "rooms": rooms(PACKAGE),
        "frames_to_backward": len(frames),
        "frames": " ".join(frames),
        "lines_with_any": sum(
            " Any" in line or "[Any" in line
            for text in texts.values()
            for line in text.splitlines()
        ),
        "import_layers": max(layers.values()),
        "config_functions": len(starting.stops),
        "config_files": len({file for file, _ in starting.stops}),
        "config_names": len(starting.names),
        "config_back_up": sum(b > a for a, b in pairwise(heights)),
        "token_files": len(preparing.files | stepping.files),
        "token_files_preparing": len(preparing.files),
        "token_files_stepping": len(stepping.files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder)), indent=2))


if __name__ == "__main__":
    main()
