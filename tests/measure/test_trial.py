"""A trial in its own process always gives a result."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from flatout.assembly.resolve import tokens_per_step
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError
from flatout.measure import resolving, trial
from flatout.measure.attach import timing
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import Answer, Request, Timing
from flatout.measure.compare import compare_commands
from flatout.measure.resolving import adding_one, choose, resolve_apart, resolve_here, with_needs
from flatout.measure.trial import Result, explained, run_command, try_recipe
from flatout.measure.tune import over_the_run

pytestmark = pytest.mark.slow

CPU_MEMORY = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12"
)
LOOP = """
import time, torch
weights = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(STEPS):
    (weights * torch.randn(3)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def tried(text, tmp_path, *, steps=5, ends_after_s=60.0, **timing):
    request = Request(timing=Timing(steps=steps, **{"warmup_steps": 2} | timing))
    words, options = [sys.executable, "-c", text], {"folder": tmp_path, "is_captured": True}
    return run_command(words, request, limit_s=ends_after_s, **options)


@pytest.mark.parametrize(
    ("busy_cores", "stated", "sleeps"),
    [(1.5, None, True), (1.5, "GOMP_SPINCOUNT", False), (0.1, None, False)],
)
def test_threads_sleep_in_what_is_measured_beside_other_processes(
    busy_cores, stated, sleeps, monkeypatch
):
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if stated:
        monkeypatch.setenv(stated, "100")
    monkeypatch.setattr(trial.CpuTimes, "others_until", lambda *_: busy_cores)
    monkeypatch.setattr(trial, "LOOK_S", 0.0)
    said = SimpleNamespace(lines=[])
    said.say = said.lines.append
    expected = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"} if sleeps else {}
    assert trial.waiting_beside_others(said) == expected
    assert len(said.lines) == (busy_cores > 1), "one line tells of it"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("end", "reason"), [("raise ValueError('mine')", "ValueError: mine"), ("sys.exit(3)", "code 3")]
)
def test_a_script_that_fails_after_some_steps_has_no_result(tmp_path, end, reason):
    text = LOOP.replace("STEPS", "4") + f"import sys; {end}"
    found = tried(text, tmp_path, steps=50)
    assert found.status == "failed"
    assert reason in found.reason


def losses_of(seed, count):
    """Return the first losses of the loop with a seed; its gradients add up."""
    generator = torch.Generator().manual_seed(seed)
    weights, gradient, losses = torch.ones(3), torch.zeros(3), []
    for _ in range(count):
        drawn = torch.randn(3, generator=generator)
        losses.append(float(weights @ drawn))
        gradient += drawn
        weights -= 0.1 * gradient
    return losses


def test_a_script_is_timed_and_ended_after_its_steps(tmp_path):
    endless = LOOP.replace("STEPS", "10**9")
    found = tried(endless, tmp_path)
    assert found.is_ok
    assert (len(found.step_s), found.warmup_steps) == (7, 2)
    assert len(found.losses) == 8
    assert min(found.step_s) > 0.01
    assert found.process_s > sum(found.step_s)
    assert found.losses == pytest.approx(losses_of(0, 8), rel=1e-5)
    late = tried(endless.replace("0.01", "0.1"), tmp_path, steps=1000, limit_s=0.3, seed_offset=1)
    assert 4 <= len(late.step_s) < 10, "a late trial ends with fewer steps"
    assert late.losses[:5] == pytest.approx(losses_of(1, 5), rel=1e-5)


@pytest.mark.quick_cases(
    r"import os; os.kill(os.getpid(), 9)-failed-SIGKILL.*memory",
    "import time; time.sleep(600)-timed-out-longer than 1 s",
)
@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "failed", r"SIGKILL.*memory"),
        ("print('garbage')", "failed", "torch was not imported"),
        ("raise SystemExit('no library')", "failed", "no library$"),
        (LOOP.replace("STEPS", "2"), "failed", "too few steps"),
        ("import time; time.sleep(600)", "timed-out", "longer than 1 s"),
    ],
)
def test_a_process_without_a_result_gives_a_failed_one(text, status, words, tmp_path):
    found = tried(text, tmp_path, ends_after_s=1.0 if status == "timed-out" else 60.0)
    assert found.status == status
    assert re.search(words, found.reason), found.reason


ERROR = '{"error": "There is no GPU.", "fix": "Use a CPU.", "kind": "OutOfMemory"}'


@pytest.mark.parametrize(
    ("code", "output", "status", "reason"),
    [
        (-11, "", "failed", "The process was killed by SIGSEGV"),
        (1, "", "failed", "The process ended with exit code 1"),
        (1, "Traceback:\nValueError: boom", "failed", "ValueError: boom"),
        (1, CPU_MEMORY, "out-of-memory", CPU_MEMORY),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", None),
        (1, f"...\n{ERROR}\nbye", "out-of-memory", "There is no GPU."),
    ],
)
def test_the_reason_of_a_failure_is_what_the_process_said_last(code, output, status, reason):
    found = explained(Result(code=code, output=output))
    assert (found.status, found.reason) == (status, reason or output)


def test_the_error_of_a_rank_names_the_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
    monkeypatch.setattr(timing, "ranks", lambda: (1, 2))
    timing.reply(str(tmp_path / "answer.json"), 40)
    answer = Answer.model_validate_json((tmp_path / "answer.json").read_text())
    assert (answer.rank, answer.steps) == (1, 40)
    assert answer.failure.message == "Rank 1: ValueError: mine"


class ChildFailed(Exception):
    """The error of torchrun after a rank was killed."""

    def get_first_failure(self):
        return 1, SimpleNamespace(exitcode=-9)


def test_the_error_of_torchrun_names_the_rank_that_ended_first():
    assert failure_of(ChildFailed(), 0).message == "Rank 1 ended with exit code -9"


def test_a_process_that_hangs_is_ended_with_everything_it_started(tmp_path):
    text = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        "pathlib.Path('pid').write_text(str(child.pid)); time.sleep(600)"
    )
    assert tried(text, tmp_path, ends_after_s=3.0).status == "timed-out"
    wait_for_end_of(int((tmp_path / "pid").read_text()))


@pytest.mark.quick_cases("import torch, nothing_of_this_name-")
@pytest.mark.parametrize(
    ("code", "without"),
    [("import torch, nothing_of_this_name", ""), ("import torch", "import torch\nimport flatout")],
)
def test_a_helper_that_fails_does_not_end_the_script(code, without, tmp_path, monkeypatch):
    """Nor does one in an environment that has no flatout."""
    monkeypatch.setattr(trial, "GRACE_S", 0.5)
    (tmp_path / "flatout.py").write_text("raise ModuleNotFoundError('no', name='flatout')")
    path = f"{str(tmp_path) + os.pathsep!r} + os.environ['PYTHONPATH']"
    path = f"os.environ['PYTHONPATH'] = {path}\n" * bool(without)
    helper = f"subprocess.run([sys.executable, '-c', {code!r}])"
    text = f"import os, subprocess, sys, time\n{without}\n{path}{helper}\ntime.sleep(2)\n"
    command = [sys.executable, "-c", text + LOOP.replace("STEPS", "10**9")]
    found = run_command(command, Request(steps=12), is_captured=True, grace_s=0.5)
    assert (found.steps, found.failure) == (12, None), found.output


@pytest.mark.thorough
def test_a_trial_ends_with_the_command_that_started_it(tmp_path):
    text = (
        LOOP.replace("STEPS", "10**9")
        + "    if step == 0: open('pid', 'w').write(str(__import__('os').getpid()))"
    )
    parent = (
        "from pathlib import Path; from flatout.measure.attach.request import Request, Timing; "
        "from flatout.measure.trial import run_command; import sys; "
        f"run_command([sys.executable, '-c', {text!r}], Request(timing=Timing(steps=10**9)), "
        f"folder=Path({str(tmp_path)!r}), is_captured=True)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as command:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            time.sleep(0.05)
        command.kill()
    wait_for_end_of(int((tmp_path / "pid").read_text()))


def wait_for_end_of(pid):
    """Wait until a process is gone or a zombie. The test's own time limit ends the wait."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


def test_a_command_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match="There is no command 'pyhton'") as refused:
        run_command(["pyhton", "train.py"], Request())
    assert "sh -c" not in refused.value.fix
    with pytest.raises(ConfigError, match="There is no command") as refused:
        run_command(["pyhton train.py | tee log"], Request())
    assert "-- sh -c 'pyhton train.py | tee log'." in refused.value.fix
    with pytest.raises(ConfigError, match="There is no command ''"):
        compare_commands(["python", "train.py"], [""])


def test_a_recipe_is_a_command(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(speedups="none")
    monkeypatch.chdir(tmp_path)
    found = try_recipe(config, Timing(steps=5, warmup_steps=3), 240)
    assert found.is_ok, found.reason
    assert (len(found.step_s), found.warmup_steps) == (8, 3)
    assert len(found.losses) >= 8
    assert (found.rows_per_device, found.accumulate, {*found.tokens}) == (4, 2, {128})
    assert found.environment["device"] == "cpu"
    assert not [*tmp_path.rglob("*checkpoints*")], "it leaves nothing behind"


def test_the_padding_of_a_step_is_no_work(tiny_config, ragged_set):
    """A step of short documents is fast, and has few tokens."""
    changes = {"data__path": str(ragged_set), "data__seq_len": 64, "batch__tokens_per_step": 1024}
    config = tiny_config(**changes, speedups=["pretokenised", "length-buckets"])
    found = try_recipe(config, Timing(steps=5, warmup_steps=3), 240)
    assert found.is_ok, found.reason
    assert len(found.tokens) == len(found.step_s) == 8
    assert max(found.tokens) < 1024
    done = sum(found.tokens[at] for at in found.measured)
    assert found.tokens_per_s == pytest.approx(done / sum(found.step_s[3:]))


def test_a_speedup_whose_name_is_in_that_of_another_may_be_off(tiny_config):
    config = tiny_config(speedups="selective-checkpointing")
    found = try_recipe(config, Timing(steps=3, warmup_steps=2), 240)
    assert found.is_ok, found.reason


def test_trials_are_compared_by_their_tokens():
    packed = Result(step_s=[2.0] * 10, tokens=[100] * 10, warmup_steps=1)
    padded = Result(step_s=[1.0] * 10, tokens=[10, *[20, 30] * 4, 25], warmup_steps=1)
    assert padded.times_as_fast(packed) == pytest.approx(0.5)
    over = over_the_run(load_config(None, ["train.steps=10", "batch.tokens_per_step=256"]), None)
    assert over(padded, packed) == pytest.approx(0.5)
    compiled = packed.model_copy(update={"compile_s": 51.2})
    assert over(packed, compiled) == pytest.approx(2.0)


def test_padding_is_no_part_of_a_run(tiny_config, tiny_set):
    """Compiling takes as long as two of the three steps without padding."""
    config = tiny_config(train__steps=3, speedups="length-buckets", batch__rows_per_device=4)
    dataset = Dataset.open(tiny_set)
    tokens = tokens_per_step(config, dataset)
    assert tokens < config.batch.tokens_per_step
    plain = Result(step_s=[1.0] * 4, tokens=[round(tokens)] * 4, warmup_steps=1)
    compiled = plain.model_copy(update={"compile_s": 2.0})
    assert over_the_run(config, dataset)(plain, compiled) == pytest.approx(5 / 3, rel=0.02)


@pytest.mark.thorough
def test_the_error_of_a_recipe_is_its_reason(tiny_config):
    config = tiny_config(speedups=["cuda-graphs"], train__device="cpu")
    found = try_recipe(config, Timing(), 240)
    assert found.status == "failed"
    assert "cuda-graphs" in found.reason


def test_speedups_are_added_only_where_auto_decides(tiny_config):
    _, decisions, additions, _ = choose(
        tiny_config(train__precision="auto", speedups="auto,-prefetch")
    )
    assert set(additions) == {decision.name for decision in decisions if not decision.on}
    assert "compile" in additions["compile"]
    assert "prefetch" not in additions["compile"]
    assert additions["tf32"].startswith("cannot be added: ")
    assert choose(tiny_config(speedups="pretokenised"))[2] == {}
    assert with_needs("fp8")[:1] == ["fp8"]
    why_not = adding_one("tf32", tiny_config(), resolve_here(tiny_config()))
    assert why_not.startswith("cannot be added: ")


@pytest.mark.thorough
def test_on_a_gpu_another_process_resolves(tiny_config, monkeypatch):
    requested = tiny_config(train__precision="auto", batch__rows_per_device="auto")
    here = resolve_apart(requested)
    monkeypatch.setattr(resolving, "uses_gpu", lambda machine, config: True)
    monkeypatch.setattr(resolving, "resolve", None)  # only a new process has the real one
    apart = resolve_apart(requested)
    assert (apart.config, apart.additions) == (here.config, here.additions)
    with pytest.raises(ConfigError, match="does not fit"):
        resolve_apart(requested.with_values({"batch.rows_per_device": 7}))
