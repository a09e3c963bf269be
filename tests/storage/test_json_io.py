"""JSON lines of a file that may still grow."""

import pytest

from flatout.errors import CheckpointError
from flatout.storage.json_io import LineReader


def test_a_line_that_is_still_being_written_is_omitted(tmp_path):
    path = tmp_path / "lines"
    assert list(LineReader(path).read()) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    reader = LineReader(path)
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    assert (reader.lines, reader.is_cut_off, reader.damaged) == (2, True, [])
    with path.open("a") as file:
        file.write(": 3}")
    assert list(LineReader(path).read()) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_damaged_lines_are_counted_and_empty_ones_are_not(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n\n[2]\n\xff\n{"a": 2}\n' + b"[" * 100_000 + b"\n")
    reader = LineReader(path)
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    assert reader.damaged == [3, 4, 6]


def test_a_directory_in_its_place_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        list(LineReader(tmp_path).read())
