"""The text of a profile: 80 columns, plain characters, what is unknown shown as such."""

from __future__ import annotations

from flatout.measure.profile.report import MemoryPeak, Profile, Segment, Timeline, text_of
from flatout.measure.profile.table import Gap, ProfileRoof, TableRow


def row(kind, **more):
    known = {"seconds": 0.0123, "share": 0.6, "calls": 1234.0, "slowest": "aten::mm"}
    rates = {"tflops": 412.5, "of_peak": 0.42, "gb_per_s": 1234.5, "of_bandwidth": 0.25}
    return TableRow(kind=kind, **known | rates | more)


def segment(lane, phase, start_s, seconds):
    return Segment(lane=lane, phase=phase, start_s=start_s, seconds=seconds)


TIMELINE = Timeline(
    step=12,
    seconds=0.02,
    segments=(
        segment("host", "data", 0.0, 0.001),
        segment("host", "forward", 0.001, 0.004),
        segment("host", "backward", 0.005, 0.005),
        segment("host", "optimizer", 0.01, 0.009),
        segment("host", "logging", 0.019, 0.001),
        segment("device", "forward", 0.002, 0.006),
        segment("device", "backward", 0.008, 0.008),
        segment("device", "optimizer", 0.017, 0.002),
    ),
    gaps=(Gap(start_s=0.0, seconds=0.002, phase="data", host_op=None),),
    device_idle=0.2,
    memory=((0.0, 1.0), (0.008, 4.0), (0.018, 1.0)),
)
PEAK = MemoryPeak(
    gib=4.0,
    parts_gib={"activations": 3.0, "weights": 0.7, "optimizer": 0.3},
    phase="backward",
    step=12,
    share_of_step=0.4,
    reserved_gib=4.5,
)


def profile(**more):
    known = {
        "recipe": "gpt2-124m",
        "device": "cuda",
        "arithmetic": "bf16",
        "speedups": ("compile",),
        "environment": {"torch": "2.13.0"},
        "first_step": 11,
        "steps": 3,
        "step_s": 0.018,
        "profiled_step_s": 0.02,
        "phases_s": {"forward": 0.004, "data": 0.001},
        "table": (row("matmul"), row("normalisation", tflops=None, of_peak=None)),
        "outside_s": 0.004,
        "roof": ProfileRoof(
            peak_tflops=989.5,
            peak_source="data sheet",
            gb_per_s=3350,
            bandwidth_source="data sheet",
        ),
        "timeline": TIMELINE,
        "memory": PEAK,
        "has_snapshot": False,
        "notes": (),
    }
    return Profile(**known | more)


def test_it_fits_into_80_columns_of_ascii():
    text = text_of(profile())
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()


def test_the_lanes_show_phases_and_gaps():
    lines = text_of(profile()).splitlines()
    host = next(line for line in lines if line.startswith("host")).split()[1]
    device = next(line for line in lines if line.startswith("device")).split()[1]
    assert len(host) == len(device) == 72
    assert [*dict.fromkeys(host)] == ["d", "F", "B", "O", "l"]
    assert [*dict.fromkeys(device)] == [".", "F", "B", "O"]
    assert device.startswith(".......F")
    assert device.endswith("OOO....")
    assert "the host runs Python (data)" in text_of(profile())


def test_memory_is_drawn_in_tenths_of_the_peak():
    lines = text_of(profile()).splitlines()
    drawn = next(line for line in lines if line.startswith("memory")).split()[1]
    assert [*dict.fromkeys(drawn)] == ["2", "9"]
    assert drawn[0] == drawn[-1] == "2"


def test_the_table_aligns_and_shows_unknown_rates_as_a_dash():
    lines = text_of(profile()).splitlines()
    header, matmul, norm = (
        next(line for line in lines if line.startswith(name))
        for name in ("class", "matmul", "normalisation")
    )
    assert len(header) == len(matmul) == len(norm)
    assert "412" in matmul
    assert norm.count(" -") == 2


def test_unknown_peaks_are_called_unknown():
    text = text_of(profile(roof=ProfileRoof()))
    assert "peak of matrix products: unknown" in text
    assert "memory bandwidth: unknown" in text


def test_without_a_profiler_the_rest_is_shown():
    nothing = {"table": None, "outside_s": None, "timeline": None, "memory": None}
    text = text_of(profile(**nothing, notes=("The profiler could not be used: no.",)))
    assert "18 ms per step" in text
    assert "forward 22%" in text
    assert text.endswith("The profiler could not be used: no.")


def test_a_profile_is_json_and_back():
    assert Profile.model_validate_json(profile().model_dump_json()) == profile()
    assert profile().format_version == 1
