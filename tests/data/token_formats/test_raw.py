"""nanoGPT's train.bin and val.bin, and other files without a header."""

import numpy as np
import pytest

from flatout.data.prepare import import_tokens
from flatout.data.token_formats.raw import guess_dtype, takes
from flatout.errors import DataError

EOT = 256
RNG = np.random.default_rng(0)


def tokens(count=1000, high=257):
    return RNG.integers(0, high, count)


def nano_gpt(folder, train, val, dtype="uint16"):
    folder.mkdir(exist_ok=True)
    np.asarray(train, dtype).tofile(folder / "train.bin")
    np.asarray(val, dtype).tofile(folder / "val.bin")
    return folder


def test_both_files_keep_their_split(tmp_path, imported):
    train, val = tokens(), tokens(300)
    made = imported(nano_gpt(tmp_path / "nano", train, val))
    assert (made.train, made.val) == (train.tolist(), val.tolist())
    ends = (np.flatnonzero(train == EOT) + 1).tolist()
    assert made.train_ends[: len(ends)] == ends
    assert made.manifest.split_rule == "named"
    assert made.manifest.source["chunks"] == 2
    assert "train.bin is read as uint16" in made.said


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64", "uint64"])
def test_the_type_is_guessed_from_the_bytes(tmp_path, imported, dtype):
    train = tokens(2000)
    made = imported(nano_gpt(tmp_path / "nano", train, train, dtype))
    assert made.train == made.val == train.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_the_type_can_be_named(tmp_path, imported, dtype):
    np.asarray([1, 2, 3, 4, 5, 6], dtype).tofile(tmp_path / "few.bin")
    made = imported(tmp_path / "few.bin", format="raw", dtype=dtype, split="tail 0.5")
    assert (made.train, made.val) == ([1, 2, 3], [4, 5, 6])
    assert "--dtype" not in made.said


def test_a_large_vocabulary_with_zeros_is_not_taken_for_a_wider_type():
    ids = np.arange(4096, dtype=np.uint16)
    assert guess_dtype(ids.tobytes(), 50_257) == "uint16"
    assert guess_dtype(ids.astype(np.uint32).tobytes(), 50_257) == "uint32"
    assert guess_dtype((ids + 60_000).tobytes(), 50_257) is None


def test_a_file_alone_is_split_at_its_tail(tmp_path, imported):
    whole = tokens()
    whole.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    made = imported(tmp_path / "tokens.bin")
    assert (made.train, made.val) == (whole[:900].tolist(), whole[900:].tolist())
    assert made.manifest.split_rule == "tail 0.1"


def test_validation_tokens_can_be_named(tmp_path, imported):
    for name in ("a.bin", "b.bin"):
        tokens(100).astype(np.uint16).tofile(tmp_path / name)
    made = imported(tmp_path / "a.bin", val=tmp_path / "b.bin")
    assert (len(made.train), len(made.val)) == (100, 100)
    assert imported(tmp_path / "a.bin", val=tmp_path / "b.bin").existed
    with pytest.raises(DataError, match=r"split is 'named', and 'tail 0\.1' is requested"):
        imported(tmp_path / "a.bin")
    tokens(90).astype(np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match="the validation text has changed"):
        imported(tmp_path / "a.bin", val=tmp_path / "b.bin")


def test_many_blocks_are_written_in_order(tmp_path, imported, monkeypatch):
    monkeypatch.setattr(import_tokens, "BLOCK_TOKENS", 7)
    whole = tokens()
    whole[[6, 7, 13, 500]] = EOT
    whole.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    made = imported(tmp_path / "tokens.bin")
    assert made.train + made.val == whole.tolist()
    ends = (np.flatnonzero(whole[:900] == EOT) + 1).tolist()
    assert made.train_ends == sorted({*ends, 900})


def test_a_file_without_end_of_text_is_one_document(tmp_path, imported):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    made = imported(tmp_path / "tokens.bin")
    assert (made.train_ends, made.val_ends) == ([180], [20])
    assert "No file contains the end-of-text token (id 256)" in made.said


def test_tokens_of_an_unknown_tokenizer_are_imported_by_their_number(tmp_path, imported):
    train = tokens(1000, 50_257)
    train[10] = 50_256
    folder = nano_gpt(tmp_path / "nano", train, train)
    made = imported(folder, tokenizer="ids:50257")
    assert made.train == train.tolist()
    assert made.train_ends[0] == 11
    assert made.manifest.vocab_size == 50_257
    assert made.manifest.text_bytes == 0


@pytest.mark.parametrize(
    ("content", "options", "wanted"),
    [
        (b"\0" * 7, {}, "has 7 bytes, which is not a whole number of uint16 tokens"),
        (b"", {}, "has 0 bytes"),
        (b"\1\0" * 9, {"dtype": "int32"}, "not a whole number of int32 tokens"),
        (b"\1\0" * 9, {"dtype": "float"}, "--dtype 'float' is not a type of tokens"),
        (b"\1\0\xff\xff\2\0", {}, r"bad.bin, token 1: the id 65535 is outside the vocabulary"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, imported, nothing_kept, content, options, wanted):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(DataError, match=wanted):
        imported(tmp_path / "bad.bin", format="raw", **options)


def test_a_file_with_an_unusual_name_needs_the_format(tmp_path, imported):
    path = tmp_path / "tokens.u16"
    np.arange(100, dtype=np.uint16).tofile(path)
    with pytest.raises(DataError, match="not a token file of a known format") as caught:
        imported(path)
    assert "--format raw" in caught.value.fix
    assert imported(path, format="raw").train == list(range(90))


def test_text_and_other_binary_files_are_not_taken(tmp_path):
    contents = {"text.bin": b"plain text", "model.bin": b"PK\x03\x04....", "gguf.bin": b"GGUF\0\0"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert not takes(tmp_path / name), name
