"""From a trace file to numbers and text: a made-up GPU, and what happens without kernels."""

import pytest
from chrome_trace import US, document

from flatout.display import terminal_text
from flatout.errors import RunFailed
from flatout.measure.attach.trace import document_in, read_trace
from flatout.measure.profile.profile import with_trace
from flatout.measure.profile.result import Profile

BEFORE = Profile(
    recipe="made-up",
    device="cuda",
    environment={},
    first_step=7,
    steps=2,
    path="profile",
    trace="profile/trace.json.gz",
    snapshot=None,
    step_ms=90e3 * US,
    profiled_step_ms=100e3 * US,
    notes=(),
)


def test_the_text_of_a_profile():
    found = with_trace(BEFORE, read_trace(document(), steps=2))
    assert terminal_text(found.display(), 80) == (
        """\
made-up on cuda, steps 7 to 8
Step       0.09 ms, 0.1 ms under the profiler
No kernel  0.063 ms, 63% of a step: the device idles

Kernels of a step
class           ms  share  calls
matmul       0.024    65%      2
elementwise  0.006    16%      1
optimizer    0.005    14%      1
copy         0.002     5%      1

profile/  trace.json.gz, profile.json
Open the trace at https://ui.perfetto.dev"""
    )


def test_without_kernels_the_rest_remains_and_a_note_shows_why():
    made = document()
    made["traceEvents"] = [
        one for one in made["traceEvents"] if one.get("cat") not in {"kernel", "gpu_memcpy"}
    ]
    found = with_trace(BEFORE, read_trace(made, steps=2))
    assert found.table is found.outside_ms is None
    text = terminal_text(found.display(), 80)
    assert "under the profiler" in text
    assert "--cap-add=SYS_ADMIN" in text
    assert "Kernels of a step" not in text


@pytest.mark.parametrize("content", [None, "", '{"traceEvents": [', "{}"])
def test_an_incomplete_trace_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "raw.json").write_text(content)
    with pytest.raises(RunFailed, match="could not write its trace"):
        document_in(tmp_path / "raw.json")


def test_a_rate_over_no_time_is_null(tmp_path):
    infinite = '{"traceEvents": [{"args": {"memory bandwidth (GB/s)": Infinity}}]}'
    (tmp_path / "raw.json").write_text(infinite)
    (event,) = document_in(tmp_path / "raw.json")["traceEvents"]
    assert event["args"] == {"memory bandwidth (GB/s)": None}
