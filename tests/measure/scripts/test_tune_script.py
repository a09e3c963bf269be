"""`flatout tune -- python train.py` on a real script, from the command to the patch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(30)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    loss = model(torch.randn(8, 32)).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    if step % 8 == 0:
        torch.save(model.state_dict(), "model.pt")
"""


def flatout(folder, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.faults
def test_a_slow_script_gets_a_patch_that_is_proved(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "model.pt").write_text("the user's own")
    words = ("--only", "no-anomaly,threads", "--minutes", "5", "--patch", "x.patch", "--json")
    done = flatout(tmp_path, "tune", *words, "--", sys.executable, "train.py")
    found = json.loads(done.stdout.splitlines()[-1])
    assert "no-anomaly" in found["taken"]
    assert "flatout-scratch" not in done.stdout
    assert found["gain"]["low"] > 1
    assert found["gain_losses"]["loss_difference"] == 0
    assert (tmp_path / "model.pt").read_text() == "the user's own"
    assert (tmp_path / "train.py").read_text() == SCRIPT
    assert {path.name for path in tmp_path.iterdir()} == {
        *("train.py", "model.pt", "x.patch", "tuned-train"),
    }
    subprocess.run(["git", "apply", "x.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == SCRIPT.replace(
        "torch.autograd.set_detect_anomaly(True)\n", ""
    )
    assert (tmp_path / "tuned-train" / "changes.patch").exists()


@pytest.mark.faults
def test_the_patch_is_of_the_whole_repository(tmp_path):
    inside = tmp_path / "examples"
    inside.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    slow = "import torch\ntorch.autograd.set_detect_anomaly(True)\ntorch.manual_seed(0)\n"
    (tmp_path / "shared.py").write_text(slow)
    script = SCRIPT.replace("torch.autograd.set_detect_anomaly(True)", "import shared")
    (inside / "train.py").write_text(f"import sys\nsys.path.insert(0, '..')\n{script}")
    words = ("--only", "no-anomaly", "--minutes", "5")
    done = flatout(inside, "tune", *words, "--", sys.executable, "train.py")
    command = next(line for line in done.stdout.splitlines() if "git -C .. apply" in line)
    subprocess.run(command.partition(": ")[2], cwd=inside, shell=True, check=True)
    assert (tmp_path / "shared.py").read_text() == "import torch\ntorch.manual_seed(0)\n"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ValueError('mine')", "mine"),
        ("print('no torch here')", "torch was not imported"),
        ("input()", "standard input"),
        (f"{SCRIPT}    if step == 40: raise ValueError('mine')\n", "ValueError: mine"),
        (f"{SCRIPT}    if step == 4: break\n", "too few"),
    ],
)
def test_a_script_that_cannot_be_tuned_shows_why(tmp_path, source, message):
    (tmp_path / "train.py").write_text(source)
    done = flatout(tmp_path, "tune", "--", sys.executable, "train.py", code=1)
    assert message in done.stderr
    assert "Fix:" in done.stderr
    assert "flatout/measure" not in done.stderr, "a traceback of its own"
    assert not (tmp_path / "tuned-train").exists()


@pytest.mark.faults
def test_no_run_changes_a_file_of_the_user(tmp_path):
    """The first one, which only measures, writes large files as little as the trials."""
    project = tmp_path / "project"
    project.mkdir()
    with (project / "big.pt").open("wb") as file:
        file.truncate(300 << 20)
    (project / "train.py").write_text(SCRIPT.replace('"model.pt"', '"big.pt"'))
    before = (project / "big.pt").stat()
    flatout(
        project, "tune", "--only", "threads", "--minutes", "1", "--", sys.executable, "train.py"
    )
    after = (project / "big.pt").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.faults
def test_run_applies_changes_and_returns_the_exit_code_of_the_script(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "torch.autograd.set_detect_anomaly(True)\n"
        "print(torch.is_anomaly_enabled(), sys.argv[1:], input())\n"
        "raise SystemExit(7)\n"
    )
    words = ["run", "--with", "no-anomaly", "--", sys.executable, "train.py", "a b", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *words],
        cwd=tmp_path,
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == "False ['a b', '--json'] hello"
