import gzip
import tracemalloc

import pytest

from flatout.data.sources import BadRow, rows
from flatout.data.sources.fields import Fields
from flatout.data.sources.files import files
from flatout.data.sources.rows import read_rows


def test_a_row_of_any_length_takes_little_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (1 << 27) + b'"}\n{"text": "b"}\n')
    for start in (0, 50):
        tracemalloc.start()
        found = list(read_rows(str(path), start, 1 << 28, Fields()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [getattr(row, "text", "bad") for row in found] == ["bad", "b"][start > 0 :]
        assert peak < 40 << 20


def test_rows_that_begin_in_a_range_are_read_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "one"}\n', b"\n", b'{"text": "two"}\n', b'{"text": "three"}']
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    for cut in range(size + 1):
        found = [
            *read_rows(str(path), 0, cut, Fields()),
            *read_rows(str(path), cut, size, Fields()),
        ]
        assert [row.text for row in found] == ["one", "two", "three"], cut
    assert [str(row.location) for row in read_rows(str(path), 17, size, Fields())] == [
        f"{path}, line 3",
        f"{path}, line 4",
    ]


def test_a_number_that_is_too_long_is_named_without_a_python_setting(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "n": {"1" * 5000}}}\n')
    (part,) = files(str(tmp_path / "a.jsonl"))
    (bad,) = part.rows()
    assert "a number has more than 4,300 digits" in bad.error.what
    assert "set_int_max" not in bad.error.what


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_row_that_is_too_long_is_bad_and_the_others_are_read(tmp_path, monkeypatch, name, before):
    monkeypatch.setattr(rows, "ROW_BYTES", 1 << 20)
    lines = [b'{"text": "a"}\n'] * before + [
        b'{"text": "' + b"x" * (1 << 21) + b'"}\n',
        b'{"text": "b"}\n',
        b'{"text": "' + b"y" * (3 << 20),
    ]
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"".join(lines)) if name.endswith("gz") else b"".join(lines))
    *good, long, after, last = read_rows(str(path), 0, 9 << 20, Fields())
    assert [row.text for row in [*good, after]] == ["a"] * before + ["b"]
    for bad, number in ((long, before + 1), (last, before + 3)):
        assert isinstance(bad, BadRow)
        assert (bad.reason, str(bad.location)) == ("too long", f"{path}, line {number}")
        assert "is longer than 1 MiB" in str(bad.error)
        assert "a separate text file, which may have any length" in bad.error.fix
