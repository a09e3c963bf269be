import os
from pathlib import Path

import pytest

from flatout.data.sources.files import files
from flatout.data.sources.listing import Wanted, find_files, matches
from flatout.errors import DataError
from flatout.storage.files import expanded

WANTED = Wanted(frozenset({".txt"}))


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def found(path):
    return find_files(str(path), WANTED)[0]


def names(path):
    return [file.name for file in found(path)]


def test_links_to_directorys_are_followed(tmp_path):
    write(tmp_path, "texts/b.txt", "elsewhere/a.txt", "elsewhere/deep/c.txt")
    (tmp_path / "texts" / "a").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path / "texts") == ["a/a.txt", "a/deep/c.txt", "b.txt"]


@pytest.mark.slow
def test_a_directory_is_searched_once_even_with_several_links(tmp_path):
    write(tmp_path, "texts/a/x.txt", "texts/b/y.txt")
    (tmp_path / "texts" / "a" / "up").symlink_to("..")
    (tmp_path / "texts" / "a" / "across").symlink_to("../b")
    (tmp_path / "texts" / "b" / "self").symlink_to(".")
    assert names(tmp_path / "texts") == ["a/across/y.txt", "a/x.txt"]
    assert names(f"{tmp_path}/texts/**/*.txt") == ["x.txt", "y.txt"]


@pytest.mark.parametrize("path", ["texts", "texts/*.txt", "texts/a.txt"])
def test_a_broken_link_is_named(tmp_path, path):
    write(tmp_path, "texts/b.txt")
    (tmp_path / "texts" / "a.txt").symlink_to("gone.txt")
    with pytest.raises(
        DataError,
        match=r"texts/a\.txt is a link to gone\.txt, which does not exist\. "
        "Fix: Repair or remove the link",
    ):
        found(tmp_path / path)


def test_a_broken_link_that_is_not_searched_for_is_skipped(tmp_path):
    write(tmp_path, "a.txt")
    for name in ("notes", ".hidden.txt"):
        (tmp_path / name).symlink_to("gone")
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("path", "closed"),
    [
        ("texts", "texts/closed"),
        ("texts/**/*.txt", "texts/closed"),
        ("texts/*/*.txt", "texts"),
        ("*", "texts"),
    ],
)
def test_a_directory_that_cannot_be_listed_is_named(tmp_path, monkeypatch, path, closed):
    write(tmp_path, "texts/a.txt", "texts/closed/b.txt")
    scandir = os.scandir

    def refusing(place="."):
        if str(place) == str(tmp_path / closed):
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=rf"{closed} cannot be read: Permission denied"):
        found(tmp_path / path)


@pytest.mark.parametrize("path", ["closed/in", "closed/*.txt"])
def test_a_system_error_is_reported(monkeypatch, path):
    def refusing(place, **_):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(Path, "is_dir", refusing)
    with pytest.raises(DataError, match=r"closed/.* cannot be read: Permission denied"):
        found(path)


def test_an_unknown_home_directory_is_an_error():
    for call in (expanded, files):
        with pytest.raises(DataError, match=r"no home directory is known for '~nosuch'"):
            call("~nosuch/x.txt")


def test_a_pattern_searches_directorys_that_match(tmp_path):
    hidden = ("texts/sub/.e.txt", "texts/sub/deep/f.txt")
    write(tmp_path, "texts/a.txt", "texts/b.py", "texts/sub/c.txt", "texts/sub/d.py", *hidden)
    assert names(f"{tmp_path}/texts/*") == ["a.txt", "b.py", "c.txt", "deep/f.txt"]
    assert names(f"{tmp_path}/texts/s*") == ["c.txt", "deep/f.txt"]
    every = [Path(file.path).name for file in found(f"{tmp_path}/texts/**")]
    assert every == ["a.txt", "b.py", "c.txt", "d.py", "f.txt"]
    python = found(f"{tmp_path}/texts/**/*.py")
    assert [Path(file.path).name for file in python] == ["b.py", "d.py"]


def test_skipped_files_of_a_directory_are_listed(tmp_path):
    inside = ("texts/sub/c.txt", "texts/sub/d.py", "texts/sub/.e.py")
    write(tmp_path, "texts/a.txt", "texts/b.py", *inside)
    folder = tmp_path / "texts"
    assert find_files(str(folder), WANTED)[1] == [f"{folder}/b.py", f"{folder}/sub/d.py"]
    assert find_files(f"{folder}/*", WANTED)[1] == [f"{folder}/sub/d.py"]
    assert find_files(f"{folder}/**", WANTED)[1] == []
    taken, passed_over = find_files(str(folder), Wanted(WANTED.suffixes, ("sub/*.py",)))
    assert [file.name for file in taken] == ["a.txt", "sub/c.txt", "sub/d.py"]
    assert passed_over == [f"{folder}/b.py"]


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("a.py", "*.py", True),
        ("x/a.py", "*.py", True),
        ("x/a.py.gz", "*.py", True),
        ("x/a.py.gz", "*.py.gz", True),
        ("x/a.py", "x/*.py", True),
        ("y/x/a.py", "x/*.py", True),
        ("xx/a.py", "x/*.py", False),
        ("a.pyc", "*.py", False),
        ("a.py", "py", False),
        ("docs/Makefile", "Makefile", True),
    ],
)
def test_a_pattern_matches_the_end_of_a_path(name, pattern, fits):
    assert matches(name, pattern) == fits


def test_a_special_file_with_a_text_name_is_named(tmp_path):
    write(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt is not a regular file"):
        found(tmp_path)
