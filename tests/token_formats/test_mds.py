"""MDS shards of MosaicML's streaming."""

import bz2
import gzip
import json

import numpy as np
import pytest

from flatout.errors import DataError

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(0, 257, length) for length in (5, 30, 1, 54, 10)]
WHOLE = np.concatenate(SAMPLES).tolist()
TYPES = {"uint16": 16, "int32": 33, "int64": 65, "uint32": 32}


def array(values, dtype, *, typed=False):
    """Return an array as a sample stores it, with its type unless the column states it."""
    values = np.asarray(values, dtype)
    head = bytes([TYPES[dtype]]) if typed else b""
    return head + bytes([1 << 2 | 1]) + np.array([len(values)], "<u2").tobytes() + values.tobytes()


def sample(*values, sizes):
    """Return a sample: the sizes that vary, and the columns."""
    stated = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
    return np.array(stated, "<u4").tobytes() + b"".join(values)


def write(folder, samples, *, names=("tokens",), encodings=("ndarray:uint16",), sizes=(None,)):
    """Write two shards: of the first two samples, and of the others."""
    folder.mkdir(parents=True)
    shards = []
    config = b'{"column_names": []}'
    for number, part in enumerate((samples[:2], samples[2:])):
        head = 4 * (len(part) + 2) + len(config)
        offsets = np.cumsum([head, *map(len, part)])
        content = np.array([len(part), *offsets], "<u4").tobytes() + config + b"".join(part)
        (folder / f"shard.{number:05}.mds").write_bytes(content)
        raw = {"basename": f"shard.{number:05}.mds", "bytes": len(content), "hashes": {}}
        shards.append(
            {
                "column_encodings": list(encodings),
                "column_names": list(names),
                "column_sizes": list(sizes),
                "compression": None,
                "format": "mds",
                "raw_data": raw,
                "samples": len(part),
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("typed", [True, False])
def test_samples_are_documents(tmp_path, imported, dtype, typed):
    samples = [sample(array(one, dtype, typed=typed), sizes=[None]) for one in SAMPLES]
    encoding = "ndarray" if typed else f"ndarray:{dtype}"
    made = imported(write(tmp_path / "mds", samples, encodings=[encoding]))
    assert made.train + made.val == WHOLE
    assert made.train_ends[:3] == [5, 35, 36]
    assert made.manifest.source["documents"] == "stored"


def test_arrays_of_a_fixed_shape_are_read(tmp_path, imported):
    rows = RNG.integers(0, 257, (6, 8)).astype("<i4")
    samples = [sample(row.tobytes(), sizes=[32]) for row in rows]
    folder = write(tmp_path / "mds", samples, encodings=["ndarray:int32:8"], sizes=[32])
    made = imported(folder, split="tail 0.5")
    assert made.train + made.val == rows.reshape(-1).tolist()


@pytest.mark.parametrize("dtype", ["int64", "uint16"])
def test_the_type_of_bytes_is_guessed(tmp_path, imported, dtype):
    samples = [sample(one.astype(dtype).tobytes(), sizes=[None]) for one in SAMPLES]
    folder = write(tmp_path / "mds", samples, encodings=["bytes"])
    made = imported(folder)
    assert made.train + made.val == WHOLE
    assert imported(folder, dtype=dtype, out="named").train == made.train


def test_the_column_with_tokens_is_read(tmp_path, imported):
    sizes = [8, None, None]
    samples = [sample(b"12345678", array(one, "int32"), b"text", sizes=sizes) for one in SAMPLES]
    folder = write(
        tmp_path / "mds",
        samples,
        names=["id", "input_ids", "text"],
        encodings=["int64", "ndarray:int32", "str"],
        sizes=sizes,
    )
    made = imported(folder)
    assert made.train + made.val == WHOLE
    with pytest.raises(DataError, match="stores 'str' in its column 'text', not tokens"):
        imported(folder, field="text", out="other")


@pytest.mark.parametrize("kind", ["zstd", "gz", "bz2"])
def test_compressed_shards_are_read(tmp_path, imported, kind):
    samples = [sample(array(one, "uint16"), sizes=[None]) for one in SAMPLES]
    folder = write(tmp_path / "mds", samples)
    pack = {"gz": gzip.compress, "bz2": bz2.compress}.get(kind)
    if pack is None:
        pack = pytest.importorskip("zstandard").compress
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        name = shard["raw_data"]["basename"]
        content = pack((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / f"{name}.{kind}").write_bytes(content)
        shard["compression"] = f"{kind}:3"
        shard["zip_data"] = {"basename": f"{name}.{kind}", "bytes": len(content)}
    (folder / "index.json").write_text(json.dumps(index))
    made = imported(folder)
    assert made.train + made.val == WHOLE
    (folder / f"{name}.{kind}").write_bytes(content[:-9])
    with pytest.raises(DataError, match=rf"{name}\.{kind}"):
        imported(folder, out="other")


def test_train_and_val_directories_keep_their_split(tmp_path, imported):
    samples = [sample(array(one, "uint16"), sizes=[None]) for one in SAMPLES]
    for split in ("train", "val", "test"):
        write(tmp_path / "mds" / split, samples if split == "train" else samples[::-1])
    made = imported(tmp_path / "mds")
    assert (made.train, made.val[:10]) == (WHOLE, SAMPLES[-1].tolist())
    assert "Not read: test" in made.said


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int32", "bytes"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_streaming_writes_is_read(tmp_path, imported, encoding, compression):
    streaming = pytest.importorskip("streaming")
    columns = {"tokens": encoding, "id": "int"}
    with streaming.MDSWriter(
        out=str(tmp_path / "mds"), columns=columns, compression=compression, size_limit=300
    ) as writer:
        for number, one in enumerate(SAMPLES):
            tokens = one.astype(np.int32)
            value = tokens.tobytes() if encoding == "bytes" else tokens
            writer.write({"tokens": value, "id": number})
    made = imported(tmp_path / "mds")
    assert made.train + made.val == WHOLE
    assert made.train_ends[:3] == [5, 35, 36]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"column_encodings": ["pkl"]}, "stores 'pkl' in its column 'tokens'"),
        ({"column_encodings": ["ndarray:float32"]}, "stores 'ndarray:float32'"),
        ({"samples": 9}, r"shard\.00001\.mds does not start with 9 items"),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 9}}, "a file outside its directory"),
        ({"raw_data": {"basename": "shard.9.mds", "bytes": 9}}, r"lists shard\.9\.mds, which"),
        ({"raw_data": {"basename": "shard.00001.mds", "bytes": 9}}, r"index\.json says 9"),
        ({"raw_data": None}, r"index\.json is damaged"),
    ],
)
def test_an_unusable_index_is_named(tmp_path, imported, nothing_kept, values, wanted):
    samples = [sample(array(one, "uint16"), sizes=[None]) for one in SAMPLES]
    folder = write(tmp_path / "mds", samples)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1] |= values
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=wanted):
        imported(folder)


def test_a_sample_whose_sizes_do_not_fit_is_named(tmp_path, imported, nothing_kept):
    samples = [sample(array(one, "uint16"), sizes=[None]) for one in SAMPLES]
    samples[3] = b"\xff\xff" + samples[3][2:]
    folder = write(tmp_path / "mds", samples)
    with pytest.raises(DataError, match=r"shard\.00001\.mds has a sample that cannot be read"):
        imported(folder)
