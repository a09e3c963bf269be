"""The settings that tune can reach, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.commands.tune import parse_only
from flatout.errors import ConfigError
from flatout.hardware import Gpu
from flatout.measure.experiments.records import PARTS, Left
from flatout.measure.experiments.resolving import choose, resolve_here
from flatout.measure.experiments.space import (
    Move,
    Setting,
    Space,
    make_space,
    memory_obstacle,
    rows_ladder,
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


def names(moves):
    return [move.name for move in moves]


def test_every_divisor_ladder_contains_the_start_and_doubles():
    assert rows_ladder(4, 16) == (1, 2, 4, 8, 16)
    assert rows_ladder(12, 12) == (1, 3, 6, 12)
    assert rows_ladder(1, 7) == (1, 7)
    assert all(90 % rows == 0 for rows in rows_ladder(9, 90))


def test_the_moves_leave_out_what_is_on_and_add_what_is_off(space_of):
    space = space_of()
    shown = names(space.moves)
    assert "- fused-adamw" in shown
    assert "+ checkpointing" in shown
    assert "data.prefetch=2" in shown
    assert not any("micro-batch" in name for name in shown)
    left = {each.name: each.reason for each in space.left}
    assert "a trial does not time saves" in left["async-checkpoints"]
    assert "cannot run here" in left["cuda-graphs"]


def test_statistical_speedups_are_tried_only_on_request(space_of):
    assert "--statistical" in {e.name: e.reason for e in space_of().left}["length-buckets"]
    assert any("length-buckets" in name for name in names(space_of(statistical=True).moves))


def test_what_the_request_names_or_leaves_out_stays(space_of):
    space = space_of(speedups="auto,-fused-adamw,+checkpointing")
    assert not any("fused-adamw" in name for name in names(space.moves))
    assert not any(name.endswith(" checkpointing") for name in names(space.moves))
    assert space_of(speedups=["prefetch", "fused-adamw"], only=["speedups"]).moves == ()


def test_only_limits_the_moves(space_of):
    assert names(space_of(only=["fused-adamw"]).moves) == ["- fused-adamw"]
    space = space_of(only=["batch"])
    assert space.moves == ()
    assert names(space.moves_from(space.start)) == ["batch.rows_per_device=4"]


def test_only_refuses_unknown_words():
    assert parse_only(None) == PARTS
    assert parse_only("batch, compile") == ("batch", "compile")
    with pytest.raises(ConfigError, match="bacth"):
        parse_only("bacth")


def test_an_added_speedup_takes_the_slot_of_its_rival():
    setting = Setting(4, 4, frozenset({"selective-checkpointing", "prefetch"}))
    after = Move("+ checkpointing", "checkpointing", adds=frozenset({"checkpointing"})).apply(
        setting
    )
    assert after.speedups == {"checkpointing", "prefetch"}


def test_a_move_without_its_need_is_impossible():
    setting = Setting(4, 4, frozenset())
    assert Move("+ cuda-graphs", "speedups", adds=frozenset({"cuda-graphs"})).apply(setting) is None


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


def test_checkpointing_comes_with_the_rows_it_makes_room_for():
    start = Setting(4, 4, frozenset())
    move = Move(
        "+ checkpointing",
        "checkpointing",
        adds=frozenset({"checkpointing"}),
        speedup="checkpointing",
    )
    grown = limited_to(4).with_room(move, start)
    assert (grown.name, grown.rows) == ("+ checkpointing, batch.rows_per_device=16", 16)
    assert grown.speedup is None, "its gain is not that of checkpointing alone"
    assert limited_to(32).with_room(move, start) is None


def test_the_estimate_decides_what_cannot_fit(tiny_config):
    resolved = resolve_here(tiny_config())
    setting = Setting(8, 4, frozenset())
    assert memory_obstacle(resolved)(setting) is None
    small = replace(resolved, machine=replace(resolved.machine, memory_gib=1e-4))
    assert "GiB by estimate" in memory_obstacle(small)(setting)
    gpu = Gpu("A GPU", 1e-4, (9, 0), "1")
    on_gpu = replace(
        resolved,
        machine=replace(resolved.machine, gpus=(gpu,)),
        config=resolved.config.with_values({"train.device": "cuda:0"}),
    )
    assert "the GPU has 0.0 GiB" in memory_obstacle(on_gpu)(setting)


def test_an_impossible_pair_of_speedups_is_an_obstacle(tiny_config):
    both = Setting(4, 4, frozenset({"checkpointing", "selective-checkpointing"}))
    assert "both fill" in memory_obstacle(resolve_here(tiny_config()))(both)


def test_what_is_left_has_a_reason(space_of):
    assert all(isinstance(each, Left) and each.reason for each in space_of().left)
