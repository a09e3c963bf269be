import json
import os
import shutil
import time
from pathlib import Path

import pytest

from flatout.cli.commands.runs import runs
from flatout.config.schema import RunConfig, load_config
from flatout.display import terminal_text
from flatout.errors import CheckpointError, ConfigError
from flatout.storage.json_io import append_line
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import hold_lock

ALIASES = "x0: &x0 [1]\n" + "\n".join(
    f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]" for level in range(1, 10)
)
"""A text whose aliases stand for 9 ** 9 values."""


def make(path, *, steps=100, records=(), code=None, summary=None, event="start"):
    layout.write_config(path, load_config(None, [f"train.steps={steps}"]))
    for record in records:
        append_line(path / "metrics.jsonl", record)
    if event:
        layout.append_event(path, event)
    if summary is not None:
        layout.write_summary(path, summary)
    if code is not None:
        layout.write_exit_code(path, code)


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
    (item,) = runs(tmp_path).items
    assert item.state == state


def test_a_locked_run_is_running(tmp_path):
    make(tmp_path / "run", code=75)
    with hold_lock(tmp_path / "run"):
        assert runs(tmp_path).items[0].state == "running"
    assert runs(tmp_path).items[0].state == "stopped"


def test_losses_and_steps_are_the_latest(tmp_path):
    records = [
        {"step": 10, "train/loss": 3.0, "val/loss": 3.5},
        {"step": 20, "train/loss": 2.0, "val/loss": 10**400},
        {"step": 30, "perf/mfu": 0.5},
        {"step": 5000, "train/loss": 9.0},  # damage: the run has 100 steps
        {"step": 10**400, "train/loss": 3.0},
    ]
    make(tmp_path / "run", records=records)
    (tmp_path / "run" / "checkpoints" / "step-20").mkdir(parents=True)
    (item,) = runs(tmp_path).items
    assert (item.step, item.last_step, item.checkpoints) == (30, 100, [20])
    assert (item.train_loss, item.val_loss) == (2.0, 3.5)


def test_size_and_age(tmp_path):
    folder = tmp_path / "run"
    make(folder, event=None)
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "model").write_bytes(bytes(5000))
    hour_ago = time.time() - 3600
    os.utime(folder / "config.yaml", (hour_ago, hour_ago))
    (item,) = runs(tmp_path).items
    configs = (folder / "config.yaml", folder / "config.copy.yaml")
    assert item.bytes == 5000 + sum(path.stat().st_size for path in configs)
    assert item.age_s == pytest.approx(3600, abs=30)
    layout.write_exit_code(tmp_path / "run", 2)  # as a command that is refused does
    assert runs(tmp_path).items[0].age_s == pytest.approx(3600, abs=30)


def test_checkpoints_elsewhere_count_too(tmp_path):
    config = RunConfig().with_values({"checkpoint.dir": str(tmp_path / "big")})
    layout.write_config(tmp_path / "runs" / "a", config)
    (tmp_path / "big" / "a" / "step-3").mkdir(parents=True)
    (tmp_path / "big" / "a" / "step-3" / "model").write_bytes(bytes(70_000))
    (item,) = runs(tmp_path / "runs").items
    assert item.checkpoints == [3]
    assert item.bytes > 70_000


@pytest.mark.parametrize("text", ["a: [", ALIASES], ids=["cut", "aliases"])
def test_a_damaged_run_does_not_hide_the_others(tmp_path, text):
    for name, steps in (("one", 10), ("two", 20), ("bad", 30)):
        make(tmp_path / name, steps=steps)
    for name in ("config.yaml", "asked.yaml"):
        (tmp_path / "bad" / name).write_text(text)
    found = {Path(item.run).name: item for item in runs(tmp_path).items}
    states = {name: item.state for name, item in found.items()}
    assert states == {"one": "killed", "two": "killed", "bad": "damaged"}
    steps = {name: item.settings.get("train.steps") for name, item in found.items()}
    assert steps == {"one": 10, "two": 20, "bad": None}


def test_the_table_has_one_line_per_run(tmp_path):
    make(tmp_path / "one", records=[{"step": 1000, "train/loss": 2.34567}], steps=2000)
    make(tmp_path / "two", steps=2000, code=75)
    head, *lines = runs(tmp_path).summary().splitlines()
    assert head == f"In {tmp_path}:"
    assert len(lines) == 3
    assert lines[0].split()[:4] == ["run", "state", "step", "loss"]
    assert lines[1].split()[:4] == ["one", "killed", "1,000/2,000", "2.3457"]


def store(path, *words, recipe="mine"):
    requested = load_config(None, [f"name={recipe}", *words])
    config = requested.with_values({"batch.rows_per_device": 8})
    layout.write_config(path, config, requested=requested)


def test_a_setting_with_line_breaks_stays_on_its_line(tmp_path):
    store(tmp_path / "mine-a", "train.sample_prompt=one\ntwo")
    store(tmp_path / "mine-b", "train.sample_prompt=three")
    lines = runs(tmp_path).summary().splitlines()
    assert lines[2].endswith("  train.sample_prompt=one\\ntwo")
    assert len(lines) == 4


def test_differences_between_runs_of_a_recipe_are_shown(tmp_path):
    """Values are as the user gave them: a choice of `auto` is not a difference."""
    store(tmp_path / "mine-a", "optim.lr=1e-3", "train.steps=500")
    store(tmp_path / "mine-b", "optim.lr=2e-3", "train.tokens=1000")
    others = ("optim.lr=5e-3", "train.steps=500", "model.kind=eigenstate")
    store(tmp_path / "c", *others, recipe="other")
    assert {Path(item.run).name: item.settings for item in runs(tmp_path).items} == {
        "mine-a": {"name": "mine", "optim.lr": 1e-3, "train.steps": 500},
        "mine-b": {"name": "mine", "optim.lr": 2e-3, "train.tokens": 1000},
        "c": {"name": "other"},
    }
    _, *lines = runs(tmp_path).summary().splitlines()
    assert [line.split("  ")[-1] for line in lines[1:]] == [
        "optim.lr=0.001, train.steps=500",
        "optim.lr=0.002, train.tokens=1000",
        "name=other",
    ]


def test_a_table_of_usual_runs_fits_80_columns(tmp_path):
    records = [{"step": 124, "train/loss": 1.6046, "val/loss": 1.8663}]
    folder = tmp_path / "shakespeare-char-428434b0"
    make(folder, steps=124, records=records, summary={}, code=0)
    hours_ago = time.time() - 23.7 * 3600
    (folder / "padding").write_bytes(bytes(190_000))
    for name in ("metrics.jsonl", "events.jsonl", "summary.json", "exit_code", "config.yaml"):
        os.utime(folder / name, (hours_ago, hours_ago))
    line = runs(tmp_path).summary().splitlines()[-1]
    assert line.endswith("  23 h")
    assert len(line) <= 80


def test_no_runs_is_not_an_error_but_a_wrong_directory_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs().items == []
    assert "flatout demo" in runs().summary()
    with pytest.raises(CheckpointError, match="There is no run directory nowhere"):
        runs(Path("nowhere"))


@pytest.fixture
def fox(fox_run, tmp_path, monkeypatch):
    """A copy of a run with a checkpoint at each of its three steps, as runs/fox."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(fox_run[0] / "runs" / "fox", Path("runs/fox"))


def spoil(run, step):
    path = catalog.checkpoint_path(run, step) / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


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
    head, titles, row, _, columns, *rows = found.summary().splitlines()
    assert (head, titles.split()[0], row.split()[0]) == ("In runs:", "run", "fox")
    assert columns.split() == ["step", "loss", "val", "loss", "size", "age"]
    assert [line.split()[:1] for line in rows[:3]] == [["1"], ["2"], ["3"]]
    assert rows[-1] == "`flatout verify runs/fox` reads every file of the checkpoints."
    assert max(map(len, terminal_text(found.display(), 80).splitlines())) <= 80


def test_a_checkpoint_with_a_missing_file_is_not_valid_and_shows_why(fox):
    path = catalog.checkpoint_path(fox, 1) / "state.json"
    path.unlink()
    manifest = catalog.checkpoint_path(fox, 3) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 9}))
    found = runs(fox)
    assert [item.valid for item in found.checkpoints] == [False, None, False]
    assert f"{path} is missing." in found.summary()
    assert "format_version 9" in found.summary()


def test_keep_deletes_all_but_the_newest_valid_and_the_best(fox):
    spoil(fox, 3)
    best = catalog.best_step_of(catalog.checkpoint_path(fox, 2))
    found = runs(fox, keep=1)
    left = sorted({2, 3, best})
    assert catalog.steps(fox) == left == [item.step for item in found.checkpoints]
    assert len(found.removed) == 3 - len(left)
    assert runs(fox, keep=1).removed == ()


def test_those_set_aside_are_listed_and_deleted_on_request(fox):
    (moved,) = catalog.set_aside(fox, after=2)
    found = runs(fox)
    assert found.aside == (str(moved),)
    assert "`flatout runs runs/fox --remove-aside` deletes" in found.summary()
    found = runs(fox, remove_aside=True)
    assert (found.removed, found.aside, moved.exists()) == ((str(moved),), (), False)
    assert f"Deleted {moved}" in found.summary()
    assert catalog.steps(fox) == [1, 2]


def test_nothing_is_deleted_while_the_run_trains(fox):
    with hold_lock(fox):
        assert len(runs(fox).checkpoints) == 3
        for words in ({"keep": 1}, {"remove_aside": True}):
            with pytest.raises(CheckpointError, match="is in use"):
                runs(fox, **words)
    assert catalog.steps(fox) == [1, 2, 3]


def test_nothing_is_deleted_through_a_link(fox, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (fox / "checkpoints").rename(elsewhere)
    (fox / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link"):
        runs(fox, keep=1)
    assert len(list(elsewhere.iterdir())) == 3


@pytest.mark.parametrize("words", [{"keep": 1}, {"remove_aside": True}])
def test_what_deletes_needs_a_run(fox, words):
    with pytest.raises(ConfigError, match="deletes checkpoints of one run"):
        runs(**words)
