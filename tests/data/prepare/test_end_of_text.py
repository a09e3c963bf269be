"""The token that ends documents: the one that the tokenizer's own files name."""

import json

import numpy as np
import pytest
from conversations import write_tokenizer
from foreign_models import LLAMA, write_model
from prepared import prepared, write_rows

from flatout.cli.commands.chat import chat
from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.store.shards import Dataset
from flatout.inference import chat as inference

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
        ("<|absent|>", None, ENDOFTEXT),
        (None, None, ENDOFTEXT),
    ],
    ids=str,
)
def test_documents_end_with_the_eos_token_of_the_config(tmp_path, eos_token, option, end):
    rows = write_rows(tmp_path / "rows.jsonl", ["!!", '"'])
    val = write_rows(tmp_path / "val.jsonl", ["#"])
    folder = named(tmp_path / "hf", eos_token)
    options = {"tokenizer": str(folder), "val": (str(val),), "end_of_text": option}
    made = prepared(rows, out=tmp_path / "out", **options)
    split = Dataset.open(made.path).split("train")
    assert split.read_tokens(0, split.num_tokens).tolist() == [0, 0, end, 1, end]


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
