"""Uploads that are killed, and remote copies with damaged files: a lost run comes back."""

import pickle
import random
import shutil
import time

import pytest
from children import wait_until
from damage import Payload, damages, refusal, tries
from tracing import counted, spread_out, traced
from victim import saved_step, saving

from flatout.training.checkpoint import catalog
from flatout.training.upload.remote import RemoteCopy, step_at

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 40
KILLS = 6
"""Kills at random moments, with and without compression."""
CALLS = ("openat", "mkdir", "link", "linkat", "sendfile", "rename", "unlink", "unlinkat", "rmdir")
KILLS_PER_CALL = 2


class UploadingRun:
    """A run directory with a remote copy in a different directory, which has its name."""

    def __init__(self, target, folder, *more):
        self.target, self.run, self.there = target, folder / "run", folder / "backup" / "run"
        self.settings = (f"checkpoint.upload=file://{folder / 'backup'}", *more)

    def start(self, **options):
        """Start to train."""
        (child,) = self.target.start(self.run, *self.settings, **options)
        return child

    def after(self):
        """Lose the run directory, train to the end, and return what is wrong.

        Nothing that the run reported as sent may be lost.
        """
        sent = saved_step(self.run, "upload")
        shutil.rmtree(self.run, ignore_errors=True)
        problems = self.target.end(self.run, *self.settings)
        restored = saved_step(self.run, "restore")
        if restored < sent:
            problems.append(f"step {sent} was sent, and {restored} was restored")
        return problems

    def continued(self):
        """Train to the end, and return what is wrong. The remote copy must then be complete."""
        problems = self.target.lost(self.run, saved_step(self.run))
        problems += self.target.end(self.run, *self.settings)
        steps = catalog.steps(self.run)
        wanted = {f"step-{step}" for step in steps}
        store = RemoteCopy(f"file://{self.there}")
        there = {f"step-{step_at(name)}" for name in store.names() if store.manifest(name)}
        if not wanted <= there:
            problems.append(f"the remote copy has {sorted(there)}, the run {sorted(wanted)}")
        return problems


def after_a_kill(uploading, number):
    """Continue a killed run, every second time in a directory that was lost."""
    lost = uploading.after() if number % 2 else uploading.continued()
    return [f"kill {number}: {problem}" for problem in lost]


@pytest.mark.parametrize("more", [(), ("checkpoint.compress=zstd",)], ids=["plain", "compressed"])
def test_a_run_killed_while_it_sends_loses_nothing(more, victim, tmp_path, survived):
    target, draw, kills, problems = victim(STEPS), random.Random(len(more)), 0, []
    assert target.whole
    for number in range(3 * KILLS):
        uploading = UploadingRun(target, tmp_path / str(number), *more)
        child, uploads = uploading.start(), draw.randint(1, 3)
        seen = set()

        def sends(run=uploading.run, seen=seen, uploads=uploads):
            seen.update(name for name in saving(run) if ".part-upload-" in name)
            return len(seen) >= uploads

        wait_until(sends, child=child)
        time.sleep(draw.uniform(0, 0.03))
        if child.kill().code < 0:
            kills += 1
            problems += after_a_kill(uploading, kills)
        if kills == KILLS:
            break
    survived("upload-kill", kills, problems)


def killed_at_calls(uploading, names, places, per_call, folder):
    """Yield the runs that are killed as they enter calls on `places`, each one in a new directory.

    `uploading` returns a run in a new directory, by its name.
    """
    child = uploading("whole").start(stopped=True)
    log = folder / "calls"
    with traced([child], log, "-y", "-e", f"trace={','.join(names)}"):
        assert child.wait().code == 0
    numbers = counted(log, *places)
    for name in names:
        for number in spread_out(numbers.get(name, []), per_call):
            target = uploading(f"{name}-{number}")
            child = target.start(stopped=True)
            fault = f"inject={name}:signal=KILL:when={number}"
            with traced([child], folder / "log", "-e", f"trace={name}", "-e", fault):
                killed = child.wait().code < 0
            if killed:
                yield target


def test_a_kill_between_two_file_operations_of_an_upload_loses_nothing(victim, tmp_path, survived):
    target, kills, problems = victim(), 0, []
    assert target.whole

    def uploading(name):
        return UploadingRun(target, tmp_path / name)

    places = ("/backup/run", ".part-upload-")
    for one in killed_at_calls(uploading, CALLS, places, KILLS_PER_CALL, tmp_path):
        kills += 1
        problems += after_a_kill(one, kills)
    assert kills >= KILLS_PER_CALL, "the calls differ from run to run"
    survived("upload-kill", kills, problems)


def test_a_kill_while_old_checkpoints_are_deleted_loses_nothing(victim, tmp_path, survived):
    target, kills, problems = victim(), 0, []
    assert target.whole

    def uploading(name):
        return UploadingRun(target, tmp_path / name, "checkpoint.upload=none")

    names = ("rename", "openat", "unlinkat", "rmdir", "unlink")
    for one in killed_at_calls(uploading, names, ["/checkpoints/step-"], 4, tmp_path):
        kills += 1
        problems += target.lost(one.run, saved_step(one.run))
        problems += target.end(one.run)
    assert kills >= 4, "the calls differ from run to run"
    survived("prune-kill", kills, problems)


@pytest.fixture(scope="module")
def remote_copy(victim, tmp_path_factory):
    """Return a function that returns a run of 40 steps, and its copy as of steps 36 and 38."""
    made = {}

    def make(*more):
        if more not in made:
            folder = tmp_path_factory.mktemp("backup")
            uploading = UploadingRun(victim(STEPS), folder, "checkpoint.keep=3", *more)
            assert uploading.start().wait().code == 0
            for copy in uploading.there.glob("step-40*"):
                shutil.rmtree(copy)
            made[more] = uploading, shutil.copytree(uploading.there, folder / "kept")
        return made[more]

    return make


def restored_with(changes, uploading, kept):
    """Restore the run with each change of each file of its copy; return tries and problems."""
    count, problems = 0, []
    assert uploading.target.whole
    for path, what, content in tries(kept, changes):
        if path.parts[0].startswith("step-36-"):
            continue
        shutil.rmtree(uploading.run, ignore_errors=True)
        shutil.rmtree(uploading.there)
        shutil.copytree(kept, uploading.there)
        if content is None:
            (uploading.there / path).unlink()
        else:
            (uploading.there / path).write_bytes(content)
        ended = uploading.start().wait()
        # An upload without its manifest was never complete; what a lost file said, nothing tells.
        name = "" if content is None and len(path.parts) == 1 else path.name.removesuffix(".zst")
        is_upload = path.name != catalog.MANIFEST or content
        found = refusal(ended, name, must=path.parts[0].startswith("step-38-") and bool(is_upload))
        if ended.code == 0:
            found += uploading.target.unequal(uploading.run, ended)
        elif path.parts[0].startswith("step-38-"):
            found.append(f"no other checkpoint was restored: {ended.err[-2000:]}")
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    return count, problems


@pytest.mark.parametrize("more", [(), ("checkpoint.compress=zstd",)], ids=["plain", "compressed"])
def test_a_damaged_file_of_a_remote_copy_is_rejected_or_replaced(
    more, remote_copy, tmp_path, survived
):
    marker = tmp_path / "opened"

    def damaged(data):
        known = (
            ("a flipped bit", "cut to 50%")
            if more
            else ("a flipped bit", "cut to 50%", "cut to 0%")
        )
        yield from (one for one in damages(data) if one[0] in known)
        yield "a pickle", pickle.dumps(Payload(marker))
        yield "missing", None

    count, problems = restored_with(damaged, *remote_copy(*more))
    assert not marker.exists()
    survived("upload-file", count, problems)
