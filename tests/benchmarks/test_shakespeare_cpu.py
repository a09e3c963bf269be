"""benchmarks/shakespeare_cpu.py: shares of nanoGPT's time per repeat, and the chart."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest


def run(curve, wall_s):
    return {"wall_s": wall_s, "val_loss": curve[-1][1], "tokens": 10**6, "curve": curve}


@pytest.fixture
def found(benchmark):
    names = ("flatout", benchmark.FEW, benchmark.LONG, "nanoGPT")
    curves = ([(10.0, 1.7), (20.0, 1.59)], [(8.0, 1.87)], [(40.0, 1.51)], [(9.0, 2.5), (70.0, 1.9)])
    runs = {name: [run(curve, curve[-1][0])] * 2 for name, curve in zip(names, curves, strict=True)}
    return {"runs": runs, "machine": "", "repeats": 2, "few_steps": 120, "commit": ""}


def test_times_to_a_loss_are_shares_of_nanogpts_run(benchmark, found):
    assert benchmark.fractions(found, 1.88) == pytest.approx([8 / 70] * 2)
    assert benchmark.fractions(found, 1.50) is None
    text = benchmark.table(found)
    assert "1.88 after 0.11 (0.11 to 0.11); target: 0.10: **missed**" in text
    assert "1.60 after 0.29 (0.29 to 0.29); target: 0.30: kept" in text
    assert "1.50 after not reached; target: 1.00: **missed**" in text


def test_the_chart_names_each_curve_where_it_ends(benchmark, found):
    picture = benchmark.picture(found)
    texts = [one.text for one in ET.fromstring(picture).iter() if one.tag.endswith("text")]
    assert "flatout: 1.59 after 20 s" in texts
    assert "9 times sooner" in texts
