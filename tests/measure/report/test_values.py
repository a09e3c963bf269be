"""Numbers and text as HTML."""

from __future__ import annotations

import math

from flatout.measure.report.values import LONGEST_VALUE, UNKNOWN, escape, number, plain, table, time


def test_markup_becomes_text():
    assert escape("<b a='1'>&\"") == "&lt;b a=&#x27;1&#x27;&gt;&amp;&quot;"


def test_a_long_text_is_cut():
    assert len(escape("x" * 10**6)) < LONGEST_VALUE + 50


def test_what_is_not_a_finite_number_is_unknown():
    for value in (None, "3", True, math.nan, math.inf, 10**400, [1]):
        assert time(value) == UNKNOWN
        assert number(value) == UNKNOWN
    assert (number(12_345), number(0.123456), number(0.5, ".1%")) == ("12,345", "0.1235", "50.0%")


def test_times():
    assert [time(s) for s in (3.21, 62, 7500, None, math.nan)] == [
        "3.2 s",
        "1 min 02 s",
        "2 h 05 min",
        UNKNOWN,
        UNKNOWN,
    ]


def test_values_of_settings():
    assert [plain(v) for v in (None, "a", True, 1e-3, [1, "b"])] == [
        UNKNOWN,
        "a",
        "true",
        "0.001",
        '[1, "b"]',
    ]


def test_a_table_has_headers_for_its_columns_and_rows():
    assert table(["", "a"], [("loss", "1")]).count("<th ") == 3
