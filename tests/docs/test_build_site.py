"""The documentation site builds strictly, and the references in docs/reference are current."""

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


def test_the_picture_of_meshes_is_current(tool):
    picture = tool("mesh_picture")
    assert picture.PICTURE.read_text() == picture.drawing()
    every = [picture.held(rank, shard=8, context=2) for rank in range(8)]
    assert [each.row for each in every] == [0, 0, 1, 1, 2, 2, 3, 3]
    for sizes, _ in picture.MESHES.values():
        every = [picture.held(rank, **sizes) for rank in range(8)]
        kept = {(block, part) for each in every for block in each.blocks for part in each.parts}
        assert len(kept) == 64, "together they have the whole model"
        read = {(each.row, token) for each in every for token in each.tokens}
        if "pipeline" not in sizes:
            assert len(read) == sum(len(each.tokens) for each in every), "and each token once"


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


def test_the_navigation_lists_every_page_but_decisions_and_results(tool):
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- .*?: (\S+\.md)$", text, re.MULTILINE)
    pages = tool("build_site").pages().values()
    unlisted = ("decisions/", "results/")
    assert sorted(listed) == sorted(page for page in pages if not page.startswith(unlisted))


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tool, tmp_path, monkeypatch, capfd):
    site = tool("build_site")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n[nowhere](#nowhere)\n", encoding="utf-8")
    monkeypatch.setattr(site, "pages", lambda: {page: "page.md"})
    assert site.build(tmp_path / "built") != 0
    assert "anchor does not exist" in capfd.readouterr().err
