"""The picture shows every row, is reproducible, and clips no text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from flatout.measure.bench.picture import COLOURS, picture

SVG = "{http://www.w3.org/2000/svg}"
LONG = " ".join(["a machine whose name is as long as its list of parts"] * 6)


def page(report):
    return ElementTree.fromstring(picture(report))


def texts(root):
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def bar_lengths(root):
    """Return the lengths of the bars, from their outlines."""
    lengths = []
    for path in root.iter(f"{SVG}path"):
        fill = re.search(r"fill: (#\w+)", path.get("style") or "")
        if fill and fill[1] in COLOURS.values():
            xs = [float(x) for x in re.findall(r"[ML] (-?[\d.]+) ", path.get("d"))]
            lengths.append(max(xs) - min(xs))
    return lengths


@pytest.mark.slow
def test_equal_reports_give_equal_pictures(sample_report):
    assert picture(sample_report) == picture(sample_report)


def test_every_measured_row_has_a_bar_as_long_as_its_rate(sample_report):
    rates = [row.tokens_per_s.median for row in sample_report.rows if row.tokens_per_s]
    lengths = bar_lengths(page(sample_report))
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [rate / rates[0] for rate in rates], rel=1e-3
    )


def test_names_gains_and_reasons_are_shown(sample_report):
    found = texts(page(sample_report))
    for row in sample_report.rows:
        assert row.kind == "absent" or row.is_unreached or row.short_name in found
    assert "Not measured, the time was up: all but wrong, all and liger." in found
    assert "bf16 for fp16" in found
    assert any("x2.10 (2.07 to 2.13)" in text for text in found)
    assert any("A <fast> CPU & more" in text for text in found)
    assert "promise broken" in found
    assert any(text.startswith("Out of memory") for text in found)


def with_long_texts(report):
    rows = [
        row.model_copy(update={"reason": LONG})
        if row.status in {"out-of-memory", "timed-out"}
        else row
        for row in report.rows
    ]
    late = [row for row in rows if row.is_unreached]
    rows += [late[0].model_copy(update={"name": f"all but {n} of the many"}) for n in range(40)]
    return report.model_copy(update={"rows": rows, "machine": LONG, "recipe": LONG})


@pytest.mark.parametrize(
    "change", [lambda report: report, with_long_texts], ids=["usual", "long texts"]
)
def test_all_texts_are_on_the_page(sample_report, change):
    root = page(change(sample_report))
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root.iter(f"{SVG}text"):
        x, y = (
            map(float, re.search(r"translate\((\S+) (\S+)\)", element.get("transform")).groups())
            if element.get("transform", "").startswith("translate")
            else (float(element.get("x")), float(element.get("y")))
        )
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_a_long_footnote_is_wrapped_and_not_cut(sample_report):
    found = " ".join(texts(page(with_long_texts(sample_report))))
    assert f"{LONG};" in found
    assert "all but 39 of the many" in found


def test_a_long_name_widens_the_page(sample_report):
    name = "all, with one and another and a third for two that were there before them"
    rows = [
        row if row.kind != "put-in" else row.model_copy(update={"name": name})
        for row in sample_report.rows
    ]
    usual, wide = page(sample_report), page(sample_report.model_copy(update={"rows": rows}))
    assert float(wide.get("viewBox").split()[2]) > float(usual.get("viewBox").split()[2])
