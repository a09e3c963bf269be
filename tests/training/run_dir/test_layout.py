import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from flatout import files
from flatout.config.schema import RunConfig, load_config
from flatout.errors import CheckpointError, ConfigError, HardwareError
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import hold_lock, is_locked
from flatout.training.run_dir.resume import config_to_resume, resume_from

HOLD = """
import sys, time
from pathlib import Path
from flatout.training.run_dir.lock import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""

LOOK = """
import sys, time
from pathlib import Path
from flatout.training.run_dir.lock import is_locked
print("looking", flush=True)
while True:
    is_locked(Path(sys.argv[1]))
    time.sleep(0.001)
"""


class Ear:
    """Records messages."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def task(self, *args, **kwargs):
        from flatout.progress import SILENT

        return SILENT.task(*args, **kwargs)


def fake_checkpoint(run, step, content=b"x", *, inside="checkpoints"):
    """Create a checkpoint whose files match its manifest."""
    path = run / inside / f"step-{step}"
    path.mkdir(parents=True)
    (path / "state.json").write_bytes(content)
    (path / "index.json").write_text('{"tensors": {}, "aliases": {}}')
    facts = {
        name: {"bytes": (path / name).stat().st_size, "sha256": files.sha256(path / name)}
        for name in ("state.json", "index.json")
    }
    (path / "manifest.json").write_text(
        json.dumps({"format_version": 1, "step": step, "files": facts})
    )
    return path


def test_a_run_is_named_after_its_recipe_and_its_settings():
    config = load_config(None, ["name=demo", "optim.lr=3e-4"])
    name = layout.run_name(config)
    assert name.startswith("demo-")
    assert len(name) == len("demo-") + 8
    assert layout.run_name(load_config(None, ["name=demo", "optim.lr=3e-4"])) == name
    assert layout.run_name(load_config(None, ["name=demo", "optim.lr=4e-4"])) != name


@pytest.mark.parametrize(
    "override",
    [
        "log.every=3",
        "checkpoint.every_steps=7",
        "checkpoint.dir=/x",
        "parallel.shard=2",
        "train.sample_prompt=hi",
    ],
)
def test_free_keys_do_not_change_the_name_of_a_run(override):
    assert layout.run_name(load_config(None, [override])) == layout.run_name(RunConfig())


@pytest.mark.parametrize(("name", "stem"), [("a/b c", "a-b-c-"), ("../x", "x-"), ("...", "run-")])
def test_a_recipe_name_becomes_a_valid_folder_name(name, stem):
    assert layout.run_name(RunConfig(name=name)).startswith(stem)


def test_the_stored_configuration_reads_back_equal(tmp_path):
    config = load_config(
        None,
        [
            "model.num_layers=2",
            "optim.eps=1e-8",
            "train.sample_prompt='ünï: #1'",
            "speedups=[bf16]",
        ],
    )
    layout.write_config(tmp_path / "run", config)
    assert layout.read_config(tmp_path / "run") == config


def test_resume_refuses_and_names_a_contradiction(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["train.steps=10", "optim.lr=0.001"]))
    fake_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 -> 0\.01.*Fix.*--run-dir"):
        config_to_resume(tmp_path, load_config(None, ["train.steps=10", "optim.lr=0.01"]))


def test_free_keys_come_from_the_request_and_the_rest_from_the_stored_configuration(tmp_path):
    stored = load_config(
        None,
        ["train.steps=10", "checkpoint.every_minutes=5", "batch.rows_per_device=4", "name=old"],
    )
    layout.write_config(tmp_path, stored)
    fake_checkpoint(tmp_path, 5)
    config = config_to_resume(
        tmp_path,
        load_config(
            None, ["train.steps=10", "checkpoint.every_steps=3", "log.every=2", "name=new"]
        ),
    )
    assert config.checkpoint.every_steps == 3
    assert config.checkpoint.every_minutes is None
    assert config.log.every == 2
    assert config.batch.rows_per_device == 4
    assert config.name == "old"


def test_keys_left_open_keep_their_stored_values(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["checkpoint.every_steps=3"]))
    fake_checkpoint(tmp_path, 5)
    assert config_to_resume(tmp_path, RunConfig()).checkpoint.every_steps == 3


def test_a_repeated_request_does_not_contradict_what_auto_chose(tmp_path):
    asked = load_config(None, ["train.epochs=2", "speedups=auto,-compile"])
    resolved = asked.with_values({"train.steps": 40, "speedups": ["bf16"]})
    layout.write_config(tmp_path, resolved, asked=asked)
    fake_checkpoint(tmp_path, 5)
    assert config_to_resume(tmp_path, asked) == resolved
    assert (
        config_to_resume(tmp_path, asked.with_values({"train.epochs": 3})) == resolved
    )  # a length is compared with the data at hand
    with pytest.raises(ConfigError, match=r"speedups"):
        config_to_resume(tmp_path, asked.with_values({"speedups": "none"}))


def test_checkpoint_dir_cannot_change(tmp_path):
    layout.write_config(tmp_path / "run", load_config(None, [f"checkpoint.dir={tmp_path / 'one'}"]))
    fake_checkpoint(tmp_path / "one" / "run", 5, inside="")
    with pytest.raises(ConfigError, match=r"checkpoint\.dir: .*/one -> .*/two"):
        config_to_resume(
            tmp_path / "run", load_config(None, [f"checkpoint.dir={tmp_path / 'two'}"])
        )
    assert config_to_resume(tmp_path / "run", RunConfig()).checkpoint.dir == str(tmp_path / "one")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], (1, "auto")),
        (["parallel.shard=4"], (4, "auto")),
        (["parallel.shard=2", "parallel.replicate=3"], (2, 3)),
    ],
)
def test_a_run_may_resume_with_another_number_of_processes(tmp_path, asked, wanted):
    layout.write_config(tmp_path, load_config(None, ["parallel.shard=2", "parallel.replicate=2"]))
    fake_checkpoint(tmp_path, 5)
    parallel = config_to_resume(tmp_path, load_config(None, asked)).parallel
    assert (parallel.shard, parallel.replicate) == wanted


def test_an_empty_folder_has_no_stored_configuration(tmp_path):
    assert config_to_resume(tmp_path, RunConfig()) is None
    assert layout.read_config(tmp_path) is None


def test_a_start_that_never_saved_does_not_bind_the_next_one(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "step-5.tmp-aa").mkdir(parents=True)
    assert config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"])) is None


@pytest.mark.parametrize("left", ["step-5", "step-5.tmp-old-aa", "step-5.aside-aa"])
def test_a_run_that_has_saved_keeps_its_configuration(tmp_path, left):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"]))


def test_a_finished_run_without_checkpoints_keeps_its_configuration(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    layout.write_summary(tmp_path, {})
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"]))


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path):
    run = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert is_locked(run)
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on "), hold_lock(run):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert not is_locked(run)
    with hold_lock(run):
        assert is_locked(run)
        assert json.loads((run / "lock").read_text())["pid"] == os.getpid()
    assert not is_locked(run)


def test_testing_the_lock_does_not_stop_a_run_from_starting(tmp_path):
    with hold_lock(tmp_path):
        pass
    looking = subprocess.Popen(
        [sys.executable, "-c", LOOK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert looking.stdout.readline() == "looking\n"
        for _ in range(50):
            with hold_lock(tmp_path):
                pass
    finally:
        looking.kill()
        looking.wait()
        looking.stdout.close()


def test_a_folder_without_a_run_is_not_locked(tmp_path):
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resume_auto_takes_the_newest_complete_checkpoint_and_reports_skipped_ones(tmp_path):
    first = fake_checkpoint(tmp_path, 5)
    second = fake_checkpoint(tmp_path, 12)
    ear = Ear()
    assert resume_from(tmp_path, "auto", progress=ear) == second
    assert ear.lines == []
    (second / "state.json").write_bytes(b"y")
    assert resume_from(tmp_path, "auto", progress=ear) == first
    assert "step-12" in ear.lines[0]
    assert "state.json is damaged" in ear.lines[0]


def test_resume_auto_starts_in_an_empty_folder(tmp_path):
    assert resume_from(tmp_path / "none") is None
    assert resume_from(tmp_path) is None


def test_resume_auto_never_starts_over_on_its_own(tmp_path):
    (fake_checkpoint(tmp_path, 5) / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"No checkpoint .* is complete.*state\.json is missing"
    ):
        resume_from(tmp_path)


def test_resume_auto_deletes_what_killed_saves_left(tmp_path):
    whole = fake_checkpoint(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-7.tmp-ab12").mkdir()
    (tmp_path / "checkpoints" / "step-7.tmp-ab12" / "model").write_text("half")
    ear = Ear()
    assert resume_from(tmp_path, progress=ear) == whole
    assert ear.lines == ["Removed step-7.tmp-ab12, left by a save that was killed."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_a_checkpoint_whose_replacement_was_killed_is_restored(tmp_path):
    whole = fake_checkpoint(tmp_path, 5)
    whole.rename(whole.with_name("step-5.tmp-old-aa"))
    (tmp_path / "checkpoints" / "step-5.tmp-bb").mkdir()
    assert resume_from(tmp_path) == whole
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_resume_never_refuses_a_folder_that_is_not_empty(tmp_path):
    with hold_lock(tmp_path):
        assert resume_from(tmp_path, "never") is None
    assert resume_from(tmp_path / "none", "never") is None
    layout.write_config(tmp_path, RunConfig())
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        resume_from(tmp_path, "never")


def test_resume_from_a_path_takes_a_checkpoint_or_a_run(tmp_path):
    path = fake_checkpoint(tmp_path / "other", 5)
    assert resume_from(tmp_path / "new", str(path)) == path
    assert resume_from(tmp_path / "new", str(tmp_path / "other")) == path
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        resume_from(tmp_path / "new", str(path))


@pytest.mark.parametrize("asked", ["old", "old/checkpoints/step-10"])
def test_the_same_resume_from_elsewhere_continues_the_run_it_started(tmp_path, asked):
    origin, new, ear = fake_checkpoint(tmp_path / "old", 10), tmp_path / "new", Ear()
    new.mkdir()
    for _ in range(2):
        assert resume_from(new, str(tmp_path / asked), progress=ear) == origin
    own = fake_checkpoint(new, 25)
    assert ear.lines == []
    assert resume_from(new, str(tmp_path / asked), progress=ear) == own
    assert "Resuming from step-25" in ear.lines[0]
    shutil.rmtree(tmp_path / "old")
    assert resume_from(new, str(tmp_path / asked)) == own
    assert resume_from(new) == own


def test_another_origin_starts_another_branch(tmp_path):
    new = tmp_path / "new"
    first, second = (
        fake_checkpoint(tmp_path / "one", 10),
        fake_checkpoint(tmp_path / "two", 12, b"2"),
    )
    assert resume_from(new, str(first)) == first
    fake_checkpoint(new, 25)
    for _ in range(2):
        assert resume_from(new, str(second)) == second
    ear = Ear()
    assert resume_from(new, progress=ear) == second
    assert "where this run started" in ear.lines[0]
    shutil.rmtree(new / "checkpoints")
    came = fake_checkpoint(new, 25, b"of another course")
    assert resume_from(new, str(second)) == came


def test_a_run_killed_before_its_first_save_resumes_from_its_origin(
    tmp_path,
):
    origin, new, ear = fake_checkpoint(tmp_path / "old", 10), tmp_path / "new", Ear()
    resume_from(new, str(tmp_path / "old"))
    fake_checkpoint(tmp_path / "old", 20)
    assert resume_from(new, progress=ear) == origin
    assert str(new / "origin.json") in ear.lines[0]
    shutil.rmtree(origin)
    with pytest.raises(
        CheckpointError,
        match=r"started from .*step-10, which no longer exists.*delete .*origin\.json",
    ):
        resume_from(new)
    (new / "origin.json").unlink()
    assert resume_from(new) is None


def test_a_runs_own_earlier_checkpoint_is_not_an_origin(tmp_path):
    early, late = fake_checkpoint(tmp_path, 5), fake_checkpoint(tmp_path, 10)
    assert resume_from(tmp_path, str(early)) == early
    assert resume_from(tmp_path, str(tmp_path)) == late
    assert not (tmp_path / "origin.json").exists()


def test_resume_from_a_path_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        resume_from(tmp_path, str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        resume_from(tmp_path, str(tmp_path))
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        resume_from(tmp_path, str(tmp_path / "bare"))


def test_events_are_lines_and_an_unfinished_one_spoils_no_other(tmp_path):
    layout.append_event(tmp_path, "start", world_size=2)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "sav')
    layout.append_event(tmp_path, "resume", folder="a field of any name")
    assert [event["event"] for event in layout.read_events(tmp_path)] == ["start", "resume"]
    assert layout.read_events(tmp_path)[0]["world_size"] == 2


def test_json_is_replaced_atomically(tmp_path, monkeypatch):
    layout.write_summary(tmp_path, {"val_loss": 0.1 + 0.2})
    monkeypatch.setattr(
        files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        layout.write_summary(tmp_path, {"val_loss": 1.0})
    assert layout.read_summary(tmp_path) == {"val_loss": 0.1 + 0.2}


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"summary\.json is damaged"):
        layout.read_summary(tmp_path)


def test_the_exit_code_is_stored_and_cleared(tmp_path):
    assert layout.read_exit_code(tmp_path) is None
    layout.write_exit_code(tmp_path, 75)
    assert layout.read_exit_code(tmp_path) == 75
    layout.clear_exit_code(tmp_path)
    layout.clear_exit_code(tmp_path)
    assert layout.read_exit_code(tmp_path) is None


def test_too_small_a_disk_is_an_error_before_the_run(tmp_path):
    layout.require_free_disk(tmp_path / "runs" / "not-yet", 1)
    with pytest.raises(
        HardwareError, match=r"need 1073741824\.0 GiB more.*Fix: Free space.*checkpoint\.dir"
    ):
        layout.require_free_disk(tmp_path, 2**60)


def test_existing_checkpoints_count_as_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(layout.shutil, "disk_usage", lambda _: SimpleNamespace(free=600 * 1024))
    step = fake_checkpoint(tmp_path, 5, bytes(2**20))
    size = files.folder_bytes(step)
    layout.require_free_disk(tmp_path, size + 600 * 1024)
    with pytest.raises(
        HardwareError,
        match=r"need 1\.5 MiB more; .* has 600\.0 KiB free"
        r".*Fix: Free space there, or lower checkpoint\.keep\.$",
    ):
        layout.require_free_disk(tmp_path, size + 1536 * 1024)
    step.rename(tmp_path / "checkpoints" / "step-5.aside-a")
    with pytest.raises(HardwareError):
        layout.require_free_disk(tmp_path, size + 600 * 1024)


def test_only_runs_are_listed_oldest_first(tmp_path):
    for age, name in enumerate(["new", "group/old"]):
        layout.write_config(tmp_path / name, RunConfig())
        stamp = time.time() - 1000 * age
        os.utime(tmp_path / name / "config.yaml", (stamp, stamp))
    (tmp_path / "no-run").mkdir()
    assert layout.list_runs(tmp_path) == [tmp_path / "group" / "old", tmp_path / "new"]
    assert layout.list_runs(tmp_path / "new") == [tmp_path / "new"]
    assert layout.list_runs(tmp_path / "missing") == []


@pytest.mark.parametrize("place", ["file.txt", "file.txt/run"])
def test_a_path_that_cannot_be_a_run_directory_is_named(tmp_path, place):
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written"), hold_lock(tmp_path / place):
        pass
    assert (tmp_path / "file.txt").read_text() == "mine"
