"""The page: what it shows, complete, self-contained, and closed to what a run directory holds."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import pytest

from flatout.measure.report.page import LONGEST_TEXT, MARK, MAX_EVENTS, render

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{e}"


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


def text_of(runs):
    """The text of the page, without markup."""
    body = render(runs).partition("<main>")[2].partition("<script")[0]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def drawn(*runs):
    """The charts of a page: titles and legends."""
    figures = re.findall(r"<figure.*?</figure>", render(list(runs)), re.DOTALL)
    return {
        re.search("<h2>(.*?)</h2>", figure)[1]: re.findall("</svg>(.*?) <output>", figure)
        for figure in figures
    }


def test_results_are_those_of_the_records_and_the_summary(make_run, read):
    summary = {"best_val_loss": 1.25, "mfu_of": "data sheet", "bits_per_byte": None}
    events = [{"event": "resume", "step": 3}, *[{"event": "skip", "step": 4}] * 2]
    shown = text_of(read(make_run(summary=summary, events=events)))
    for text in (
        "state finished steps 20 time 10 s",
        "Loss, training 0.2 nats per token Throughput 1,011 tokens/s",
        "Time of a step, step 10 ms Time of a step, device 8 ms",
        "Memory, peak 0.5 GiB",
        "best validation loss 1.25 peak rate data sheet events 1 resume, 2 skip",
    ):
        assert text in shown
    assert "bits per byte" not in shown
    shown = text_of(read(make_run("a"), make_run("empty", records=[])))
    assert "steps 20 of 40 0 of 40 time 10 s –" in shown
    assert "empty: metrics.jsonl has no records yet, so there are no curves." in shown


def test_the_sections_begin_with_what_differs_and_the_results(make_run, read):
    other = "name: tiny\nmodel: {vocab_size: 65}\ndata: {path: data/x}\ntrain: {steps: 40}\n"
    page = render(read(make_run("a", events=()), make_run("b", config=other, events=())))
    sections = re.findall('<section id="(.*?)"', page)
    expected = ["differences", "results", "charts", "findings", "findings", "settings", "about"]
    assert sections == expected
    shown = text_of(read(make_run("c"), make_run("d", config=other)))
    assert (
        "c d model.vocab_size 257 65 data.path data/book data/x model.vocab_size differs" in shown
    )
    assert "(257, 65): a loss per token means something else in each." in shown
    assert "(data/book, data/x): the runs were trained and evaluated on different" in shown
    assert "Differences The settings are the same. Results" in text_of(
        read(make_run("e"), make_run("f"))
    )
    shown = text_of(read(make_run("g", config=None), make_run("h", config=None)))
    assert shown.count("no config.yaml, so their settings are not known") == 2


def test_what_the_records_show_is_diagnosed(make_run, read):
    steps = [{"step": n, "perf/step_ms": 10.0, "perf/device_ms": 9.0} for n in range(1, 21)]
    assert "Findings Nothing was found." in text_of(read(make_run(records=steps, events=())))
    slow = [step | {"perf/device_ms": 4.0, "perf/data_wait_ms": 5.0} for step in steps]
    shown = text_of(read(make_run("slow", records=slow, events=())))
    assert "Findings 50% of each step waits for data. evidence" in shown


def test_speedups_that_are_switched_off_later_are_events(make_run, read):
    first = {"event": "speedup", "step": 0, "wall_s": 2.0, "name": "compile", "on": True}
    late = first | {"on": False, "step": 3, "reason": "no compiler"}
    sample = {"event": "sample", "step": 5, "text": "Once upon a time"}
    shown = text_of(read(make_run(events=[first, {"event": "start"}, late, sample])))
    assert "2.0 s 0 speedup" not in shown
    assert "2.0 s 3 speedup name compile, on no, reason no compiler" in shown
    assert "– 5 sample text Once upon a time" in shown


def test_settings_are_shown_and_compared_with_all_their_digits(make_run, read):
    rates = ("1.23456e-3", "1.23461e-3")
    runs = [make_run(lr, config=f"optim: {{lr: {lr}, clip: 2.0}}\n") for lr in rates]
    shown = text_of(read(*runs))
    assert "optim.lr 0.00123456 0.00123461" in shown
    assert "The settings are the same" not in shown
    assert "optim.clip 2.0 2.0 " in shown


def test_many_events_and_long_texts_are_cut(make_run, read):
    events = [{"event": "skip", "step": step} for step in range(MAX_EVENTS + 7)]
    events[-1]["text"] = "x" * 10**6
    shown = text_of(read(make_run(events=events)))
    assert "7 earlier events are in events.jsonl." in shown
    assert "– 506 skip" in shown
    assert "– 6 skip" not in shown
    assert "x... (1,000,005 characters)" in shown
    assert len(shown) < LONGEST_TEXT + 50_000


def test_the_charts_are_those_of_the_numbers(make_run, read):
    charts = drawn(*read(make_run()))
    assert [*charts] == [
        "Loss",
        "Throughput",
        "Time of a step",
        "Memory",
        "Gradient norm",
        "Learning rate",
    ]
    assert charts["Throughput"] == ["Throughput"]
    assert charts["Time of a step"] == ["step", "device", "host", "waiting for data"]
    gpu = [{"step": 1, "gpu/util_pct": 97.0, "gpu/power_w": 640.0, "perf/mfu": 0.5}]
    charts = drawn(*read(make_run("gpu", records=gpu)))
    assert [*charts] == ["Model FLOPs utilisation", "GPU utilisation", "GPU power"]
    assert drawn(*read(make_run("none", records=[{"step": 1, "train/loss": None}]))) == {}
    charts = drawn(*read(make_run("one"), make_run("two")))
    assert charts["Learning rate"] == ["one", "two"]
    assert charts["Loss"] == ["one · training", "two · training"]
    many = [{"step": 1, "val/loss/book": 2.0} | {f"my/f{n:03}": 1.0 for n in range(100)}]
    (run,) = read(make_run("many", records=many))
    assert len(drawn(run)) == 12
    assert "Metrics without a chart: my/f012, my/f013, my/f014, my/f015, my/f016, and 84 more." in (
        text_of([run])
    )
    assert "without a chart" not in text_of(read(make_run("few")))


def test_no_two_lines_of_a_chart_look_alike(make_run, read):
    records = [{"step": 1, "train/loss": 1.0, "val/loss": 2.0, "train/lr": 3.0}]
    runs = read(*(make_run(f"run-{number}", records=records) for number in range(12)))
    for figure in re.findall(r"<figure.*?</figure>", render(runs), re.DOTALL):
        looks = re.findall(r'class="(c\d)" stroke-dasharray="(.*?)"', figure)
        assert len(looks) in (12, 24)
        assert len({*looks}) == len(looks)


def test_the_loss_is_drawn_over_the_whole_width(make_run, read):
    page = render(read(make_run()))
    (key,) = re.findall(r'figure\[data-chart="(\w+)"\][^{]*{ grid-column: 1 / -1; }', page)
    assert f'<figure data-chart="{key}"><figcaption><h2>Loss</h2>' in page


def test_all_plots_share_one_horizontal_range_with_an_axis_for_each_position(make_run, read):
    page = render(read(make_run("a"), make_run("b")))
    data = data_of(page)
    roots = [root["attributes"] for root in data["document"]["roots"]]
    assert len(roots) == len(data["charts"]) == 6
    assert len({str(root["x_range"].get("id")) for root in roots}) == 1
    for root in roots:
        names = [axis["attributes"].get("name") for axis in root["below"]]
        assert names == ["step", "tokens", "elapsed_s"]
    assert data["bounds"]["step"] == [1, 20]
    names = re.findall(r'"name": ?"([^"]*\|curve)"', json.dumps(data["document"]))
    lines = [f"{key}|curve" for key in re.findall('data-line="([^"]*)"', page)]
    assert sorted(names) == sorted(lines)
    assert len({*lines}) == len(lines)
    data = data_of(render(read(make_run("c", records=[{"step": 1, "a/b": 1}]))))
    assert data["bounds"] == {"step": [1, 1], "tokens": None, "elapsed_s": None}


@pytest.mark.parametrize(
    ("number", "glyphs"), [(1, ["Scatter"]), (5, ["Line", "Scatter"]), (100, ["Line"])]
)
def test_a_short_curve_has_a_marker_at_each_point(make_run, read, number, glyphs):
    records = [{"step": step, "train/loss": float(step)} for step in range(number)]
    (root,) = data_of(render(read(make_run(records=records))))["document"]["roots"]
    found = [each["attributes"]["glyph"]["name"] for each in root["attributes"]["renderers"]]
    assert found == glyphs


def test_nothing_is_loaded_from_elsewhere(make_run, read):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    page = render(read(folder))
    assert page.startswith(MARK)
    assert "line 21) is incomplete" in page
    assert 'id="differences"' not in page, "there is one run"
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
        {"event": "speedup", "name": ATTACK, "on": True},
        {"event": "speedup", "name": ATTACK, "on": ATTACK},
        {"event": ATTACK, "step": 1, ATTACK: ATTACK},
        {"event": "exit", "code": 1, "what": ATTACK, "fix": ATTACK},
    ]
    return make_run(
        "<script>alert(3)<",
        records=records,
        events=events,
        summary={"mfu_of": ATTACK, "compile_s": [ATTACK], ATTACK: 2.0},
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


def test_a_hundred_thousand_records_make_a_page_of_less_than_two_megabytes(make_run, read):
    records = [{"step": s, "tokens": s, "elapsed_s": s, "train/loss": s % 7} for s in range(10**5)]
    assert len(render(read(make_run(records=records)))) < 2e6
