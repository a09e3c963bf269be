"""What the tests of all ops share."""

import sys
from pathlib import Path

import pytest
import torch

from flatout.ops import cross_entropy, heads, scan

sys.path.append(str(Path(__file__).parent))
"""attention_cases is shared by three files here."""


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's kernels run in its interpreter, on the CPU. No variable is set, so the compiler that
    torch makes of Triton stays as it is.

    Those that kernels call are rewritten once: called as they are, the interpreter would look
    through all of Triton at each call.
    """
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from flatout.ops import head_kernels, loss_kernels, scan_kernels

    for kernels in (head_kernels, loss_kernels, scan_kernels):
        for name, function in list(vars(kernels).items()):
            if isinstance(function, jit.JITFunction):
                interpreted = interpreter.InterpretedFunction(function.fn)
                monkeypatch.setattr(
                    kernels, name, interpreted.rewrite() if name.startswith("_") else interpreted
                )
    language = pytest.importorskip("triton.language")
    for name, combine in (
        ("max", "_elementwise_max"),
        ("sum", "_sum_combine"),
    ):  # these are written in Triton's own language
        reduce = getattr(language.standard, combine)
        monkeypatch.setattr(
            language,
            name,
            lambda tensor, axis, reduce=reduce: language.reduce(tensor, axis, reduce),
        )
    for op in (cross_entropy, heads, scan):
        monkeypatch.setattr(op, "_runs_triton", lambda tensor: True)
