"""Importing an optional package prints nothing."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

IMPORTS = {
    "torchao": "import flatout.speedups.fp8.linear; "
    "from flatout.assembly.speedup import load_package; "
    "load_package('torchao.optim', 'adamw-8bit')"
}


@pytest.mark.thorough
@pytest.mark.parametrize("package", IMPORTS)
def test_importing_a_package_prints_nothing(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS[package]],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
