"""The benchmark of checkpoints measures saves, and requires equal weights from all ways."""

from __future__ import annotations

import pytest

RESUMES = [{"seconds": 3.0, "step_s": 0.5}]


@pytest.fixture
def small(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPE", {"num_layers": 1, "d_model": 16, "num_heads": 2})
    monkeypatch.setattr(benchmark, "TOKENIZER", "byte")
    return benchmark


@pytest.mark.slow
def test_the_saves_of_all_ways_are_counted(small, tmp_path, monkeypatch):
    benchmark = small
    monkeypatch.setattr(benchmark, "resumed", lambda *_: RESUMES)
    url = f"file://{tmp_path / 'backup'}"
    found = benchmark.measure(tmp_path, url, repeats=1, saves=2, every=2, device="cpu")
    assert not (tmp_path / "backup").exists()
    for (row,) in found["rows"].values():
        assert len(row["blocked_ms"]) == len(row["seconds"]) == 2
        assert row["bytes"] > 12 * row["parameters"] > 0
    assert found["rows"]["beside training, with uploads"][0]["upload_s"]
    found |= {"upload": "a directory", "machine": "a machine", "threads": 1, "commit": "abc"}
    text = benchmark.table(found)
    assert (
        found["rows"]["beside training"][0]["reserve_ms"]
        >= 0
        == found["rows"]["in the loop"][0]["reserve_ms"]
    )
    assert "| beside training | " in text
    found["rows"]["in the loop"][0]["weights_sha256"] = "other"
    with pytest.raises(SystemExit, match="same weights"):
        benchmark.table(found)


def test_the_ratio_is_computed_per_repeat(benchmark):
    def row(blocked_ms):
        times = {
            "blocked_ms": [9e9, blocked_ms],
            "seconds": [9e9, 1.0],
            "reserve_ms": 0.0,
            "wall_s": 5.0,
            "tokens_per_s": 1e5 / blocked_ms,
            "upload_s": [2.0],
        }
        return times | {"parameters": 10**6, "bytes": 12_060_000, "weights_sha256": "a"}

    rows = {
        "in the loop": [row(1000.0), row(100.0)],
        "beside training": [row(100.0), row(30.0)],
        "beside training, with uploads": [row(200.0), row(40.0)],
    }
    text = benchmark.table(
        {
            "rows": rows,
            "repeats": 2,
            "saves": 1,
            "every": 2,
            "device": "cpu",
            "machine": "",
            "threads": 1,
            "commit": "",
            "resumes": RESUMES,
            "restores": {"url": RESUMES, "directory": RESUMES},
            "upload": "a directory",
        }
    )
    assert "Blocked by 80.0 (70.0 to 90.0)% less." in text
    assert "training waits for 0.011% of the time; goal: under 1%: kept." in text
    assert "12.060 bytes per parameter, 0.50% more than weights and moments" in text
    assert "begins its first step 3.00 (3.00 to 3.00) s after its start; goal: under 5 s: k" in text
    assert "blocks the loop" not in text
    assert "begins 3.00 (3.00 to 3.00) s after the start that restores it, and 3.00" in text
    assert "without: 37.5 (25.0 to 50.0)% less. An upload of 0.01 GB takes 2.0 (2.0" in text


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("uploads", [False, True])
def test_the_start_of_a_killed_run_is_measured(uploads, small, tmp_path):
    data = small.make_data(tmp_path / "data", 1 << 16, shards=1)
    config = small.settings(data, 2000, 2, "cpu", small.WAYS["in the loop"])
    changes = {"checkpoint.upload": f"file://{tmp_path / 'backup'}"} if uploads else {}
    rows = small.resumed(tmp_path, config.with_values({"log.every": 1} | changes), repeats=2)
    assert [row["seconds"] > 0 < row["step_s"] for row in rows] == [True, True]
