"""Training with a fault at an exact system call, injected by strace."""

import pytest
from tracing import counted, spread_out, traced
from victim import saved_step

pytestmark = [pytest.mark.slow, pytest.mark.faults]

MAKING = ("write", "pwrite64", "fsync", "mkdir", "rename")
"""Calls that a full or failing disk rejects."""
KILLED_AT = (*MAKING, "openat", "unlink", "unlinkat", "rmdir")
KILLS, REFUSALS = 6, 3
"""Tries per call."""


@pytest.fixture(scope="module")
def numbers(victim, tmp_path_factory):
    """Which calls of a run concern its directory."""
    target, folder = victim(), tmp_path_factory.mktemp("calls")
    run, log = folder / "run", folder / "log"
    child = target.children.start(*target.words(run), stopped=True)
    with traced([child], log, "-y", "-e", f"trace={','.join(KILLED_AT)}"):
        assert child.wait().code == 0
    found = counted(log, run)
    assert {"write", "fsync", "rename", "mkdir", "unlink"} <= found.keys()
    return found


def chosen_calls(numbers, names, most):
    """Return the calls to fail, with their numbers."""
    return [(name, n) for name in names for n in spread_out(numbers.get(name, []), most)]


def test_a_kill_at_an_exact_call_loses_nothing(numbers, victim, tmp_path, survived):
    target, kills, problems = victim(), 0, []
    for name, number in chosen_calls(numbers, KILLED_AT, KILLS):
        run = tmp_path / f"{name}-{number}"
        child = target.children.start(*target.words(run), stopped=True)
        fault = f"inject={name}:signal=KILL:when={number}"
        with traced([child], tmp_path / "log", "-e", f"trace={name}", "-e", fault):
            killed = child.wait().code < 0
        kills += killed
        found = [*target.lost(run, saved_step(run)), *target.end(run)]
        problems += [f"{name} {number}: {problem}" for problem in found]
    assert kills >= 20, "the calls differ from run to run"
    survived("call", kills, problems)


@pytest.mark.parametrize(("disk", "error"), [("full", "ENOSPC"), ("broken", "EIO")])
def test_a_disk_that_fails_from_one_call_on_loses_nothing(
    disk, error, numbers, victim, tmp_path, survived
):
    target, tries, problems = victim(), 0, []
    for name, number in chosen_calls(numbers, MAKING, REFUSALS):
        run = tmp_path / f"{name}-{number}"
        child = target.children.start(*target.words(run), stopped=True)
        fault = f"inject={name}:error={error}:when={number}+"
        with traced([child], tmp_path / "log", "-e", f"trace={name}", "-e", fault):
            ended = child.wait()
        tries += 1
        found = [] if ended.code >= 0 else [f"the process ended in {ended.code}"]
        found += ["a traceback"] if "Traceback" in ended.err else []
        found += [*target.lost(run, saved_step(run)), *target.end(run)]
        problems += [f"{name} {number}: {problem}" for problem in found]
    survived(disk, tries, problems)
