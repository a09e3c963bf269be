import pytest
from fakes import fake_checkpoint

from flatout.config.sections import CheckpointConfig
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import most_at_once, newest_to_keep, prune


def make(run, *steps):
    return [fake_checkpoint(run, step, **{"model-00000": b"weights"}) for step in steps]


@pytest.mark.parametrize(
    ("keep", "best", "keep_every", "left"),
    [
        (1, None, None, [4]),
        (2, None, None, [3, 4]),
        (1, 1, None, [1, 4]),
        (2, 4, None, [3, 4]),
        (9, None, None, [0, 1, 2, 3, 4]),
        (None, None, None, [0, 1, 2, 3, 4]),
        (None, 1, 2, [0, 1, 2, 3, 4]),
        (1, None, 2, [2, 4]),
        (1, 1, 3, [1, 3, 4]),
    ],
)
def test_the_newest_the_best_and_the_multiples_stay(tmp_path, keep, best, keep_every, left):
    make(tmp_path, 0, 1, 2, 3, 4)
    deleted = prune(tmp_path, keep, best, keep_every)
    assert catalog.steps(tmp_path) == left
    assert sorted(deleted + left) == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


def test_incomplete_checkpoints_do_not_count(tmp_path):
    """The last complete one is never deleted, whatever is newer."""
    _, _, third, fourth = make(tmp_path, 1, 2, 3, 4)
    (third / "model-00000.safetensors").unlink()
    (fourth / "manifest.json").write_text("{")
    assert prune(tmp_path, 1) == [1]
    assert catalog.steps(tmp_path) == [2, 3, 4]
    assert prune(tmp_path, 2) == []
    make(tmp_path, 5)
    assert prune(tmp_path, 1) == [2, 3, 4]


def test_a_damaged_index_is_no_complete_checkpoint(tmp_path):
    first, second = make(tmp_path, 1, 2)
    for name in ("index.json", "manifest.json"):
        (second / name).write_bytes(b"?" * (second / name).stat().st_size)
        assert prune(tmp_path, 1) == []
    assert catalog.latest(tmp_path) == first


@pytest.mark.parametrize(
    ("given", "newest", "most"),
    [
        ({}, 2, 4),
        ({"keep": 5}, 5, 7),
        ({"keep": 1, "keep_every": 30}, 1, 6),
        ({"keep": "all", "every_steps": 10}, None, 12),
        ({"keep": "all", "every_epochs": 0.25}, None, 27),
        ({"keep": "all"}, None, 3),
    ],
)
def test_the_most_checkpoints_at_once_follow_from_the_configuration(given, newest, most):
    config = CheckpointConfig(**given)
    assert newest_to_keep(config) == newest
    assert most_at_once(config, 100, 16.0) == most
    uploaded = config.model_copy(update={"upload": "s3://bucket/runs"})
    assert most_at_once(uploaded, 100, 16.0) == most + 1, "one is being sent"
