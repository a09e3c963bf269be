"""The page in a real browser: it draws, reacts to the mouse, and runs no foreign script.

Needs the package playwright, and Chromium: from the system, or by `playwright install chromium`.
"""

import shutil
import time

import pytest

from flatout.measure.report.page import render

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the package playwright is not installed"
)
pytestmark = pytest.mark.slow
NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
WAIT_MS = 60_000
EVENTS = [
    {"event": "start", "step": 0},
    {"event": "save", "step": 10, "path": "checkpoints/step-10"},
    {"event": "sample", "step": 20, "text": "</script><script>window.attacked = 1</script>"},
]


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as kit:
        try:
            found = kit.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


class Tab:
    """An open page, and what went wrong on it."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.wrong, self.requests = [], []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type == "error" else None
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=WAIT_MS)

    def wait_for(self, condition):
        """Wait until a JavaScript expression is true. The page's policy forbids what Playwright's
        own function for it does.
        """
        deadline_s = time.monotonic() + WAIT_MS / 1e3
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline_s, condition
            self.page.wait_for_timeout(50)

    def range(self):
        """Start and end of the horizontal axis."""
        return self.page.evaluate("[range().start, range().end]")


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of some runs: `show(runs, **options of the browser's context)`."""
    tabs = []

    def show(runs, **options):
        file = tmp_path / "page.html"
        file.write_text(render(runs))
        tabs.append(Tab(browser, file.as_uri(), **options))
        return tabs[-1]

    yield show
    for tab in tabs:
        tab.context.close()


def test_every_chart_is_drawn_without_errors_or_requests(make_run, read, show):
    tab = show(read(make_run(events=EVENTS)))
    assert tab.wrong == []
    assert len(tab.requests) == 1
    assert tab.page.evaluate("plots.length") == 6
    heights = tab.page.evaluate("plots.map(plot => plot.view.frame.bbox.height)")
    assert min(heights) > 20
    assert tab.page.evaluate("window.attacked") is None
    assert "<script>window.attacked" in tab.page.text_content("#events")


def test_no_text_of_a_run_is_executed_as_a_script(make_run, read, show):
    attack = "</script><img src=x onerror='window.attacked=1'><script>window.attacked=1</script>"
    records = [{"step": 1, "train/loss": 1.0, f"x/{attack}": 2.0}]
    events = [{"event": "sample", "step": 1, "text": attack}]
    tab = show(read(make_run("<b>bold", records=records, events=events), make_run("b")))
    assert attack in tab.page.text_content("#events")
    assert (tab.wrong, len(tab.requests)) == ([], 1)
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.attacked = 1'}))"
    )
    assert tab.page.evaluate("window.attacked") is None
    assert any("Content Security Policy" in text for text in tab.wrong)


def test_the_axis_can_show_steps_tokens_and_time(make_run, read, show):
    tab = show(read(make_run()))
    for name, last in (("tokens", 2000), ("elapsed_s", 10), ("step", 20)):
        tab.page.check(f'input[value="{name}"]')
        _, high = tab.range()
        assert last <= high < 1.05 * last
        shown = tab.page.evaluate(
            "plots[0].model.below.filter(axis => axis.visible).map(axis => axis.name)"
        )
        assert shown == [name]


def test_the_legends_have_the_values_below_the_mouse(make_run, read, show):
    tab = show(read(make_run()))
    box = tab.page.locator('[data-chart="chart0"] .plot').bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert 0.3 < float(tab.page.inner_text('[data-chart="chart0"] output')) < 0.5
    assert tab.page.inner_text('[data-chart="chart4"] output') == "0.5000"
    tab.page.mouse.move(1, 1)
    assert tab.page.inner_text('[data-chart="chart0"] output') == ""


def test_positions_have_short_labels_that_differ_however_close_they_are(make_run, read, show):
    tab = show(read(make_run()))
    for name in ("step", "tokens"):
        axis = f"plots[0].model.below.find(axis => axis.name === '{name}')"
        labels = tab.page.evaluate(
            f"{axis}.formatter.doFormat([20, 1500, 2000000, 1234567000, 1234568000], {{}})"
        )
        assert labels == ["20", "1.5k", "2m", "1.234567b", "1.234568b"]


def test_the_axis_of_equal_values_starts_at_0(make_run, read, show):
    tab = show(read(make_run()))
    at = {"chart6": 1e-3, "chart4": 0.5}  # the learning rate, the memory
    for key, value in at.items():
        range_of = f"plots.find(plot => plot.key === '{key}').model.y_range"
        tab.wait_for(f"Math.abs({range_of}.end / {2 * value} - 1) < 1e-6")
        assert abs(tab.page.evaluate(f"{range_of}.start")) < 1e-9


def test_a_run_without_tokens_has_no_value_on_their_axis(make_run, read, show):
    other = [{"step": step, "train/loss": 1.0} for step in range(1, 21)]
    tab = show(read(make_run("a"), make_run("b", records=other)))
    tab.page.check('input[value="tokens"]')
    plot = tab.page.locator('[data-chart="chart0"] .plot')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    first, second = tab.page.locator('[data-chart="chart0"] output').all_inner_texts()
    assert 0.3 < float(first) < 0.5
    assert second == ""


def test_the_mouse_zooms_and_a_double_click_shows_the_whole_run(make_run, read, show):
    tab = show(read(make_run()))
    whole = tab.range()
    box = tab.page.locator('[data-chart="chart0"] .plot').bounding_box()
    x, y = box["x"] + 300, box["y"] + 100
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 200, y + 10, steps=4)
    tab.page.mouse.up()
    tab.wait_for(f"range().end < {whole[1]}")
    tab.page.mouse.dblclick(x, y)
    tab.wait_for(f"range().end === {whole[1]}")


def test_a_legend_hides_and_shows_its_line(make_run, read, show):
    tab = show(read(make_run()))
    button = tab.page.locator('[data-chart="chart3"] .legend button').first
    visible = "plots.flatMap(p => p.model.renderers).filter(r => r.visible).length"
    before = tab.page.evaluate(visible)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert tab.page.evaluate(visible) < before
    button.click()
    assert tab.page.evaluate(visible) == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(make_run, read, show, scheme):
    tab = show(read(make_run()), color_scheme=scheme)
    back = "getComputedStyle(document.body).backgroundColor"
    line = "plots[0].model.renderers[0].glyph.line_color.value"
    before = tab.page.evaluate(f"[{back}, {line}]")
    tab.page.click("#theme")
    after = tab.page.evaluate(f"[{back}, {line}]")
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert (before[0] == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_phone_needs_no_sideways_scrolling(make_run, read, show):
    runs = read(make_run("one", events=EVENTS), make_run("with-a-long-name-" * 5))
    tab = show(runs, viewport=PHONE, is_mobile=True, has_touch=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert min(tab.page.evaluate("plots.map(plot => plot.view.frame.bbox.width)")) > 200
    assert tab.page.evaluate("plots[0].model.toolbar.active_drag") is None
    assert tab.wrong == []
