"""JSON lines of a file that grows while it is read."""

from __future__ import annotations

import pytest

from flatout.errors import CheckpointError
from flatout.json_io import LineReader


def test_each_line_is_read_once(tmp_path):
    path = tmp_path / "lines"
    reader = LineReader(path)
    assert list(reader.read()) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    assert (reader.lines, reader.is_cut_off, reader.damaged) == (2, True, [])
    with path.open("a") as file:
        file.write(": 3}\n")
    assert list(reader.read()) == [{"a": 3}]
    assert (reader.lines, reader.is_cut_off) == (3, False)
    assert list(reader.read()) == []


def test_damaged_lines_are_counted_and_empty_ones_are_not(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n\n[2]\n\xff\n{"a": 2}\n' + b"[" * 100_000 + b"\n")
    reader = LineReader(path)
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    assert reader.damaged == [3, 4, 6]


def test_a_replaced_or_shortened_file_is_noticed(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    reader = LineReader(path)
    assert not reader.was_replaced()
    list(reader.read())
    assert not reader.was_replaced()
    path.write_text('{"a": 1}\n')
    assert reader.was_replaced()
    reader.restart()
    assert list(reader.read()) == [{"a": 1}]
    path.unlink()
    assert reader.was_replaced()


def test_a_directory_in_its_place_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        list(LineReader(tmp_path).read())
