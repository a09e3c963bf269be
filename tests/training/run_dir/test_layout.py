"""The files of a run directory: its name, configuration, events, summary and exit code."""

import os
import time
from types import SimpleNamespace

import pytest
from fakes import fake_checkpoint

import flatout
from flatout.config.schema import RunConfig, load_config
from flatout.errors import ConfigError, HardwareError
from flatout.storage import files
from flatout.training.run_dir import layout
from flatout.training.run_dir.resume import run_name
from flatout.training.run_dir.runlog import RunLog


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text("train: {steps: 1000}\nlog: {every: 5}\nmodel: {num_layers: 2}\n")
    return path


def test_a_run_is_named_after_its_recipe_and_what_was_stated(recipe):
    name = run_name(recipe, ["optim.lr=3e-4"])
    assert name.startswith("demo-")
    assert len(name) == len("demo-") + 8
    assert run_name(recipe, ["optim.lr=0.0003"]) == name
    assert run_name(recipe, ["optim.lr=4e-4"]) != name
    assert run_name(recipe, []) != name
    for rank in (4, 8):  # a section is its keys
        section = run_name(recipe, [f"lora={{rank: {rank}}}"])
        assert section == run_name(recipe, [f"lora.rank={rank}"]) != run_name(recipe, [])
    recipe.write_text("# the same\nmodel:\n  num_layers: 2\ntrain:\n  steps: 1e3\n")
    assert run_name(recipe, ["optim.lr=3e-4"]) == name
    recipe.write_text("model: {num_layers: 3}\ntrain: {steps: 1000}\n")
    assert run_name(recipe, ["optim.lr=3e-4"]) != name


def test_the_name_of_a_run_does_not_depend_on_defaults_or_on_what_a_recipe_of_flatout_contains():
    """A release may change both. The same command still finds its run."""
    assert run_name("demo") == "demo-8a7b5fd6"
    assert run_name("demo", ["train.steps=1e3", "data.path=data/x"]) == "demo-5d325ee3"
    assert run_name("demo-char") != run_name("demo", ["name=demo-char"])


def test_a_config_built_in_python_is_named_after_the_fields_that_were_set():
    config = RunConfig(name="own", train={"steps": 10})
    assert run_name(config) == run_name(RunConfig(name="own", train={"steps": 10.0}))
    assert run_name(config) != run_name(RunConfig(name="own"))
    assert run_name(config, ["optim.lr=1"]) != run_name(config)


@pytest.mark.parametrize(
    "override",
    [
        *("log.every=3", "train.devices=2", "parallel.shard=2"),
        *("train.eval_every_epochs=2", "train.sample_prompt=hi", "checkpoint.every_steps=7"),
        "checkpoint.best=false",
    ],
)
def test_free_keys_do_not_change_the_name_of_a_run(override, recipe):
    assert run_name(recipe, [override]) == run_name(recipe)


@pytest.mark.parametrize(("name", "stem"), [("a/b c", "a-b-c-"), ("../x", "x-"), ("...", "run-")])
def test_a_recipe_name_becomes_a_valid_directory_name(name, stem):
    assert run_name(RunConfig(name=name)).startswith(stem)


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


def test_an_unfinished_event_does_not_damage_the_others(tmp_path):
    layout.append_event(tmp_path, "start", world_size=2)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "sav')
    layout.append_event(tmp_path, "resume", folder="a field of any name")
    assert [event["event"] for event in RunLog(tmp_path).events] == ["start", "resume"]
    assert RunLog(tmp_path).events[0]["world_size"] == 2


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
        HardwareError, match=r"need 1152921504\.6 GB more.*Fix: Free space.*--run-dir DIR"
    ):
        layout.require_free_disk(tmp_path, 2**60)


def test_existing_checkpoints_count_as_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(layout.shutil, "disk_usage", lambda _: SimpleNamespace(free=600 * 1024))
    step = fake_checkpoint(tmp_path, 5, bytes(2**20))
    size = files.folder_bytes(step)
    layout.require_free_disk(tmp_path, size + 600 * 1024)
    with pytest.raises(
        HardwareError,
        match=r"need 1\.6 MB more\. .* has 614\.4 kB free"
        r".*Fix: Free space there, or keep fewer checkpoints \(checkpoint\.keep, ",
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


def test_an_empty_requested_configuration_is_damaged(tmp_path):
    """It would read as the defaults, and the stored settings as changes."""
    assert layout.read_requested(tmp_path) is None
    layout.write_config(tmp_path, RunConfig())
    (tmp_path / layout.CONFIG).write_text("requested:\nresolved: {}\n...\n")
    with pytest.raises(ConfigError, match=r"has no settings under `requested` and `resolved`"):
        layout.read_requested(tmp_path)
    (tmp_path / layout.CONFIG).unlink()
    layout.write_config(tmp_path, RunConfig())
    text = (tmp_path / layout.CONFIG).read_text()
    for length in range(len(text) - 5, len(text) - 60, -1):
        (tmp_path / layout.CONFIG).write_text(text[:length])
        with pytest.raises(
            ConfigError, match=r"does not end with `\.\.\.`: it was cut|not valid YAML"
        ):
            layout.read_requested(tmp_path)


def test_a_configuration_of_another_version_names_it(tmp_path):
    layout.write_config(tmp_path, RunConfig())
    text = (tmp_path / layout.CONFIG).read_text()
    newer = text.replace(f"flatout: {flatout.__version__}", "flatout: 99.0")
    (tmp_path / layout.CONFIG).write_text(newer.replace("    lr:", "    warp: null\n    lr:"))
    assert layout.read_config(tmp_path) == RunConfig(), "a null of a newer version means no change"
    (tmp_path / layout.CONFIG).write_text(newer.replace("    lr:", "    warp: 9\n    lr:"))
    with pytest.raises(ConfigError, match=r"'optim\.warp'\. flatout 99\.0 wrote it, and this is"):
        layout.read_config(tmp_path)
