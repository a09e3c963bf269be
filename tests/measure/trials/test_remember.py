"""The last gain of each speedup of a ladder is stored for the GPU or CPU that measured it."""

from __future__ import annotations

from flatout.assembly.prediction import read
from flatout.hardware import Gpu, Machine
from flatout.measure.trials.remember import gains, remember

MACHINE = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11")


class RecordedLines:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def changed(report, name, **changes):
    """Return the report with changes to one line."""
    rows = [row.model_copy(update=changes) if row.name == name else row for row in report.rows]
    return report.model_copy(update={"rows": rows})


def test_the_gain_in_the_full_set_counts_most(sample_report):
    report = changed(sample_report, "+ prefetch", speedup="prefetch")
    below = gains(report)
    assert set(below) == {"pretokenised", "prefetch"}
    assert below["pretokenised"].gain == 2.1
    assert (
        below["pretokenised"].recipe,
        below["pretokenised"].commit,
        below["pretokenised"].torch,
    ) == ("shakespeare-char", "abc1234", "2.13.0")
    assert below["prefetch"].where == "on the way up"
    within = gains(changed(report, "all but prefetch", speedup="prefetch"))
    assert within["prefetch"].where == "in the full set"


def test_it_is_stored_for_the_hardware_that_measured(sample_report, tmp_path):
    remember(gains(sample_report), MACHINE, "cuda:1", tmp_path)
    assert not list(tmp_path.iterdir()), "there is one GPU"
    for device, hardware in (("cuda", "NVIDIA H200"), ("cpu", "a CPU, 2 cores")):
        remember(gains(sample_report), MACHINE, device, tmp_path)
        assert set(read(hardware, tmp_path).speedups) == {"pretokenised"}


def test_a_gain_with_a_broken_promise_is_not_stored(sample_report):
    report = changed(sample_report, "+ prefetch", speedup="prefetch", promise_kept=False)
    assert set(gains(report)) == {"pretokenised"}


def test_a_ladder_without_gains_stores_nothing(sample_report, tmp_path):
    report = sample_report.model_copy(update={"rows": sample_report.rows[:1]})
    remember(gains(report), MACHINE, "cuda", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_reported(sample_report, tmp_path):
    progress, cache = RecordedLines(), tmp_path / "file"
    cache.write_text("")
    remember(gains(sample_report), MACHINE, "cuda", cache, progress=progress)
    (line,) = progress.lines
    assert line.startswith(f"Cannot write {cache}: ")
