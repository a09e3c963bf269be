"""Memory that is nearly full, or spills to the host, with the batch that is faster."""

from __future__ import annotations

import pytest

from flatout.config.schema import load_config
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.steps.evidence import Evidence, MemoryFacts, Roofline


def found(rows, held_gib, rate=None, known=None):
    """Return the finding about the memory of a run of so many rows on a card of 16 GB."""
    batch = {"batch.rows_per_device": rows, "batch.tokens_per_step": 256 * 256}
    config = load_config("shakespeare-char-16gb").with_values(batch | {"batch.accumulate": None})
    evidence = Evidence(
        source="measured run",
        config=config,
        device="cuda",
        memory=MemoryFacts(reserved_gib=held_gib, peak_gib=held_gib - 0.3, total_gib=15.6),
        roofline=Roofline(tokens_per_s=rate),
        rates_by_rows=known or {},
    )
    return next((f for f in diagnosis_of(evidence).findings if f.name == "full-memory"), None)


def test_a_batch_that_fills_the_memory_is_a_warning_with_a_smaller_one():
    warned = found(256, 15.0)
    assert warned.harm == "warns"
    assert "96% of the GPU's memory" in warned.verdict
    assert warned.fixes[0].overrides["batch.rows_per_device"] == 128


def test_a_batch_that_spills_names_the_batch_that_was_faster():
    slow = found(256, 15.5, rate=15_200.0, known={64: 300_000.0, 128: 364_000.0, 256: 15_000.0})
    assert slow.harm == "slows"
    assert slow.share == pytest.approx(1 - 15_200 / 364_000)
    assert "128 rows reached 364,000" in slow.verdict
    assert slow.fixes[0].overrides["batch.rows_per_device"] == 128


def test_a_single_row_is_not_told_to_be_one_row():
    assert "checkpointing" in found(1, 15.0).fixes[0].text


def test_more_than_the_memory_is_in_the_memory_of_the_host():
    assert found(256, 19.0).harm == "slows"


def test_a_batch_with_room_is_silent():
    assert found(128, 10.0) is None
    assert found(128, 10.0, rate=364_000.0, known={64: 300_000.0, 96: 380_000.0}) is None
