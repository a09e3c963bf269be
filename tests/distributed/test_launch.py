"""Several processes are started with the variables of torchrun, and end together."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from flatout.distributed import launch as module
from flatout.distributed.launch import MOST_PER_CORE, launch, num_processes, program
from flatout.errors import ConfigError, HardwareError, Interrupted, RunFailed, SmallerBatch
from flatout.hardware.machine import Machine

pytestmark = pytest.mark.slow

MACHINE = Machine("a CPU", 2, 8.0, (), "3.11")
WAIT = "import time; time.sleep(600)"


def command(text: str) -> list[str]:
    """Return a program in which `rank` is known."""
    return [sys.executable, "-c", f"import os, sys\nrank = int(os.environ['RANK'])\n{text}"]


def start(text: str, count: int = 2, cores: int = 8, **environment: str) -> int:
    return launch(command(text), count, {**os.environ, **environment}, cores)


def variables_to(folder: Path, names: str) -> str:
    """Return code that writes environment variables to a file named after the rank."""
    values = f"' '.join(map(os.environ.get, {names.split()}))"
    return f"open({str(folder)!r} + f'/{{rank}}', 'w').write({values})"


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(psutil.Process().children())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert set(psutil.Process().children()) <= before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_all_start_again_when_one_has_recorded_a_smaller_micro_batch(tmp_path):
    """The other one waits for it, and is ended. The third start succeeds."""
    code = f"""
import pathlib, time
count = pathlib.Path({str(tmp_path)!r}, f'{{rank}}')
number = len(count.read_text()) if count.exists() else 0
count.write_text('x' * (number + 1))
if number < 2:
    if rank == 1:
        sys.exit({SmallerBatch.exit_code})
    time.sleep(600)
"""
    assert start(code) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["xxx", "xxx"]


@pytest.mark.parametrize(
    ("devices", "device", "gpus", "count"),
    [
        (None, "cuda:1", 2, 1),
        (1, "cuda:1", 2, 1),
        (3, "cpu", 2, 3),
        ("all", "cpu", 2, 1),
        (2, "auto", 2, 2),
        ("all", "auto", 2, 2),
        ("all", "cuda", 1, 1),
        (2, "auto", 0, 2),
        ("all", "auto", 0, 1),
        ("all", "mps", 0, 1),
    ],
)
def test_the_processes_of_train_devices_are_counted(monkeypatch, devices, device, gpus, count):
    chosen = "cuda" if gpus and device == "auto" else device.replace("auto", "cpu")
    monkeypatch.setattr(module, "pick_device", lambda *_: (chosen, ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert num_processes(devices, device, MACHINE) == count


def test_more_devices_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(module, "pick_device", lambda device, _: (device, ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(HardwareError, match=r"train\.devices=3 needs that many GPUs.*sees 2"):
        num_processes(3, "cuda", MACHINE)
    with pytest.raises(HardwareError, match=r"train\.devices=2 needs that many GPUs.*sees 1"):
        num_processes(2, "mps", MACHINE)
    most = MOST_PER_CORE * MACHINE.cores
    assert num_processes(most, "cpu", MACHINE) == most
    with pytest.raises(HardwareError, match=rf"train\.devices={most + 1} .*{MACHINE.cores} cores"):
        num_processes(most + 1, "cpu", MACHINE)
    with pytest.raises(ConfigError, match=r"train\.device=cuda:0 is one GPU"):
        num_processes("all", "cuda:0", MACHINE)


def test_each_rank_has_the_variables_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
    write = variables_to(tmp_path, names)
    assert start(write, count=3) == 0
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert found == [f"{rank} {rank} 3 3 127.0.0.1 2" for rank in range(3)]
    assert start(write, OMP_NUM_THREADS="7") == 0
    assert (tmp_path / "0").read_text().endswith(" 7")


def test_all_ranks_have_one_free_port_and_the_launchers_id(tmp_path):
    assert start(variables_to(tmp_path, "MASTER_PORT FLATOUT_LAUNCHER")) == 0
    (first, second) = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert first == second
    assert 0 < int(first[0]) < 2**16
    assert int(first[1]) == os.getpid()


def test_only_rank_0_prints_and_every_rank_reports_errors(capfd):
    # one write each: processes share the terminal
    text = "print('out', rank, flush=True); os.write(2, b'error %d\\n' % int(rank))"
    assert start(text, count=3) == 0
    printed = capfd.readouterr()
    assert printed.out == "out 0\n"
    assert sorted(printed.err.splitlines()) == ["error 0", "error 1", "error 2"]


@pytest.mark.parametrize("code", [0, 75])
def test_ranks_that_end_well_are_waited_for(tmp_path, code):
    """Rank 0 may still write when the others have finished: it waits for rank 1 to end."""
    text = (
        "import time\n"
        f"folder = {str(tmp_path)!r}\n"
        f"if rank == 1:\n open(folder + '/pid', 'w').write(f'{{os.getpid()}} '); sys.exit({code})\n"
        "def is_running():\n"
        " try:\n"
        "  pid, end = open(folder + '/pid').read().split(' ')\n"
        " except (OSError, ValueError):\n"
        "  return True\n"
        " return os.path.exists(f'/proc/{pid}')\n"
        "while is_running():\n time.sleep(0.01)\n"
        f"open(folder + '/done', 'w'); sys.exit({code})"
    )
    assert start(text) == code
    assert (tmp_path / "done").exists()


def test_an_error_of_rank_0_ends_the_others_and_keeps_its_code():
    assert start(f"sys.exit(2) if rank == 0 else None\n{WAIT}", count=3) == 2


@pytest.mark.parametrize("code", [1, 2, 3])
def test_an_error_of_another_rank_is_named_and_keeps_its_code(code):
    with pytest.raises(RunFailed, match=rf"Rank 1 failed with exit code {code}") as caught:
        start(f"sys.exit({code}) if rank == 1 else None\n{WAIT}")
    assert caught.value.exit_code == code
    assert "[rank 1]" in caught.value.fix


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(rank):
    text = f"if rank == {rank}:\n os.kill(os.getpid(), 9)\n{WAIT}"
    with pytest.raises(RunFailed, match=rf"Rank {rank} was killed by SIGKILL") as caught:
        start(text)
    assert caught.value.exit_code == 1
    assert "too little memory" in caught.value.fix


def test_a_rank_that_cannot_be_interrupted_is_killed(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    text = f"import signal\nif rank == 1:\n sys.exit(3)\nsignal.signal(15, signal.SIG_IGN)\n{WAIT}"
    with pytest.raises(RunFailed, match="Rank 1 failed with exit code 3"):
        start(text)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stuck_when_another_has_stopped_is_killed(monkeypatch, stopped):
    """A watchdog has ended the other one, and the run resumes."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    text = f"import signal\nif rank == {1 - stopped}:\n sys.exit(75)\n"
    text += "os.kill(os.getpid(), signal.SIGSTOP)"
    assert start(text) == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_each_rank_once(tmp_path, number):
    text = (
        "import signal, time\n"
        "def stop(number, _):\n"
        f" open({str(tmp_path)!r} + f'/got-{{rank}}', 'a').write(f'{{number}} '); sys.exit(75)\n"
        f"signal.signal({int(number)}, stop)\n"
        f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')\n{WAIT}"
    )
    with beside(send_when_ready, tmp_path, number):
        assert start(text) == 75
    assert [(tmp_path / f"got-{rank}").read_text() for rank in range(2)] == [f"{int(number)} "] * 2


def send_when_ready(folder: Path, number: int, count: int = 2) -> None:
    """Send a signal to this process once every rank handles it."""
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.01)
    os.kill(os.getpid(), number)


@contextmanager
def beside(send: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Send signals from a thread meanwhile."""
    thread = threading.Thread(target=send, args=arguments, daemon=True)
    thread.start()
    yield
    thread.join()


def test_a_run_that_is_interrupted_before_it_saved_keeps_that_code(tmp_path):
    ready = f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')"
    text = f"try:\n {ready}\n {WAIT}\nexcept KeyboardInterrupt:\n sys.exit(130)"
    with beside(send_when_ready, tmp_path, signal.SIGINT):
        assert start(text) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_ranks_do_not_handle_yet_interrupts_the_run(tmp_path, number):
    text = f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')\n{WAIT}"
    with beside(send_when_ready, tmp_path, number), pytest.raises(Interrupted) as caught:
        start(text)
    assert caught.value.exit_code == 128 + number


def test_the_code_of_a_run_that_saved_stays_when_a_signal_ends_another_rank_later(tmp_path):
    ready = f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')"
    text = f"import signal\nsignal.signal(15, lambda *_: sys.exit(75))\n{ready}\n{WAIT}"
    default = f"if rank == 1:\n {ready}\n {WAIT}\n{text}"
    with beside(send_when_ready, tmp_path, signal.SIGTERM):
        assert start(default) == 75


def test_a_second_sigint_kills_ranks_that_do_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAME_REQUEST_S", 0.0)
    monkeypatch.setattr(module, "QUIT_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", 600.0)
    ready = f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')"
    text = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{ready}\n{WAIT}"

    passed_on, send = threading.Event(), module._Run._send

    def noted(run, number):
        send(run, number)
        passed_on.set()

    monkeypatch.setattr(module._Run, "_send", noted)

    def send_twice():
        send_when_ready(tmp_path, signal.SIGINT)
        assert passed_on.wait(60)  # two pending signals would be one
        os.kill(os.getpid(), signal.SIGINT)

    with beside(send_twice), pytest.raises(Interrupted) as caught:
        start(text)
    assert caught.value.exit_code == 130


def test_a_signal_while_ranks_start_ends_those_that_have(monkeypatch):
    plain = subprocess.Popen

    def start_then_signal(*arguments, **options):
        process = plain(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_then_signal)
    with pytest.raises(Interrupted) as caught:
        start(WAIT)
    assert caught.value.exit_code == 143


def test_the_program_is_this_one_in_any_directory(tmp_path):
    done = subprocess.run(
        program(["--version"]), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("flatout ")
