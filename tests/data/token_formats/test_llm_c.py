"""llm.c's .bin files, which modded-nanogpt reads too."""

import struct

import numpy as np
import pytest

from flatout.errors import DataError


def write(path, tokens, magic=20240520, dtype="<u2", count=None):
    header = struct.pack("<3i", magic, 1, len(tokens) if count is None else count)
    path.write_bytes(header.ljust(1024, b"\0") + np.asarray(tokens, dtype).tobytes())


def test_shards_keep_the_split_of_their_names(tmp_path, imported):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    write(folder / "fineweb_val_000000.bin", [9, 256] * 5)
    write(folder / "fineweb_train_000002.bin", [3, 256] * 5)
    write(folder / "fineweb_train_000001.bin", [1, 2, 256])
    made = imported(folder)
    assert made.train == [1, 2, 256, *[3, 256] * 5]
    assert made.val == [9, 256] * 5
    assert made.manifest.source["chunks"] == 3


def test_the_header_states_the_type(tmp_path, imported):
    write(tmp_path / "llama.bin", [100_000, 5] * 20, magic=20240801, dtype="<u4")
    made = imported(tmp_path / "llama.bin", tokenizer="ids:128256:128001")
    assert made.train == [100_000, 5] * 18


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (struct.pack("<3i", 20240520, 1, 5), "less than llm.c's header"),
        (struct.pack("<3i", 20240520, 1, 5).ljust(1028, b"\0"), "states 5 tokens.*contains 2"),
        (struct.pack("<3i", 20240520, 1, 0).ljust(1024, b"\0"), "states 0 tokens"),
        (struct.pack("<3i", 20240520, 1, 1).ljust(1027, b"\0"), "states 1 tokens"),
    ],
)
def test_a_truncated_file_is_named(tmp_path, imported, nothing_kept, content, wanted):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(DataError, match=wanted):
        imported(tmp_path / "bad.bin")
