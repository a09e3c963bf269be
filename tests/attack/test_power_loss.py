"""Power loss: a run and a prepare go on from what a disk still holds, whichever writes it lost."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress

import pytest
from tracing import calls, traced
from write_log import TRACE, Disk, everything, names_first, only_synced, torn, write

from flatout.data.store.verify import verify_dataset
from flatout.errors import FlatoutError
from flatout.training.checkpoint import catalog

pytestmark = [pytest.mark.slow, pytest.mark.faults]

RESUMED = 10
"""Trees of each kind from which the command is run again to its end."""


def recorded(children, words, folder):
    """Run a command that writes into the directory `disk` of a folder, and return its log."""
    (folder / "disk").mkdir(parents=True)
    child = children.start(*words, stopped=True)
    with traced(child, folder / "log", *TRACE):
        ended = child.wait()
    assert ended.code == 0, ended.err
    return folder / "log"


def surviving(log, root):
    """Yield what a power loss leaves, by kind: each different tree, and the log's last event.

    The replay of the whole log must give what the command left.
    """
    disk, seen = Disk(root), set()
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


@pytest.mark.parametrize("way", ["loop", "beside"])
def test_a_power_loss_loses_no_saved_step(way, victim, tmp_path, survived):
    attacked = victim(way=way)
    log = recorded(attacked.children, attacked.words(tmp_path / "disk" / "run"), tmp_path)
    tries, problems, kept = 0, [], {}
    for number, (kind, tree, whole) in enumerate(surviving(log, tmp_path / "disk")):
        tries += 1
        folder = tmp_path / "after"
        run = write(tree, folder) / "run"
        found = attacked.lost(run, saved_in(whole))
        found += records_lost(tree, max(catalog.steps(run), default=0))
        problems += [f"{number}, {kind}: {problem}" for problem in found]
        shutil.rmtree(folder)
        kept.setdefault(kind, []).append(tree)
    for kind, trees in kept.items():
        for tree in random.Random(kind).sample(trees, min(RESUMED, len(trees))):
            folder = tmp_path / "resumed"
            found = attacked.end(write(tree, folder) / "run")
            problems += [f"resumed, {kind}: {problem}" for problem in found]
            shutil.rmtree(folder)
    survived("power", tries, problems)


def test_a_power_loss_during_prepare_leaves_a_whole_dataset_or_none(children, tmp_path, survived):
    text = tmp_path / "book.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)

    def words(folder):
        return [
            *("prepare", text, "--out", folder / "data", "--tokenizer", "byte"),
            *("--workers", 1, "--json"),
        ]

    log = recorded(children, words(tmp_path / "disk"), tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "data").iterdir()}
    draw, tries, problems = random.Random(0), 0, []
    for number, (kind, tree, _) in enumerate(surviving(log, tmp_path / "disk")):
        tries += 1
        folder = tmp_path / "after"
        write(tree, folder)
        if (folder / "data" / "manifest.json").exists():
            try:
                found = list(verify_dataset(folder / "data").problems)
            except FlatoutError as error:
                found = [str(error)]
            problems += [f"{number}, {kind}: {problem}" for problem in found]
        if draw.random() < 0.1:
            ended = children.run(*words(folder))
            data = folder / "data"
            after = (
                {path.name: path.read_bytes() for path in data.iterdir()} if not ended.code else {}
            )
            if after != files:
                problems.append(f"{number}, {kind}: again: {ended.code}: {ended.err[-2000:]}")
        shutil.rmtree(folder)
    survived("prepare-power", tries, problems)
