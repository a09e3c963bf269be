"""The base of a LoRA checkpoint is found, also after both moved, and refused when it changed."""

from __future__ import annotations

import json

import pytest
from fakes import fake_checkpoint

from flatout.errors import CheckpointError
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.base import digest_of, find_base
from flatout.training.checkpoint.catalog import Base, read_index

WEIGHTS = {"model-00000": b"weights"}


@pytest.fixture
def pair(tmp_path):
    """Return a checkpoint of adapters, and its base."""
    path = fake_checkpoint(tmp_path / "here" / "base", 6, **WEIGHTS)
    adapters = fake_checkpoint(tmp_path / "here" / "lora", 3, **{"model-00000": b"adapters"})
    base = Base(
        path=str(path),
        digest=digest_of(path),
        scale=2.0,
        rows={"blocks.0.up.adapters.up": (0, 4)},
    )
    (adapters / catalog.INDEX).write_text(
        json.dumps({"tensors": {}, "aliases": {}, "base": base.model_dump()})
    )
    return adapters, base


def test_the_entry_of_the_index_is_read_back(pair):
    adapters, base = pair
    assert read_index(adapters).base == base


def test_a_checkpoint_of_whole_weights_has_no_base(tmp_path):
    assert read_index(fake_checkpoint(tmp_path, 1)).base is None


def test_the_digest_is_that_of_the_weights_alone(tmp_path):
    paths = [
        fake_checkpoint(tmp_path / str(number), 1, state=state, **{"model-00000": content})
        for number, (state, content) in enumerate([(b"a", b"w"), (b"b", b"w"), (b"a", b"x")])
    ]
    one, other_state, other_weights = map(digest_of, paths)
    assert one == other_state != other_weights


def test_the_base_is_where_it_was(pair):
    assert str(find_base(*pair)) == pair[1].path


def test_a_base_that_moved_with_the_adapters_is_found(pair, tmp_path):
    adapters, base = pair
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / adapters.relative_to(tmp_path / "here")
    assert find_base(moved, base) == tmp_path / "there/base/checkpoints/step-6"


def test_a_missing_base_is_refused(pair, tmp_path):
    adapters, base = pair
    gone = base.model_copy(update={"path": str(tmp_path / "far" / "checkpoints" / "step-3")})
    with pytest.raises(CheckpointError, match="contains LoRA adapters, and the weights") as refused:
        find_base(adapters, gone)
    assert "Restore them there" in refused.value.fix


def test_a_changed_base_is_refused(pair, tmp_path):
    adapters, base = pair
    with pytest.raises(CheckpointError, match="have changed since the LoRA adapters in") as refused:
        find_base(adapters, base.model_copy(update={"digest": "0" * 64}))
    assert "Restore them from a copy" in refused.value.fix


NAN = {"path": "a", "digest": "b", "scale": float("nan"), "rows": {}}
NEGATIVE = {"path": "a", "digest": "b", "scale": 1.0, "rows": {"a": [-1, 2]}}


@pytest.mark.parametrize("base", [{}, {"path": "a"}, [], {"rows": {"a": 1}}, 3, NAN, NEGATIVE])
def test_a_damaged_entry_is_an_error(pair, base):
    adapters, _ = pair
    (adapters / catalog.INDEX).write_text(json.dumps({"tensors": {}, "aliases": {}, "base": base}))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        read_index(adapters)
