"""The replay of a write log tells what survives a power loss."""

import random

import pytest
from tracing import calls
from write_log import Disk, everything, names_first, only_synced, torn, write


def hexadecimal(path):
    return "".join(f"\\x{byte:02x}" for byte in str(path).encode())


@pytest.fixture
def disk(tmp_path):
    """Return a function that replays lines of strace, in which {a} is the path /d/a in hex."""

    def replay(*lines):
        log = tmp_path / "log"
        names = {name: hexadecimal(f"/d/{name}") for name in ("a", "b", "f")} | {
            "inner": hexadecimal("/d/f/a"),
            "d": hexadecimal("/d"),
            "word": hexadecimal("word"),
            "name": hexadecimal("a"),
        }
        log.write_text("".join("7 " + line.format(**names) + "\n" for line in lines))
        disk = Disk("/d")
        for call in calls(log):
            disk.apply(*call[1:])
        return disk

    return replay


CREATED = 'openat(AT_FDCWD<{d}>, "{a}", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3<{a}>'
WRITTEN = 'write(3<{a}>, "{word}", 4) = 4'
SYNCED = "fsync(3<{a}>) = 0"
FOLDER_SYNCED = "fsync(4<{d}>) = 0"
RENAMED = 'rename("{a}", "{b}") = 0'


def test_a_kill_keeps_everything(disk):
    assert disk(CREATED, WRITTEN).tree(everything) == {"": None, "/a": b"word"}


def test_only_synced_data_under_synced_names_survives(disk):
    assert disk(CREATED, WRITTEN, SYNCED).tree(only_synced) == {"": None}
    assert disk(CREATED, WRITTEN, FOLDER_SYNCED).tree(only_synced) == {"": None, "/a": b""}
    assert disk(CREATED, SYNCED, WRITTEN, FOLDER_SYNCED).tree(only_synced)["/a"] == b""
    assert disk(CREATED, WRITTEN, SYNCED, FOLDER_SYNCED).tree(only_synced)["/a"] == b"word"


def test_a_renamed_file_has_its_old_name_until_the_directory_is_synced(disk):
    before = (CREATED, WRITTEN, SYNCED, FOLDER_SYNCED, RENAMED)
    assert disk(*before).tree(only_synced) == {"": None, "/a": b"word"}
    assert disk(*before, FOLDER_SYNCED).tree(only_synced) == {"": None, "/b": b"word"}


def test_names_may_survive_before_their_data(disk):
    assert disk(CREATED, WRITTEN, RENAMED).tree(names_first) == {"": None, "/b": bytes(4)}


def test_a_torn_file_begins_with_what_was_synced(disk):
    replayed = disk(CREATED, WRITTEN, SYNCED, WRITTEN, FOLDER_SYNCED)
    trees = [replayed.tree(torn(random.Random(seed))) for seed in range(50)]
    found = {tree["/a"] for tree in trees}
    assert found == {(b"word" * 2)[:length] for length in range(4, 9)}


def test_appends_seeks_cuts_links_and_directorys_are_followed(disk):
    tree = disk(
        'mkdir("{f}", 0777) = 0',
        CREATED,
        WRITTEN,
        "lseek(3<{a}>, 2, SEEK_SET) = 2",
        WRITTEN,
        'openat(AT_FDCWD<{d}>, "{a}", O_WRONLY|O_APPEND) = 5<{a}>',
        "lseek(5<{a}>, 0, SEEK_SET) = 0",
        'write(5<{a}>, "{word}", 4) = 4',
        "ftruncate(3<{a}>, 8) = 0",
        'pwrite64(3<{a}>, "{word}", 4, 10) = 4',
        'link("{a}", "{b}") = 0',
        'unlink("{a}") = 0',
        'link("{b}", "{inner}") = 0',
        'unlinkat(9<{f}>, "{name}", 0) = 0',
        'link("{b}", "{inner}") = -1 EIO (Input/output error)',
    ).tree(everything)
    assert tree == {"": None, "/f": None, "/b": b"wowordwo\0\0word"}


def test_calls_that_threads_interleave_are_joined(disk):
    tree = disk(
        CREATED, 'write(3<{a}>, "{word}", 4 <unfinished ...>', "<... write resumed>) = 4"
    ).tree(everything)
    assert tree["/a"] == b"word"


def test_a_tree_is_written_as_files(disk, tmp_path):
    folder = write({"": None, "/f": None, "/f/a": b"word"}, tmp_path / "new")
    assert (folder / "f" / "a").read_bytes() == b"word"
