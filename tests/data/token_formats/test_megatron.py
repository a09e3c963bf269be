"""Megatron's indexed datasets, of Megatron and of fairseq."""

import struct

import numpy as np
import pytest

from flatout.data.token_formats.megatron import MAPPED
from flatout.errors import DataError

RNG = np.random.default_rng(0)
CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_data(prefix, sequences, dtype):
    data = np.concatenate(sequences).astype(dtype) if sequences else np.empty(0, dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(data.tobytes())


def write_mapped(prefix, sequences, documents, dtype="uint16", modes=b""):
    """Write a dataset of Megatron-LM. Without `documents`, as fairseq does."""
    write_data(prefix, sequences, dtype)
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    starts = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    counts = struct.pack("<Q", len(sizes))
    if documents is not None:
        counts += struct.pack("<Q", len(documents))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        MAPPED
        + struct.pack("<QB", 1, CODES[dtype])
        + counts
        + sizes.tobytes()
        + starts.astype("<i8").tobytes()
        + np.array(documents or [], "<i8").tobytes()
        + modes
    )
    return prefix


SEQUENCES = [RNG.integers(0, 256, length) for length in (5, 3, 40, 1, 51, 10)]
WHOLE = np.concatenate(SEQUENCES).tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_tokens_and_documents_are_kept(tmp_path, imported, dtype):
    prefix = write_mapped(tmp_path / "corpus_text_document", SEQUENCES, [0, 2, 3, 4, 6], dtype)
    made = imported(prefix)
    assert made.train + made.val == WHOLE
    assert len(made.train) == 99
    assert made.train_ends == [8, 48, 49, 99]
    assert made.val_ends == [11]
    assert made.manifest.source["documents"] == "stored"
    assert made.manifest.source["chunks"] == 2


@pytest.mark.parametrize("documents", [None, [0]])
def test_without_documents_each_sequence_is_one(tmp_path, imported, documents):
    made = imported(write_mapped(tmp_path / "corpus", SEQUENCES, documents))
    assert made.train_ends == [5, 8, 48, 49, 99]


def test_the_modes_of_sequences_are_ignored(tmp_path, imported):
    prefix = write_mapped(tmp_path / "corpus", SEQUENCES, [0, 6], modes=b"\1" * 6)
    assert imported(prefix).train_ends == [99]


def test_sequences_after_the_last_listed_document_are_one(tmp_path, imported):
    assert imported(write_mapped(tmp_path / "a", SEQUENCES, [0, 1, 2])).train_ends == [5, 8, 99]


def test_empty_sequences_and_documents_end_nothing(tmp_path, imported):
    empty = np.empty(0, int)
    sequences = [SEQUENCES[0], empty, SEQUENCES[1], empty, *SEQUENCES[2:]]
    prefix = write_mapped(tmp_path / "a", sequences, [0, 1, 2, 2, 3, 4, 5, 6, 7, 8])
    made = imported(prefix)
    assert made.train + made.val == WHOLE
    assert made.train_ends == [5, 8, 48, 49, 99]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_any_of_the_names_is_taken(tmp_path, imported, suffix):
    write_mapped(tmp_path / "corpus.v1", SEQUENCES, [0, 6])
    assert len(imported(tmp_path / f"corpus.v1{suffix}").train) == 99


def test_a_directory_keeps_the_split_of_its_names(tmp_path, imported):
    folder = tmp_path / "megatron"
    folder.mkdir()
    write_mapped(folder / "my_train_text_document", SEQUENCES, [0, 6])
    write_mapped(folder / "my_valid_text_document", SEQUENCES[:2], [0, 1, 2])
    made = imported(folder)
    assert (made.train, made.val_ends) == (WHOLE, [5, 8])


def test_end_of_text_can_decide_instead(tmp_path, imported):
    prefix = write_mapped(tmp_path / "a", [[1, 256, 2], [3, 256] * 20], [0, 2])
    assert imported(prefix, documents="end-of-text").train_ends[:2] == [2, 5]


def test_megatron_reads_the_hand_made_files(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write_mapped(tmp_path / "a", SEQUENCES, [0, 2, 3, 4, 6])
    theirs = indexed.IndexedDataset(str(tmp_path / "a"))
    assert [sequence.tolist() for sequence in theirs] == [s.tolist() for s in SEQUENCES]


def spoiled(index, data, kind):
    return {
        "truncated index": lambda: index.write_bytes(index.read_bytes()[:-1]),
        "header only": lambda: index.write_bytes(index.read_bytes()[:20]),
        "wrong magic": lambda: index.write_bytes(b"XX" + index.read_bytes()[2:]),
        "version": lambda: index.write_bytes(MAPPED + b"\7" + index.read_bytes()[10:]),
        "type": lambda: index.write_bytes(
            index.read_bytes()[:17] + b"\6" + index.read_bytes()[18:]
        ),
        "truncated data": lambda: data.write_bytes(data.read_bytes()[:-2]),
        "missing data": data.unlink,
        "order": lambda: index.write_bytes(
            index.read_bytes()[:58] + b"\2" + index.read_bytes()[59:]
        ),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("truncated index", r"a\.idx is truncated or damaged: it states 6 sequences"),
        ("header only", r"a\.idx is truncated"),
        ("wrong magic", r"a\.idx is not an index of Megatron: it starts with b'XX"),
        ("version", "an index of version 7. Version 1 is known"),
        ("type", "states the type 6, which is not one of integers"),
        ("truncated data", r"a\.bin has 218 bytes, but its index describes 110 tokens of uint16"),
        ("missing data", r"a\.idx is the index of .*a\.bin, which does not exist"),
        ("order", "does not describe a.bin in order"),
    ],
)
def test_damage_is_named_and_nothing_is_kept(tmp_path, imported, nothing_kept, kind, wanted):
    prefix = write_mapped(tmp_path / "a", SEQUENCES, [0, 2, 3, 4, 6])
    spoiled(tmp_path / "a.idx", tmp_path / "a.bin", kind)()
    with pytest.raises(DataError, match=wanted):
        imported(prefix)


def test_any_truncation_of_an_index_is_an_error(tmp_path, imported, nothing_kept):
    prefix = write_mapped(tmp_path / "a", SEQUENCES, [0, 6])
    whole = (tmp_path / "a.idx").read_bytes()
    for keep in range(0, len(whole), 5):
        (tmp_path / "a.idx").write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"a\.idx"):
            imported(prefix)


def test_documents_out_of_order_are_rejected(tmp_path, imported, nothing_kept):
    with pytest.raises(DataError, match="lists documents out of order"):
        imported(write_mapped(tmp_path / "a", SEQUENCES, [0, 3, 2, 6]))
    with pytest.raises(DataError, match="lists a document after the last of 6 sequences"):
        imported(write_mapped(tmp_path / "a", SEQUENCES, [0, 7]))
