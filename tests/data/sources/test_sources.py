import pickle

import pytest

from flatout.config.registry import SOURCES
from flatout.data.sources import Document, LeftOut, ReadTask, RowLocation, read_tasks_of
from flatout.errors import DataError


def plain(count: int = 2):
    for number in range(count):
        yield f"text {number}"


def with_documents():
    return [Document("a", "first"), Document("", "second")]


def with_parts():
    return [ReadTask(plain, (1,), "x"), ReadTask(plain, (2,), "y")]


def test_a_function_that_yields_strings_is_a_source():
    (part,) = read_tasks_of(plain, "mine:plain", {"count": 3})
    assert [(row.text, str(row.location)) for row in part.rows()] == [
        (f"text {n}", f"document {n}") for n in range(3)
    ]
    assert [row.text for row in part.rows()] == [f"text {n}" for n in range(3)], (
        "a part can be read twice"
    )
    assert part.fingerprint != read_tasks_of(plain, "mine:plain", {"count": 4})[0].fingerprint


def test_a_function_that_returns_documents_is_a_source():
    (part,) = read_tasks_of(with_documents, "mine:docs", {})
    assert list(part.rows()) == [Document("a", "first"), LeftOut("empty document", "second")]


def test_a_function_that_returns_tasks_is_a_source():
    assert [len(list(part.rows())) for part in read_tasks_of(with_parts, "mine:parts", {})] == [
        1,
        2,
    ]


def test_a_parameter_that_a_source_does_not_take_is_named():
    with pytest.raises(DataError, match=r"'counts'.*Its parameters are: count"):
        read_tasks_of(plain, "plain", {"counts": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in SOURCES.names() if name != "hub"]
)  # test_hub.py sends its parts to a worker
def test_every_source_splits_into_tasks_that_can_be_pickled(name, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    parameters = {"path": str(tmp_path)} if name == "files" else {}
    parts = read_tasks_of(SOURCES.get(name), name, parameters)
    for part in (parts[0], parts[-1]):
        assert list(pickle.loads(pickle.dumps(part)).rows()) == list(part.rows())


def test_a_row_is_named_by_its_line_in_large_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    line = b'{"text": "' + b"x" * 1000 + b'"}\n'
    path.write_bytes(line * 3000)
    assert str(RowLocation(str(path), 0)) == f"{path}, line 1"
    assert str(RowLocation(str(path), len(line) * 2999)) == f"{path}, line 3000"
