"""Known, irrelevant log messages of other packages are hidden. All others are shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flatout.assembly.speedup import NOISE, without_noise

MESSAGES = {
    "torchao": (
        "Failed to load /a/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load this "
        "library"
    ),
    "torch.utils._pytree": (
        "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by "
        "torch.compile"
    ),
}
IMPORTS = {
    "torchao": "import flatout.speedups.fp8.linear; "
    "from flatout.assembly.speedup import load_package; "
    "load_package('torchao.optim', 'adamw-8bit', 'adamw-8bit')"
}


@pytest.mark.parametrize("name", NOISE)
def test_only_known_messages_are_dropped_and_only_during_imports(name, caplog, monkeypatch):
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "propagate", True)
    with without_noise():
        logger.warning(MESSAGES[name])
        logger.warning("Failed to load what matters: %s", 5)
    logger.warning(MESSAGES[name])
    assert caplog.messages == ["Failed to load what matters: 5", MESSAGES[name]]


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
