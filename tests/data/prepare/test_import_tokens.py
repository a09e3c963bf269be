"""Tokens of other tools: what is read at a path, how it is split, and what is kept."""

import base64
import json
import os
import pickle
import re
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from texts import byte_level_json

from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.verify import verify
from flatout.data import tokenizers
from flatout.data.prepare import import_tokens as importing
from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.store.manifest import Manifest
from flatout.data.store.shards import Dataset
from flatout.data.token_files import Reading, find_tokens, guess_dtype, kind_of, read_tokens
from flatout.data.tokenizers import load_tokenizer, make_tokenizer
from flatout.errors import DataError
from flatout.progress import SILENT

EOT = 256  # of the byte tokenizer
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Imported:
    """A dataset that was imported."""

    manifest: Manifest
    train: list[int]
    train_ends: list[int]
    val: list[int]
    val_ends: list[int]
    said: str
    existed: bool


class Heard:
    """A progress that records its messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, what, **_):
        return SILENT.task(what)

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def imported(tmp_path):
    """Import a path with the options of the command, and return what the dataset contains."""

    def bring_in(path, *, out="out", **options):
        heard = Heard()
        options = ImportOptions(**{"tokenizer": "byte", **options})
        made = import_tokens(path, tmp_path / out, options, progress=heard)
        dataset = Dataset.open(tmp_path / out)
        assert verify(tmp_path / out).ok
        splits = [dataset.split(name) for name in ("train", "val")]
        found = [
            values
            for split in splits
            for values in (
                split.read_tokens(0, split.num_tokens).tolist(),
                split.document_ends.tolist(),
            )
        ]
        return Imported(made.manifest, *found, " ".join(heard.lines), made.existed)

    return bring_in


@pytest.fixture
def nothing_kept(tmp_path):
    """Check after the test that neither a dataset nor a work directory is left."""
    yield
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.part").exists()


@pytest.fixture
def chunks(tmp_path):
    """Write chunks, arrays by number, and metadata into a folder, and return it."""

    def write(by_number, metadata=None, *, name="chunks"):
        folder = tmp_path / name
        folder.mkdir()
        for number, tokens in by_number.items():
            is_saved = isinstance(tokens, torch.Tensor | dict)
            saved = tokens if is_saved else torch.tensor(np.asarray(tokens), dtype=torch.int64)
            torch.save(saved, folder / f"chunk_{number:06d}.pt")
        if metadata is not None:
            (folder / "metadata.json").write_text(json.dumps(metadata))
        return folder

    return write


def llm_c(path, tokens, magic=20240520, dtype="<u2"):
    header = struct.pack("<3i", magic, 1, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + np.asarray(tokens, dtype).tobytes())
    return path


def raw(path, tokens, dtype="uint16"):
    np.asarray(tokens, dtype).tofile(path)
    return path


def npy(path, tokens, dtype="int64"):
    np.save(path, np.asarray(tokens, dtype))
    return path


def pt(path, tokens, dtype="int64"):
    torch.save(torch.from_numpy(np.asarray(tokens, dtype)), path)
    return path


def old_pt(path, tokens):
    torch.save(torch.tensor(tokens), path, _use_new_zipfile_serialization=False)
    return path


WRITERS = {"tokens.npy": npy, "tokens.bin": raw, "fineweb.bin": llm_c, "a.pt": pt, "b.pth": old_pt}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_imported_unchanged_and_split_at_its_tail(tmp_path, imported, name):
    whole = RNG.integers(0, 256, 1000)
    whole[[99, 150, 420, 949]] = EOT
    path = WRITERS[name](tmp_path / name, whole.tolist())
    made = imported(path, split="tail 0.25")
    assert (made.train, made.train_ends) == (whole[:750].tolist(), [100, 151, 421, 750])
    assert (made.val, made.val_ends) == (whole[750:].tolist(), [200, 250])
    assert (made.manifest.text_bytes, made.manifest.split_rule) == (996, "tail 0.25")
    assert imported(path, split="tail 0.250").existed
    with pytest.raises(DataError, match=r"split is 'tail 0\.25', and 'tail 0\.1' is requested"):
        imported(path)
    with pytest.raises(DataError, match=r"documents is 'end-of-text', and 'chunk' is requested"):
        imported(path, documents="chunk", split="tail 0.25")
    WRITERS[name](path, (whole[::-1]).tolist()[:-4])
    with pytest.raises(DataError, match="contains a different dataset: the text has changed"):
        imported(path, split="tail 0.25")


INTEGERS = ["uint8", "int8", "uint16", ">u2", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_any_integers_are_imported(tmp_path, imported, dtype):
    tokens = np.arange(100)
    assert imported(npy(tmp_path / "a.npy", tokens, dtype)).train == list(range(90))
    if dtype not in (">u2", "uint64"):
        pt(tmp_path / "a.pt", tokens, dtype)
        assert imported(tmp_path / "a.pt", out="more").train == list(range(90))


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64", "uint64"])
def test_the_type_of_a_file_without_header_is_guessed_from_its_bytes(tmp_path, imported, dtype):
    train = RNG.integers(0, 257, 2000)
    made = imported(raw(tmp_path / "a.bin", train, dtype))
    assert made.train + made.val == train.tolist()
    shown = dtype if dtype.startswith("u") else f"u{dtype}"
    assert f"a.bin is read as {shown}" in made.said


def test_a_large_vocabulary_with_zeros_is_not_taken_for_a_wider_type():
    ids = np.arange(4096, dtype=np.uint16)
    assert guess_dtype(ids.tobytes(), 50_257) == "uint16"
    assert guess_dtype(ids.astype(np.uint32).tobytes(), 50_257) == "uint32"
    assert guess_dtype((ids + 60_000).tobytes(), 50_257) is None


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_the_type_can_be_named_also_for_a_file_of_any_name(tmp_path, imported, dtype):
    raw(tmp_path / "few.ids", [1, 2, 3, 4, 5, 6], dtype)
    with pytest.raises(DataError, match="not a token file of a known format") as caught:
        imported(tmp_path / "few.ids")
    assert "--dtype uint16" in caught.value.fix
    made = imported(tmp_path / "few.ids", dtype=dtype, split="tail 0.5")
    assert (made.train, made.val) == ([1, 2, 3], [4, 5, 6])
    assert "--dtype" not in made.said


def test_the_header_of_llm_c_states_the_type(tmp_path, imported):
    path = llm_c(tmp_path / "llama.bin", [100_000, 5] * 20, magic=20240801, dtype="<u4")
    assert imported(path, tokenizer="ids:128256:128001").train == [100_000, 5] * 18


@pytest.mark.parametrize("name", WRITERS)
def test_a_type_that_a_file_contradicts_is_an_error(tmp_path, imported, name):
    path = WRITERS[name](tmp_path / name, list(range(20)))
    own = "uint16" if path.suffix == ".bin" else "int64"
    assert imported(path, dtype=own).train == list(range(18))
    if name != "tokens.bin":  # which states none
        with pytest.raises(DataError, match=f"{name} contains {own}, but --dtype is uint32"):
            imported(path, dtype="uint32", out="other")


def test_rows_follow_each_other(tmp_path, imported):
    rows = np.arange(200).reshape(20, 10)
    for number, array in enumerate((rows, np.asfortranarray(rows))):
        np.save(tmp_path / "rows.npy", array)
        made = imported(tmp_path / "rows.npy", out=f"out{number}")
        assert made.train + made.val == list(range(200))
        assert "20 rows of 10 tokens" in made.said


def test_tokens_of_an_unknown_tokenizer_are_imported_by_their_number(tmp_path, imported):
    train = RNG.integers(0, 50_256, 1000)
    train[10] = 50_256
    made = imported(npy(tmp_path / "a.npy", train), tokenizer="ids:50257", split="tail 0.5")
    assert made.train + made.val == train.tolist()
    assert made.train_ends[0] == 11
    assert (made.manifest.vocab_size, made.manifest.text_bytes) == (50_257, 0)


def test_many_blocks_are_written_in_order(tmp_path, imported, monkeypatch):
    monkeypatch.setattr(importing, "BLOCK_TOKENS", 7)
    whole = RNG.integers(0, 256, 1000)
    whole[[6, 7, 13, 500]] = EOT
    made = imported(raw(tmp_path / "tokens.bin", whole))
    assert made.train + made.val == whole.tolist()
    ends = (np.flatnonzero(whole[:900] == EOT) + 1).tolist()
    assert made.train_ends == sorted({*ends, 900})


def test_each_file_may_be_a_document(tmp_path, imported, chunks):
    made = imported(chunks({0: [1, 2, 3], 1: [4, EOT, 5], 2: [6, 7]}), split="tail 0.5")
    assert (made.train_ends, made.val_ends) == ([4], [1, 4])
    by_file = imported(tmp_path / "chunks", documents="chunk", split="tail 0.5", out="more")
    assert (by_file.train, by_file.train_ends) == ([1, 2, 3, 4], [3, 4])
    assert (by_file.val, by_file.val_ends) == ([EOT, 5, 6, 7], [2, 4])


def test_a_file_without_end_of_text_is_one_document(tmp_path, imported):
    made = imported(raw(tmp_path / "tokens.bin", np.arange(200)))
    assert (made.train_ends, made.val_ends) == ([180], [20])
    assert "No file contains the end-of-text token (id 256)" in made.said


def test_validation_tokens_can_be_named(tmp_path, imported):
    a, b = (raw(tmp_path / name, RNG.integers(0, 257, 100)) for name in ("a.bin", "b.bin"))
    made = imported(a, val=b)
    assert (len(made.train), len(made.val), made.manifest.split_rule) == (100, 100, "named")
    assert imported(a, val=b).existed
    with pytest.raises(DataError, match=r"split is 'named', and 'tail 0\.1' is requested"):
        imported(a)
    raw(b, RNG.integers(0, 257, 90))
    with pytest.raises(DataError, match="the validation text has changed"):
        imported(a, val=b)


@pytest.mark.parametrize(
    ("ends", "documents"),
    [([], 1), ([9, 49, 99], 3), ([9, 89, 99], 3), ([99], 1)],
    ids=["one text", "cut", "not cut", "cut at the end"],
)
def test_a_document_that_the_split_cuts_counts_once(tmp_path, imported, ends, documents):
    tokens = np.arange(100)
    tokens[ends] = EOT
    np.save(tmp_path / "a.npy", tokens)
    assert imported(tmp_path / "a.npy").manifest.documents == documents
    named = tmp_path / "val.npy"
    np.save(named, tokens + 0)
    both = imported(tmp_path / "a.npy", val=named, out="both").manifest
    assert both.documents == 2 * documents


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.arange(9)) if path.suffix == ".npy" else path.write_bytes(b"\1\0" * 9)
    return folder


@pytest.mark.parametrize(
    ("files", "train", "val"),
    [
        (["train.bin", "val.bin", "meta.pkl", "input.txt"], ["train.bin"], ["val.bin"]),
        (["b_train_2.npy", "b_train_1.npy", "b_validation_0.npy"], 2, ["b_validation_0.npy"]),
        (["a.npy", "b.npy"], ["a.npy", "b.npy"], []),
        (["training.bin", "valid.bin", "test.bin"], ["training.bin"], ["valid.bin"]),
        (["train.bin", "dev.bin"], ["train.bin"], ["dev.bin"]),
        (["tokens.bin", "tokens_eval.bin"], ["tokens.bin"], ["tokens_eval.bin"]),
        (["training_evaluate.bin", "valuable.bin"], 2, []),
        ([".hidden.bin", "train.bin"], ["train.bin"], []),
        (["train/chunk_0.pt", "train/chunk_1.pt", "val/chunk_0.pt"], 2, ["chunk_0.pt"]),
    ],
)
def test_names_decide_the_split(tmp_path, files, train, val):
    found = find_tokens(touch(tmp_path, *files))
    names = [[path.name for path in split] for split in (found.train, found.val)]
    assert (names[0] if isinstance(train, list) else len(names[0]), names[1]) == (train, val)


@pytest.mark.parametrize(
    ("files", "arguments", "wanted"),
    [
        ([], ["absent"], "There is no file "),
        (["a/b.txt"], ["a"], "has no token files"),
        (["a.txt"], ["a.txt"], "is not a token file of a known format"),
        (["val.bin"], ["."], "contains only tokens for validation"),
        (["a.bin", "b.npy"], ["."], r"several formats: a\.bin \(raw\) and b\.npy \(numpy\)"),
        (["train.bin", "val.bin"], [".", "val.bin"], r"validation tokens, val\.bin, and --val"),
        (["train.bin"], ["train.bin", "train.bin"], "is also training data"),
        (["c/chunk_0.pt", "c/chunk_3.pt", "c/chunk_5.pt"], ["c"], "has no chunk 1, 2, 4"),
        (["c/chunk_4.pt", "c/chunk_9.pt"], ["c"], "has no chunk 1, 2, 3, 5, 6, and 2 more"),
        (["c/chunk_0.pt", "c/chunk_00.pt"], ["c"], "more than one chunk number 0"),
    ],
)
def test_other_paths_are_rejected(tmp_path, files, arguments, wanted):
    touch(tmp_path, *files)
    with pytest.raises(DataError, match=wanted):
        find_tokens(*(tmp_path / argument for argument in arguments))


def test_text_and_other_binary_files_are_not_taken(tmp_path):
    contents = {"text.bin": b"plain text", "elf.bin": b"\x7fELF\0", "gguf.bin": b"GGUF\0\0"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert kind_of(tmp_path / name) is None, name
    os.mkfifo(tmp_path / "chunk_000000.pt")
    assert kind_of(tmp_path / "chunk_000000.pt") is None, "it would wait for a writer"


class Evil:
    def __reduce__(self):
        return print, ("run",)


OBJECTS = np.array([{"a": 1}, None], dtype=object)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.pt", torch.tensor([1.0]), "contains float32, not integers"),
        ("a.pt", {"model": {"w": torch.zeros(3)}}, "has 0 keys of tokens"),
        ("a.pt", {"w": torch.zeros(3), "b": torch.zeros(1)}, "has 0 keys of tokens"),
        ("a.pt", torch.tensor([True]), "contains bool, not integers"),
        ("a.pt", torch.zeros(2, 2, 2).int(), r"has the shape \(2, 2, 2\)"),
        ("a.pt", torch.tensor(4), r"has the shape \(\)"),
        ("a.pt", torch.tensor([1, 2, 257]), "token 2: the id 257 is outside the vocabulary"),
        ("a.pt", torch.tensor([1, -1, 2]), "token 1: the id -1 is outside the vocabulary"),
        ("a.pt", {"tokens": [1]}, "has 0 keys of tokens"),
        ("a.pt", {"a": torch.tensor([1]), "b": torch.tensor([2])}, "has 2 keys of tokens"),
        ("a.pt", Evil(), "Reading them would execute code"),
        ("a.pt", bytearray(9), "contains a bytearray, not a dense tensor|execute code"),
        ("a.pt", b"no pickle", "execute code|: "),
        ("a.pt", b"", "the file is empty or truncated"),
        ("a.pt", torch.zeros(4).int().to_sparse(), "not a dense tensor"),
        ("a.pt", torch.empty(4, dtype=torch.int64, device="meta"), "not a dense tensor"),
        ("a.npy", np.zeros(5), "contains float64, not integers"),
        ("a.npy", np.array(["a"]), "contains <U1, not integers"),
        ("a.npy", np.array(5), r"has the shape \(\)"),
        ("a.npy", np.zeros(0, np.int64), "contains no tokens"),
        ("a.npy", OBJECTS, "Python objects"),
        ("a.npy", pickle.dumps([1, 2]), "cannot be read as an array"),
        ("a.bin", b"\0" * 7, "has 7 bytes, which is not a whole number of uint16 tokens"),
        ("a.bin", b"\1\0\xff\xff\2\0", "token 1: the id 65535 is outside the vocabulary"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 5), "states 5 tokens.*contains 0"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 5).ljust(1028, b"\0"), "states 5.*contains 2"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 0).ljust(1024, b"\0"), "states 0 tokens"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 1).ljust(1027, b"\0"), "states 1 tokens"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, imported, nothing_kept, capsys, name, content, wanted):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        torch.save(content, path)
    with pytest.raises(DataError, match=f"{name}.*({wanted})"):
        imported(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", WRITERS)
def test_any_truncated_file_is_named(tmp_path, imported, nothing_kept, name):
    path = WRITERS[name](tmp_path / name, list(range(150)))
    whole = path.read_bytes()
    for keep in (3, 21, 129, len(whole) - 5):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=path.name):
            imported(path)


@pytest.mark.parametrize("name", ["a.pt", "b.pth"])
def test_any_changed_byte_gives_integers_or_a_named_error(tmp_path, name):
    path = WRITERS[name](tmp_path / name, list(range(40)))
    whole = path.read_bytes()
    start = whole.index(b"ctorch._utils")
    messages = []
    for offset in range(start - 2, start + 140):
        for bits in (0x01, 0x40, 0xFF):
            changed = bytes([whole[offset] ^ bits])
            path.write_bytes(whole[:offset] + changed + whole[offset + 1 :])
            try:
                read_tokens(path, Reading(vocab_size=300))
            except DataError as error:
                messages.append(error.what)
    assert len(messages) > 100
    assert all(str(path) in what and "weights_only" not in what for what in messages)


def test_a_changed_token_is_named_by_its_checksum(tmp_path, imported, nothing_kept):
    path = WRITERS["a.pt"](tmp_path / "a.pt", list(range(100)))
    whole, token = path.read_bytes(), torch.arange(40, 60).numpy().tobytes()
    assert whole.count(token) == 1
    path.write_bytes(whole.replace(token, torch.arange(40, 60).flip(0).numpy().tobytes()))
    with pytest.raises(DataError, match=r"a\.pt is damaged: .*does not match its checksum"):
        imported(path)


def test_the_key_of_a_dict_can_be_named(imported, chunks):
    folder = chunks({0: {"a": torch.arange(50), "b": torch.arange(50) + 100}})
    with pytest.raises(DataError, match="has no key 'c'") as caught:
        imported(folder, field="c")
    assert "--field: 'a', 'b'" in caught.value.fix
    assert imported(folder, field="b").train == list(range(100, 145))
    with pytest.raises(DataError, match="field is 'b', and 'a' is requested"):
        imported(folder, field="a")
    usual = {"attention_mask": torch.ones(50), "input_ids": torch.arange(50)}
    assert imported(chunks({0: usual}, name="usual"), out="usual-out").train == list(range(45))


def test_a_file_that_changes_during_the_import_is_named(
    imported, nothing_kept, chunks, monkeypatch
):
    folder = chunks({0: np.arange(200), 1: np.arange(200)})
    seen = []

    def changing(path, reading):
        read = read_tokens(path, reading)
        seen.append(path)
        if len(seen) == 4:
            before = path.stat()
            torch.save(torch.arange(200) + 1, path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return read

    monkeypatch.setattr(importing, "read_tokens", changing)
    with pytest.raises(DataError, match="a token file was changed during the import"):
        imported(folder)


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = ["The cat sat on the mat. ", "It's 12345 cats, isn't it?\n"] * 20


def hub_file(folder):
    """Write a small tokenizer like GPT-2's, end-of-text last, in the layout of a hub snapshot."""
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "blob").write_text(byte_level_json(TEXTS, 280))
    (snapshot / "tokenizer.json").symlink_to(folder / "blob")
    (snapshot / "config.json").write_text(json.dumps({"vocab_size": 50_304}))
    return snapshot / "tokenizer.json"


def tiktoken_file(folder):
    tokenizer = make_tokenizer("train:280", lambda _: TEXTS)
    pieces = [tokenizer.decode_bytes([index]) for index in range(tokenizer.eot_id)]
    (folder / "small.tiktoken").write_bytes(
        b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    )
    return folder / "small.tiktoken"


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder", "saved", "tiktoken", "metadata"])
def test_tokens_of_every_kind_of_tokenizer_are_imported(chunks, imported, tmp_path, kind):
    path = tiktoken_file(tmp_path) if kind == "tiktoken" else hub_file(tmp_path)
    options = {"pattern": GPT2_PATTERN} if kind == "tiktoken" else {}
    known = load_tokenizer(path, **options)
    if kind == "saved":
        path = tmp_path / "saved.json"
        known.save(path)
    documents = [[*known.encode(text), known.eot_id] for text in TEXTS]
    whole = [token for document in documents for token in document]
    third = len(whole) // 3
    metadata = {"vocab_size": 320, "total_tokens": len(whole), "author": None}
    if kind == "metadata":
        metadata["tokenizer_name"] = os.path.relpath(path, tmp_path / "chunks")
    folder = chunks(
        {0: whole[:third], 1: whole[third : 2 * third], 2: whole[2 * third :]}, metadata
    )
    spec = None if kind == "metadata" else str(path.parent if kind == "folder" else path)
    made = imported(folder, tokenizer=spec, split="tail 0.25", **options)
    assert made.train + made.val == whole
    ends = np.cumsum([len(document) for document in documents]).tolist()
    assert made.train_ends[:-1] == ends[: len(made.train_ends) - 1]
    assert Dataset.open(tmp_path / "out").tokenizer.decode(made.train) == known.decode(made.train)
    assert (made.manifest.vocab_size, made.manifest.text_bytes) == (
        known.vocab_size,
        sum(len(text) for text in TEXTS),
    )
    assert ("names the tokenizer" in made.said) == (kind == "metadata")


def test_metadata_may_lie_above_the_splits_and_use_another_tools_name_of_a_tokenizer(
    tmp_path, chunks, imported, monkeypatch
):
    path, asked = hub_file(tmp_path), []
    monkeypatch.setattr(tokenizers, "tokenizer_file", lambda name, **_: asked.append(name) or path)
    monkeypatch.setattr(tokenizers, "repository_file", lambda *_, **__: None)
    (tmp_path / "old").mkdir()
    for name in ("train", "val"):
        chunks({0: [1, 2, 3]}, name=f"old/{name}")
    metadata = {"tokenizer": "gpt2", "total_tokens": 6, "num_chunks": 2}
    (tmp_path / "old" / "metadata.json").write_text(json.dumps(metadata))
    made = imported(tmp_path / "old", tokenizer=None)
    assert (made.train, made.val, asked) == ([1, 2, 3], [1, 2, 3], ["openai-community/gpt2"])
    metadata = {"tokenizer": "gpt2", "total_tokens": 7}
    (tmp_path / "old" / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(DataError, match=r"has total_tokens 7\. There are 6"):
        imported(tmp_path / "old", tokenizer=None, out="other")


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({"total_tokens": 9}, "has total_tokens 9. There are 4 tokens."),
        ({"num_tokens": True}, "has num_tokens true. There are 4 tokens."),
        ({"num_chunks": 7}, "has num_chunks 7. The number of files is 2."),
        ({"num_sequences": 0}, "has num_sequences 0. There is at least 1."),
        ({"num_sequences": 9}, "has num_sequences 9. There are 4 tokens."),
        (
            {"chunks": ["chunk_000000.pt", "chunk_000009.pt"]},
            'has chunks ["chunk_000009.pt"]. Those the directory lacks, and it has '
            "['chunk_000001.pt'] besides.",
        ),
        (
            {"chunks": ["a/chunk_000000.pt"]},
            "has chunks []. Those the directory lacks, and it has ['chunk_000001.pt'] besides.",
        ),
        ({"vocab_size": 100}, "has vocab_size 100. The tokenizer has 257 ids."),
        (
            {"vocab_size": 50257},
            "has vocab_size 50257. With padding, the tokenizer has at most 1281 ids.",
        ),
        ({"eos_token_id": 0}, "has eos_token_id 0. The end-of-text token of the tokenizer is 256."),
        ({"eos_token_id": True}, "has eos_token_id true. The end-of-text token of the"),
        ({"dtype": "torch.uint16"}, 'has dtype "uint16". The tokens are int64.'),
        (
            {"num_sequences": 3, "sequence_length": 2},
            "has num_sequences*sequence_length 6. There are 4 tokens.",
        ),
        ({"splits": {"train": 3}}, "has splits.train 3. There are 4 tokens for training."),
        (
            {"splits": {"validation": {"num_tokens": 1}}},
            "has splits.validation.num_tokens 1. There are 0 tokens for validation.",
        ),
        ([1], "is not a JSON object"),
    ],
)
def test_metadata_that_contradicts_the_chunks_is_rejected(
    chunks, imported, nothing_kept, metadata, wanted
):
    folder = chunks({0: [1, 2], 1: [3, 4]}, metadata)
    with pytest.raises(DataError, match=re.escape(wanted)):
        imported(folder)
    (folder / "metadata.json").unlink()
    os.mkfifo(folder / "metadata.json")
    with pytest.raises(DataError, match=r"Cannot read .*metadata\.json"):
        imported(folder)


def test_metadata_that_agrees_with_the_chunks_is_accepted(chunks, imported):
    metadata = {
        "num_tokens": 4,
        "num_sequences": 2,
        "sequence_length": 2,
        "dtype": "torch.int64",
        "eos_token_id": 256,
        "vocab_size": 320,
        "splits": {"train": {"num_tokens": 4}, "val": 0.1, "test": 17},
        "chunks": ["old/chunk_000000.pt", "old/chunk_000001.pt"],
    }
    assert imported(chunks({0: [1, 2], 1: [3, 4]}, metadata)).train == [1, 2, 3]


def test_totals_of_all_files_are_not_compared_with_a_part_of_them(tmp_path, imported):
    folder = tmp_path / "old"
    folder.mkdir()
    for name, count in (("train", 40), ("val", 10), ("test", 30)):
        raw(folder / f"{name}.bin", np.arange(count))
    (folder / "metadata.json").write_text(json.dumps({"num_tokens": 80, "splits": {"train": 40}}))
    assert len(imported(folder / "train.bin", out="one").train) == 36
    assert len(imported(folder, out="both").val) == 10
    made = imported(folder / "train.bin", out="named", val=folder / "val.bin")
    assert (len(made.train), len(made.val)) == (40, 10)
    (folder / "metadata.json").write_text(json.dumps({"num_tokens": 80, "splits": {"train": 41}}))
    with pytest.raises(DataError, match=r"has splits\.train 41\. There are 40 tokens"):
        imported(folder, out="again")
    (folder / "test.bin").unlink()
    with pytest.raises(DataError, match=r"has num_tokens 80\. There are 50"):
        imported(folder, out="again")


def test_the_type_that_metadata_states_is_that_of_files_without_a_header(tmp_path, imported):
    """Read as uint32, these bytes would be tokens too."""
    folder = tmp_path / "old"
    folder.mkdir()
    raw(folder / "tokens.bin", [5, 0, 6, 0] * 10)
    (folder / "metadata.json").write_text(json.dumps({"dtype": "uint16"}))
    made = imported(folder)
    assert made.train + made.val == [5, 0, 6, 0] * 10
    assert "--dtype" not in made.said
    with pytest.raises(DataError, match=r'has dtype "uint16"\. The tokens are uint32'):
        imported(folder, out="other", dtype="uint32")


@pytest.mark.parametrize("listed", [[{"file": "chunk_000000.pt"}] * 2, [2, 2], []])
def test_lists_of_other_things_than_names_are_not_compared(chunks, imported, listed):
    made = imported(chunks({0: [1, 2], 1: [3, 4]}, {"chunks": listed}))
    assert made.train == [1, 2, 3]


def test_a_tokenizer_that_metadata_names_twice_must_be_the_same(chunks, imported, tmp_path):
    metadata = {"tokenizer": "byte", "tokenizer_name": "gpt2"}
    folder = chunks({0: [1, 2, 3]}, metadata)
    with pytest.raises(DataError) as caught:
        imported(folder, tokenizer=None)
    assert json.dumps(metadata) in caught.value.what
    assert "--tokenizer" in caught.value.fix
    assert imported(folder, split="tail 0.4").train == [1]
    (folder / "metadata.json").write_text('{"tokenizer": "byte", "tokenizer_name": "byte"}')
    assert imported(folder, tokenizer=None, split="tail 0.4", out="same").train == [1]
    (folder / "metadata.json").write_text('{"tokenizer": 5}')
    with pytest.raises(DataError, match="5"):
        imported(folder, tokenizer=None, out="other")


@pytest.mark.parametrize(("name", "writer"), [("a.npy", npy), ("a.bin", raw), ("a.pt", pt)])
def test_a_field_of_a_file_without_keys_is_an_error(tmp_path, imported, nothing_kept, name, writer):
    with pytest.raises(DataError, match=f"{name} has no key 'x'") as caught:
        imported(writer(tmp_path / name, list(range(20))), field="x")
    assert caught.value.fix == "Remove --field."


def test_a_checkpoint_is_answered_with_the_key_that_starts_a_run_from_it(tmp_path, imported):
    for number, content in enumerate(({"model": {}}, {"w": torch.zeros(2), "v": torch.zeros(2)})):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(DataError) as caught:
            imported(tmp_path / f"{number}.pt")
        assert f"train.init_from={tmp_path}/{number}.pt" in caught.value.fix


def write_arrow(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=2)


def test_a_dataset_that_datasets_saved_is_imported_by_its_splits(imported, tmp_path):
    rows = [[1, 2, EOT], [3], [4, 5, EOT]]
    write_arrow(tmp_path / "saved/train/data-00000-of-00002.arrow", rows)
    write_arrow(tmp_path / "saved/train/data-00001-of-00002.arrow", [[6, EOT]])
    write_arrow(tmp_path / "saved/validation/data-00000-of-00001.arrow", [[7, EOT]])
    found = imported(tmp_path / "saved", tokenizer="byte")
    assert (found.train, found.train_ends) == ([1, 2, EOT, 3, 4, 5, EOT, 6, EOT], [3, 7, 9])
    assert found.val == [7, EOT]
    (tmp_path / "saved/train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="has 1 of 2 files"):
        find_tokens(tmp_path / "saved")
    damaged = tmp_path / "saved/validation/data-00000-of-00001.arrow"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as Arrow"):
        read_tokens(damaged, Reading(257))


def test_text_that_datasets_saved_is_answered_with_the_command_that_prepares_it(imported, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["one two", "three"] * 200})
    path = tmp_path / "saved/data-00000-of-00001.arrow"
    path.parent.mkdir()
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(DataError, match="has 0 keys of tokens") as caught:
        imported(path.parent)
    source = f"{path.parent}/*.arrow"
    assert f"`flatout prepare '{source}' --out data/saved`" in caught.value.fix
    made = prepare([source], tmp_path / "prepared", tokenizer="byte")
    assert made.documents == 400
