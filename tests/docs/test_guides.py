"""The commands of the guides run as pasted: offline, in order, in an empty directory.

A block that cannot is marked in the page: `<!-- not run: REASON -->` on the line before it. Runs
take a few steps here instead of those in the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDES = ("quickstart", "fine-tune", "resuming", "out-of-memory", "clusters")
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS, SHORTER = 18, 50
FLATOUT = '#!/bin/sh\nPYTHONPATH={root} exec {python} -P -m flatout "$@"\n'


def blocks(guide: str) -> list[tuple[bool, str]]:
    """Return the shell blocks of a guide, and whether each runs."""
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    return [(not mark, block) for mark, block in BLOCK.findall(text)]


def shortened(line: str) -> str:
    """Return a command whose run takes a few steps."""
    if not line.startswith("flatout train "):
        return line
    fewer = re.sub(r"train\.steps=(\d+)", lambda n: f"train.steps={int(n[1]) // SHORTER}", line)
    return fewer if fewer != line else f"{line} train.steps={STEPS}"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_opens_with_commands_that_run(guide):
    (runs, first), *_ = blocks(guide)
    assert runs
    assert first.lstrip("#").strip()


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "flatout"
    program.write_text(FLATOUT.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    lines = [line for runs, block in blocks(guide) if runs for line in block.splitlines()]
    done = subprocess.run(
        ["bash", "-exo", "pipefail", "-c", "\n".join(map(shortened, lines))],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HTTPS_PROXY": "http://127.0.0.1:9",  # no command may use the network
            "HTTP_PROXY": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_runs_are_shortened():
    assert shortened("flatout train a train.steps=900 b=1") == "flatout train a train.steps=18 b=1"
    assert shortened("flatout train a") == f"flatout train a train.steps={STEPS}"
    assert shortened("flatout eval a") == "flatout eval a"
