import json
import zlib

import numpy as np
import pytest
from manifests import seal

from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.manifest import BLOCK_BYTES, read_manifest
from flatout.data.store.verify import verify_dataset, verify_remote
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError

RNG = np.random.default_rng(0)
TOKENS = BLOCK_BYTES // 2 + 1000


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer("byte", lambda _: iter([]))
    out = tmp_path / "set"
    with DatasetWriter(
        out, vocab_size=tokenizer.vocab_size, shard_bytes=BLOCK_BYTES + 4096
    ) as writer:
        for split, size in ((writer.train, TOKENS + 5000), (writer.val, 300)):
            tokens = RNG.integers(0, 257, size)
            split.append(tokens, [10, size], text_bytes=size, mask=RNG.integers(0, 2, size))
        writer.finish(tokenizer=tokenizer, source={}, split_rule="named")
    return out


def flip(path, byte):
    data = bytearray(path.read_bytes())
    data[byte] ^= 255
    path.write_bytes(data)


def edit(folder, change):
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    seal(path)


def problems(folder):
    return list(verify_dataset(folder).problems)


def test_an_intact_directory_is_read_completely(folder):
    found = verify_dataset(folder)
    assert found.problems == ()
    entries = [
        entry
        for split in read_manifest(folder).splits.values()
        for entry in (*split.shards, *split.masks, split.document_ends)
    ]
    assert found.num_bytes == sum(entry.size_bytes for entry in entries)
    assert found.blocks == sum(len(entry.block_crc32) for entry in entries)
    assert found.files == len(entries) + 1 == len(list(folder.iterdir())) - 1


def test_all_damage_is_listed(folder):
    flip(folder / "train-00000.bin", BLOCK_BYTES + 3)
    flip(folder / "train-00000.mask.bin", 3)
    flip(folder / "val-documents.bin", 0)
    (folder / "val-00000.bin").write_bytes(b"short")
    (folder / "val-00000.mask.bin").unlink()
    (folder / "tokenizer.json").write_text("{}")
    found = problems(folder)
    wanted = [
        "val-00000.bin has 5 bytes. The manifest lists 600 bytes.",
        "val-00000.mask.bin is missing. The manifest lists 300 bytes.",
        "tokenizer.json has 2 bytes. The manifest lists",
        f"train-00000.bin, byte {BLOCK_BYTES}: the 4096-byte block at this offset fails its "
        "checksum.",
        "train-00000.mask.bin, byte 0: the ",
        "val-documents.bin, byte 0: the 16-byte block at this offset fails its checksum.",
    ]
    assert len(found) == len(wanted)
    for problem, part in zip(found, wanted, strict=True):
        assert part in problem


def test_ids_beyond_the_vocabulary(folder):
    edit(folder, lambda document: document.update(vocab_size=256))
    found = problems(folder)
    assert any(
        "tokenizer.json has 257 tokens. The manifest lists 256." in problem for problem in found
    )
    assert any("the token id 256 is outside the vocabulary" in problem for problem in found)


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ([10, 9], "document 1 of val ends at 9, not after"),
        ([0, 300], "document 0 of val ends at 0"),
        ([10, 299], "end at 299, but it has 300 tokens"),
    ],
)
def test_document_ends_ascend_to_the_end_of_the_tokens(folder, ends, wanted):
    data = np.array(ends, "<i8").tobytes()
    (folder / "val-documents.bin").write_bytes(data)
    edit(
        folder,
        lambda document: document["splits"]["val"]["document_ends"].update(
            block_crc32=[zlib.crc32(data)]
        ),
    )
    (problem,) = problems(folder)
    assert wanted in problem


@pytest.fixture
def url(folder, store):
    """A URL with the same files as the folder."""
    for path in folder.iterdir():
        store.put_file(str(path), f"faulty://bucket/set/{path.name}")
    return "faulty://bucket/set"


def test_a_remote_dataset_is_read_without_being_stored(folder, url, store, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert verify_remote(url) == verify_dataset(folder)
    assert not (tmp_path / "home").exists()


def test_all_damage_at_a_url_is_listed(folder, url, store):
    flip(folder / "train-00000.bin", 5)
    flip(folder / "train-00000.bin", BLOCK_BYTES + 5)
    (folder / "val-00000.bin").write_bytes(b"short")
    for name in ("train-00000.bin", "val-00000.bin"):
        store.put_file(str(folder / name), f"{url}/{name}")
    store.pipe_file(f"{url}/tokenizer.json", b"{}")
    store.rm_file(f"{url}/train-00000.mask.bin")
    found = verify_remote(url)
    size = (folder / "train-00000.bin").stat().st_size - BLOCK_BYTES
    assert found.problems == (
        f"{url}/tokenizer.json is not the tokenizer that made these tokens.",
        f"{url}/train-00000.bin, byte 0: the {BLOCK_BYTES}-byte block at this offset fails its "
        "checksum.",
        f"{url}/train-00000.bin, byte {BLOCK_BYTES}: the {size}-byte block at this offset fails "
        "its checksum.",
        f"{url}/train-00000.mask.bin is missing. "
        f"The manifest lists {(BLOCK_BYTES + 4096) // 2} bytes.",
        f"{url}/val-00000.bin has 5 bytes. The manifest lists 600 bytes.",
    )


def test_a_url_is_checked_as_strictly_as_a_directory(folder, url, store):
    """Checksums, sizes and the manifest's digest all match. The values they cover are wrong."""
    files = {
        "train-00000.bin": (100, b"\xff\xff"),
        "val-00000.mask.bin": (7, b"\x02"),
        "val-documents.bin": (0, b"\x00"),
    }
    for name, (start, data) in files.items():
        whole = bytearray((folder / name).read_bytes())
        whole[start : start + len(data)] = data
        (folder / name).write_bytes(whole)
    crcs = {
        name: [zlib.crc32(block) for block in blocks((folder / name).read_bytes())]
        for name in files
    }

    def state(document):
        document["vocab_size"] = 258
        for split in document["splits"].values():
            for entry in (*split["shards"], *split["masks"], split["document_ends"]):
                entry["block_crc32"] = crcs.get(entry["name"], entry["block_crc32"])
        document["splits"]["train"]["shards"][1]["block_crc32"] *= 2

    edit(folder, state)
    for path in folder.iterdir():
        store.put_file(str(path), f"{url}/{path.name}")
    found = [problem.replace(str(folder), url) for problem in verify_dataset(folder).problems]
    assert len(found) == 5
    assert list(verify_remote(url).problems) == found


def blocks(data):
    return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]


def test_a_store_that_does_not_answer_is_an_error_not_damage(url, store):
    with pytest.raises(DataError, match="There is no dataset at"):
        verify_remote("faulty://bucket/none")
    store.faults[:] = [None] + [OSError("no route")] * 99
    with pytest.raises(DataError, match="no route"):
        verify_remote(url)
