"""Every speedup in the registry keeps its promise; a new one needs no new test code."""

from __future__ import annotations

import pytest
import torch

from flatout.assembly.selection import all_speedups
from flatout.hardware import probe
from flatout.progress import SILENT
from flatout.registry import MODELS
from flatout.training.step import train_step
from flatout.training.warmup import warm_up

pytestmark = pytest.mark.slow

STEPS = 20
WINDOWS = 16
"""Two micro-batches of 8 rows in the baseline, one of 16 with `micro-batch`."""


class NoLog:
    """Records events."""

    progress = SILENT

    def __init__(self):
        self.events = []

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def compiled(self, seconds):
        pass


def losses_after(build_run, config):
    run = build_run(config)
    log = NoLog()
    warm_up(run, log)
    assert log.events == []
    found = []
    for _ in range(STEPS):
        found.append(float(train_step(run, next(run.feed)).loss))
        run.step += 1
    torch.set_float32_matmul_precision("highest")
    return found


@pytest.fixture(scope="module")
def plain_losses():
    return {}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
@pytest.mark.parametrize("kind", MODELS.names())
@pytest.mark.parametrize("speedup", all_speedups(), ids=lambda s: s.name)
def test_speedup_keeps_its_promise(speedup, kind, build_run, tiny_config, plain_losses):
    batch = {"batch__tokens_per_step": WINDOWS * 16, "batch__rows_per_device": "auto"}
    config = tiny_config(
        train__steps=STEPS, train__precision="auto", optim__lr=2e-3, model__kind=kind, **batch
    )
    why_not = speedup.reason_against(probe(), config)
    if why_not:
        pytest.skip(why_not)
    needs = [
        *speedup.needs,
        *(["fast-scan"] if kind == "eigenstate" and speedup.compiles else []),
    ]  # a step a token stays uncompiled
    base = ",".join(needs) or "none"
    if (kind, base) not in plain_losses:
        plain_losses[kind, base] = losses_after(build_run, config.with_values({"speedups": base}))
    fast = losses_after(build_run, config.with_values({"speedups": [*needs, speedup.name]}))
    plain = plain_losses[kind, base]
    assert plain[-1] < plain[0] - 0.1, "the run must learn, or equal losses say nothing"
    if (
        speedup.promise.kind == "statistical"
    ):  # whether it holds takes several seeds, which bench runs; here it has to learn
        assert fast[-1] < fast[0] - 0.1
        return
    assert speedup.promise.holds(fast, plain), (speedup.promise, fast, plain)


@pytest.mark.parametrize("speedup", all_speedups(), ids=lambda s: s.name)
def test_a_speedup_states_what_it_saves_and_changes_something(speedup):
    assert speedup.saves
    assert speedup.fills
