"""Every speedup in the registry stays within its tolerance. A new one needs no new test code."""

from types import SimpleNamespace

import pytest
import torch

from flatout.assembly.choices import all_speedups
from flatout.config.registry import MODELS
from flatout.hardware.machine import probe
from flatout.progress import SILENT
from flatout.training.step import train_step
from flatout.training.warmup import warm_up

pytestmark = pytest.mark.slow

STEPS = 20
OF_A_MODEL = {"activations", "attention", "compilation", "cross_entropy", "heads", "linear"}
OF_A_MODEL |= {"newton_schulz", "precision", "scan"}
"""Parts that a model calls or changes. All others are the same for every model."""
PAIRS = [
    pytest.param(
        speedup,
        kind,
        id=f"{speedup.name}-{kind}",
        marks=[pytest.mark.thorough] if (speedup.name, kind) == ("compile", "eigenstate") else [],
    )
    for speedup in all_speedups()
    for kind in MODELS.names()
    if kind == "transformer" or (speedup.sets & OF_A_MODEL and speedup.name != "compile-blocks")
]
"""The layers of one model are enough for what `compile` compiles of each."""
WINDOWS = 16
"""Two micro-batches of 8 rows in the baseline, one of 16 with `micro-batch`."""


def log_of(events):
    """A log that records events."""
    return SimpleNamespace(
        progress=SILENT, event=lambda kind, **_: events.append(kind), compiled=lambda seconds: None
    )


def losses_after(build_run, config):
    run, events = build_run(config), []
    warm_up(run, log_of(events))
    assert events == []
    found = []
    for _ in range(STEPS):
        found.append(float(train_step(run, next(run.loader)).loss))
        run.step += 1
    torch.set_float32_matmul_precision("highest")
    return found


@pytest.fixture(scope="module")
def plain_losses():
    return {}


# torch's own compiler makes objects of its functions
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("speedup", "kind"), PAIRS)
def test_speedup_stays_within_its_tolerance(speedup, kind, build_run, tiny_config, plain_losses):
    batch = {"batch__tokens_per_step": WINDOWS * 16, "batch__rows_per_device": "auto"}
    options = {"train__steps": STEPS, "train__precision": "auto", "optim__lr": 2e-3}
    config = tiny_config(**options, model__kind=kind, **batch)
    why_not = speedup.reason_against(probe(), config)
    if why_not:
        pytest.skip(why_not)
    needs = [*speedup.needs]
    base = ",".join(needs) or "none"
    if (kind, base) not in plain_losses:
        plain_losses[kind, base] = losses_after(build_run, config.with_values({"speedups": base}))
    fast = losses_after(build_run, config.with_values({"speedups": [*needs, speedup.name]}))
    plain = plain_losses[kind, base]
    assert plain[-1] < plain[0] - 0.1, "the run must learn, or equal losses say nothing"
    if speedup.tolerance.kind == "statistical":
        # Whether it holds takes several seeds, which bench runs; here it has to learn.
        assert fast[-1] < fast[0] - 0.1
    else:
        assert fast == pytest.approx(plain, rel=speedup.tolerance.rtol, abs=0)


def test_a_speedup_states_what_it_saves_and_changes_something():
    assert [each.name for each in all_speedups() if not (each.saves and each.sets)] == []
