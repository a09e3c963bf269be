"""Power loss: a run and a prepare go on from what a disk still holds, whichever writes it lost."""

import json
import random
import shutil
from contextlib import suppress

import pytest
from tracing import calls, traced
from write_log import TRACE, Disk, everything, names_first, only_synced, torn, write

from flatout.data.store.manifest import read_manifest
from flatout.errors import FlatoutError
from flatout.storage.whole import damage_of, name_of
from flatout.training.checkpoint import catalog

pytestmark = [pytest.mark.slow, pytest.mark.faults]

RESUMED, FEW_RESUMED = 10, 3
"""Trees of each kind from which the command is run again to its end; few of costly ones."""


def recorded(start, folder):
    """Run what `start` starts, which writes into the directory `disk` of a folder; return the log.

    `start` returns the processes, stopped.
    """
    (folder / "disk").mkdir(parents=True)
    children = start()
    with traced(children, folder / "log", *TRACE):
        for ended in [child.wait() for child in children]:
            assert ended.code == 0, ended.err
    return folder / "log"


def surviving(log, root, scratch=None):
    """Yield what a power loss leaves, by kind: each different tree, and all that was written.

    The replay of the whole log must give what the command left.
    """
    disk, seen = Disk(root, scratch), set()
    draw = random.Random(0)
    kinds = {"only synced": only_synced, "names first": names_first, "torn": torn(draw)}
    for _, *call in calls(log):
        if not disk.apply(*call):
            continue
        whole = disk.tree(everything)
        for kind, survives in kinds.items():
            tree = disk.tree(survives)
            key = (kind, frozenset(tree.items()))
            if key not in seen:
                seen.add(key)
                yield kind, tree, whole
    left = {f"/{path.relative_to(root)}": path for path in root.rglob("*")}
    assert {path for path in disk.tree(everything) if path} == set(left)
    for path, data in disk.tree(everything).items():
        assert data is None or data == left[path].read_bytes(), path


def saved_in(tree):
    """Return the last step that the events in a tree report as saved."""
    lines = (tree.get("/run/events.jsonl") or b"").split(b"\n")[:-1]
    events = [json.loads(line) for line in lines]
    return max((event["step"] for event in events if event["event"] == "save"), default=0)


def records_lost(tree, step):
    """Return what is wrong with the records on a disk whose newest checkpoint is that of `step`."""
    lines = (tree.get("/run/metrics.jsonl") or b"").split(b"\n")[:-1]
    last = 0
    for line in lines:
        with suppress(ValueError):  # zeros, or the rest of a line
            last = max(last, json.loads(line)["step"])
    return [f"the records end at step {last}, and step {step} is saved"] if last < step else []


def checked(target, found, folder):
    """Check the newest checkpoint on each disk; return the tries, the problems, the disks by kind.

    `found` yields the disks as `surviving` does, with the run in the directory `run`.
    """
    tries, problems, kept = 0, [], {}
    for number, (kind, tree, whole) in enumerate(found):
        tries += 1
        local = {path: data for path, data in tree.items() if not path.startswith("/backup")}
        run = write(local, folder) / "run"
        lost = target.lost(run, saved_in(whole))
        lost += records_lost(tree, max(catalog.steps(run), default=0))
        problems += [f"{number}, {kind}: {problem}" for problem in lost]
        shutil.rmtree(folder)
        kept.setdefault(kind, []).append(tree)
    return tries, problems, kept


def ended(kept, most, folder, end):
    """Write at most `most` disks of each kind to a folder; return the problems that `end` finds."""
    problems = []
    for kind, trees in kept.items():
        for tree in random.Random(kind).sample(trees, min(most, len(trees))):
            shutil.rmtree(folder, ignore_errors=True)
            found = end(write(tree, folder))
            problems += [f"resumed, {kind}: {problem}" for problem in found]
    return problems


@pytest.mark.parametrize("way", ["loop", "beside"])
def test_a_power_loss_loses_no_saved_step(way, victim, tmp_path, survived):
    target, disk = victim(way=way), tmp_path / "disk"
    log = recorded(lambda: target.start(disk / "run", stopped=True), tmp_path)
    tries, problems, kept = checked(target, surviving(log, disk), tmp_path / "after")
    problems += ended(kept, RESUMED, disk, lambda disk: target.end(disk / "run"))
    survived("power", tries, problems)


@pytest.mark.parametrize("shard", [1, 2], ids=["ddp", "fully-sharded"])
def test_a_power_loss_of_two_ranks_loses_no_saved_step(shard, victim, tmp_path, survived):
    target, disk = victim(4, ranks=2, shard=shard), tmp_path / "disk"
    log = recorded(lambda: target.start(disk / "run", stopped=True), tmp_path)
    tries, problems, kept = checked(target, surviving(log, disk), tmp_path / "after")
    problems += ended(kept, FEW_RESUMED, disk, lambda disk: target.end(disk / "run"))
    survived("rank-power", tries, problems)


def with_backup(found):
    """Yield the disks of `found` with all that has been uploaded: that machine keeps its power."""
    for kind, tree, whole in found:
        there = {path: data for path, data in whole.items() if path.startswith("/backup")}
        here = {path: data for path, data in tree.items() if not path.startswith("/backup")}
        yield kind, here | there, whole


def test_a_power_loss_during_uploads_loses_neither_the_run_nor_its_remote_copy(
    victim, tmp_path, survived
):
    target, disk = victim(4), tmp_path / "disk"
    settings = f"checkpoint.upload=file://{disk / 'backup'}"
    log = recorded(lambda: target.start(disk / "run", settings, stopped=True), tmp_path)
    found = with_backup(surviving(log, disk, target.children.scratch))
    tries, problems, kept = checked(target, found, tmp_path / "after")

    def end(disk):
        problems = target.end(disk / "run", settings)
        local = {
            path.name: path.read_bytes() for path in (disk / "run/checkpoints/step-4").iterdir()
        }
        newest = disk / "backup" / "run" / name_of("step-4", local["manifest.json"])
        if {path.name: path.read_bytes() for path in newest.glob("*")} != local:
            problems.append("the remote copy lacks the last checkpoint")
        shutil.rmtree(disk / "run")
        return problems + target.end(disk / "run", settings)

    problems += ended(kept, FEW_RESUMED, disk, end)
    survived("upload-power", tries, problems)


def test_a_power_loss_during_prepare_leaves_a_whole_dataset_or_none(children, tmp_path, survived):
    text = tmp_path / "book.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)

    def words(folder):
        return [
            *("prepare", text, "--out", folder / "data", "--tokenizer", "byte"),
            *("--workers", 1, "--json"),
        ]

    disk = tmp_path / "disk"
    log = recorded(lambda: [children.start(*words(disk), stopped=True)], tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "data").iterdir()}
    draw, tries, problems = random.Random(0), 0, []
    for number, (kind, tree, _) in enumerate(surviving(log, tmp_path / "disk")):
        tries += 1
        folder = tmp_path / "after"
        write(tree, folder)
        if (folder / "data" / "manifest.json").exists():
            try:
                found = damage_of(folder / "data", read_manifest(folder / "data").files)
            except FlatoutError as error:
                found = [str(error)]
            problems += [f"{number}, {kind}: {problem}" for problem in found]
        if draw.random() < 0.1:
            again = children.run(*words(folder))
            data = folder / "data"
            after = (
                {path.name: path.read_bytes() for path in data.iterdir()} if not again.code else {}
            )
            if after != files:
                problems.append(f"{number}, {kind}: again: {again.code}: {again.err[-2000:]}")
        shutil.rmtree(folder)
    survived("prepare-power", tries, problems)
