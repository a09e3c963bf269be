"""A run that is made longer equals one that had that length from the start, and is refused where
its rates depended on the length.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flatout.errors import ConfigError, Stopped
from flatout.training import run as training
from flatout.training.checkpoint import catalog
from flatout.training.run import run_training
from flatout.training.run_dir import layout

OPEN = {"schedule__kind": "constant", "schedule__warmup": 2}
FALLING = {
    "schedule__kind": "wsd",
    "schedule__warmup": 2,
    "schedule__decay": 0.5,
    "checkpoint__every_steps": 1,
}


def steps_trained(place):
    return [
        line["step"]
        for line in map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        if "train/loss" in line
    ]


def events(place, kind):
    return [event for event in layout.read_events(place) if event["event"] == kind]


def state_of(place, step):
    """The digest of every tensor and every value of a checkpoint, but for the times in it."""
    files = catalog.read_manifest(catalog.checkpoint_path(place, step))["files"]
    state = json.loads((catalog.checkpoint_path(place, step) / catalog.STATE).read_text())
    return (
        {name: facts["sha256"] for name, facts in files.items() if name != catalog.STATE},
        {**state["values"], "elapsed_s": 0},
        state["ranks"],
    )


@pytest.fixture
def place(tmp_path):
    return tmp_path / "runs" / "first"


def test_a_finished_run_that_is_made_longer_equals_a_longer_one_to_the_bit(
    tiny_config, tmp_path, place
):
    asked = tiny_config(train__steps=6, model__dropout=0.1, **OPEN)
    whole = run_training(asked, tmp_path / "whole")
    run_training(tiny_config(train__steps=4, model__dropout=0.1, **OPEN), place)
    longer = run_training(asked, place)
    assert (longer["steps"], longer["resumed_from"]) == (6, str(place / "checkpoints" / "step-4"))
    assert longer["weights_sha256"] == whole["weights_sha256"]
    assert state_of(place, 6) == state_of(tmp_path / "whole", 6)
    assert events(place, "longer")[0]["steps_before"] == 4
    assert steps_trained(place) == [1, 2, 3, 4, 5, 6]


def test_the_new_length_is_the_runs_own_from_then_on(tiny_config, place):
    run_training(tiny_config(train__steps=4, **OPEN), place)
    longer = run_training(tiny_config(train__steps=6, **OPEN), place)
    assert layout.read_config(place).train.steps == layout.read_asked(place).train.steps == 6
    assert (
        run_training(tiny_config(train__steps=6, **OPEN), place) == longer
    )  # finished, its seal whole
    assert (
        run_training(tiny_config(train__steps=None, **OPEN), place) == longer
    )  # no length stated: its own
    with pytest.raises(ConfigError, match="is planned for 6 steps, and 4 were requested"):
        run_training(tiny_config(train__steps=4, **OPEN), place)


def test_a_stopped_run_can_be_made_longer(tiny_config, tmp_path, place, stop_at):
    whole = run_training(tiny_config(train__steps=6, **OPEN), tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(tiny_config(train__steps=4, **OPEN), place, observers=[stop_at(2)])
    assert (
        run_training(tiny_config(train__steps=6, **OPEN), place)["weights_sha256"]
        == whole["weights_sha256"]
    )


@pytest.mark.parametrize(
    ("stated", "steps"), [({"train__tokens": 6 * 128 - 5}, 6), ({"train__tokens": 4 * 128}, 4)]
)
def test_a_length_may_be_stated_in_other_words(tiny_config, place, stated, steps):
    run_training(tiny_config(train__steps=4, **OPEN), place)
    longer = run_training(tiny_config(train__steps=None, **stated, **OPEN), place)
    assert (longer["steps"], layout.read_config(place).train.steps) == (steps, steps)


def test_a_warm_up_that_is_a_fraction_stays_at_its_steps(tiny_config, tmp_path, place):
    whole = run_training(tiny_config(train__steps=8, **OPEN), tmp_path / "whole")
    run_training(tiny_config(train__steps=4, **OPEN | {"schedule__warmup": 0.5}), place)
    for _ in range(2):
        longer = run_training(
            tiny_config(train__steps=8, **OPEN | {"schedule__warmup": 0.5}), place
        )
        assert longer["weights_sha256"] == whole["weights_sha256"]
    assert layout.read_config(place).schedule.warmup == 2


def test_wsd_continues_from_before_its_decay(tiny_config, tmp_path, place):
    whole = run_training(tiny_config(train__steps=12, **FALLING), tmp_path / "whole")
    run_training(tiny_config(train__steps=8, checkpoint__keep=6, **FALLING), place)
    longer = run_training(tiny_config(train__steps=12, **FALLING), place)
    assert longer["resumed_from"] == str(place / "checkpoints" / "step-6")
    assert longer["weights_sha256"] == whole["weights_sha256"]
    assert sorted(
        path.name.partition(".aside")[0] for path in (place / "checkpoints").glob("*.aside-*")
    ) == ["step-7", "step-8"]


@pytest.mark.parametrize(
    "schedule",
    [{"schedule__kind": "cosine"}, {**FALLING, "checkpoint__keep": 1}],
    ids=["cosine", "wsd"],
)
def test_rates_that_depended_on_the_length_are_refused_with_what_works(
    tiny_config, place, schedule
):
    first = run_training(tiny_config(train__steps=8, **schedule), place)
    before = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match="cannot be made longer, 8 -> 12 steps") as refused:
        run_training(tiny_config(train__steps=12, **schedule), place)
    assert {
        path: path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != "lock"
    }.items() <= before.items()
    assert layout.read_summary(place) == first
    words = shlex.split(refused.value.fix.split("`")[1])
    assert words == ["--resume", str(place), "--run-dir", f"{place}-12"]


def test_the_command_that_the_refusal_names_trains_on(tiny_config, place):
    run_training(tiny_config(train__steps=3), place)
    with pytest.raises(ConfigError) as refused:
        run_training(tiny_config(train__steps=5), place)
    _, resume, _, run = shlex.split(refused.value.fix.split("`")[1])
    assert run_training(tiny_config(train__steps=5), Path(run), resume=resume)["steps"] == 5
    assert steps_trained(Path(run)) == [4, 5]


def test_a_checkpoint_of_the_decay_that_is_named_is_refused(tiny_config, place):
    run_training(tiny_config(train__steps=8, checkpoint__keep=6, **FALLING), place)
    with pytest.raises(
        ConfigError,
        match=r"it is at step 7, and with schedule\.kind=wsd its learning rate has depended on its length since step 7",
    ):
        run_training(
            tiny_config(train__steps=12, **FALLING),
            place,
            resume=str(place / "checkpoints" / "step-7"),
        )


def test_a_run_that_came_from_another_answers_for_its_own_steps_alone(tiny_config, tmp_path, place):
    run_training(tiny_config(train__steps=3, schedule__kind="cosine"), tmp_path / "cosine")
    run_training(tiny_config(train__steps=5, **OPEN), place, resume=str(tmp_path / "cosine"))
    assert run_training(tiny_config(train__steps=7, **OPEN), place)["steps"] == 7


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "killed_in",
    [
        (layout, "write_text"),
        pytest.param((layout, "write_config"), marks=pytest.mark.faults),
        pytest.param((training, "execute"), marks=pytest.mark.faults),
    ],
)
def test_a_kill_while_the_length_is_written_loses_nothing(
    tiny_config, tmp_path, place, monkeypatch, killed_in
):
    whole = run_training(tiny_config(train__steps=6, **FALLING), tmp_path / "whole")
    run_training(tiny_config(train__steps=4, checkpoint__keep=6, **FALLING), place)

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*killed_in, kill)
        patch.setattr(layout, "write_exit_code", lambda *_: None)
        with pytest.raises(Killed):
            run_training(tiny_config(train__steps=6, **FALLING), place)
    assert list((place / "checkpoints").glob("step-4.aside-*"))
    longer = run_training(tiny_config(train__steps=6, **FALLING), place)
    assert (longer["steps"], longer["weights_sha256"]) == (6, whole["weights_sha256"])


def test_another_setting_is_still_refused_and_named(tiny_config, place):
    run_training(tiny_config(train__steps=4, **OPEN), place)
    with pytest.raises(
        ConfigError,
        match=r"other settings: optim\.lr: 0\.01 -> 0\.02\. Fix: .*--resume .*first --run-dir DIR",
    ):
        run_training(tiny_config(train__steps=6, optim__lr=0.02, **OPEN), place)
