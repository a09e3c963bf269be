"""Resolving a recipe before measuring, in this process and in another one."""

from __future__ import annotations

import json
import sys

import pytest

from flatout.assembly.recipe import Speedup, Tolerance
from flatout.errors import ConfigError, RunFailed
from flatout.hardware import machine as hardware
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.experiments import resolving
from flatout.measure.experiments.resolving import (
    adding_one,
    choose,
    choose_in_subprocess,
    resolve_apart,
    resolve_here,
    with_needs,
)

pytestmark = pytest.mark.slow

GPU = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")


def test_speedups_are_added_only_where_auto_decides(tiny_config):
    found = choose(tiny_config(train__precision="auto", speedups="auto,-prefetch"))
    off = {decision.name for decision in found.decisions if not decision.on}
    assert set(found.additions) == off
    assert "compile" in found.additions["compile"]
    assert "prefetch" not in found.additions["compile"]
    assert found.additions["tf32"].startswith("cannot run here, because: ")
    assert choose(tiny_config(speedups="pretokenised")).additions == {}


def test_a_speedup_is_added_with_its_needs(tiny_config, monkeypatch):
    def made_up(name, *needs, **more):
        return Speedup(name, "", Tolerance.exact(), needs=needs, **more)

    speedups = [
        made_up("fp8", "compile"),
        made_up("compile", "bf16"),
        made_up("bf16"),
        made_up("bf16-gathers", "fp16"),
        made_up("fp16", why_not=lambda machine, config: "It is odd."),
    ]
    config, resolved = tiny_config(), resolve_here(tiny_config())
    monkeypatch.setattr(resolving, "speedup_named", {s.name: s for s in speedups}.__getitem__)
    assert with_needs("fp8") == ["fp8", "compile", "bf16"]
    because = "cannot run here, because"
    assert adding_one("fp16", config, resolved) == f"{because}: It is odd."
    assert adding_one("bf16-gathers", config, resolved) == f"{because} fp16 cannot: It is odd."


def test_reasons_are_those_of_the_resolved_device(tiny_config, monkeypatch):
    requested = tiny_config(train__device="auto", train__precision="auto", speedups="auto")
    monkeypatch.setattr(resolving, "probe", lambda: GPU)
    monkeypatch.setattr(
        resolving, "pick_device", lambda wanted, machine: ("cpu", "this torch is a CPU build")
    )
    found = choose(requested).additions
    assert isinstance(found["bf16"], list)
    assert "on a GPU" not in str(found)


def test_two_named_speedups_for_one_slot_are_rejected_as_in_training(tiny_config, monkeypatch):
    monkeypatch.setattr(hardware, "_multiplies_bf16", lambda: True)
    found = choose(tiny_config(train__precision="auto", speedups="auto,+onednn"))
    assert "both fill the slot" in found.additions["bf16-products"]


def test_another_process_makes_the_same_choice(tiny_config):
    requested = tiny_config(train__precision="auto", batch__rows_per_device="auto")
    assert choose_in_subprocess(requested) == choose(requested)


def test_on_a_gpu_another_process_resolves_and_this_one_does_not_touch_the_gpu(
    tiny_config, monkeypatch
):
    requested, answer = tiny_config(train__device="auto"), choose(tiny_config())

    def touch(*_, **__):
        raise AssertionError("a context on the GPU")

    monkeypatch.setattr(resolving, "probe", lambda: GPU)
    for name in ("pick_device", "resolve"):
        monkeypatch.setattr(resolving, name, touch)
    monkeypatch.setattr(resolving, "choose_in_subprocess", lambda config, cache: answer)
    resolved = resolve_apart(requested)
    assert (resolved.config.to_dict(), resolved.additions) == (answer.config, answer.additions)
    with pytest.raises(AssertionError):
        resolve_apart(requested.with_values({"train.device": "cpu"}))


def test_an_error_in_the_other_process_is_raised_here(tiny_config):
    def answered(program):
        choose_in_subprocess(tiny_config(), command=[sys.executable, "-c", program])

    told = json.dumps({"error": "ConfigError", "what": "It is wrong.", "fix": "Mend it."})
    with pytest.raises(ConfigError, match="It is wrong"):
        answered(f"print({told!r}); raise SystemExit(2)")
    with pytest.raises(RunFailed, match="died: no library"):
        answered("raise SystemExit('no library')")
