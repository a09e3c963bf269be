"""`flatout train`: its summary."""

from __future__ import annotations

import pytest

from flatout.cli.commands import train as command
from flatout.cli.commands.train import TrainResult, train
from flatout.inference import generate
from flatout.training.run_dir.layout import read_config, read_events, read_summary


@pytest.mark.slow
def test_a_run_that_ended_early_gives_the_reason_last(tiny_run):
    summary = read_summary(tiny_run)
    result = TrainResult(
        **{name: summary[name] for name in TrainResult.model_fields}
        | {"stopped_early": True, "stopped_because": "No better loss."}
    )
    assert result.summary().endswith("\n\nNo better loss.")
    assert "dataset" not in result.summary(), "a single dataset needs no table"


def test_an_old_summary_without_newer_fields_is_read(tiny_run):
    path = tiny_run / "summary.json"
    before = path.read_text()
    try:
        path.write_text(
            before.replace('"stopped_early"', '"of_old"').replace('"by_dataset"', '"of_older"')
        )
        result = train(read_config(tiny_run), run=tiny_run)
    finally:
        path.write_text(before)
    assert (result.stopped_early, result.by_dataset) == (False, ())


def test_a_sample_of_a_model_of_short_documents_has_several(tiny_config, tmp_path, monkeypatch):
    seeds = []

    def sample(*_, seed, **options):
        seeds.append(seed)
        return iter(["Ann, ", "Bob" if len(seeds) < 3 else "x" * command.SAMPLE_TOKENS])

    monkeypatch.setattr(generate, "sample", sample)
    train(tiny_config(train__steps=1), run=tmp_path / "run")
    (text,) = (e["text"] for e in read_events(tmp_path / "run") if e["event"] == "sample")
    assert text.splitlines()[:2] == ["Ann, Bob"] * 2
    assert len(text.splitlines()) == len(set(seeds)) == 3
