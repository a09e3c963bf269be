from pathlib import Path

import pytest

from flatout.data.sources import Document, LeftOut, python_stdlib
from flatout.errors import DataError


def names_of(rows):
    return [row.location for row in rows]


def make(root: Path, **texts: str | bytes) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path = path.with_name(path.name + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def test_this_python_gives_the_same_text_in_sorted_order_twice():
    parts = python_stdlib.python_stdlib()
    rows = [row for part in parts for row in part.rows()]
    documents = [row for row in rows if isinstance(row, Document)]
    assert sum(len(row.text) for row in documents) > 5_000_000
    assert names_of(rows) == sorted(names_of(rows))
    assert not any("site-packages" in row.location for row in rows)
    assert [row.text for row in documents if row.location == "this.py"] == [
        Path(parts[0].arguments[0], "this.py").read_text()
    ]
    assert [part.fingerprint for part in python_stdlib.python_stdlib()] == [
        part.fingerprint for part in parts
    ]
    assert len(parts) > 4


def test_tests_are_added_only_until_there_is_enough_text(tmp_path, monkeypatch):
    root = make(
        tmp_path, b="x" * 50, a__c="x" * 50, test__a="y" * 10, test__b="y" * 10, site__x="z"
    )
    monkeypatch.setattr(python_stdlib, "ENOUGH_BYTES", 90)
    assert python_stdlib.choose(root) == ["a/c.py", "b.py", "site/x.py"]
    monkeypatch.setattr(python_stdlib, "ENOUGH_BYTES", 105)
    assert python_stdlib.choose(root) == ["a/c.py", "b.py", "site/x.py", "test/a.py"]
    monkeypatch.setattr(python_stdlib, "ENOUGH_BYTES", 10_000)
    assert python_stdlib.choose(root) == ["a/c.py", "b.py", "site/x.py", "test/a.py", "test/b.py"]


def test_installed_packages_are_not_the_standard_library(tmp_path):
    root = make(tmp_path, a="x")
    make(tmp_path / "site-packages" / "numpy", x="y")
    make(tmp_path / "dist-packages", x="y")
    assert python_stdlib.choose(root) == ["a.py"]


def test_modules_are_read_in_the_encoding_they_declare(tmp_path):
    make(
        tmp_path,
        a="# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"),
        b=b"# coding: no-such\n",
        c=b"\xff\xfe",
        d="# é\n".encode(),
    )
    rows = list(python_stdlib.read_modules(str(tmp_path), ("a.py", "b.py", "c.py", "d.py")))
    assert rows == [
        Document("# -*- coding: latin-1 -*-\n# é\n", "a.py"),
        LeftOut("cannot be decoded", "b.py"),
        LeftOut("cannot be decoded", "c.py"),
        Document("# é\n", "d.py"),
    ]


def test_a_python_without_its_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="contains no Python sources"):
        python_stdlib.python_stdlib()
