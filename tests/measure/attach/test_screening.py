"""Changes are screened inside a running script, and everything is as before between them."""

from __future__ import annotations

import sys

import pytest

from flatout.measure.attach.request import Request
from flatout.measure.attach.screening import Clock
from flatout.measure.trial import run_command

START = """
import gc, os, random, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

torch.manual_seed(0)
torch.set_num_threads(1)
models = [nn.Linear(8, 8) for _ in range(2)]
optimizer = torch.optim.SGD([w for model in models for w in model.parameters()], lr=1e-3)

class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.01)  # as a tokenizer would
        return torch.full((8,), float(index)) + ADDED

def step(batch):
    loss = models[1](models[0](batch)).square().mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
"""
SLOW = (
    START.replace("ADDED", "0.0")
    + """
torch.autograd.set_detect_anomaly(True)
rows = Rows()
for number in range(1_000_000):
    for batch in DataLoader(rows, batch_size=4):
        step(batch)
        if number % 3 == 0:  # steps differ
            time.sleep(0.02)
"""
)
ENDS = (
    START.replace("ADDED", "torch.rand(8)")
    + """
rows = Rows()
for number in range(1_000_000):
    for batch in DataLoader(rows, batch_size=4):
        step(batch)
        optimizer.zero_grad(set_to_none=False)
        if models[0].weight.grad is None:
            HOW
"""
)
STREAM = (
    START.replace("ADDED", "0.0")
    + """
class Stream(IterableDataset):
    def __iter__(self):
        for index in range(12):
            yield Rows()[index]

for number in range(1_000_000):
    for batch in DataLoader(Stream(), batch_size=4):
        step(batch)
"""
)


@pytest.fixture
def screened(tmp_path):
    """Return a function that screens changes of a script; the answer, and what was noted."""

    def run(source, *names):
        (tmp_path / "train.py").write_text(source)
        notes = []
        ran = run_command(
            [sys.executable, "train.py"],
            Request(seconds=0.3, screen=names, screen_s=12.0, copy_of_user=str(tmp_path)),
            folder=tmp_path,
            is_captured=True,
            limit_s=240,
            note=notes.append,
        )
        assert ran.evidence is not None, ran.output
        return ran, notes

    return run


def test_what_a_loop_loses_is_found_within_one_run(screened):
    found, notes = screened(SLOW, "zero-grad-none", "cached-items", "no-anomaly", "tf32")
    assert "cached-items" in found.kept
    assert found.screened["cached-items"].screened.median > 1.5
    assert found.screened["cached-items"].against is None
    assert {"zero-grad-none", "no-anomaly"} <= {*found.screened}
    assert "tf32" not in found.screened, "it does not fit a CPU"
    assert found.evidence.anomaly_detection, "the evidence is of the unchanged script"
    assert "screening cached-items" in notes[0] or any("times so far" in note for note in notes)
    assert found.is_complete


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["raise ValueError('mine')", "os._exit(3)", "sys.exit()"])
def test_what_was_found_stays_when_a_change_ends_the_script(screened, how):
    found, _ = screened(ENDS.replace("HOW", how), "cached-items", "gc-thresholds", "zero-grad-none")
    assert found.failed["cached-items"] == "Its items differ from call to call."
    assert found.failed["zero-grad-none"] == "the script ended with it"
    assert "zero-grad-none" not in found.screened
    assert found.evidence.step_s > 0


@pytest.mark.thorough
def test_a_stream_is_not_kept_in_memory(screened):
    found, _ = screened(STREAM, "cached-items")
    assert (found.screened, found.failed, found.kept) == ({}, {}, [])


def test_seconds_without_load_leave_out_waits_for_a_core_and_keep_those_for_data():
    start = Clock(0.0, 0.0, 0.0)
    assert start.until(Clock(10.0, 4.0, 5.0)) == (10.0, 5.0)
    assert start.until(Clock(10.0, 18.0, 2.0)) == (10.0, 18.0)
    assert start.until(Clock(10.0, 4.0, float("nan"))) == (10.0, 10.0)
    assert Clock.now().cpu_s > 0
