import subprocess
import sys

import pytest
import torch

from flatout.ops import uncompiled


def test_a_compiled_caller_runs_it_as_written():
    is_compiling = []

    @uncompiled
    def doubled(value):
        is_compiling.append(torch.compiler.is_compiling())
        return 2 * value

    compiled = torch.compile(lambda value: doubled(value) + 1, backend="eager")
    assert compiled(torch.tensor(3.0)) == 7
    assert is_compiling == [False]


@pytest.mark.thorough
def test_models_are_imported_without_the_compiler():
    code = (
        "import sys; import flatout.training.run, flatout.models.transformer, "
        "flatout.models.eigenstate; raise SystemExit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
