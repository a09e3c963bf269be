"""From a trace file to numbers: a made-up GPU, and what happens without kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from chrome_trace import US, document

from flatout.errors import RunFailed
from flatout.measure.profile.profile import NOT_PERMITTED, gaps_of, with_trace
from flatout.measure.profile.report import Profile
from flatout.measure.steps.trace import exported, read_trace

BEFORE = Profile(
    recipe="made-up",
    device="cuda",
    arithmetic="bf16",
    speedups=(),
    environment={},
    first_step=7,
    steps=2,
    path="profile",
    trace="profile/trace.json.gz",
    snapshot=None,
    step_ms=90e3 * US,
    profiled_step_ms=100e3 * US,
    phases_ms=None,
    notes=(),
)


def figures(made, profile=BEFORE):
    trace = read_trace(made, steps=2)
    return trace, with_trace(profile, trace)


def test_a_gpu_has_gaps():
    _, found = figures(document())
    assert found.device_idle == pytest.approx(0.63)
    assert found.outside_ms == pytest.approx(63e3 * US)
    assert found.notes == ()
    assert "The device idles 63% of a step." in found.text()


def test_without_kernels_the_rest_remains_and_a_note_shows_why():
    made = document()
    made["traceEvents"] = [
        one for one in made["traceEvents"] if one.get("cat") not in {"kernel", "gpu_memcpy"}
    ]
    _, found = figures(made)
    assert found.table is found.outside_ms is None
    assert found.notes == (NOT_PERMITTED,)
    assert found.device_idle is found.gaps is None
    assert "--cap-add=SYS_ADMIN" in found.text()


def written(content):
    """A profiler that writes a text, or nothing."""
    return SimpleNamespace(
        export_chrome_trace=lambda path: content is None or Path(path).write_text(content)
    )


def test_an_incomplete_trace_is_an_error(tmp_path):
    for content in (None, "", '{"traceEvents": [', "{}"):
        with pytest.raises(RunFailed, match="could not write its trace"):
            exported(written(content), tmp_path / "raw.json")
    infinite = '{"traceEvents": [{"args": {"memory bandwidth (GB/s)": Infinity}}]}'
    (event,) = exported(written(infinite), tmp_path / "raw.json")["traceEvents"]
    assert event["args"] == {"memory bandwidth (GB/s)": None}


def test_the_longest_gap_says_what_the_host_did():
    trace, _ = figures(document())
    gaps = gaps_of(trace, trace.step_ranges[0])
    assert [round(gap.seconds / US) for gap in gaps[:3]] == [30, 21, 10]
    assert gaps[0].host_op == "aten::linear"
    assert gaps[0].phase == "forward"
    assert gaps[1].phase == "optimizer"
    assert gaps[2].host_op is None
