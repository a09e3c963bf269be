"""Threads that wait sleep sooner while other processes use the cores."""

import json
import os
import subprocess
import sys
import threading

import pytest

from flatout.distributed import spinning
from flatout.progress import SILENT


@pytest.fixture
def stated(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(spinning, "usable_cores", lambda: 2)
    monkeypatch.setattr(spinning.threading, "enumerate", list)  # another test may have started one
    return monkeypatch


@pytest.fixture
def started(stated):
    """Return the names of threads that were started; none is."""
    names = []
    stated.setattr(threading.Thread, "start", lambda self: names.append(self.name))
    return names


def test_a_watch_starts_once(stated, started):
    spinning.spin_less_beside_others(SILENT)
    assert started == [spinning.NAME]
    stated.setattr(spinning.threading, "enumerate", lambda: [threading.Thread(name=spinning.NAME)])
    spinning.spin_less_beside_others(SILENT)
    assert started == [spinning.NAME]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_environment_states_stays(stated, started, name):
    stated.setenv(name, "1")
    spinning.spin_less_beside_others(SILENT)
    assert started == []


def test_one_core_needs_no_watch(stated, started):
    stated.setattr(spinning, "usable_cores", lambda: 1)
    spinning.spin_less_beside_others(SILENT)
    assert started == []


class Over(Exception):
    """The looks are over."""


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_busy_machine_matters_once_torch_is_loaded(stated, started, is_loaded):
    loads = iter([1.5, 1.5, 1.5])

    def others(self, later):
        for cores in loads:
            return cores
        raise Over

    stated.setattr(spinning.CpuTimes, "others_until", others)
    for name in ("EVERY_S", "LOOK_S"):
        stated.setattr(spinning, name, 0.0)
    if is_loaded:
        stated.setitem(sys.modules, "torch", sys)
    else:
        stated.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(Over):
        spinning._watch(SILENT, spinning.CpuTimes.read())
    assert len(started) == is_loaded


LOADS = """
import json, os, threading, torch
torch.set_num_threads(2)
from flatout.hardware import machine as hardware
from flatout.distributed import spinning
spinning.EVERY_S, spinning.LOOK_S = 0.3, 0.05
loads = iter([0.1, 1.5, 1.5, 0.1, 0.1, 1.5, 1.5, 0.1])
def others(self, later):
    seen.append(len(os.listdir("/proc/self/task")))
    value = next(loads, None)
    if value is None:
        done.set()
        threading.Event().wait()
    return value
seen, done, said = [], threading.Event(), []
hardware.CpuTimes.others_until = others
class Progress:
    def say(self, text): said.append(text)
torch.zeros(1 << 17).add_(1)
args = Progress(), hardware.CpuTimes.read()
threading.Thread(target=spinning._watch, args=args, daemon=True).start()
assert done.wait(30)
print(json.dumps([seen, said]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux shows threads there")
def test_a_team_more_exists_while_others_use_the_cores():
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    words = [sys.executable, "-c", LOADS]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen, said = json.loads(done.stdout)
    alone = seen[0]  # two looks, by the second of which others are there; one thread and its team
    assert seen == [alone, alone, alone, alone + 2, alone, alone, alone, alone + 2, alone]
    assert len(said) == 1
    assert said[0].startswith("This machine is busy (1.5 of ")
