"""The throughput entries combine compatible speedups and have the right shapes."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.assembly import conditions
from flatout.assembly.selection import assemble, select
from flatout.hardware import Gpu, probe

FOLDER = Path(__file__).parents[2] / "benchmarks"
H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("throughput")


@pytest.fixture
def every_package(monkeypatch):
    """Pretend that the optional packages of a GPU machine are installed."""
    monkeypatch.setattr(conditions, "find_spec", lambda package: package)


@pytest.mark.usefixtures("every_package")
def test_every_entry_is_a_compatible_set_of_speedups_on_a_gpu(benchmark, tmp_path):
    session = benchmark.Session(benchmark.parser().parse_args([]), H200, tmp_path, tmp_path)
    for entry in benchmark.ENTRIES:
        work = next(work for work in benchmark.WORKS if work.name == entry.work)
        config = (
            session.available.config(entry, benchmark.shape(work, tiny=False))
            if entry.kind == "flatout"
            else None
        )
        if config is not None:
            decisions = select(config, H200, device="cuda", minutes=60.0)
            assemble(decisions)
            on = {decision.name for decision in decisions if decision.on}
            assert entry.about is None or entry.about in on
            assert on or entry.plain
            assert not on & set(entry.drops)


def test_a_speedup_brings_what_it_needs(benchmark, tmp_path):
    session = benchmark.Session(
        benchmark.parser().parse_args(["--tiny"]), probe(), tmp_path, tmp_path
    )
    entry = benchmark.Entry("gpt2-124m", "x", "x", (1,), adds=("bf16-stream",))
    assert (
        session.available.config(entry, benchmark.shape(benchmark.WORKS[0], tiny=True)).speedups
        == "auto,+bf16-stream,+bf16"
    )


def test_the_real_shapes_are_those_of_the_recipes(benchmark):
    shapes = {work.name: benchmark.shape(work, tiny=False) for work in benchmark.WORKS}
    models = {name: config.model.own() for name, config in shapes.items()}
    assert {name: config.data.seq_len for name, config in shapes.items()} == {
        name: 32_768 if "32k" in name else 1_024 for name in shapes
    }
    assert [models["gpt2-700m"][key] for key in ("num_layers", "d_model")] == [24, 1536]
    for name in ("gpt2-124m", "gpt2-124m-fast", "gpt2-124m-32k", "gpt2-124m-32k-wide-heads"):
        assert [models[name][key] for key in ("num_layers", "d_model")] == [12, 768]
    assert [
        models[name]["num_heads"] for name in ("gpt2-124m-32k", "gpt2-124m-32k-wide-heads")
    ] == [12, 6]


@pytest.mark.usefixtures("every_package")
def test_no_two_entries_are_the_same_run_on_a_gpu(benchmark, tmp_path):
    session = benchmark.Session(benchmark.parser().parse_args([]), H200, tmp_path, tmp_path)
    runs = []
    for work in benchmark.WORKS:
        for entry in (
            entry
            for entry in benchmark.ENTRIES
            if entry.work == work.name and entry.kind == "flatout" and entry.name != "recipe"
        ):
            config = session.available.config(entry, benchmark.shape(work, tiny=False))
            decisions = (
                select(config, H200, device="cuda", minutes=60.0) if config is not None else ()
            )
            on = frozenset(decision.name for decision in decisions if decision.on)
            chunk = (
                config.model.own().get("chunk_size")
                if config is not None and "fast-scan" in on
                else None
            )
            runs += (
                [(work.name, entry.variant, on, chunk)]
                if on and all(":" not in added for added in entry.adds)
                else []
            )
    assert len(set(runs)) == len(runs) > 20


def test_every_target_names_entries_that_exist(benchmark):
    entries = importlib.import_module("throughput_entries")
    names = {(entry.work, entry.name) for entry in entries.ENTRIES}
    assert len(names) == len(entries.ENTRIES)
    assert {work.name for work in entries.WORKS} == {work for work, _ in names}
    assert all(
        (target.work, target.against) in names for target in entries.TARGETS if target.against
    )
