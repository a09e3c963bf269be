"""`flatout runs`: the state of runs, their differences, and the checkpoints of one."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from flatout.cli.commands.runs import runs
from flatout.config.schema import load_config
from flatout.display import terminal_text
from flatout.errors import CheckpointError
from flatout.storage.json_io import append_line
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import hold_lock

ALIASES = "x0: &x0 [1]\n" + "\n".join(
    f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]" for level in range(1, 10)
)
"""A text whose aliases stand for 9 ** 9 values."""


def make(path, *words, steps=100, records=(), code=None, summary=None, event="start", name="mine"):
    requested = load_config(None, [f"name={name}", f"train.steps={steps}", *words])
    config = requested.with_values({"batch.rows_per_device": 8})
    layout.write_config(path, config, requested=requested)
    for record in records:
        append_line(path / "metrics.jsonl", record)
    if event:
        layout.append_event(path, event)
    if summary is not None:
        layout.append_event(path, "end", **summary)
    if code is not None:
        layout.append_event(path, "exit", code=code)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"event": None}, "new"),
        ({}, "killed"),
        ({"code": 75}, "stopped"),
        ({"code": 130}, "interrupted"),
        ({"code": 143}, "interrupted"),
        ({"code": 1}, "failed"),
        ({"summary": {}, "code": 0}, "finished"),
        ({"summary": {}}, "finished"),
    ],
)
def test_the_state_follows_from_the_directory(tmp_path, given, state):
    make(tmp_path / "run", **given)
    with hold_lock(tmp_path / "run"):
        assert runs(tmp_path).items[0].state == "running"
    assert runs(tmp_path).items[0].state == state


def test_losses_and_steps_are_the_latest(tmp_path):
    records = [
        {"step": 10, "train/loss": 3.0, "val/loss": 3.5},
        {"step": 20, "train/loss": 2.34567, "val/loss": 10**400},
        {"step": 30, "perf/mfu": 0.5},
        {"step": 5000, "train/loss": 9.0},  # damage: the run has 100 steps
        {"step": 10**400, "train/loss": 3.0},
    ]
    make(tmp_path / "run", records=records)
    (tmp_path / "run" / "checkpoints" / "step-20").mkdir(parents=True)
    (item,) = runs(tmp_path).items
    assert (item.step, item.last_step, item.checkpoints) == (30, 100, [20])
    assert (item.train_loss, item.val_loss) == (2.34567, 3.5)
    head, line = runs(tmp_path).summary().splitlines()
    assert head.split()[:4] == ["run", "state", "step", "loss"]
    assert line.split()[:4] == [str(tmp_path / "run"), "killed", "30/100", "2.3457"]


def test_a_finished_run_whose_metrics_were_cut_has_the_results_of_its_summary(tmp_path):
    summary = {"steps": 100, "train_loss": 2.5, "val_loss": 2.75}
    make(tmp_path / "run", summary=summary, records=[{"step": 10, "train/loss": 3.0}])
    (item,) = runs(tmp_path).items
    assert (item.step, item.train_loss, item.val_loss) == (100, 2.5, 2.75)


def test_a_run_whose_journal_was_deleted_says_so(tmp_path):
    make(tmp_path / "run", event=None)
    (tmp_path / "run" / "checkpoints" / "step-20").mkdir(parents=True)
    found = runs(tmp_path / "run")
    assert found.items[0].state == "killed"
    assert "events.jsonl is missing" in found.notes[0]


def test_size_and_age_count_files_of_the_run_and_its_checkpoints_on_another_disk(tmp_path):
    folder = tmp_path / "runs" / "run"
    make(folder, event=None)
    (tmp_path / "big" / "step-3").mkdir(parents=True)
    (folder / "checkpoints").symlink_to(tmp_path / "big")
    (tmp_path / "big" / "step-3" / "model").write_bytes(bytes(70_000))
    hour_ago = time.time() - 3600
    os.utime(folder / "config.yaml", (hour_ago, hour_ago))
    layout.write_exit_code(folder, 2)  # as a command that is rejected does
    (item,) = runs(tmp_path / "runs").items
    assert item.checkpoints == [3]
    assert item.bytes == 70_000 + sum(
        path.stat().st_size for path in folder.iterdir() if path.is_file()
    )
    assert item.age_s == pytest.approx(3600, abs=30)


@pytest.mark.parametrize("text", ["a: [", ALIASES], ids=["cut", "aliases"])
def test_a_damaged_run_does_not_hide_the_others(tmp_path, text):
    for name, steps in (("one", 10), ("two", 20), ("bad", 30)):
        make(tmp_path / name, steps=steps)
    (tmp_path / "bad" / "config.yaml").write_text(text)
    found = {Path(item.run).name: item for item in runs(tmp_path).items}
    assert {
        name: (item.state, item.settings.get("train.steps")) for name, item in found.items()
    } == {"one": ("killed", 10), "two": ("killed", 20), "bad": ("damaged", None)}


def test_differences_between_runs_of_a_recipe_are_shown(tmp_path, monkeypatch):
    """Values are as the user gave them: a choice of `auto` is not a difference."""
    monkeypatch.chdir(tmp_path)
    make(Path("runs/mine-a"), "optim.lr=1e-3", "train.sample_prompt=one\ntwo", steps=500)
    make(Path("runs/mine-b"), "optim.lr=2e-3", "train.sample_prompt=two", steps=500)
    make(Path("runs/c"), "optim.lr=5e-3", "model.kind=eigenstate", name="other")
    assert {Path(item.run).name: item.settings for item in runs().items} == {
        "mine-a": {"name": "mine", "optim.lr": 1e-3, "train.sample_prompt": "one\ntwo"},
        "mine-b": {"name": "mine", "optim.lr": 2e-3, "train.sample_prompt": "two"},
        "c": {"name": "other"},
    }
    _, *lines = runs().summary().splitlines()
    assert [(line.split()[0], line.split("  ")[-1]) for line in lines] == [
        ("mine-a", "optim.lr=0.001, train.sample_prompt=one\\ntwo"),
        ("mine-b", "optim.lr=0.002, train.sample_prompt=two"),
        ("c", "name=other"),
    ]


def test_a_table_of_usual_runs_fits_80_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [{"step": 124, "train/loss": 1.6046, "val/loss": 1.8663}]
    folder = Path("runs/shakespeare-char-428434b0")
    make(folder, steps=124, records=records, summary={}, code=0)
    hours_ago = time.time() - 23.7 * 3600
    (folder / "padding").write_bytes(bytes(190_000))
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml"):
        os.utime(folder / name, (hours_ago, hours_ago))
    line = runs().summary().splitlines()[-1]
    assert line.endswith("  23 h")
    assert len(line) <= 80


def test_no_runs_is_not_an_error_but_a_wrong_directory_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "flatout demo" in runs().summary()
    with pytest.raises(CheckpointError, match="There is no run directory nowhere"):
        runs(Path("nowhere"))


@pytest.fixture
def fox(fox_run, tmp_path, monkeypatch):
    """A copy of a run with a checkpoint at each of its three steps, as runs/fox."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(fox_run[0] / "runs" / "fox", Path("runs/fox"))


def test_the_checkpoints_of_a_run_are_listed_with_their_losses(fox):
    found = runs("fox")
    records = [json.loads(line) for line in (fox / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    assert {item.step: item.val_loss for item in found.checkpoints} == losses
    assert all(item.valid is None and item.problems == [] for item in found.checkpoints)
    assert [item.step for item in found.checkpoints if item.best] == [min(losses, key=losses.get)]
    assert all(
        0 <= item.age_s == pytest.approx(time.time() - item.info.saved_at, abs=60)
        for item in found.checkpoints
    )
    titles, row, _, columns, *rows = terminal_text(found.display(), 80).splitlines()
    assert (titles.split()[0], row.split()[0]) == ("run", "fox")
    assert columns.split() == ["step", "loss", "val", "loss", "size", "age"]
    assert [line.split()[:1] for line in rows[:3]] == [["1"], ["2"], ["3"]]
    assert rows[-1] == "`flatout verify runs/fox` reads every file of the checkpoints."
    assert max(map(len, [*rows, row])) <= 80


def test_a_checkpoint_with_a_missing_file_is_not_valid_and_shows_why(fox):
    path = catalog.checkpoint_path(fox, 1) / "state.json"
    path.unlink()
    manifest = catalog.checkpoint_path(fox, 3) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 9}))
    found = runs(fox)
    assert [item.valid for item in found.checkpoints] == [False, None, False]
    assert f"{path} is missing." in found.summary()
    assert "newer version of flatout" in found.summary()


def test_keep_deletes_all_but_the_newest_valid_and_the_best(fox):
    path = catalog.checkpoint_path(fox, 3) / "model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    left = sorted({2, 3, catalog.best_step_of(catalog.checkpoint_path(fox, 2))})
    found = runs(fox, keep=1)
    assert catalog.steps(fox) == left == [item.step for item in found.checkpoints]
    assert len(found.removed) == 3 - len(left) > 0
    assert runs(fox, keep=1).removed == ()


def test_nothing_is_deleted_while_the_run_trains_or_through_a_link(fox, tmp_path):
    with hold_lock(fox):
        assert len(runs(fox).checkpoints) == 3
        with pytest.raises(CheckpointError, match="is in use"):
            runs(fox, keep=1)
    step, elsewhere = fox / "checkpoints" / "step-1", tmp_path / "elsewhere"
    step.rename(elsewhere)
    step.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link"):
        runs(fox, keep=1)
    assert list(elsewhere.iterdir())
