"""Whole runs with background saves: the same losses, the same checkpoints, the same endings."""

import hashlib
import json
import os
import signal
import threading
from concurrent.futures import Future

import pytest

from flatout.errors import DiskFull, Stopped
from flatout.training import loop
from flatout.training.checkpoint import catalog, savers
from flatout.training.checkpoint.catalog import INFO
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

BESIDE = "auto,-compile,+async-checkpoints"


@pytest.fixture
def slow_disk(monkeypatch):
    """Let a thread write only while the loop waits for it, to make saves as long as possible."""
    waited_for, write_share = threading.Event(), savers.write_share

    def gated(*arguments):
        assert threading.current_thread().name != "checkpoint" or waited_for.wait(60)
        write_share(*arguments)

    class Waited(Future):
        def result(self, timeout=None):
            waited_for.set()
            try:
                return super().result(timeout)
            finally:
                waited_for.clear()

    monkeypatch.setattr(savers, "write_share", gated)
    monkeypatch.setattr(savers, "Job", Waited)


class StopAt(Quiet):
    """Asks this process to stop after a step, as Ctrl+C would."""

    def __init__(self, step):
        self.step = step

    def on_tick(self, step, last_step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def saves(folder):
    return [event for event in RunLog(folder).events if event["event"] == "save"]


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r.get("train/loss"), r.get("val/loss")) for r in records]


def digests(folder):
    """Digest of every file. The state and the info without what varies, no manifest."""
    found = {}
    for step in catalog.steps(folder):
        path = catalog.checkpoint_path(folder, step)
        assert catalog.verify(path) == []
        for file in path.iterdir():
            if file.name not in (catalog.STATE, catalog.MANIFEST, INFO):
                found[step, file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        state = json.loads((path / catalog.STATE).read_text())
        del state["values"]["elapsed_s"]
        info = json.loads((path / INFO).read_text())
        varies = {"elapsed_s", "saved_at", "tokens_per_s", "config_digest", "metrics_bytes"}
        found[step] = state, {key: value for key, value in info.items() if key not in varies}
    return found


@pytest.mark.parametrize("besides", ["", ",+bf16"])
def test_a_run_leaves_the_files_of_one_that_saves_in_the_loop(
    tiny_config, tmp_path, slow_disk, besides
):
    settings = {"train__precision": "auto", "train__steps": 9, "train__eval_every": 4}
    settings |= {"checkpoint__every_steps": 3, "checkpoint__keep": 9, "model__dropout": 0.1}
    results, reported = {}, {}
    for name, speedups in (("loop", "auto,-compile"), ("beside", BESIDE)):
        folder = tmp_path / name
        results[name] = run_training(tiny_config(**settings, speedups=speedups + besides), folder)
        reported[name] = [(e["step"], e["path"].removeprefix(str(folder))) for e in saves(folder)]
    for name in ("weights_sha256", "val_loss", "best_step", "best_val_loss", "steps", "tokens"):
        assert results["beside"][name] == results["loop"][name]
    assert losses(tmp_path / "beside") == losses(tmp_path / "loop")
    assert digests(tmp_path / "beside") == digests(tmp_path / "loop")
    assert reported["beside"] == reported["loop"]
    for event in saves(tmp_path / "beside"):
        assert 0 < event["blocked_ms"] <= 1e3 * event["seconds"] + 1


def test_a_checkpoint_is_reported_when_complete_and_old_ones_are_deleted_then(
    tiny_config, tmp_path, slow_disk
):
    """Saves at 2, 4 and 6 of 7 steps: each is complete once the next one has waited for it."""
    seen = []

    class Watch(Quiet):
        def on_tick(self, step, last_step):
            seen.append((step, catalog.steps(tmp_path / "run")))

        def on_event(self, event):
            if event["event"] == "save":
                seen.append(("save", event["step"]))

    every = {"checkpoint__every_steps": 2, "checkpoint__keep": 1}
    config = tiny_config(train__steps=7, **every, speedups=BESIDE)
    run_training(config, tmp_path / "run", observers=[Watch()])
    first = [(step, []) for step in (1, 2, 3, 4)]
    second = [("save", 2), (5, [2]), (6, [2]), ("save", 4), (7, [4])]
    assert seen[:9] == first + second
    assert ("save", 7) in seen
    assert catalog.steps(tmp_path / "run") == [7]


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_stop_waits_for_the_checkpoint_and_resumes_bit_for_bit(
    tiny_config, tmp_path, slow_disk, stop
):
    every = {"checkpoint__every_steps": 4, "checkpoint__keep": 1}
    config = tiny_config(train__steps=8, **every, speedups=BESIDE, model__dropout=0.1)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[StopAt(stop)])
    assert read_exit_code(tmp_path / "run") == 75
    assert catalog.steps(tmp_path / "run") == [stop]
    steps = [event["step"] for event in saves(tmp_path / "run")]
    assert steps == sorted({4, stop} if stop >= 4 else {stop}), "no step is written twice"
    resumed = run_training(config, tmp_path / "run")
    assert resumed["resumed_from"].endswith(f"step-{stop}")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_failing_run_completes_and_reports_the_checkpoint(tiny_config, tmp_path, slow_disk):
    class Broken(Quiet):
        def on_tick(self, step, last_step):
            if step == 3:
                raise ZeroDivisionError

    config = tiny_config(checkpoint__every_steps=2, speedups=BESIDE)
    with pytest.raises(ZeroDivisionError):
        run_training(config, tmp_path / "run", observers=[Broken()])
    assert catalog.latest(tmp_path / "run") == catalog.checkpoint_path(tmp_path / "run", 2)
    assert [event["step"] for event in saves(tmp_path / "run")] == [2]


@pytest.fixture
def full_disk(monkeypatch):
    """Fill the disk for the saves of some steps."""
    write = savers.write_share

    def full(is_full):
        def refused(snapshot, temporary):
            if is_full(snapshot.documents[catalog.STATE]["step"]):
                raise OSError(28, "No space left on device")
            write(snapshot, temporary)

        monkeypatch.setattr(savers, "write_share", refused)

    return full


def test_a_disk_that_is_full_for_a_while_costs_only_the_checkpoints_of_that_time(
    tiny_config, tmp_path, full_disk
):
    every = {"checkpoint__every_steps": 4, "checkpoint__keep": 1}
    config = tiny_config(train__steps=12, **every, speedups=BESIDE)
    whole = run_training(config, tmp_path / "whole")
    full_disk(lambda step: step == 8)
    result = run_training(config, tmp_path / "run")
    assert {event["step"] for event in saves(tmp_path / "run")} == {4, 12}
    (failed,) = (e for e in RunLog(tmp_path / "run").events if e["event"] == "save_failed")
    assert "No space left on device" in failed["text"]
    assert "The newest checkpoint is that of step 4" in failed["text"]
    assert result["weights_sha256"] == whole["weights_sha256"]


def test_a_full_disk_at_the_end_fails_with_a_fix_and_the_next_start_completes_the_run(
    tiny_config, tmp_path, full_disk
):
    config = tiny_config(train__steps=6, checkpoint__every_steps=4, speedups=BESIDE)
    full_disk(lambda step: step > 4)
    with pytest.raises(DiskFull, match=r"No space left.* has .* free") as failed:
        run_training(config, tmp_path / "run")
    assert failed.value.fix == "Free space on that disk, then run the same command again."
    assert read_exit_code(tmp_path / "run") == 1
    assert catalog.steps(tmp_path / "run") == [4]
    full_disk(lambda step: False)
    assert run_training(config, tmp_path / "run")["resumed_from"].endswith("step-4")


def test_the_last_checkpoint_is_complete_before_the_final_evaluation(
    tiny_config, tmp_path, monkeypatch
):
    class Killed(Exception):
        pass

    def killed(*_, **__):
        assert catalog.steps(tmp_path / "run") == [6]
        raise Killed

    monkeypatch.setattr(loop, "score", killed)
    with pytest.raises(Killed):
        run_training(tiny_config(speedups=BESIDE), tmp_path / "run")
