"""What earlier runs needed is kept per hardware, and found again for runs of the same shape."""

from __future__ import annotations

from flatout.assembly import past_runs
from flatout.assembly.past_runs import PastRun, alike, keep, read
from flatout.config.schema import load_config

RUN = PastRun(
    by="train",
    recipe="tiny",
    date="2026-11-22T12:00:00+00:00",
    torch="2.13.0",
    shape="a",
    kind="transformer",
    speedups=["bf16", "compile"],
    rows_per_device=4,
    accumulate=1,
    world_size=1,
    is_compiled=True,
    tokens_per_s=10.0,
)


def test_runs_are_appended_per_hardware(tmp_path):
    keep("A GPU", RUN, tmp_path)
    keep("A GPU", RUN.model_copy(update={"shape": "b"}), tmp_path)
    keep("Another GPU", RUN, tmp_path)
    assert [run.shape for run in read("A GPU", tmp_path)] == ["a", "b"]
    assert read("Another GPU", tmp_path) == [RUN]


def test_only_the_latest_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(past_runs, "MOST_RUNS", 3)
    for number in range(5):
        keep("A GPU", RUN.model_copy(update={"rows_per_device": number}), tmp_path)
    assert [run.rows_per_device for run in read("A GPU", tmp_path)] == [2, 3, 4]


def test_without_a_readable_file_there_are_none(tmp_path):
    assert read("A GPU", tmp_path) == read(None, tmp_path) == read("A GPU", None) == []
    keep("A GPU", RUN, tmp_path)
    (path,) = (tmp_path / "past-runs").iterdir()
    for broken in ("", "[]", "{}", '{"format_version": 99, "hardware": "A GPU", "runs": []}'):
        path.write_text(broken)
        assert read("A GPU", tmp_path) == []


def test_two_names_that_share_a_file_do_not_share_runs(tmp_path):
    keep("A GPU", RUN, tmp_path)
    assert read("A-GPU", tmp_path) == []


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "past-runs").write_text("a file")
    keep("A GPU", RUN, tmp_path)


def test_a_run_with_adapters_has_another_shape():
    whole = load_config()
    lora = load_config(None, ["lora.rank=4"])
    assert past_runs.shape_of(whole) != past_runs.shape_of(lora)
    assert past_runs.shape_of(lora) != past_runs.shape_of(load_config(None, ["lora.rank=8"]))


def test_runs_of_one_shape_have_the_same_speedups_in_any_order():
    others = [
        RUN.model_copy(update=changed)
        for changed in ({"shape": "b"}, {"speedups": ["bf16"]}, {"world_size": 2})
    ]
    found = alike([*others, RUN], "a", ["compile", "bf16"], 1)
    assert found == [RUN]
