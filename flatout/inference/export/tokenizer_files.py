"""The tokenizer of an export: the run's tokenizer.json, and its settings for transformers."""

from __future__ import annotations

import json
from pathlib import Path

from flatout.data.conversation.templates import CONFIG_FILE
from flatout.data.tokenizers import Tokenizer
from flatout.data.tokenizers.tokenizer import library_tokenizer
from flatout.storage.files import write_whole
from flatout.storage.json_io import JsonObject, write_json

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that uses a tokenizer.json as it is."""


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_tokens: int | None, chat_template: str | None
) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json, and return what the user should know.

    The tokenizer.json is that of the run. Only a step that adds special tokens to each text is
    left out: the model was trained without them. `max_tokens` are the positions of the model, None
    for any.
    """
    content, notes = tokenizer.content, []
    if library_tokenizer(content, post_process=True).num_special_tokens_to_add(False):
        content = json.dumps(json.loads(content) | {"post_processor": None}).encode()
        notes.append(
            "The tokenizer adds no special tokens, such as one at the start: the model was trained "
            "without them."
        )
    if tokenizer.name == "char":
        notes.append("The tokenizer drops characters that are not in its vocabulary.")
    write_whole(folder / "tokenizer.json", content.decode())
    write_json(folder / CONFIG_FILE, tokenizer_config(tokenizer, max_tokens, chat_template))
    return notes


def tokenizer_config(
    tokenizer: Tokenizer, max_tokens: int | None, chat_template: str | None
) -> JsonObject:
    """Return the tokenizer_config.json. Without a pad_token, the end-of-text token pads."""
    result: JsonObject = {
        "tokenizer_class": TOKENIZER_CLASS,
        "eos_token": tokenizer.end_of_text,
        "pad_token": tokenizer.end_of_text,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        **tokenizer.named,
    }
    result |= {"model_max_length": max_tokens} if max_tokens else {}
    return result | ({"chat_template": chat_template} if chat_template else {})
