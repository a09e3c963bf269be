import base64
import json

import numpy as np
import pytest
import torch
from texts import byte_level_json

from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.store.shards import Dataset
from flatout.data.store.verify import verify_dataset
from flatout.data.token_formats.chunks import files
from flatout.data.tokenizers import load_tokenizer, make_tokenizer
from flatout.errors import DataError

EOT = 256  # of the byte tokenizer
RNG = np.random.default_rng(0)


@pytest.fixture
def chunks(tmp_path):
    """Write chunks, arrays by number, and metadata into a folder, and return it."""

    def write(by_number, metadata=None, *, name="chunks"):
        folder = tmp_path / name
        folder.mkdir()
        for number, tokens in by_number.items():
            torch.save(
                tokens
                if isinstance(tokens, torch.Tensor | dict)
                else torch.tensor(np.asarray(tokens), dtype=torch.int64),
                path(folder, number),
            )
        if metadata is not None:
            (folder / "metadata.json").write_text(json.dumps(metadata))
        return folder

    return write


def path(folder, number):
    return folder / f"chunk_{number:06d}.pt"


def bring_in(folder, **options):
    options = ImportOptions(**{"tokenizer": "byte", **options})
    return import_tokens(folder, folder.parent / "out", options)


def of_split(folder, name):
    split = Dataset.open(folder.parent / "out").split(name)
    return split.read_tokens(0, split.num_tokens).tolist(), split.document_ends.tolist()


@pytest.mark.parametrize("first", [0, 1])
def test_tokens_are_imported_unchanged(chunks, first):
    whole = RNG.integers(0, 256, 1000)
    whole[[99, 150, 420, 949]] = EOT
    folder = chunks(
        {first + number: whole[number * 100 : number * 100 + 100] for number in range(10)},
        {"num_chunks": 10, "seq_len": 100},
    )
    made = bring_in(folder, split="tail 0.25")
    assert of_split(folder, "train") == (whole[:750].tolist(), [100, 151, 421, 750])
    assert of_split(folder, "val") == (whole[750:].tolist(), [200, 250])
    assert made.manifest.text_bytes == 996
    assert made.manifest.split_rule == "tail 0.25"
    assert made.manifest.source["metadata"] == {"num_chunks": 10, "seq_len": 100}
    assert verify_dataset(folder.parent / "out").problems == ()
    assert made.manifest.source["chunks"] == 10


def test_each_chunk_can_be_a_document(chunks):
    folder = chunks({0: [1, 2, 3], 1: [4, EOT, 5], 2: [6, 7]})
    bring_in(folder, documents="chunk", split="tail 0.5")
    assert of_split(folder, "train") == ([1, 2, 3, 4], [3, 4])
    assert of_split(folder, "val") == ([EOT, 5, 6, 7], [2, 4])


def test_importing_again_does_nothing_and_a_different_dataset_is_rejected(chunks):
    folder = chunks({0: np.arange(200)})
    bring_in(folder)
    assert bring_in(folder).existed
    assert bring_in(folder, split="tail 0.10").existed
    with pytest.raises(
        DataError,
        match=r"contains a different dataset: split is 'tail 0\.1', and 'tail 0\.2' is requested",
    ):
        bring_in(folder, split="tail 0.2")
    with pytest.raises(DataError, match=r"documents is 'end-of-text', and 'chunk' is requested"):
        bring_in(folder, documents="chunk")
    torch.save(torch.arange(200) + 1, path(folder, 0))
    with pytest.raises(DataError, match="contains a different dataset: the text has changed"):
        bring_in(folder)


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


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder", "saved", "tiktoken"])
def test_chunks_of_every_kind_of_tokenizer_are_imported(chunks, tmp_path, kind):
    path = tiktoken_file(tmp_path) if kind == "tiktoken" else hub_file(tmp_path)
    options = {"pattern": GPT2_PATTERN} if kind == "tiktoken" else {}
    known = load_tokenizer(path, **options)
    if kind == "saved":
        path = tmp_path / "saved.json"
        known.save(path)
    documents = [[*known.encode(text), known.eot_id] for text in TEXTS]
    whole = [token for document in documents for token in document]
    third = len(whole) // 3
    folder = chunks(
        {0: whole[:third], 1: whole[third : 2 * third], 2: whole[2 * third :]},
        {"vocab_size": 50_304, "total_tokens": len(whole)},
    )
    made = bring_in(
        folder,
        tokenizer=str(path.parent if kind == "folder" else path),
        split="tail 0.25",
        **options,
    )
    train, ends = of_split(folder, "train")
    assert train + of_split(folder, "val")[0] == whole
    assert (
        ends[: len(ends) - 1]
        == np.cumsum([len(document) for document in documents])[: len(ends) - 1].tolist()
    )
    dataset = Dataset.open(folder.parent / "out")
    assert dataset.tokenizer.decode(train) == known.decode(train)
    assert (made.manifest.vocab_size, made.manifest.text_bytes) == (
        known.vocab_size,
        sum(len(text) for text in TEXTS),
    )


def test_numbers_that_json_lacks_are_kept_as_text(chunks):
    folder = chunks({0: np.arange(200)})
    (folder / "metadata.json").write_text('{"loss": NaN, "most": -Infinity, "large": [1e999, 1.5]}')
    made = bring_in(folder)
    assert made.manifest.source["metadata"] == {
        "loss": "NaN",
        "most": "-Infinity",
        "large": ["1e999", 1.5],
    }
    assert bring_in(folder).existed
    (folder / "metadata.json").write_text('{"loss": 1}')
    with pytest.raises(
        DataError, match=r"contains a different dataset: metadata\.json has changed\."
    ):
        bring_in(folder)


def test_missing_numbers_are_named(chunks):
    folder = chunks({number: [1] for number in (0, 1, 3, 4, 8)})
    with pytest.raises(DataError, match=r"has no chunk 2, 5 to 7\."):
        files(folder)
    with pytest.raises(DataError, match=r"has no chunk 1 to 4\."):
        files(chunks({5: [1]}, name="late"))
    with pytest.raises(DataError, match="17, 19 and 40 more gaps"):
        files(chunks({number: [1] for number in range(0, 101, 2)}, name="even"))
    with pytest.raises(DataError, match=r"num_chunks 7\. There are 2"):
        bring_in(chunks({0: [1], 1: [1]}, {"num_chunks": 7}, name="fewer"))


def test_duplicate_numbers_are_rejected(chunks):
    folder = chunks({0: [1], 1: [2]})
    torch.save(torch.tensor([1]), folder / "chunk_1.pt")
    with pytest.raises(DataError, match="more than one chunk number 1"):
        files(folder)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (torch.tensor([1.0]), "contains a tensor of float32, not of integers"),
        (torch.tensor([True]), "contains a tensor of bool, not of integers"),
        (torch.zeros(3, 4, dtype=torch.int64), r"of shape \(3, 4\), not of one dimension"),
        (torch.tensor(4), r"of shape \(\), not of one dimension"),
        (
            torch.tensor([1, 2, 257]),
            "token 2: the id 257 is outside the vocabulary of .*, whose ids are below 257",
        ),
        (torch.tensor([1, -1, 2]), "token 1: the id -1 is outside the vocabulary"),
        ({"tokens": [1]}, "contains a dict, not a tensor"),
        ({"tokens": torch.tensor([1.0])}, "contains a tensor of float32"),
        (
            {"a": torch.tensor([1]), "b": torch.tensor([2])},
            "has 2 keys, and it is not clear which contains the tokens",
        ),
        (
            Evil(),
            r"contains more than a tensor: it names \w+\.print, and code in a file is never run",
        ),
        (b"no pickle", "cannot be read as a tensor: "),
        (b"", "cannot be read as a tensor: "),
        (
            torch.zeros(1, dtype=torch.int64).expand(1 << 40),
            "contains an expanded tensor: 1,099,511,627,776 elements in 8 bytes",
        ),
        (torch.zeros(4, dtype=torch.int64).to_sparse(), "contains "),
        (torch.empty(1 << 40, dtype=torch.int64, device="meta"), "contains "),
        (bytearray(9), r"contains more than a tensor: it names \w+\.bytearray"),
    ],
)
def test_an_unusable_chunk_is_named_and_nothing_is_kept(chunks, capsys, content, wanted):
    folder = chunks({0: [1, 2, 3], 1: [1]})
    if isinstance(content, bytes):
        path(folder, 1).write_bytes(content)
    else:
        torch.save(content, path(folder, 1))
    with pytest.raises(DataError, match=f"chunk_000001.pt.*{wanted}"):
        bring_in(folder)
    assert not (folder.parent / "out").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({"total_tokens": 9}, "has total_tokens 9. There are 4"),
        ({"vocab_size": 100}, "has vocab_size 100. The tokenizer has 257"),
        ([1], "is not a JSON object"),
    ],
)
def test_metadata_that_contradicts_the_chunks_is_rejected(chunks, metadata, wanted):
    folder = chunks({0: [1, 2], 1: [3, 4]}, metadata)
    with pytest.raises(DataError, match=wanted):
        bring_in(folder)


def test_a_padded_vocabulary_and_unknown_keys_are_accepted(chunks):
    metadata = {"vocab_size": 50_304, "total_tokens": 4, "author": None}
    assert bring_in(chunks({0: [1, 2], 1: [3, 4]}, metadata)).manifest.tokens == 4


def test_metadata_must_be_json(chunks):
    folder = chunks({0: [1, 2]})
    (folder / "metadata.json").write_text("{")
    with pytest.raises(DataError, match=r"metadata.json cannot be read"):
        bring_in(folder)


DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "uint32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_any_integers_and_dicts_are_imported(chunks, dtype):
    tokens = np.arange(100).astype(dtype)
    saved = torch.from_numpy(tokens)
    mask = torch.ones(100)
    folder = chunks({0: saved, 1: {"input_ids": saved, "attention_mask": mask}})
    bring_in(folder, split="tail 0.5")
    assert of_split(folder, "train")[0] == of_split(folder, "val")[0] == tokens.tolist()


def test_the_key_of_a_dict_can_be_named(chunks):
    pair = {"a": torch.arange(50), "b": torch.arange(50) + 100}
    folder = chunks({0: pair})
    with pytest.raises(DataError, match="has no key 'c'") as caught:
        bring_in(folder, field="c")
    assert "--field: 'a', 'b'" in caught.value.fix
    bring_in(folder, field="b")
    assert of_split(folder, "train")[0] == list(range(100, 145))
    with pytest.raises(DataError, match="field is 'b', and 'a' is requested"):
        bring_in(folder, field="a")


def test_a_file_of_torch_is_imported_alone(tmp_path):
    torch.save(torch.arange(200), tmp_path / "tokens.pt")
    bring_in(tmp_path / "tokens.pt")
    assert of_split(tmp_path / "tokens.pt", "train")[0] == list(range(180))
