"""The tokenizer of an export: tokenizer.json and its settings, checked to give the same ids."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from flatout.data.tokenizers import Tokenizer
from flatout.data.tokenizers.base import Document, NotEncodable
from flatout.errors import DataError
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    import tokenizers

SAMPLES = (
    "Hello, world!  It's 2026, isn't it? He'll SHOUT: DON'T!",
    "def f(x):\n\n\tif x:   # spaces\r\n        return 12345 * x\n    \n  ",
    "Ça coûte 1234,56 € à Zürich — 東京は雨、 привет мир 🙂👍🏽 e\u0301",
    " \n \n\n  leading and trailing \t ",
)
"""Texts on which an exported tokenizer must give the same ids."""
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that uses a tokenizer.json as it is."""
SAMPLE_IDS = 2000
"""Ids of the vocabulary, drawn at random, whose text is a different sample."""


def tokenizer_json(tokenizer: Tokenizer) -> Document:
    """Return a tokenizer.json that gives the same ids.

    Raises: DataError when there is none for this kind of tokenizer, or its ids differ.
    """
    document = tokenizer.tokenizer_json()
    if document is None:
        raise DataError(
            f"The tokenizer {tokenizer.name!r} has no counterpart as a tokenizer.json.",
            fix="Encode with flatout's own tokenizer.json, as it is in the run directory.",
        )
    difference = first_difference(tokenizer, document)
    if difference is not None:
        raise DataError(
            f"A tokenizer.json of {tokenizer.name!r} gives other ids than the tokenizer itself for "
            f"{difference[:60]!r}.",
            fix="Encode with flatout's own tokenizer.json, as it is in the run directory.",
        )
    return document


def loaded(document: Document) -> tokenizers.Tokenizer:
    """Return the `tokenizers` object of a tokenizer.json."""
    from tokenizers import Tokenizer as Library

    return Library.from_str(json.dumps(document))


def first_difference(tokenizer: Tokenizer, document: Document) -> str | None:
    """Return the first sample text that a tokenizer.json encodes otherwise, or None.

    Texts that the tokenizer cannot encode are omitted: the model never sees them.
    """
    other = loaded(document)
    special = {int(entry["id"]) for entry in document.get("added_tokens") or []}
    for text in _samples(tokenizer, special):
        try:
            ids = tokenizer.encode(text)
        except NotEncodable:
            continue
        if other.encode(text, add_special_tokens=False).ids != ids:
            return text
    return None


def _samples(tokenizer: Tokenizer, special: set[int]) -> Iterator[str]:
    """Yield texts of several languages, their parts, and text made from the vocabulary."""
    for text in SAMPLES:
        yield text
        yield from text.split(" ")
    usable = [index for index in range(tokenizer.vocab_size) if index not in special]
    drawn = random.Random(0).choices(usable, k=SAMPLE_IDS)
    for start in range(0, SAMPLE_IDS, 50):
        yield tokenizer.decode(drawn[start : start + 50]).replace("\ufffd", "")


def end_of_text(document: Document, eot_id: int) -> str:
    """Return the text of the end-of-text token of a tokenizer.json."""
    added = {int(entry["id"]): entry["content"] for entry in document.get("added_tokens") or []}
    return str(added.get(eot_id) or loaded(document).id_to_token(eot_id))


def tokenizer_config(
    token: str, named: Mapping[str, str], max_tokens: int | None, chat_template: str | None
) -> JsonObject:
    """Return the tokenizer_config.json beside a tokenizer.json.

    `token` is the end-of-text token, which also pads unless `named`, the special tokens by name,
    has a different one. `max_tokens` are the positions of the model, None for any.
    """
    result: JsonObject = {
        "tokenizer_class": TOKENIZER_CLASS,
        "eos_token": token,
        "pad_token": token,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        **named,
    }
    result |= {"model_max_length": max_tokens} if max_tokens else {}
    return result | ({"chat_template": chat_template} if chat_template else {})
