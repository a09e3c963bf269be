"""The token that ends documents: the one that the tokenizer's own files name."""

import json

import numpy as np
import pytest
from conversations import write_tokenizer
from foreign_models import LLAMA, write_model
from prepared import prepared, write_rows

from flatout.cli.commands.chat import chat
from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.prepare.request.request import difference, tokenizer_mark
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, OutputInUse
from flatout.inference import generate as inference

ENDOFTEXT, IM_END = 256, 258


def named(folder, eos_token):
    """Write a tokenizer with <|endoftext|> and <|im_end|> whose config names one of them."""
    write_tokenizer(folder)
    config = {"eos_token": eos_token, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("eos_token", "option", "end"),
    [
        ("<|im_end|>", None, IM_END),
        ({"content": "<|im_end|>"}, None, IM_END),
        ("<|im_end|>", "<|endoftext|>", ENDOFTEXT),
        ("<|absent|>", "<|im_end|>", IM_END),
        (None, None, ENDOFTEXT),
    ],
    ids=str,
)
def test_documents_end_with_the_eos_token_of_the_config(tmp_path, eos_token, option, end):
    assert tokens_of(tmp_path, named(tmp_path / "hf", eos_token), option) == [0, 0, end, 1, end]


def tokens_of(tmp_path, folder, option=None):
    """Return the tokens of the documents !! and ", prepared with the tokenizer in a folder."""
    rows = write_rows(tmp_path / "rows.jsonl", ["!!", '"'])
    val = write_rows(tmp_path / "val.jsonl", ["#"])
    options = {"tokenizer": str(folder), "val": (str(val),), "end_of_text": option}
    made = prepared(rows, out=tmp_path / "out", **options)
    split = Dataset.open(made.path).split("train")
    return split.read_tokens(0, split.num_tokens).tolist()


def test_a_dataset_whose_config_now_names_a_different_eos_token_is_another_one(tmp_path):
    folder = named(tmp_path / "hf", "<|im_end|>")
    assert tokens_of(tmp_path, folder) == tokens_of(tmp_path, folder)
    named(folder, "<|endoftext|>")
    with pytest.raises(
        OutputInUse, match=r"different dataset: tokenizer is 'sha256:\w+ <.im_end.>'"
    ):
        tokens_of(tmp_path, folder)


def test_a_dataset_without_a_stored_eos_token_is_still_the_same(tmp_path):
    folder = named(tmp_path / "hf", "<|im_end|>")
    requested = {"tokenizer": tokenizer_mark(str(folder))}
    stored = {"tokenizer": requested["tokenizer"].partition(" ")[0]}
    assert stored != requested
    assert difference(stored, requested) == ""


START = 257
TOKENIZER, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({MAP: {"eos_token": "<|im_start|>"}}, START),
        ({MAP: {"eos_token": {"content": "<|im_start|>", "lstrip": False}}}, START),
        ({GENERATION: {"eos_token_id": START}}, START),
        ({MODEL: {"eos_token_id": START}}, START),
        ({MODEL: {"eos_token_id": [START, IM_END]}}, START),
        ({TOKENIZER: {"eos_token": "<|im_end|>"}, MAP: {"eos_token": "<|im_start|>"}}, IM_END),
        ({MAP: {"eos_token": "<|im_end|>"}, GENERATION: {"eos_token_id": START}}, IM_END),
        ({GENERATION: {"eos_token_id": [IM_END]}, MODEL: {"eos_token_id": START}}, IM_END),
        ({TOKENIZER: {"eos_token": None}, GENERATION: {"eos_token_id": None}}, ENDOFTEXT),
        ({GENERATION: {"eos_token_id": []}, MODEL: {"eos_token_id": START}}, START),
        ({MODEL: {"eos_token_id": 999}}, ENDOFTEXT),
        ({MODEL: {"eos_token_id": 0}}, ENDOFTEXT),
    ],
    ids=str,
)
def test_the_first_file_that_states_the_end_of_text_decides(tmp_path, files, end):
    folder = write_files(tmp_path / "hf", files)
    assert tokens_of(tmp_path, folder) == [0, 0, end, 1, end]


def write_files(folder, files):
    """Write a tokenizer.json with the JSON files beside it to a folder."""
    (write_tokenizer(folder) / TOKENIZER).unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "key", "value"), [(TOKENIZER, "eos_token", "<|nope|>"), (MAP, "eos_token", "<|nope|>")]
)
def test_an_end_of_text_that_the_vocabulary_lacks_is_an_error(tmp_path, name, key, value):
    folder = write_files(tmp_path / "hf", {name: {key: value}})
    with pytest.raises(DataError) as error:
        tokens_of(tmp_path, folder)
    assert f"{folder / name} has the {key} {value!r}" in error.value.what
    assert "--end-of-text NAME" in error.value.fix
    assert tokens_of(tmp_path, folder, "<|im_end|>") == [0, 0, IM_END, 1, IM_END]


def test_imported_tokens_are_split_at_the_eos_token_of_the_config(tmp_path):
    tokens = np.array([1, 2, IM_END, 3, ENDOFTEXT, 4, IM_END, 5, 6, IM_END], np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    options = ImportOptions(tokenizer=str(named(tmp_path / "hf", "<|im_end|>")), split="tail 0.3")
    import_tokens(tmp_path / "tokens.npy", tmp_path / "out", options)
    assert Dataset.open(tmp_path / "out").split("train").document_ends.tolist() == [3, 7]


@pytest.mark.parametrize("eos_token", ["<|endoftext|>", "<|im_end|>"])
def test_a_chat_without_a_template_stops_at_the_eos_token_of_the_config(
    tmp_path, eos_token, monkeypatch
):
    model = named(tmp_path / "model", eos_token)
    write_model(model, LLAMA | {"vocab_size": 260})
    drawn = iter([0, IM_END, 1])
    monkeypatch.setattr(inference, "draw_token", lambda *_, **__: next(drawn))
    found = chat(str(model), chat_template="plain", lines=["!"], max_tokens=3)
    stops = eos_token == "<|im_end|>"
    assert found.conversations[0][1].content == ("!" if stops else '!"')
