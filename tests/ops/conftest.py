"""Fixtures for the tests of all ops."""

import sys
from pathlib import Path

import pytest
import torch

from flatout.ops import scan

sys.path.append(str(Path(__file__).parent))
"""Three files here import attention_cases."""


@pytest.fixture
def poisoned_memory():
    """New tensors contain NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted(monkeypatch):
    """Run Triton kernels in Triton's interpreter, on the CPU.

    No environment variable is set, so torch's own use of Triton is unaffected. Functions that
    kernels call are rewritten once. Otherwise the interpreter would search all of Triton on each
    call.
    """
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from flatout.ops import scan_kernels

    for name, function in list(vars(scan_kernels).items()):
        if isinstance(function, jit.JITFunction):
            interpreted = interpreter.InterpretedFunction(function.fn)
            monkeypatch.setattr(
                scan_kernels, name, interpreted.rewrite() if name.startswith("_") else interpreted
            )
    language = pytest.importorskip("triton.language")
    # Triton implements these two in its own language.
    for name, combine in (("max", "_elementwise_max"), ("sum", "_sum_combine")):
        reduce = getattr(language.standard, combine)
        monkeypatch.setattr(
            language,
            name,
            lambda tensor, axis, reduce=reduce: language.reduce(tensor, axis, reduce),
        )
    patch = interpreter._patch_lang_tensor

    def with_scalar_index(tensor, scope):
        """Convert loop bounds, which Triton 3.6 passes as arrays that NumPy no longer converts."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_scalar_index)
    monkeypatch.setattr(scan, "runs_triton", lambda tensor: True)


@pytest.fixture
def without_triton(monkeypatch):
    """Make the code choose Triton kernels, and importing Triton fail."""
    import flatout.ops

    monkeypatch.delitem(sys.modules, "flatout.ops.scan_kernels", raising=False)
    monkeypatch.delattr(flatout.ops, "scan_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(scan, "runs_triton", lambda tensor: True)
