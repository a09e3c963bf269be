"""`import flatout`, `--help`, `list`, `prepare` and `inspect` never import torch: it is slow."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HEAVY_PARTS = {
    "ops",
    "models",
    "optim",
    "distributed",
    "roofline",
    "compiling",
    "memory",
    "gpu_rate",
    "linear",
    "prediction",
    "recompute",
    "run",
    "shape",
    "resolve",
    "training",
    "inference",
    "measure",
    "loader",
    "baseline",
    "__main__",
}
"""Modules that may import torch, by a part of their name."""


def modules_after(code: str, cwd) -> set[str]:
    """Return the modules that a new Python process has loaded after running `code`."""
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as stop:\n    assert not stop.code,"
        " stop.code\nprint('\\n' + '\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n"))


def heavy(modules: set[str]) -> list[str]:
    return sorted(modules & {"torch", "tensorboard"})


def test_light_modules_import_no_torch(package, root):
    names = [source.module for source in package if not HEAVY_PARTS & set(source.module.split("."))]
    assert len(names) > 20
    each = (
        "importlib.import_module(name); assert 'torch' not in sys.modules, f'{name} imports torch'"
    )
    program = f"import sys, importlib\nfor name in {names!r}: {each}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


def test_quick_commands_import_no_torch(root, tmp_path):
    text, tokens = tmp_path / "book.txt", tmp_path / "tokens.bin"
    text.write_text("A sentence of a book. " * 200, encoding="utf-8")
    tokens.write_bytes(bytes([7, 0, 0, 1]) * 200)
    prepare = ["prepare", str(text), "--out", str(tmp_path / "data"), "--tokenizer", "byte"]
    commands = [
        ["--help"],
        ["train", "--help"],
        *(["list", kind] for kind in ("recipes", "speedups", "models", "machines", "datasets")),
        [*prepare, "--workers", "1"],
        ["inspect", str(tmp_path / "data")],
        ["import", str(tokens), "--out", str(tmp_path / "old"), "--tokenizer", "byte"],
    ]
    run = "import flatout; from flatout.cli.main import execute"
    check = "assert not execute(words) and 'torch' not in sys.modules, words"
    assert heavy(modules_after(f"{run}\n    for words in {commands!r}: {check}", root)) == []


def test_a_model_that_is_not_compiled_imports_no_compiler(root, fox_run):
    run = fox_run[0] / "runs" / "fox"
    lines = (
        "from flatout.cli.main import execute",
        f"assert not execute(['generate', {str(run)!r}, '--max-tokens', '2'])",
        "from torch import nn, ones",
        "from flatout.optim.adamw import fused",
        "weight = nn.Parameter(ones(2))",
        "weight.grad = ones(2)",
        "group = {'params': [weight], 'weight_decay': 0.0}",
        "fused([group], {'lr': 0.1, 'betas': (0.9, 0.9), 'eps': 1e-8}).step()",
        "assert weight.tolist() != [1, 1]",
    )
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy", "tensorboard"}
    assert sorted(modules_after("\n    ".join(lines), root) & slow) == []
