"""Kills processes while they save, in the loop or beside it, and checks what they leave.

python saver.py FOLDER loop|beside random KILLS SEED | every STRIDE START | full
"""

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from stand_in import build, outcome, train

from flatout.errors import RunFailed
from flatout.speedups.async_checkpoints.saver import BackgroundSaver
from flatout.training.checkpoint import catalog, location, read_write
from flatout.training.checkpoint.savers import InTheLoop
from flatout.training.run_dir.resume import resume_from

SAVERS = {"loop": InTheLoop, "beside": BackgroundSaver}


def resumed(place):
    """Return a run that goes on from what lies in `place`, as a second `train` would."""
    run = build(place, seed=1)
    path = resume_from(place)
    if path is not None:
        read_write.load(run, path)
    return run


def warm_up(place):
    """Load here what torch loads at first use, so that the children begin at once."""
    run = build(place, seed=1)
    train(run, 1)
    read_write.load(resumed(place), read_write.save(run))


def tell(saver, pipe):
    """Say which steps are saved."""
    for saved in saver.finished():
        os.write(pipe, f"{saved.step}\n".encode())


def forked(work):
    """Run `work(pipe)` in a child, and return its pid and the reading end of its pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        work(writing)
    finally:
        os._exit(0)


def reported(reading):
    """Return the last step that the child said was saved; each is one line."""
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    return int(lines[-1]) if lines else None


def check(place, saved_step):
    """Nothing that was saved is lost, what counts is whole, what does not is swept up."""
    newest = resume_from(place)
    if newest is None:
        assert saved_step is None, f"step {saved_step} was saved and nothing is left"
        return 0
    step = catalog.step_of(newest)
    assert saved_step is None or step >= saved_step, (
        f"step {saved_step} was saved, {step} is the newest"
    )
    for other in catalog.steps(place):
        assert catalog.verify(catalog.checkpoint_path(place, other)) == []
    left = [
        path.name for path in location.checkpoints_folder(place).iterdir() if ".tmp-" in path.name
    ]
    assert not left, left
    return step


def same_as_never_killed(place, step):
    """The survivor of all kills goes on like a run that nobody killed, in every bit."""
    survivor = outcome(resumed(place), 3)
    run = build(place, seed=1)
    train(run, step)
    assert outcome(run, 3) == survivor


def at_random(place, make_saver, kills, seed):
    moments = random.Random(seed)
    saved_step, caught = None, 0

    def work(pipe):
        run, saver = resumed(place), make_saver()
        while True:
            train(run, 1)
            saver.save(run, environment={}, keep=2)
            tell(saver, pipe)
            train(run, 1)
            tell(saver, pipe)

    for _ in range(kills):
        pid, reading = forked(work)
        time.sleep(moments.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        caught += any(location.checkpoints_folder(place).glob("*.tmp-*"))
        saved_step = reported(reading) or saved_step
        step = check(place, saved_step)
    same_as_never_killed(place, step)
    print(f"{kills} kills, {caught} in the middle of a save, {step} steps")


def everywhere(place, make_saver, stride, start):
    """Kill a save, a save over it, and a deletion at every `stride`-th thing they do to the file
    system.
    """
    moment, done, saved_step = start, False, None
    while not done:

        def work(pipe, moment=moment):
            count = 0

            def hook(event, arguments):
                nonlocal count
                if event in FILE_EVENTS and str(place) in str(arguments[0]):
                    count += 1
                    if count == moment:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            run, saver = resumed(place), make_saver()
            train(run, 1)
            saver.save(run, environment={}, keep=2)
            saver.wait()
            tell(saver, pipe)
            saver.save(run, environment={}, keep=1)
            saver.wait()

        pid, reading = forked(work)
        _, status = os.waitpid(pid, 0)
        saved_step = reported(reading) or saved_step
        step = check(place, saved_step)
        done = not os.WIFSIGNALED(status)
        moment += stride
    same_as_never_killed(place, step)
    print(f"killed at {(moment - start) // stride - 1} moments, {step} steps")


FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def full(place, make_saver):
    """A file system that takes no more than a few bytes a file."""
    run, saver = resumed(place), make_saver()
    path = read_write.save(run)
    train(run, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        saver.save(run, environment={}, keep=1)
        train(run, 3)
        saver.wait()
    except RunFailed as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert resume_from(place) == path


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, way, what, *numbers = sys.argv[1:]
    warm_up(Path(where) / "warm")
    {"random": at_random, "every": everywhere, "full": full}[what](
        Path(where) / "run", SAVERS[way], *map(int, numbers)
    )
