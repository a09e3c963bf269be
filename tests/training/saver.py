"""Kill processes during saves, in the loop or in the background, and check the files they leave.

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
from flatout.training.checkpoint import catalog, read_write, savers
from flatout.training.checkpoint.savers import Saver, in_background

SAVERS = {"loop": Saver, "beside": in_background}


def newest_of(run_folder):
    """Return the checkpoint from which a run resumes, without the leftovers of a kill."""
    catalog.remove_leftovers(run_folder)
    return catalog.latest(run_folder)


def resumed(run_folder):
    """Return a run resumed from the directory `run_folder`, as a second `train` would."""
    run = build(run_folder, seed=1)
    path = newest_of(run_folder)
    if path is not None:
        read_write.load(run, path)
    return run


def warm_up(run_folder):
    """Trigger torch's lazy imports here, so that the children start quickly."""
    run = build(run_folder, seed=1)
    train(run, 1)
    read_write.load(resumed(run_folder), savers.save(run))


def report_saved(saver, pipe):
    """Report the saved steps."""
    for saved in saver.finished():
        os.write(pipe, f"{saved.step}\n".encode())


def forked(work):
    """Run `work(pipe)` in a child, and return its pid and the read end of its pipe."""
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
    """Return the last step that the child reported as saved, one per line."""
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    return int(lines[-1]) if lines else None


def check(run_folder, saved_step):
    """Check that no saved step is lost, checkpoints are complete, and leftovers are deleted."""
    newest = newest_of(run_folder)
    if newest is None:
        assert saved_step is None, f"step {saved_step} was saved, but no checkpoint is left"
        return 0
    step = catalog.step_of(newest)
    assert saved_step is None or step >= saved_step, (
        f"step {saved_step} was saved, but {step} is the newest"
    )
    for other in catalog.steps(run_folder):
        assert catalog.verify(catalog.checkpoint_path(run_folder, other)) == []
    left = [
        path.name for path in (run_folder / catalog.CHECKPOINTS).iterdir() if ".part-" in path.name
    ]
    assert not left, left
    return step


def same_as_never_killed(run_folder, step):
    """Check that a run that survived all kills continues bit for bit like one without kills."""
    survivor = outcome(resumed(run_folder), 3)
    run = build(run_folder, seed=1)
    train(run, step)
    assert outcome(run, 3) == survivor


def at_random(run_folder, make_saver, kills, seed):
    moments = random.Random(seed)
    saved_step, caught = None, 0

    def work(pipe):
        run, saver = resumed(run_folder), make_saver()
        while True:
            train(run, 1)
            saver.save(run, environment={}, keep=2)
            report_saved(saver, pipe)
            train(run, 1)
            report_saved(saver, pipe)

    for _ in range(kills):
        pid, reading = forked(work)
        time.sleep(moments.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        caught += any((run_folder / catalog.CHECKPOINTS).glob("*.part-*"))
        saved_step = reported(reading) or saved_step
        step = check(run_folder, saved_step)
    same_as_never_killed(run_folder, step)
    print(f"{kills} kills, {caught} in the middle of a save, {step} steps")


def everywhere(run_folder, make_saver, stride, start):
    """Kill a save, a second save of that step, and a deletion at every `stride`-th operation."""
    moment, done, saved_step = start, False, None
    while not done:

        def work(pipe, moment=moment):
            count = 0

            def hook(event, arguments):
                nonlocal count
                if event in FILE_EVENTS and str(run_folder) in str(arguments[0]):
                    count += 1
                    if count == moment:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            run, saver = resumed(run_folder), make_saver()
            train(run, 1)
            saver.save(run, environment={}, keep=2)
            saver.wait()
            report_saved(saver, pipe)
            saver.save(run, environment={}, keep=1)
            saver.wait()

        pid, reading = forked(work)
        _, status = os.waitpid(pid, 0)
        saved_step = reported(reading) or saved_step
        step = check(run_folder, saved_step)
        done = not os.WIFSIGNALED(status)
        moment += stride
    same_as_never_killed(run_folder, step)
    print(f"killed at {(moment - start) // stride - 1} moments, {step} steps")


FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def full(run_folder, make_saver):
    """Save on a file system that takes only a few bytes per file."""
    run, saver = resumed(run_folder), make_saver()
    path = savers.save(run)
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
    assert newest_of(run_folder) == path


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, way, what, *numbers = sys.argv[1:]
    warm_up(Path(where) / "warm")
    {"random": at_random, "every": everywhere, "full": full}[what](
        Path(where) / "run", SAVERS[way], *map(int, numbers)
    )
