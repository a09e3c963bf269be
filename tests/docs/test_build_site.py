"""The documentation site builds strictly, and the references in docs/reference are current."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "docs" / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.parametrize("page", ["reference/config.md", "reference/commands.md"])
def test_the_references_are_current(tool, page, is_current):
    path = ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    wanted = tool("build_site").with_reference(text, page)
    is_current(path, wanted)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tool, tmp_path):
    assert tool("build_site").build(tmp_path) == 0
    site = tmp_path / "site"
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert "flatout.train" in api
    assert "<code>trust_code</code>: " in api
    assert "Annotated" not in api
    keys = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert "optim.lr" in keys
    assert "may change when a run resumes" in keys
    assert "--out" in (site / "reference" / "commands.html").read_text(encoding="utf-8")


def test_the_navigation_lists_every_page_but_the_decisions(tool):
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- .*?: (\S+\.md)$", text, re.MULTILINE)
    pages = [page for page in tool("build_site").pages().values() if "decisions/" not in page]
    assert sorted(listed) == sorted(pages)


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tool, tmp_path, monkeypatch, capfd):
    site = tool("build_site")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n[nowhere](#nowhere)\n", encoding="utf-8")
    monkeypatch.setattr(site, "pages", lambda: {page: "page.md"})
    assert site.build(tmp_path / "built") != 0
    assert "anchor does not exist" in capfd.readouterr().err


def test_links_lead_to_pages_pictures_and_the_repository(tool, tmp_path, monkeypatch):
    site = tool("build_site")
    staged = {
        ROOT / "README.md": "index.md",
        ROOT / "docs" / "reference" / "api.md": "reference/api.md",
    }
    source = ROOT / "docs" / "reference" / "api.md"

    def rewritten(text):
        return site.with_site_links(text, source, staged, tmp_path)

    assert rewritten("[start](../../README.md#start)") == "[start](../index.md#start)"
    assert (
        rewritten("[here](#below), [far](https://a.org)") == "[here](#below), [far](https://a.org)"
    )
    picture = rewritten("![run](../assets/terminal.svg)")
    assert picture == "![run](../assets/terminal.svg)"
    assert (tmp_path / "terminal.svg").exists()
    monkeypatch.setattr(site, "repository_url", lambda: None)
    assert rewritten("the [licence](../../LICENSE)") == "the licence"
    monkeypatch.setattr(site, "repository_url", lambda: "https://host/flatout")
    assert rewritten("[it](../../LICENSE)") == "[it](https://host/flatout/blob/main/LICENSE)"


def test_an_escaped_bar_in_code_is_unescaped(tool):
    table = "| `a \\| b <c>` | `d` |"
    assert (
        tool("build_site").with_bars_in_code(table) == "| <code>a &#124; b &lt;c&gt;</code> | `d` |"
    )


def test_contracts_become_list_items(tool):
    text = "Return the sum.\n\nShapes:  a (B, T);\n         b (B,).\nRaises:  ShapeError."
    expected = "Return the sum.\n\n- **Shapes**: a (B, T); b (B,).\n- **Raises**: ShapeError.\n"
    assert tool("docstrings").with_contract_items(text) == expected


def test_types_are_written_in_short_form(tool):
    site = tool("build_site")
    assert site.type_name(int | None) == "int"
    assert site.type_name(tuple[float, float]) == "tuple[float, float]"
    assert site.shown((0.9, 0.95)) == "[0.9, 0.95]"
    assert site.shown(None) == "null"


def test_the_picture_shows_the_last_screen(tool):
    picture = tool("terminal_picture")
    output = (
        "one\r\n\x1b[36m50%\x1b[0m\r\n  left\r\x1b[2K\x1b[1A\x1b[2K\x1b[36m100%\x1b[0m\r\ndone\r\n"
    )
    lines = picture.screen(output)
    assert lines == ["one", "\x1b[36m100%\x1b[0m", "done", ""]
    drawn = picture.svg(lines, "$ demo")
    assert drawn.startswith("<svg")
    assert "100%" in drawn
    assert "50%" not in drawn
