"""The text of a profile: 80 columns, plain characters, what is unknown shown as such."""

from __future__ import annotations

from flatout.measure.profile.report import Gap, Profile
from flatout.measure.steps.evidence import KernelRow


def row(kind, **more):
    known = {"seconds": 0.0123, "share": 0.6, "calls": 1234.0, "slowest": "aten::mm"}
    return KernelRow(kind=kind, **known | more)


def profile(**more):
    known = {
        "recipe": "gpt2-124m",
        "device": "cuda",
        "arithmetic": "bf16",
        "speedups": ("compile",),
        "environment": {"torch": "2.13.0"},
        "first_step": 11,
        "steps": 3,
        "path": "profile/gpt2",
        "trace": "profile/gpt2/trace.json.gz",
        "snapshot": None,
        "step_ms": 18.0,
        "profiled_step_ms": 20.0,
        "phases_ms": {"forward": 4.0, "data": 1.0},
        "table": (row("matmul"), row("normalisation", share=0.005)),
        "outside_ms": 4.0,
        "gaps": (Gap(start_s=0.0, seconds=0.002, phase="data", host_op=None),),
        "device_idle": 0.2,
        "notes": (),
    }
    return Profile(**known | more)


def test_it_fits_into_80_columns_of_ascii():
    text = profile().text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    assert "The device idles 20% of a step." in text
    assert "2 ms idle at 0 ms: the host runs Python (data)" in text
    assert profile().summary().splitlines()[-2:] == [
        "profile/gpt2/  trace.json.gz, profile.json, profile.txt",
        "Open the trace at https://ui.perfetto.dev",
    ]
    assert "Host: data 6%, forward 22%, waiting for the device and others 72%" in text
    assert "waiting" not in profile(device="cpu").text()


def test_the_table_aligns():
    lines = profile().text().splitlines()
    header, matmul, norm = (
        next(line for line in lines if line.startswith(name))
        for name in ("class", "matmul", "normalisation")
    )
    assert len(header) == len(matmul) == len(norm)
    assert matmul.split() == ["matmul", "12.3", "60%", "1,234"]
    assert "outside of them 4 ms per step, 20%: the device idles" in lines


def test_without_a_profiler_the_rest_is_shown():
    nothing = {"table": None, "outside_ms": None, "gaps": None, "device_idle": None}
    text = profile(**nothing, notes=("The profiler could not be used: no.",)).text()
    assert "18 ms per step" in text
    assert "forward 22%" in text
    assert text.endswith("The profiler could not be used: no.")
