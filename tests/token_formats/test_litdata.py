"""litdata's chunks: bare tokens, and items with fields."""

import json

import numpy as np
import pytest

from flatout.errors import DataError

RNG = np.random.default_rng(0)
ITEMS = [RNG.integers(0, 257, length) for length in (5, 30, 1, 54, 10)]
WHOLE = np.concatenate(ITEMS).tolist()
SPEC = {"type": "builtins.dict", "context": json.dumps(["input_ids", "name"]), "children_spec": []}


def pack(items):
    """Return a chunk with these items, as bytes."""
    head = 4 * (len(items) + 2)
    offsets = np.cumsum([head, *map(len, items)])
    return np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)


def fields(*values):
    """Return an item with several fields."""
    return np.array([len(value) for value in values], "<u4").tobytes() + b"".join(values)


def write(folder, items, *, dims=None, formats=("no_header_tensor:18",), spec=None, **config):
    """Write two chunks: of the first two items, and of the others."""
    folder.mkdir(parents=True)
    chunks = []
    for number, part in enumerate((items[:2], items[2:])):
        content = pack(part)
        (folder / f"chunk-0-{number}.bin").write_bytes(content)
        chunks.append(
            {
                "filename": f"chunk-0-{number}.bin",
                "chunk_size": len(part),
                "chunk_bytes": len(content),
                "dim": dims and dims[number],
            }
        )
    config = {
        "compression": None,
        "data_format": list(formats),
        "data_spec": spec and json.dumps([1, spec]),
        "encryption": None,
    } | config
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


TYPES = {
    "no_header_tensor:18": "<i8",
    "no_header_tensor:16": "<i4",
    "no_header_tensor:14": "<i2",
    "no_header_numpy:5": "<u2",
    "no_header_numpy:2": "<i4",
    "no_header_numpy:6": "<u4",
}


@pytest.mark.parametrize("form", TYPES)
def test_items_of_bare_tokens_are_documents(tmp_path, imported, form):
    items = [item.astype(TYPES[form]).tobytes() for item in ITEMS]
    made = imported(write(tmp_path / "lit", items, dims=[35, 65], formats=[form]))
    assert made.train + made.val == WHOLE
    assert made.train_ends[:3] == [5, 35, 36]
    assert made.manifest.source["documents"] == "stored"


@pytest.mark.parametrize("form", TYPES)
def test_items_with_one_field_are_documents(tmp_path, imported, form):
    items = [fields(item.astype(TYPES[form]).tobytes()) for item in ITEMS]
    made = imported(write(tmp_path / "lit", items, formats=[form]))
    assert made.train + made.val == WHOLE


def test_the_field_with_tokens_is_read(tmp_path, imported):
    items = [fields(item.astype("<i4").tobytes(), b"some name") for item in ITEMS]
    folder = write(tmp_path / "lit", items, formats=["no_header_numpy:2", "str"], spec=SPEC)
    assert imported(folder).train_ends[:3] == [5, 35, 36]
    with pytest.raises(DataError, match="stores 'str' where tokens are expected"):
        imported(folder, field="name", out="other")


def test_arrays_with_a_header_are_read(tmp_path, imported):
    rows = [np.arange(12, dtype="<i4").reshape(3, 4) + number for number in range(4)]
    head = np.array([2, 2, 3, 4], "<u4").tobytes()
    items = [fields(head + row.tobytes()) for row in rows]
    made = imported(write(tmp_path / "lit", items, formats=["numpy"]), split="tail 0.5")
    assert made.train + made.val == np.concatenate(rows).reshape(-1).tolist()


def test_train_and_val_directories_keep_their_split(tmp_path, imported):
    items = [item.astype("<i8").tobytes() for item in ITEMS]
    write(tmp_path / "lit" / "train", items, dims=[35, 65])
    write(tmp_path / "lit" / "val", items[::-1], dims=[64, 36])
    made = imported(tmp_path / "lit")
    assert (made.train, made.val[:10]) == (WHOLE, ITEMS[-1].tolist())
    assert made.manifest.split_rule == "named"


def test_compressed_chunks_are_read(tmp_path, imported):
    zstandard = pytest.importorskip("zstandard")
    items = [item.astype("<i8").tobytes() for item in ITEMS]
    folder = write(tmp_path / "lit", items, dims=[35, 65], compression="zstd:4")
    for chunk in folder.glob("*.bin"):
        chunk.write_bytes(zstandard.compress(chunk.read_bytes()))
    made = imported(folder)
    assert made.train + made.val == WHOLE
    chunk.write_bytes(zstandard.compress(chunk.read_bytes())[:-3])
    with pytest.raises(DataError, match=f"{chunk.name}"):
        imported(folder, out="other")


def litdata_writes(folder, items, loader):
    writer = pytest.importorskip("litdata.streaming.writer")
    loaders = pytest.importorskip("litdata.streaming.item_loader")
    made = writer.BinaryWriter(str(folder), chunk_size=60, item_loader=getattr(loaders, loader)())
    for number, item in enumerate(items):
        made[number] = item
    made.done()
    made.merge(1)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["TokensLoader", "PyTreeLoader"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "dict"])
def test_what_litdata_writes_is_read(tmp_path, imported, loader, kind):
    import torch

    form = {
        "torch": torch.from_numpy,
        "numpy": lambda item: item.astype(np.uint16),
        "dict": lambda item: {"input_ids": item.astype(np.int32), "name": "x"},
    }[kind]
    if kind == "dict" and loader == "TokensLoader":
        pytest.skip("TokensLoader stores tokens alone")
    litdata_writes(tmp_path / "lit", [form(item) for item in ITEMS], loader)
    made = imported(tmp_path / "lit")
    assert made.train + made.val == WHOLE
    assert made.train_ends[:3] == [5, 35, 36]


def change(folder, **values):
    index = json.loads((folder / "index.json").read_text())
    index["chunks"][1] |= {k: v for k, v in values.items() if k in index["chunks"][1]}
    index["config"] |= {k: v for k, v in values.items() if k in index["config"]}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"encryption": {"level": "chunk"}}, "is encrypted"),
        ({"compression": "brotli"}, "is compressed with brotli, which is not supported"),
        ({"filename": "../chunk-0-1.bin"}, "names a file outside its directory"),
        ({"filename": "chunk-0-9.bin"}, r"lists chunk-0-9\.bin, which .* does not contain"),
        ({"chunk_bytes": 9}, r"chunk-0-1\.bin has .* bytes; index\.json says 9"),
        ({"chunk_size": 2}, r"chunk-0-1\.bin does not start with 2 items"),
        ({"chunk_size": None}, r"index\.json is damaged"),
        ({"data_format": ["pickle"]}, "stores 'pickle' where tokens are expected"),
        ({"data_format": ["no_header_tensor:1"]}, "stores 'no_header_tensor:1' where tokens"),
        ({"data_format": []}, "has 0 fields"),
    ],
)
def test_an_unusable_index_is_named(tmp_path, imported, nothing_kept, values, wanted):
    items = [item.astype("<i8").tobytes() for item in ITEMS]
    folder = write(tmp_path / "lit", items, dims=[35, 65])
    change(folder, **values)
    with pytest.raises(DataError, match=wanted):
        imported(folder)


def test_any_changed_offset_is_an_error_or_other_documents(tmp_path, imported):
    items = [fields(item.astype("<i8").tobytes()) for item in ITEMS]
    folder = write(tmp_path / "lit", items)
    whole = (folder / "chunk-0-1.bin").read_bytes()
    refused = []
    for offset in range(24):
        changed = whole[:offset] + bytes([whole[offset] ^ 0x41]) + whole[offset + 1 :]
        (folder / "chunk-0-1.bin").write_bytes(changed)
        try:
            imported(folder, out=f"out{offset}")
        except DataError as error:
            refused.append(error.what)
    assert len(refused) > 16
    assert all("chunk-0-1.bin" in what for what in refused)
