"""An extended run equals one that had that length from the start."""

import json
import shlex
from pathlib import Path

import pytest

from flatout.errors import ConfigError, Stopped
from flatout.training import run as training
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import INFO
from flatout.training.run import run_training
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

OPEN = {"schedule__kind": "constant", "schedule__warmup": 2}
FALLING = {
    "schedule__kind": "wsd",
    "schedule__warmup": 2,
    "schedule__decay": 0.5,
    "checkpoint__every_steps": 1,
}


def steps_with(folder, metric):
    return [line["step"] for line in RunLog(folder).records() if metric in line]


def steps_trained(folder):
    return steps_with(folder, "train/loss")


def events(folder, kind):
    return [event for event in RunLog(folder).events if event["event"] == kind]


def state_of(folder, step):
    """Return the digests of a checkpoint's tensors, and its metadata without times."""
    files = catalog.read_manifest(catalog.checkpoint_path(folder, step)).files
    state = json.loads((catalog.checkpoint_path(folder, step) / catalog.STATE).read_text())
    return (
        {one.name: one.sha256 for one in files if one.name not in (catalog.STATE, INFO)},
        {**state["values"], "elapsed_s": 0},
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "first"


def test_a_finished_run_made_longer_equals_a_longer_one_bit_for_bit(tiny_config, tmp_path, folder):
    more = {"model__dropout": 0.1, "train__eval_every": 2, "train__eval_tokens": 64}
    asked = tiny_config(train__steps=6, **more, **OPEN)
    whole = run_training(asked, tmp_path / "whole")
    run_training(tiny_config(train__steps=4, **more, **OPEN), folder)
    longer = run_training(asked, folder)
    assert (longer["steps"], longer["resumed_from"]) == (6, str(folder / "checkpoints" / "step-4"))
    assert longer["weights_sha256"] == whole["weights_sha256"]
    assert state_of(folder, 6) == state_of(tmp_path / "whole", 6)
    assert events(folder, "longer")[0]["steps"] == 6
    assert steps_trained(folder) == [1, 2, 3, 4, 5, 6]
    assert steps_with(folder, "val/loss") == [2, 4, 6] == steps_with(tmp_path / "whole", "val/loss")


def test_the_new_length_replaces_the_old_one(tiny_config, folder):
    run_training(tiny_config(train__steps=4, **OPEN), folder)
    longer = run_training(tiny_config(train__steps=6, **OPEN), folder)
    assert layout.read_config(folder).train.steps == layout.read_requested(folder).train.steps == 6
    for steps in (6, None):  # finished; a request without a length keeps the stored one
        assert run_training(tiny_config(train__steps=steps, **OPEN), folder) == longer
    with pytest.raises(ConfigError, match="is planned for 6 steps, but 4 were requested"):
        run_training(tiny_config(train__steps=4, **OPEN), folder)
    assert (layout.read_exit_code(folder), RunLog(folder).state) == (2, "finished")


def test_a_stopped_run_can_be_made_longer(tiny_config, tmp_path, folder, stop_at):
    whole = run_training(tiny_config(train__steps=6, **OPEN), tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(tiny_config(train__steps=4, **OPEN), folder, observers=[stop_at(2)])
    longer = run_training(tiny_config(train__steps=6, **OPEN), folder)
    assert longer["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("stated", "steps"), [({"train__tokens": 6 * 128 - 5}, 6), ({"train__tokens": 4 * 128}, 4)]
)
def test_a_length_may_be_given_in_other_units(tiny_config, folder, stated, steps):
    run_training(tiny_config(train__steps=4, **OPEN), folder)
    longer = run_training(tiny_config(train__steps=None, **stated, **OPEN), folder)
    assert (longer["steps"], layout.read_config(folder).train.steps) == (steps, steps)


def test_a_fractional_warm_up_keeps_its_number_of_steps(tiny_config, tmp_path, folder):
    whole = run_training(tiny_config(train__steps=8, **OPEN), tmp_path / "whole")
    run_training(tiny_config(train__steps=4, **OPEN | {"schedule__warmup": 0.5}), folder)
    for _ in range(2):
        longer = run_training(
            tiny_config(train__steps=8, **OPEN | {"schedule__warmup": 0.5}), folder
        )
        assert longer["weights_sha256"] == whole["weights_sha256"]
    assert layout.read_config(folder).schedule.warmup == 2


def test_the_command_that_the_error_names_equals_a_longer_run(tiny_config, tmp_path, folder):
    whole = run_training(tiny_config(train__steps=12, **FALLING), tmp_path / "whole")
    first = run_training(tiny_config(train__steps=8, checkpoint__keep=6, **FALLING), folder)
    asked = tiny_config(train__steps=12, **FALLING)
    with pytest.raises(ConfigError, match="cannot be made longer, 8 -> 12 steps") as refused:
        run_training(asked, folder)
    assert (RunLog(folder).summary, RunLog(folder).state) == (first, "finished")
    _, resume, _, run = shlex.split(refused.value.fix.split("`")[1])
    longer = run_training(asked, Path(run), resume=resume)
    assert longer["resumed_from"] == str(folder / "checkpoints" / "step-6")
    assert longer["weights_sha256"] == whole["weights_sha256"]
    assert steps_trained(Path(run)) == [*range(7, 13)]


def test_a_run_from_initial_weights_is_made_longer_like_any_other(tiny_config, tmp_path, folder):
    run_training(tiny_config(train__steps=2, **OPEN), tmp_path / "base")
    start = {"train__init_from": str(tmp_path / "base"), **OPEN}
    whole = run_training(tiny_config(train__steps=6, **start), tmp_path / "whole")
    run_training(tiny_config(train__steps=4, **start), folder)
    longer = run_training(tiny_config(train__steps=6, **start), folder)
    assert longer["resumed_from"] == str(folder / "checkpoints" / "step-4")
    assert longer["weights_sha256"] == whole["weights_sha256"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "killed_in",
    [(layout, "write_config"), pytest.param((training, "claimed"), marks=pytest.mark.faults)],
)
def test_a_kill_while_the_length_is_written_loses_nothing(
    tiny_config, tmp_path, folder, monkeypatch, killed_in
):
    whole = run_training(tiny_config(train__steps=6, **OPEN), tmp_path / "whole")
    run_training(tiny_config(train__steps=4, **OPEN), folder)

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*killed_in, kill)
        patch.setattr(layout, "write_exit_code", lambda *_: None)
        with pytest.raises(Killed):
            run_training(tiny_config(train__steps=6, **OPEN), folder)
    longer = run_training(tiny_config(train__steps=6, **OPEN), folder)
    assert (longer["steps"], longer["weights_sha256"]) == (6, whole["weights_sha256"])
