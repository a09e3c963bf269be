import importlib.util
import sys

import pytest

from flatout.data.sources import BadRow, Document, LeftOut
from flatout.data.sources import file_reading as module
from flatout.data.sources.files import files
from flatout.errors import MissingPackage

PAGE = """<!doctype html>
<html><head><title>Title</title><style>p {x: y}</style><script>var a;</script></head>
<body><h1>One</h1><p>It was a <b>dark</b> and
stormy<i> night</i>.<br>Rain &amp; more.</p><pre>def f():
    return 1
</pre><!-- no --></body></html>"""


class Stub:
    """Replaces resiliparse where it is not installed."""

    @staticmethod
    def extract_plain_text(html, **options):
        assert options == {"alt_texts": False}
        return html.removeprefix("<p>")


def rows(path):
    return [row for part in files(str(path)) for row in part.rows()]


@pytest.mark.skipif(
    importlib.util.find_spec("resiliparse") is None, reason="resiliparse is not installed"
)
def test_a_page_becomes_its_text(tmp_path):
    (tmp_path / "a.html").write_text(PAGE)
    (row,) = rows(tmp_path / "a.html")
    assert (
        row.text == "One\n\nIt was a dark and stormy night.\nRain & more.\n\ndef f():\n    return 1"
    )


def test_pages_are_read_as_one_document_each(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_package", lambda path: Stub)
    monkeypatch.setattr(module, "PAGE_BYTES", 20)
    for name, content in {
        "a.html": b"\xef\xbb\xbf<p>one",
        "b.HTM": b"<p>",
        "c.xhtml": b"<p>\xe9",
        "d.html": b"<p>" * 10,
    }.items():
        (tmp_path / name).write_bytes(content)
    one, empty, latin, long = rows(f"{tmp_path}/*")
    assert one == Document("one", f"{tmp_path}/a.html")
    assert isinstance(empty, LeftOut)
    assert isinstance(latin, BadRow)
    assert (latin.reason, long.reason) == ("not UTF-8", "too long")


def test_a_missing_package_is_reported_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resiliparse.extract.html2text", None)
    (tmp_path / "a.html").write_text(PAGE)
    with pytest.raises(
        MissingPackage,
        match=r'a\.html needs the package resiliparse.*pip install "flatout\[html\]"',
    ):
        files(str(tmp_path / "a.html"))
