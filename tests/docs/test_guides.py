"""The commands of the guides run as pasted: offline, in order, in an empty directory.

A block that cannot is marked in the page: `<!-- not run: REASON -->` on the line before it. Runs
take a few steps here instead of those in the page.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDES = (
    "quickstart",
    "recipe",
    "fine-tune",
    "resuming",
    "out-of-memory",
    "clusters",
    "coming-from",
)
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS, SHORTER = 18, 50


def blocks(guide: str) -> list[tuple[bool, str]]:
    """Return the shell blocks of a guide, and whether each runs."""
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    return [(not mark, block) for mark, block in BLOCK.findall(text)]


def shortened(line: str) -> str:
    """Return a command whose run takes a few steps."""
    line = line.replace("--max-bytes 1000000", "--max-bytes 300000")
    if not line.startswith("flatout train "):
        return line
    fewer = re.sub(r"train\.steps=(\d+)", lambda n: f"train.steps={int(n[1]) // SHORTER}", line)
    return fewer if fewer != line else f"{line} train.steps={STEPS}"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_opens_with_commands_that_run(guide):
    (runs, first), *_ = blocks(guide)
    assert runs
    assert first.lstrip("#").strip()


def run(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run one line of a guide; a command of flatout alone needs no shell."""
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **offline, "PYTHONPATH": str(ROOT)}
    if line.startswith("flatout ") and not {*"|>"} & {*line}:
        words = shlex.split(line.replace("$PWD", str(folder)), comments=True)
        return warm.run(["-m", *words], cwd=folder, env=environment)
    program = f'flatout() {{ "{sys.executable}" -P -m flatout "$@"; }}\n'
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", program + line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.quick_cases("quickstart")
@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide, tmp_path):
    lines = [line for runs, block in blocks(guide) if runs for line in block.splitlines()]
    for line in lines:
        done = run(shortened(line), tmp_path)
        assert done.returncode == 0, line + done.stdout[-2000:] + done.stderr[-4000:]


def test_runs_are_shortened():
    assert shortened("flatout train a train.steps=900 b=1") == "flatout train a train.steps=18 b=1"
    assert shortened("flatout train a") == f"flatout train a train.steps={STEPS}"
    assert shortened("flatout eval a") == "flatout eval a"
