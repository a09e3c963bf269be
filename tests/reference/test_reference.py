"""Five datasets and five runs keep their bits, and `auto` keeps its decisions.

`record.py` wrote both files here at commit 2f2663a9. Where a change is meant to alter them, record
them again in the same commit and say there what differs and why.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record import PORTABLE, decisions_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DECISIONS = json.loads((HERE / "decisions.json").read_text("utf-8"))
MACHINES = ("h100-sxm", "rtx-4070")


def recorded(name: str) -> dict:
    return json.loads((HERE / name).read_text("utf-8"))


@pytest.fixture(scope="module")
def now() -> dict:
    words = [sys.executable, str(HERE / "record.py"), "runs"]
    done = subprocess.run(words, env=os.environ | PORTABLE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", recorded("runs.json")["datasets"])
def test_a_dataset_keeps_its_tokens(now, name):
    assert now["datasets"][name] == recorded("runs.json")["datasets"][name]


@pytest.mark.parametrize("name", recorded("runs.json")["runs"])
def test_a_run_keeps_its_losses_and_tensors(now, name):
    assert now["runs"][name] == recorded("runs.json")["runs"][name]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", ["demo-gpu", "gpt2-124m-fast", "eigenstate-small-32k"])
def test_auto_keeps_its_decisions(recipe, machine):
    expected = next(one for one in DECISIONS[recipe] if machine in one["machines"])
    assert decisions_of(recipe, machine) == {k: v for k, v in expected.items() if k != "machines"}
