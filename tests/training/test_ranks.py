"""Checkpoints of several processes, sharded or replicated, read by more or fewer processes."""

import json
from pathlib import Path

import pytest
import torch
from stand_in import build, outcome, train
from warm import run_ranks

from flatout.training.checkpoint import catalog, read_write, savers
from flatout.training.checkpoint.merged import read_merged

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LAYOUTS = {"ddp": 2, "fsdp": 2, "fsdp4": 4, "hsdp": 4}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the directory of all runs, and the reports of 2 and 4 processes."""
    folder = tmp_path_factory.mktemp("ranks")
    alone = build(folder / "alone", seed=11)
    train(alone, 4)
    savers.save(alone)
    reports = {}
    for world_size in (2, 4):
        report = folder / f"report-{world_size}.json"
        launch(world_size, folder, report)
        reports[world_size] = json.loads(report.read_text())
    return folder, reports


def launch(world_size, *arguments):
    done = run_ranks([HERE / "ranks_worker.py", *arguments], world_size)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=LAYOUTS)
def layout(request, ranks):
    folder, reports = ranks
    return folder, request.param, reports[LAYOUTS[request.param]]


def test_the_same_ranks_resume_bit_for_bit(layout):
    _, name, report = layout
    assert report[name]["exact"]


def test_one_process_and_several_read_each_others_checkpoints(layout):
    """One process writes, several read and write again, one reads: nothing changes."""
    folder, name, _ = layout
    there = folder / "alone" / "checkpoints" / "step-4"
    back = folder / f"{name}-again" / "checkpoints" / "step-4"
    first, second = build(folder, seed=5), build(folder, seed=6)
    read_write.load(first, there)
    differences = read_write.load(second, back)
    assert "written by" in differences[0]
    one, two = read_merged(there), read_merged(back)
    assert all(torch.equal(one[name], two[name]) for name in one | two)
    one, two = outcome(first, 3), outcome(second, 3)
    for key in ("losses", "weights", "moments", "numbers", "scale"):
        assert one[key] == two[key], key


def test_every_rank_writes_its_share_and_no_byte_twice(layout):
    folder, name, _ = layout
    path = folder / name / "checkpoints" / "step-3"
    index = json.loads((path / "index.json").read_text())["tensors"]
    for tensor, entry in index.items():
        volume = sum(torch.Size(piece["shape"]).numel() for piece in entry["slices"])
        assert volume == torch.Size(entry["shape"]).numel(), tensor
    writers = {
        piece["file"]
        for entry in index.values()
        for piece in entry["slices"]
        if piece["file"].startswith("model")
    }
    assert len(writers) == LAYOUTS[name]
    assert json.loads((path / "state.json").read_text())["world_size"] == LAYOUTS[name]
    assert catalog.verify(path) == []


def test_ranks_with_different_tokens_draw_different_numbers(layout):
    _, name, report = layout
    assert report[name]["apart"]
    assert "written by 1 process and" in report[name]["differences"][0]


def test_a_failure_on_one_rank_fails_all_ranks(layout):
    _, name, report = layout
    assert report[name]["failure"]
    assert report[name]["failure_beside"]
    assert report[name]["damage"]


def test_background_saves_write_what_the_loop_writes(layout):
    _, name, report = layout
    assert report[name]["beside"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_stop_one_step_after_the_request(ranks, world_size):
    assert ranks[1][world_size]["stops"] == [6.0] * world_size
