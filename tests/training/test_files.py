import errno
import json

import pytest

from flatout.errors import CheckpointError
from flatout.training import files


def test_reading_the_tail_of_a_file_leaves_out_the_line_it_cuts(tmp_path):
    path = tmp_path / "lines"
    for number in range(100):
        files.append_line(path, {"n": number})
    tail = [line["n"] for line in files.read_lines(path, tail_bytes=50)]
    assert tail == list(range(tail[0], 100))
    assert 0 < len(tail) < 10


def test_a_line_after_a_torn_one_stands_alone(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"n": 1}\n{"n":')
    files.append_line(path, {"n": 2})
    files.append_line(path, {"n": 3})
    assert [line["n"] for line in files.read_lines(path)] == [1, 2, 3]
    assert list(files.read_lines(tmp_path / "none")) == []


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0])
def test_floats_come_back_in_every_bit(tmp_path, value):
    files.write_json(tmp_path / "f", {"x": value})
    assert files.read_json(tmp_path / "f")["x"].hex() == value.hex()


def test_nothing_but_the_file_is_left_behind(tmp_path):
    files.write_json(tmp_path / "f", [1])
    files.write_json(tmp_path / "f", [2])
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert json.loads((tmp_path / "f").read_text()) == [2]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"Cannot read .*/f: No such file"):
        files.read_json(tmp_path / "f")


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(10))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(7))
    assert files.folder_bytes(tmp_path) == 17
    assert files.folder_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "Free space"), (errno.ENOENT, "Keep the run directory"), (errno.ENAMETOOLONG, "Choose a shorter path")]
)
def test_the_way_out_is_that_of_the_disks_own_reason(number, fix):
    assert files.way_out(OSError(number, "")).startswith(fix)
