import json
import zlib

import numpy as np
import pytest
from manifests import seal

from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.manifest import BLOCK_BYTES, read_manifest
from flatout.data.store.verify import verify_dataset
from flatout.data.tokenizers import make_tokenizer

RNG = np.random.default_rng(0)
TOKENS = BLOCK_BYTES // 2 + 1000


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer("byte", lambda _: iter([]))
    out = tmp_path / "set"
    with DatasetWriter(out, tokenizer, shard_tokens=BLOCK_BYTES // 2 + 2048) as writer:
        for split, size in (("train", TOKENS + 5000), ("val", 300)):
            tokens = RNG.integers(0, 257, size)
            writer.append(split, tokens, [10, size], text_bytes=size, mask=RNG.integers(0, 2, size))
        writer.finish(source={}, split_rule="named")
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
    entries = read_manifest(folder).files
    blocks = [entry for entry in entries if entry.block_crc32]
    assert found.num_bytes == sum(entry.size_bytes for entry in blocks)
    assert found.blocks == sum(len(entry.block_crc32) for entry in entries)
    assert found.files == len(entries) == len(list(folder.iterdir())) - 1


def test_all_damage_is_listed(folder):
    flip(folder / "00000.bin", BLOCK_BYTES + 3)
    flip(folder / "00000.mask.bin", 3)
    flip(folder / "00000.ends.bin", 0)
    (folder / "00001.bin").write_bytes(b"short")
    (folder / "00001.mask.bin").unlink()
    (folder / "tokenizer.json").write_text("{}")
    found = problems(folder)
    wanted = [
        "00001.bin has 5 bytes. The manifest lists 8504 bytes.",
        "00001.mask.bin is missing. The manifest lists 4252 bytes.",
        "tokenizer.json has 2 bytes. The manifest lists",
        f"00000.bin, byte {BLOCK_BYTES}: the 4096-byte block at this offset fails its checksum.",
        "00000.ends.bin, byte 0: the 8-byte block at this offset fails its checksum.",
        "00000.mask.bin, byte 0: the ",
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
    path = folder / "00001.ends.bin"
    data = path.read_bytes()[:8] + np.array(ends, "<i8").tobytes()
    path.write_bytes(data)
    edit(
        folder,
        lambda document: document["shards"][1]["ends"].update(block_crc32=[zlib.crc32(data)]),
    )
    (problem,) = problems(folder)
    assert wanted in problem


def test_values_are_checked_where_checksums_match(folder):
    wrong = {"00000.bin": (100, b"\xff\xff"), "00001.mask.bin": (7, b"\x02")}
    crcs = {}
    for name, (start, data) in wrong.items():
        whole = bytearray((folder / name).read_bytes())
        whole[start : start + len(data)] = data
        (folder / name).write_bytes(whole)
        blocks = range(0, len(whole), BLOCK_BYTES)
        crcs[name] = [zlib.crc32(whole[at : at + BLOCK_BYTES]) for at in blocks]

    def state(document):
        for shard in document["shards"]:
            for entry in (shard["tokens"], shard["mask"]):
                entry["block_crc32"] = crcs.get(entry["name"], entry["block_crc32"])

    edit(folder, state)
    tokens, mask = problems(folder)
    assert "00000.bin, byte 100: the token id 65535 is outside" in tokens
    assert "00001.mask.bin, byte 7: the mask contains 2, not 0 or 1" in mask


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda d: d["shards"][1]["tokens"].update(block_crc32=[1, 2]), "one checksum per block"),
        (
            lambda d: d["shards"][1]["splits"]["val"].update(documents=3),
            "do not fit into 00001.ends",
        ),
        (lambda d: d["shards"][1].update(mask=None), "do not fit into 00001.bin"),
        (lambda d: d["shards"].append(d["shards"][1]), "lists 00001.bin twice"),
    ],
    ids=["checksums", "documents", "mask", "twice"],
)
def test_contradictions_in_a_manifest(folder, change, wanted):
    edit(folder, change)
    assert any(wanted in problem for problem in problems(folder))
