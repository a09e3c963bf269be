import subprocess
import sys

import torch

from flatout.ops.uncompiled import constant_in_graphs, uncompiled


def test_a_compiled_caller_runs_it_as_written():
    is_compiling = []

    @uncompiled
    def doubled(value):
        is_compiling.append(torch.compiler.is_compiling())
        return 2 * value

    compiled = torch.compile(lambda value: doubled(value) + 1, backend="eager")
    assert compiled(torch.tensor(3.0)) == 7
    assert is_compiling == [False]


def test_a_compiled_caller_takes_the_result_for_a_constant():
    calls = []

    @constant_in_graphs
    def number():
        calls.append(1)
        return 5

    compiled = torch.compile(lambda value: value + number(), backend="eager", fullgraph=True)
    assert [compiled(torch.tensor(float(value))) for value in (1, 2)] == [6, 7]
    assert len(calls) == 1


def test_models_are_imported_without_the_compiler():
    code = (
        "import sys; import flatout.training.run, flatout.models.transformer, "
        "flatout.models.eigenstate; raise SystemExit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
