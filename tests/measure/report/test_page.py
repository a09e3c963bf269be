"""The page: complete, self-contained, and closed to what a run directory holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.report.page import MARK, render
from flatout.measure.rules import Finding, Fix
from flatout.measure.steps.evidence import CallSite, Evidence

pytestmark = pytest.mark.slow

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&"


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.scripts, self.is_script = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.is_script = tag == "script"
        if self.is_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.is_script = False

    def handle_data(self, data):
        if self.is_script:
            self.scripts[-1] += data


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_nothing_is_loaded_from_elsewhere(make_run, read):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    page = render(read(folder))
    assert page.startswith(MARK)
    assert "line 21) is incomplete" in page
    assert 'id="differences"' not in page, "there is one run"
    assert 'id="findings"' not in page
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in {"link", "iframe", "object", "base", "img"}
        assert not {"src", "href", "action"} & attributes.keys()
    policy = next(a["content"] for t, a in elements.found if "http-equiv" in a)
    digests = [hashlib.sha256(text.encode()).digest() for text in elements.scripts[1:]]
    own = {base64.b64encode(digest).decode() for digest in digests}
    assert own == set(re.findall(r"'sha256-([^']+)'", policy))
    assert len(own) == 2
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy


def attacked(make_run):
    """A run whose every text is an attack."""
    records = [{"step": 1, f"my/{ATTACK}": 1.0, "train/loss": 1.0, ATTACK: 3}]
    events = [
        {"event": "sample", "step": 1, "text": ATTACK},
        {"event": "skip", "step": 1, "reason": ATTACK},
        {"event": ATTACK, "step": 1, ATTACK: ATTACK},
    ]
    site, fixes = CallSite(file=ATTACK, line=1, text=ATTACK), (Fix(text=ATTACK), Fix(text=ATTACK))
    figures = {ATTACK: ATTACK}
    finding = Finding(verdict=ATTACK, harm="slows", figures=figures, site=site, fixes=fixes)
    diagnosis = diagnosis_of(Evidence(source="recorded run"))
    found = diagnosis.model_copy(update={"verdict": ATTACK, "findings": (finding,)})
    return make_run(
        "<script>alert(3)<",
        records=records,
        events=events,
        summary={"mfu": 0.5, "mfu_of": ATTACK, ATTACK: 2.0},
        findings=found.model_dump(mode="json"),
        config=json.dumps({"name": ATTACK, "data": {"path": ATTACK, ATTACK: ATTACK}}),
    )


def test_no_text_of_a_run_becomes_markup_or_script(make_run, read):
    clean = Elements(render(read(make_run("clean"), make_run("clean2"))))
    page = render(read(attacked(make_run), make_run("other")))
    elements = Elements(page)
    of_findings = {"article", "pre", "dt", "dd", "dl", "br"}
    known = {tag for tag, _ in clean.found} | of_findings
    assert {tag for tag, _ in elements.found} <= known
    assert len(elements.scripts) == 3
    assert "<article>" in page
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert ATTACK in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"')


def test_a_run_without_records_still_has_a_page(make_run, read):
    page = render(read(make_run(records=[])))
    assert "no records yet" in page
    assert data_of(page)["charts"] == []


def test_every_line_has_its_source(make_run, read):
    page = render(read(make_run("a"), make_run("b")))
    data = data_of(page)
    names = set(re.findall(r'"name": ?"([^"]*\|curve)"', json.dumps(data["document"])))
    lines = {f"{key}|curve" for key in re.findall('data-line="([^"]*)"', page)}
    assert names == lines
    assert data["bounds"]["step"] == [1, 20]


def test_a_hundred_thousand_records_make_a_page_of_less_than_two_megabytes(make_run, read):
    records = [{"step": s, "tokens": s, "elapsed_s": s, "train/loss": s % 7} for s in range(10**5)]
    assert len(render(read(make_run(records=records)))) < 2e6
