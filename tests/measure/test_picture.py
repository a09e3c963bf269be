"""The picture is whole, and nothing of it lies outside the page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from flatout.measure.picture import picture

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(report):
    return ElementTree.fromstring(picture(report))


def test_every_measured_row_has_a_bar_as_long_as_its_rate(sample_report):
    bars = [element for element in drawn(sample_report).iter(f"{SPACE}rect") if element.get("x")]
    rates = [row.tokens_per_s.median for row in sample_report.rows if row.tokens_per_s]
    lengths = [float(bar.get("width")) for bar in bars]
    assert [round(length / lengths[0], 2) for length in lengths] == [
        round(rate / rates[0], 2) for rate in rates
    ]


def test_names_gains_and_reasons_are_written_out(sample_report):
    words = [element.text for element in drawn(sample_report).iter(f"{SPACE}text")]
    for row in sample_report.rows:
        assert row.kind == "absent" or row.is_unreached or row.short_name in words
    assert "Not measured, the time was up: all but wrong, all and liger." in words
    assert "bf16 for fp16" in words
    assert any("x2.10 (2.07 to 2.13)" in word for word in words)
    assert any("A <fast> CPU & more" in word for word in words)
    assert "promise broken" in words
    assert any(word.startswith("Out of memory") for word in words)


DEJAVU_EM = 0.6
"""Mean width of a letter in DejaVu Sans, in font sizes: what a browser on Linux takes for
Helvetica. Its bold is wider by a tenth.
"""
LONG = " ".join(
    [
        "in words that never end, wherever they are written, of a machine whose name is as long as its list of parts"
    ]
    * 3
)


def reaches(element):
    """Return from where to where a text goes, in pixels."""
    widest = DEJAVU_EM * (1.1 if element.get("font-weight") == "bold" else 1.0)
    at, length = (
        float(element.get("x")),
        widest * float(element.get("font-size")) * len(element.text),
    )
    return (at - length, at) if element.get("text-anchor") == "end" else (at, at + length)


def everywhere_long(report):
    rows = [
        row.model_copy(update={"reason": LONG})
        if row.status in {"out-of-memory", "timed-out"}
        else row
        for row in report.rows
    ]
    late = [row for row in rows if row.is_unreached]
    rows += [
        late[0].model_copy(update={"name": f"all but {number} of the many"}) for number in range(40)
    ]
    return report.model_copy(update={"rows": rows, "machine": LONG, "recipe": LONG})


@pytest.mark.parametrize("make", [lambda report: report, everywhere_long], ids=["usual", "long"])
def test_no_text_is_clipped(sample_report, make):
    page = drawn(make(sample_report))
    width, height = float(page.get("width")), float(page.get("height"))
    for element in page.iter(f"{SPACE}text"):
        first, last = reaches(element)
        assert 0 <= first < last <= width, element.text
        assert float(element.get("y")) <= height - 4, element.text


def test_a_long_footnote_is_broken_and_not_cut(sample_report):
    words = " ".join(
        element.text for element in drawn(everywhere_long(sample_report)).iter(f"{SPACE}text")
    )
    assert f"{LONG};" in words
    assert "all but 39 of the many" in words


@pytest.mark.parametrize(
    "name", ["all", "all, with one and another and a third for two that were there"]
)
def test_everything_lies_on_the_page(sample_report, name):
    rows = [
        row if row.kind != "put-in" else row.model_copy(update={"name": name})
        for row in sample_report.rows
    ]
    page = drawn(sample_report.model_copy(update={"rows": rows}))
    width, height = float(page.get("width")), float(page.get("height"))
    for element in page.iter():
        for place, limit in (("x", width), ("x2", width), ("y", height), ("y2", height)):
            assert 0 <= float(element.get(place) or 0) <= limit
    bars = [element for element in page.iter(f"{SPACE}rect") if element.get("x")]
    assert max(float(bar.get("x")) + float(bar.get("width")) for bar in bars) < width
    names = [
        element for element in page.iter(f"{SPACE}text") if element.get("text-anchor") == "end"
    ]
    assert all(float(element.get("x")) > 6.5 * len(element.text) for element in names)
