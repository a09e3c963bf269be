import subprocess
import sys

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


def test_an_eager_run_and_its_resume_load_neither_the_compiler_nor_triton(tiny_set, tmp_path):
    code = f"""
import sys
import flatout, flatout.models.eigenstate
for steps in (2, 4):
    changes = ["data.path={tiny_set}", "data.seq_len=16", "schedule.kind=constant"]
    flatout.train("shakespeare-char", [*changes, f"train.steps={{steps}}"], {str(tmp_path)!r})
heavy = {{"torch._dynamo", "torch._inductor", "sympy", "triton", "tensorboard.summary"}}
print(*heavy & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
