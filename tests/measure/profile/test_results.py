"""From a trace file to numbers: a made-up GPU, and what happens without kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chrome_trace import US, document

from flatout.errors import RunFailed
from flatout.measure.profile.memory import Moment, Named, timeline
from flatout.measure.profile.profile import (
    NOT_PERMITTED,
    blocks,
    gaps_of,
    thinned,
    with_trace,
    write_trace,
)
from flatout.measure.profile.report import Profile, ProfileRoofline
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
    roofline=ProfileRoofline(),
    notes=(),
)


def figures(made, profile=BEFORE):
    trace = read_trace(made, steps=2, on_gpu=profile.device != "cpu")
    moments = timeline(trace, Named({"weights": {1: 4000}}, {}))
    return trace, moments, with_trace(profile, trace, moments)


def test_a_gpu_has_gaps_and_its_own_memory():
    _, _, found = figures(document())
    assert found.device_idle == pytest.approx(0.63)
    assert found.outside_ms == pytest.approx(63e3 * US)
    assert found.memory.parts_gib.keys() == {"other", "weights", "activations"}
    assert found.memory.reserved_gib == 4096 / 2**30
    assert found.notes == ()
    assert "The device idles 63% of a step." in found.text()


def test_without_kernels_the_rest_remains_and_a_note_shows_why():
    made = document()
    made["traceEvents"] = [
        one for one in made["traceEvents"] if one.get("cat") not in {"kernel", "gpu_memcpy"}
    ]
    _, _, found = figures(made)
    assert found.table is found.outside_ms is None
    assert found.notes == (NOT_PERMITTED,)
    assert found.device_idle is found.gaps is None
    assert found.memory.gib > 0
    assert "--cap-add=SYS_ADMIN" in found.text()


def test_the_trace_gets_counters_of_memory_in_its_own_time(tmp_path):
    made = document()
    trace, moments, _ = figures(made)
    write_trace(made, trace, moments, tmp_path / "trace.json.gz")
    written = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    counters = [one for one in written["traceEvents"] if one["ph"] == "C"]
    assert len(counters) == len(moments) == 5
    assert counters[1]["ts"] == pytest.approx(1e9 + 200 + 14)
    assert counters[1]["args"]["activations"] == 512 / 2**20


def test_views_of_one_block_count_once():
    whole = torch.ones(8, 4)
    assert blocks([whole, whole[2:], whole.T]) == {whole.data_ptr(): 128}
    assert blocks([torch.empty(0)]) == {}


def test_of_too_many_moments_the_highest_remain():
    moments = [Moment(float(at), {"weights": at % 7}) for at in range(100)]
    kept = [*thinned(moments, 10)]
    assert [moment.total for moment in kept] == [6] * 10
    assert [*thinned(moments, 1000)] == moments


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
    trace, _, _ = figures(document())
    gaps = gaps_of(trace, trace.step_ranges[0])
    assert [round(gap.seconds / US) for gap in gaps[:3]] == [30, 21, 10]
    assert gaps[0].host_op == "aten::linear"
    assert gaps[0].phase == "forward"
    assert gaps[1].phase == "optimizer"
    assert gaps[2].host_op is None
