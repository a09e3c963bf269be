"""The settings that tune can reach, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.cli.commands.tune import parse_only
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu
from flatout.measure.experiments.records import PARTS
from flatout.measure.experiments.resolving import choose, resolve_here
from flatout.measure.experiments.space import (
    Move,
    Setting,
    Space,
    make_space,
    memory_obstacle,
    rows_to_try,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def space_of(tiny_config):
    """Return a function that makes the space of a tiny configuration."""

    def make(*, only=PARTS, statistical=False, **changes):
        config = tiny_config(**({"batch__rows_per_device": "auto", "speedups": "auto"} | changes))
        resolved = replace(resolve_here(config), additions=choose(config).additions)
        return make_space(config, resolved, only=only, statistical=statistical)

    return make


CHECKPOINTING = Move(
    "+ checkpointing", "checkpointing", adds=frozenset({"checkpointing"}), speedup="checkpointing"
)


def names(moves):
    return [move.name for move in moves]


def test_the_rows_to_try_contain_the_start_and_double():
    assert rows_to_try(4, 16) == (1, 2, 4, 8, 16)
    assert rows_to_try(12, 12) == (1, 3, 6, 12)
    assert rows_to_try(1, 7) == (1, 7)
    assert all(90 % rows == 0 for rows in rows_to_try(9, 90))


def test_only_rejects_unknown_words():
    assert parse_only(None) == PARTS
    assert parse_only("batch, compile") == ("batch", "compile")
    with pytest.raises(ConfigError, match="bacth"):
        parse_only("bacth")


def test_the_moves_leave_out_what_is_on_and_add_what_is_off(space_of):
    space = space_of()
    assert {"- fused-adamw", "+ checkpointing", "data.prefetch=2"} <= set(names(space.moves))
    assert not any("micro-batch" in name for name in names(space.moves))
    left = {each.name: each.reason for each in space.left}
    assert all(left.values())
    assert "a trial does not time saves" in left["async-checkpoints"]
    assert "cannot run here" in left["cuda-graphs"]
    assert "--statistical" in left["length-buckets"]
    assert any("length-buckets" in name for name in names(space_of(statistical=True).moves))


def test_what_the_request_names_or_omits_stays(space_of):
    space = space_of(speedups="auto,-fused-adamw,+checkpointing")
    assert not any("fused-adamw" in name for name in names(space.moves))
    assert not any(name.endswith(" checkpointing") for name in names(space.moves))
    assert space_of(speedups=["prefetch", "fused-adamw"], only=["speedups"]).moves == ()


def test_only_limits_the_moves(space_of):
    assert names(space_of(only=["fused-adamw"]).moves) == ["- fused-adamw"]
    space = space_of(only=["batch"])
    assert space.moves == ()
    assert names(space.moves_from(space.start)) == ["batch.rows_per_device=4"]


def test_an_added_speedup_takes_the_slot_of_its_rival_and_needs_its_needs():
    setting = Setting(4, 4, frozenset({"selective-checkpointing", "prefetch"}))
    assert CHECKPOINTING.apply(setting).speedups == {"checkpointing", "prefetch"}
    graphs = Move("+ cuda-graphs", "speedups", adds=frozenset({"cuda-graphs"}))
    assert graphs.apply(Setting(4, 4, frozenset())) is None


def limited_to(most):
    """Return a space: `most` rows fit, four times as many with checkpointing."""

    def obstacle(setting):
        limit = most * (4 if "checkpointing" in setting.speedups else 1)
        return None if setting.rows <= limit else "too large"

    start = Setting(4, 4, frozenset())
    return Space(start, ("batch",), (), (), (1, 2, 4, 8, 16, 32), obstacle)


def test_the_most_rows_that_fit_are_tried_as_well():
    start = Setting(4, 4, frozenset())
    shown = names(limited_to(16).moves_from(start))
    assert shown == [f"batch.rows_per_device={rows}" for rows in (8, 2, 16)]
    assert limited_to(0).most_rows(start) == 0
    assert limited_to(99).most_rows(start) == 32
    grown = limited_to(4).with_room(CHECKPOINTING, start)
    assert (grown.name, grown.rows) == ("+ checkpointing, batch.rows_per_device=16", 16)
    assert grown.speedup is None, "its gain is not that of checkpointing alone"
    assert limited_to(32).with_room(CHECKPOINTING, start) is None


def test_the_estimate_decides_what_cannot_fit(tiny_config):
    resolved = resolve_here(tiny_config())
    setting = Setting(8, 4, frozenset())
    assert memory_obstacle(resolved)(setting) is None
    both = Setting(4, 4, frozenset({"checkpointing", "selective-checkpointing"}))
    assert "both fill" in memory_obstacle(resolved)(both)
    gpu = Gpu("A GPU", 1e-4, (9, 0), "1")
    small = replace(resolved.machine, memory_gib=1e-4, gpus=(gpu,))
    assert "GiB by estimate" in memory_obstacle(replace(resolved, machine=small))(setting)
    on_gpu = resolved.config.with_values({"train.device": "cuda:0"})
    found = memory_obstacle(replace(resolved, machine=small, config=on_gpu))(setting)
    assert "the GPU has 0.0 GiB" in found
