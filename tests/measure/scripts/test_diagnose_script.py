"""`flatout diagnose -- python train.py` measures a script without an edit, and leaves it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flatout.errors import ConfigError, RunFailed
from flatout.measure.attach.request import Request
from flatout.measure.diagnose.script import diagnose_script
from flatout.measure.trial import run_command

pytestmark = pytest.mark.slow

TEXT = """
import importlib.util; importlib.util.find_spec("torch")  # as many packages do
import copy, os, sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn(64, 64)
kept = []
{before}
for step in range({steps}):
    loss = (model(inputs) - inputs).square().mean()
    {inside}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""


def script(*, before: str = "", inside: str = "", after: str = "", steps: int = 100_000) -> str:
    """Return a loop with something planted before it, in its forward pass, or after its steps."""
    return TEXT.format(before=before, inside=inside, after=after, steps=steps)


FAULTS = {
    "sleep": {"after": "time.sleep(0.01)"},
    "copy": {"after": "best = [copy.deepcopy(model) for _ in range(20)]"},
    "evaluation": {"after": "with torch.no_grad(): score = [model(inputs) for _ in range(20)]"},
    "kept": {"inside": "kept.append(loss)"},
    "anomaly": {"before": "torch.autograd.set_detect_anomaly(True)"},
    "padding": {
        "before": "model = nn.Embedding(8, 64); inputs = torch.randint(8, (64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); inputs[:, 16:] = 0",
    },
    "decomposition": {"inside": "loss = loss + torch.linalg.svdvals(model[0].weight)[0]"},
    "teacher": {
        "before": "teacher = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))",
        "inside": "loss = loss + (teacher(inputs) - model(inputs)).square().mean()",
    },
    "square": {"inside": "loss = loss + (model(inputs)[:, :1] - inputs[:, 0]).abs().mean()"},
    "python": {"inside": "total = sum(number & 3 for number in range(200_000))"},
    "created": {"inside": "loss = loss + nn.Linear(64, 1)(model(inputs)).mean()"},
    "unclipped": {"inside": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    "other module": {
        "before": "scale = nn.Linear(64, 64)",
        "inside": "loss = loss + model(scale(inputs)).square().mean()",
    },
    "uncleared": {"before": "optimizer.zero_grad = lambda: None"},
    "copies": {
        "before": "copied = copy.deepcopy(model)\n"
        "optimizer = torch.optim.SGD(copied.parameters(), lr=1e-3)",
        "after": "model.zero_grad()",
    },
    "averaged": {
        "before": "average = copy.deepcopy(model)",
        "after": "for kept, weights in zip(average.parameters(), model.parameters()):\n"
        "        if step > 12: weights.data = 0.99 * kept.data + 0.01 * weights.data",
    },
    "own forward": {
        "before": "net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64))\n"
        "inputs, model = torch.randint(8, (64, 64)), net.forward\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=1e-3); inputs[:, 16:] = 0",
    },
    "operator": {
        "before": "seen = list(range(20_000))\n"
        "def new(rows):\n"
        "    found = []\n"
        "    for row in rows:\n"
        "        if row in seen:\n"
        "            continue\n"
        "        found.append(row)\n"
        "    return found",
        "after": "rows = new(range(100_000, 100_020))",
    },
}
NAMED = {
    "sleep": ("slow-code", "time.sleep(0.01)"),
    "copy": ("slow-code", "copy.deepcopy"),
    "evaluation": ("frequent-evaluation", "model(inputs) for _"),
    "kept": ("growing-memory", None),
    "anomaly": ("anomaly-detection", "set_detect_anomaly(True)"),
    "padding": ("padding", "model(inputs)"),
    "decomposition": ("decomposition", "linalg"),
    "teacher": ("wasted-gradients", "loss.backward()"),
    "square": ("broadcast-loss", "inputs[:, 0]"),
    "python": ("slow-code", "range(200_000)"),
    "created": ("created-weights", "nn.Linear(64, 1)"),
    "unclipped": ("unclipped-gradients", "clip_grad_norm_"),
    "other module": ("unlearned-weights", None),
    "uncleared": ("uncleared-gradients", "optimizer.step()"),
    "copies": ("cleared-gradients", "optimizer.step()"),
    "averaged": ("undone-updates", "weights.data = 0.99"),
    "own forward": ("padding", "model(inputs)"),
    "operator": ("slow-code", "found.append(row)"),  # the next call
}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a script and returns the command that runs it."""

    def make(text: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(text)
        return [sys.executable, str(path)]

    return make


@pytest.mark.quick_cases("evaluation")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_line(fault, write):
    found, _ = diagnose_script(write(script(**FAULTS[fault])), Request(seconds=0.8))
    name, line = NAMED[fault]
    (finding,) = (one for one in found.findings if one.name == name)
    assert line is None or line in finding.site.text


HEALTHY = {
    "reads": {"inside": "number = loss.item(), loss.item(), loss.item()"},
    "evaluations": {
        "before": "inputs = inputs.repeat(20, 1); torch.save(model, os.devnull)",
        "after": "if step % 100 == 0: model.eval(); score = model(inputs).sum(); model.train()",
    },
    "threads": {
        "before": "import queue, threading\n"
        "inputs, ready = inputs.repeat(50, 1), queue.Queue(2)\n"
        "def load(batch):\n"
        "    while True: ready.put(batch.clone())\n"
        "threading.Thread(target=load, args=[inputs], daemon=True).start()",
        "inside": "inputs = ready.get()",
    },
    "updated by hand, and ranked": {
        "before": "other = nn.Linear(64, 512); inputs = inputs.repeat(20, 1)",
        "inside": "scores = model(inputs[:99])[:, 0]; order = scores.unsqueeze(1) - scores\n"
        "    loss = loss + other(inputs).square().mean() + order.relu().mean()",
        "after": "[weights.data.sub_(weights.grad) for weights in other.parameters()]",
    },
    "dropped inputs": {
        "before": "plain, inputs = model.forward, inputs.repeat(200, 1)\n"
        "model.forward = lambda rows: plain(nn.functional.dropout(rows, 0.1))",
    },
    "transformed": {
        "before": "inputs = inputs.repeat(20, 1)\n"
        "def mean(rows):\n    return model(rows).square().mean()",
        "inside": "loss = loss + torch.func.vmap(torch.func.grad(mean))(inputs).sum() * 0",
    },
    "adversary": {
        "before": "critic = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))\n"
        "other = torch.optim.SGD(critic.parameters(), lr=1e-3)",
        "inside": "loss = loss - critic(model(inputs)).mean()",
        "after": "critic(model(inputs).detach()).mean().backward(); other.step()\n"
        "    other.zero_grad()",
    },
}


@pytest.mark.thorough
def test_the_line_of_a_busy_thread_is_seen_and_its_turns_stay_as_long(write, capfd):
    """How long the loop waits for it depends on the machine. The rule is tested on its own."""
    before = (
        "import atexit, collections, threading\nturns = collections.Counter()\n"
        "atexit.register(lambda: print(turns[0.005] > 0.5 * sum(turns.values())))\n"
        "def poll():\n    while len(kept) < 9: pass\n"
    )
    text = script(
        before=before + "threading.Thread(target=poll, daemon=True).start()",
        after="turns[round(sys.getswitchinterval(), 6)] += 1",
    )
    answer = run_command(write(text), Request(seconds=0.8))
    assert capfd.readouterr().out == "True\n"
    (site, *_) = answer.evidence.sites["thread"]
    assert site.text == "while len(kept) < 9: pass"


@pytest.mark.quick_cases("reads")
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_script_has_no_finding(kind, write):
    found, _ = diagnose_script(write(script(**HEALTHY[kind])), Request(seconds=0.8))
    names, of_the_machine = {one.name for one in found.findings}, {"busy-machine", "cpu-threads"}
    if kind == "threads" and "busy-machine" in names:  # its thread gets no core, so the loop waits
        of_the_machine.add("slow-code")
    assert names <= of_the_machine, found.summary()
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=0.02)


def test_the_hooks_end_the_script_and_its_last_words_are_said(write, capfd):
    text = script(before="import atexit; atexit.register(print, 'at exit')")
    answer = run_command(write(text), Request(seconds=60.0, steps=12))
    assert (answer.steps, answer.code) == (12, 0)
    assert capfd.readouterr().out == "at exit\n"


@pytest.mark.faults
def test_long_steps_are_measured_a_few_times_only(write):
    answer = run_command(write(script(after="time.sleep(2.1)")), Request(seconds=3.0))
    assert answer.code == 0
    assert answer.steps <= 9
    assert answer.evidence.step_s > 2
    assert answer.evidence.sites["own"][0].text == "time.sleep(2.1)"


@pytest.mark.thorough
def test_with_json_its_output_goes_to_standard_error(write, capfd):
    text = script(before="print('mine')", steps=3)
    answer = run_command(write(text), Request(seconds=60.0), as_json=True)
    assert (answer.steps, answer.code) == (2, 0)
    assert capfd.readouterr() == ("", "mine\n")


@pytest.mark.quick_cases("if step == 30: raise ValueError('mine')-1")
@pytest.mark.parametrize(
    ("after", "expected"),
    [("if step == 30: raise ValueError('mine')", 1), ("if step == 30: os._exit(3)", 3)],
)
def test_a_script_that_fails_is_answered_with_what_was_measured(after, expected, write, capfd):
    found, code = diagnose_script(write(script(after=after)), Request(seconds=60.0))
    found = found.model_copy(update={"script_code": code})
    assert found.exit_code == code == expected
    assert found.findings[0].name == "failure"
    assert found.step_s is not None
    assert ("ValueError: mine" in capfd.readouterr().err) == ("raise" in after)


@pytest.mark.quick_cases("import torch; raise SystemExit(7)-exit code 7")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('no torch')", "torch was not imported"),
        ("import torch; raise SystemExit(7)", "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (script(steps=1), "no optimizer of torch took two steps"),
        (script(steps=4), "too few steps: 3"),
        (script(after="raise ValueError('mine')"), "cannot be measured: ValueError: mine"),
    ],
)
def test_a_script_without_enough_steps_is_told(text, said, write):
    with pytest.raises(RunFailed, match=said) as caught:
        diagnose_script(write(text), Request(seconds=60.0))
    assert caught.value.exit_code == {"exit code 7": 7, "killed by SIGKILL": 137}.get(said, 1)


def test_a_pipeline_needs_a_shell():
    with pytest.raises(ConfigError) as caught:
        run_command(["python a.py | tee x"], Request(seconds=1.0))
    assert "sh -c 'python a.py | tee x'" in caught.value.fix


def test_an_environment_without_flatout_is_told_what_to_install(write, tmp_path):
    missing = "raise ModuleNotFoundError('no flatout', name='flatout')"
    for package, text in {"torch": "", "flatout": missing}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    with pytest.raises(ConfigError, match="package flatout is missing") as caught:
        diagnose_script(write("import torch, time; time.sleep(600)"), Request(seconds=1.0))
    assert "-m pip install flatout" in caught.value.fix


def test_interrupting_leaves_nothing_running(tmp_path):
    """Ctrl+C reaches the command. A child that ignores it and has lost its parent ends too."""
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = f"setsid {sys.executable} -c {child!r} & exec sleep 600"
    words = ["-m", "flatout", "diagnose", "--", "sh", "-c", command]
    # fmt: off
    process = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # fmt: on
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert not psutil.pid_exists(int(mark.read_text()))
