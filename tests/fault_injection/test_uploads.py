"""Uploads to a mirror that are killed, and mirrors with damaged files: a lost run comes back."""

from __future__ import annotations

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
from flatout.training.mirror.remote import MirrorStore

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 40
KILLS = 6
"""Kills at random moments, with and without compression."""
CALLS = ("openat", "mkdir", "link", "linkat", "sendfile", "rename", "unlink", "unlinkat", "rmdir")
KILLS_PER_CALL = 2


class Mirrored:
    """A run directory with a mirror in a different directory, which has its name."""

    def __init__(self, target, folder, *more):
        self.target, self.run, self.there = target, folder / "run", folder / "mirror" / "run"
        self.settings = (f"checkpoint.mirror=file://{folder / 'mirror'}", *more)

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
        """Train to the end, and return what is wrong. The mirror must then be complete."""
        problems = self.target.lost(self.run, saved_step(self.run))
        problems += self.target.end(self.run, *self.settings)
        steps = catalog.steps(self.run)
        wanted = {f"step-{step}" for step in steps}
        there = {f"step-{step}" for step in MirrorStore(f"file://{self.there}").complete()}
        if not wanted <= there or [*self.there.glob("step-*/upload.json")]:
            problems.append(f"the mirror has {sorted(there)}, the run {sorted(wanted)}")
        return problems


def after_a_kill(mirrored, number):
    """Continue a killed run, every second time in a directory that was lost."""
    lost = mirrored.after() if number % 2 else mirrored.continued()
    return [f"kill {number}: {problem}" for problem in lost]


@pytest.mark.parametrize("more", [(), ("checkpoint.compress=zstd",)], ids=["plain", "compressed"])
def test_a_run_killed_while_it_sends_loses_nothing(more, victim, tmp_path, survived):
    target, draw, kills, problems = victim(STEPS), random.Random(len(more)), 0, []
    assert target.whole
    for number in range(3 * KILLS):
        mirrored = Mirrored(target, tmp_path / str(number), *more)
        child, uploads = mirrored.start(), draw.randint(1, 3)
        seen = set()

        def sends(run=mirrored.run, seen=seen, uploads=uploads):
            seen.update(name for name in saving(run) if ".tmp-upload-" in name)
            return len(seen) >= uploads

        wait_until(sends, child=child)
        time.sleep(draw.uniform(0, 0.03))
        if child.kill().code < 0:
            kills += 1
            problems += after_a_kill(mirrored, kills)
        if kills == KILLS:
            break
    survived("upload-kill", kills, problems)


def killed_at_calls(mirrored, names, places, per_call, folder):
    """Yield the runs that are killed as they enter calls on `places`, each one in a new directory.

    `mirrored` returns a run in a new directory, by its name.
    """
    child = mirrored("whole").start(stopped=True)
    log = folder / "calls"
    with traced([child], log, "-y", "-e", f"trace={','.join(names)}"):
        assert child.wait().code == 0
    numbers = counted(log, *places)
    for name in names:
        for number in spread_out(numbers.get(name, []), per_call):
            target = mirrored(f"{name}-{number}")
            child = target.start(stopped=True)
            fault = f"inject={name}:signal=KILL:when={number}"
            with traced([child], folder / "log", "-e", f"trace={name}", "-e", fault):
                killed = child.wait().code < 0
            if killed:
                yield target


def test_a_kill_between_two_file_operations_of_an_upload_loses_nothing(victim, tmp_path, survived):
    target, kills, problems = victim(), 0, []
    assert target.whole

    def mirrored(name):
        return Mirrored(target, tmp_path / name)

    places = ("/mirror/run", ".tmp-upload-", "/run/mirror.json")
    for one in killed_at_calls(mirrored, CALLS, places, KILLS_PER_CALL, tmp_path):
        kills += 1
        problems += after_a_kill(one, kills)
    assert kills >= KILLS_PER_CALL, "the calls differ from run to run"
    survived("upload-kill", kills, problems)


def test_a_kill_while_old_checkpoints_are_deleted_loses_nothing(victim, tmp_path, survived):
    target, kills, problems = victim(), 0, []
    assert target.whole

    def mirrored(name):
        return Mirrored(target, tmp_path / name, "checkpoint.mirror=none")

    names = ("rename", "openat", "unlinkat", "rmdir", "unlink")
    for one in killed_at_calls(mirrored, names, [".tmp-delete-"], 4, tmp_path):
        kills += 1
        problems += target.lost(one.run, saved_step(one.run))
        problems += target.end(one.run)
    assert kills >= 4, "the calls differ from run to run"
    survived("prune-kill", kills, problems)


@pytest.fixture(scope="module")
def mirror(victim, tmp_path_factory):
    """Return a function that returns a run of 40 steps, and the mirror as of steps 36 and 38."""
    made = {}

    def make(*more):
        if more not in made:
            folder = tmp_path_factory.mktemp("mirror")
            mirrored = Mirrored(victim(STEPS), folder, "checkpoint.keep=3", *more)
            assert mirrored.start().wait().code == 0
            for copy in mirrored.there.glob("step-40*"):
                shutil.rmtree(copy)
            (mirrored.there / "summary.json").unlink()
            made[more] = mirrored, shutil.copytree(mirrored.there, folder / "kept")
        return made[more]

    return make


def restored_with(changes, mirrored, kept):
    """Restore the run with each change of each file of its mirror; return tries and problems."""
    count, problems = 0, []
    assert mirrored.target.whole
    for path, what, content in tries(kept, changes):
        if path.parts[0] == "step-36":
            continue
        shutil.rmtree(mirrored.run, ignore_errors=True)
        shutil.rmtree(mirrored.there)
        shutil.copytree(kept, mirrored.there)
        if content is None:
            (mirrored.there / path).unlink()
        else:
            (mirrored.there / path).write_bytes(content)
        ended = mirrored.start().wait()
        # An upload without its manifest was never complete; what a lost file said, nothing tells.
        name = "" if content is None and len(path.parts) == 1 else path.name.removesuffix(".zst")
        is_upload = path.name != catalog.MANIFEST or content
        found = refusal(ended, name, must=path.parts[0] == "step-38" and bool(is_upload))
        if ended.code == 0:
            found += mirrored.target.unequal(mirrored.run, ended)
        elif path.parts[0] == "step-38":
            found.append(f"no other checkpoint was restored: {ended.err[-2000:]}")
        count += 1
        problems += [f"{path}, {what}: {problem}" for problem in found]
    return count, problems


@pytest.mark.parametrize("more", [(), ("checkpoint.compress=zstd",)], ids=["plain", "compressed"])
def test_a_damaged_file_of_a_mirror_is_rejected_or_replaced(more, mirror, tmp_path, survived):
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

    count, problems = restored_with(damaged, *mirror(*more))
    assert not marker.exists()
    survived("mirror-file", count, problems)
