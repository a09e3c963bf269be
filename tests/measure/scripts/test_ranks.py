"""`flatout diagnose -- torchrun ...` measures every rank, and names the one that is at fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from flatout.errors import RunFailed
from flatout.measure.attach.request import Request
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.script import diagnose_script, evidence_in
from flatout.measure.trial import run_command

pytestmark = pytest.mark.slow

TEXT = """
import os, sys, time
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
width, micro_batches = 16, 1
{before}
torch.manual_seed(0)
layers = nn.Embedding(500, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 500)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range({steps}):
    for micro in range(micro_batches):
        tokens = torch.randint(500, (8, width))
        with {context}:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a script and returns the command that starts two ranks."""

    def make(*, before="", after="", context="nullcontext()", steps=100_000) -> list[str]:
        path = tmp_path / "train.py"
        text = TEXT.format(before=before, after=after, context=context, steps=steps)
        path.write_text(text)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *launch, str(path)]

    return make


def names(found):
    return {one.name for one in found.findings}


def test_gradients_of_each_micro_batch_and_the_rank_with_longer_rows_are_named(write, capfd):
    before = "width, micro_batches = 16 + 112 * rank, 4"
    found, code = diagnose_script(write(before=before), Request(seconds=1.0))
    named = {one.name: one for one in found.findings}
    reduced, slow = named["accumulation-sync"], named["slow-rank"]
    assert reduced.verdict.startswith("Gradients are reduced 4 times in each step")
    assert reduced.site.text == "loss.backward()"
    assert "no_sync" in reduced.fixes[0].text
    assert "rank 1" in slow.verdict
    assert "8.0 times as many elements" in slow.verdict
    assert "same number of elements" in slow.fixes[0].text
    assert dict(found.about)["Ranks"].count("ms") == 2
    assert code is None
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_script_that_uses_no_sync_reduces_once(write):
    context = "model.no_sync() if micro < 3 else nullcontext()"
    command = write(before="micro_batches = 4", context=context)
    answer = run_command(command, Request(seconds=1.0))
    assert answer.evidence.gradient_syncs == pytest.approx(1.0)
    assert "accumulation-sync" not in names(diagnosis_of(answer.evidence))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("time.sleep(0.05 * rank)", 1),
        ("time.sleep(0.05 - 0.05 * rank)", 0),
    ],
)
def test_the_rank_that_does_something_else_is_named_with_its_line(write, line, rank):
    barrier = "\n    dist.barrier()" * (rank == 0)  # where the others wait
    found, _ = diagnose_script(write(after=line + barrier), Request(seconds=2.0))
    (finding,) = (one for one in found.findings if one.name == "slow-rank")
    assert f"rank {rank}" in finding.verdict
    assert finding.site.text == line
    assert "dist.barrier()" not in {one.site.text for one in found.findings if one.site}
    assert dict(found.about)["Ranks"].count("ms") == 2


@pytest.mark.thorough
def test_all_ranks_end_after_the_same_step_and_none_fails(write, capfd):
    ran = run_command(write(), Request(seconds=60.0, steps=12))
    assert (ran.steps, ran.code, ran.evidence.world_size) == (12, 0, 2)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_rank_that_fails_is_named_with_its_line(write):
    after = "if step == 40 and rank == 1: raise ValueError('mine')"
    found, code = diagnose_script(write(after=after), Request(seconds=60.0))
    assert found.verdict == "The run fails at step 40: Rank 1: ValueError: mine"
    assert found.findings[0].site.text == after
    assert code == 1


@pytest.mark.thorough
def test_a_rank_that_fails_before_the_first_step_is_named(write):
    command = write(before="assert rank == 0, 'mine'")
    with pytest.raises(RunFailed, match="Rank 1: AssertionError: mine"):
        diagnose_script(command, Request(seconds=60.0))


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named(write):
    command = write(before="rank == 1 and os.kill(os.getpid(), 9)")
    with pytest.raises(RunFailed, match="Rank 1 ended with exit code -9"):
        diagnose_script(command, Request(seconds=60.0))


@pytest.mark.thorough
def test_accelerate_launch_is_measured_like_torchrun(write):
    pytest.importorskip("accelerate")
    path = write(after="time.sleep(0.05 * rank)")[-1]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    ran = run_command([sys.executable, *launch, path], Request(seconds=2.0))
    evidence = evidence_in("", ran)
    assert (evidence.world_size, evidence.slowest, ran.code) == (2, 1, 0)


LOOP = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def main():
    history, step = [], 0
    while True:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        step += 1
        {after}
main()
"""


@pytest.mark.thorough
def test_a_run_that_is_followed_shows_what_grows_and_which_container(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        LOOP.format(after="time.sleep(2e-5 * len(history))\n        if step > 400: break")
    )
    command = [sys.executable, str(path)]
    ran = run_command(command, Request(seconds=0.1, to_the_end=True))
    idle = {"other_busy_cores": 0.0}  # beside other processes, steps may grow for their sake
    found = diagnosis_of(ran.evidence.model_copy(update=idle))
    (finding,) = (one for one in found.findings if one.name == "growing-steps")
    assert (ran.code, ran.steps > 350) == (0, True)
    assert finding.site.text == "time.sleep(2e-5 * len(history))"
    assert finding.fixes[0].text.startswith("Look at history, which gets items in each step")


def test_a_run_that_is_killed_shows_what_was_found_before(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(after="if step == 300: import os; os.kill(os.getpid(), 9)"))
    command = [sys.executable, str(path)]
    found, code = diagnose_script(command, Request(seconds=0.1, to_the_end=True))
    assert code == -signal.SIGKILL
    assert found.findings[0].name == "out-of-memory"
    assert found.step_s is not None


def test_a_run_that_is_interrupted_shows_its_results(tmp_path):
    path, mark = tmp_path / "train.py", tmp_path / "mark"
    path.write_text(LOOP.format(after=f"if step == 200: open({str(mark)!r}, 'w').close()"))
    words = [sys.executable, "-m", "flatout", "diagnose", "--to-the-end", "--"]
    # fmt: off
    process = subprocess.Popen(
        [*words, sys.executable, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # fmt: on
    while not mark.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "was interrupted" in shown
    assert "on average of" in shown
