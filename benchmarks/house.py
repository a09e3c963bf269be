"""Measure the code itself: its size, and the way from `main` to the backward pass.

`python benchmarks/house.py` measures the package that Python imports, so
`PYTHONPATH=CHECKOUT python benchmarks/house.py` measures another commit the same way.

- Code tokens, in all and by room (the directories of flatout; `top` has the files beside them):
  Python's own tokens without comments, docstrings, layout and trailing commas, so
  that line length and documentation do not count.
- Frames: functions of flatout on the stack from `main` to the call of `backward`, both counted.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tempfile
import tokenize
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch

import flatout
from flatout.cli import main as cli

PACKAGE = Path(flatout.__file__).parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER, tokenize.ENCODING}
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
    """Return the code tokens of each directory in a package, and of the files beside them."""
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


def measure(folder: Path) -> dict[str, Any]:
    """Return every result; works in an empty directory."""
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    (folder / "text.txt").write_text("All happy families are alike. " * 400, encoding="utf-8")
    flatout.prepare([folder / "text.txt"], folder / "data", tokenizer="byte", workers=1)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(folder / "data")), encoding="utf-8")
    frames = frames_to_backward(["train", str(recipe), "--run-dir", str(folder / "run")])
    by_room = rooms(PACKAGE)
    return {
        "files": len(texts),
        "longest_file_lines": max(len(text.splitlines()) for text in texts),
        "code_tokens": sum(by_room.values()),
        "rooms": by_room,
        "frames_to_backward": len(frames),
        "frames": " ".join(frames),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder)), indent=2))
