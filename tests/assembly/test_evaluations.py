"""A run that states no interval evaluates after every epoch, or about 20 times."""

import pytest

from flatout.assembly.resolve import resolve
from flatout.data.store.mix import open_data
from flatout.hardware.machine import probe


@pytest.fixture
def resolved(tiny_config):
    """Return the steps of a run, those between its evaluations, and what each of them scores."""

    def resolve_with(**keys):
        stated = {f"train__{key}": value for key, value in keys.items()}
        config = tiny_config(**{"train__steps": None, "train__eval_every": None} | stated)
        dataset = open_data(config.data)
        config, _ = resolve(config, machine=probe(), dataset=dataset, world_size=1)
        return config.train.steps, config.train.eval_every, config.train.eval_tokens

    return resolve_with


def test_a_run_in_epochs_evaluates_after_each(resolved):
    one, *_ = resolved(epochs=1)
    steps, every, _ = resolved(epochs=3)
    assert steps == pytest.approx(3 * one, abs=3)
    assert every == one


def test_other_runs_evaluate_twenty_times(resolved):
    assert resolved(steps=1000)[1] == 50
    assert resolved(steps=25)[1] == 10, "but no more often than every ten steps"
    assert resolved(epochs=1)[1] == max(-(-resolved(epochs=1)[0] // 20), 10)


def test_the_evaluations_take_five_percent_of_the_run(resolved):
    whole = 1266
    assert resolved(steps=25)[2] < whole
    assert resolved(steps=20_000)[2] == "all"


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"eval_every": 7}, (7, "all")),
        ({"eval_every": 0}, (0, "all")),
        ({"eval_every": 7, "eval_tokens": 640}, (7, 640)),
        ({"eval_tokens": "all"}, (50, "all")),
    ],
)
def test_what_is_stated_stays(resolved, stated, expected):
    assert resolved(steps=1000, **stated)[1:] == expected
