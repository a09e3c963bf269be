"""Where packed-heads is used, and the reason where it is not."""

import pytest

from flatout.assembly import conditions
from flatout.config.schema import load_config
from flatout.hardware import Gpu, Machine
from flatout.speedups.packed_heads import SPEEDUP

CPU = Machine("a CPU", 2, 8.0, (), "3.11")


def gpu(capability):
    return Machine("a CPU", 2, 8.0, (Gpu("a GPU", 16.0, capability, "1"),), "3.11")


def reason(machine, *overrides):
    return SPEEDUP.reason_against(machine, load_config(None, ["train.device=auto", *overrides]))


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(conditions, "find_spec", lambda name: object())


def test_it_is_for_heads_that_are_normalised_or_rotated():
    assert reason(gpu((9, 0))) is None
    assert reason(gpu((9, 0)), "model.positions=learned", "model.qk_norm=true") is None
    assert "neither normalised nor rotated" in reason(gpu((9, 0)), "model.positions=learned")
    assert "makes no use of ops.heads" in reason(gpu((9, 0)), "model.kind=eigenstate")


def test_it_names_what_is_missing(monkeypatch):
    assert "uses a CPU; use fused-heads there" in reason(CPU)
    assert "needs compute capability 8.0" in reason(gpu((7, 5)))
    monkeypatch.setattr(conditions, "find_spec", lambda name: None)
    assert "pip install triton" in reason(gpu((9, 0)))


def test_its_gain_is_predicted():
    read, written = 302 + 201, 302
    assert 1818 - (read + written) == 1013
    assert SPEEDUP.predicted.startswith(f"{1013e6 * 12 / 4.3e12 * 1e3:.1f} ms")
