"""The tokenizer of a GGUF file: a byte-level BPE, which llama.cpp calls `gpt2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatout.data.tokenizers.base import Document
from flatout.data.tokenizers.bpe import SCHEMES
from flatout.data.tokenizers.byte_level import (
    GPT2_SPLIT,
    LLAMA_CPP_PATTERNS,
    UNSPLIT,
    byte_level_alphabet,
    layout_of,
    split_by,
)
from flatout.errors import DataError

if TYPE_CHECKING:
    from gguf import GGUFWriter

NO_MERGE = "\u0100 \u0100"
"""A merge of two zero bytes without a piece: llama.cpp rejects a file without merges."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""GGUF's types of tokens."""
_SCHEME_NAMES = {"gpt4": "llama-bpe", "o200k": "gpt-4o"}
"""llama.cpp's names of tiktoken's patterns, by gigatoken's."""


def write_vocabulary(
    writer: GGUFWriter, document: Document, eot_id: int, named: Mapping[str, int], rows: int
) -> None:
    """Write tokens, merges and the way to split text. `rows` are those of the embedding.

    `named` are the ids of special tokens by name, such as bos_token.

    Raises: DataError when llama.cpp has no such tokenizer.
    """
    document = _as_byte_level(document)
    layout = layout_of(document)
    pre = layout and _names().get(layout.pattern)
    if layout is None or pre is None:
        raise DataError(
            "llama.cpp has no tokenizer like that of this run: GGUF files from flatout have "
            "byte-level BPE with a published pattern, bytes, or ASCII characters.",
            fix="Export with --to huggingface.",
        )
    vocabulary: Mapping[str, int] = layout.model["vocab"]
    pieces = {index: (piece, NORMAL) for piece, index in vocabulary.items()}
    for entry in document.get("added_tokens") or []:
        kind = CONTROL if entry.get("special") else USER_DEFINED
        pieces[int(entry["id"])] = (str(entry["content"]), kind)
    table = [pieces.get(index, (f"[PAD{index}]", UNUSED)) for index in range(rows)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in layout.model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([piece for piece, _ in table])
    writer.add_token_types([kind for _, kind in table])
    writer.add_token_merges(merges or [NO_MERGE])
    writer.add_bos_token_id(named.get("bos_token", eot_id))
    writer.add_eos_token_id(named.get("eos_token", eot_id))
    if "pad_token" in named:
        writer.add_pad_token_id(named["pad_token"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _names() -> dict[str, str]:
    """Return llama.cpp's name of each pattern that it has."""
    tiktoken = {
        split_by(pattern)["pretokenizers"][0]["pattern"]["Regex"]: _SCHEME_NAMES[scheme]
        for pattern, scheme in SCHEMES.items()
        if scheme in _SCHEME_NAMES
    }
    return LLAMA_CPP_PATTERNS | tiktoken


def _as_byte_level(document: Document) -> Document:
    """Return a tokenizer.json without merges as one of byte-level BPE, if it has the same ids.

    Without merges, no way of splitting text changes an id. A vocabulary of ASCII characters is one
    of bytes.
    """
    model = document.get("model") or {}
    if model.get("type") != "BPE" or model.get("merges"):
        return document
    special = {entry["content"] for entry in document.get("added_tokens") or []}
    if document.get("pre_tokenizer") is None:
        vocabulary: dict[str, int] = model["vocab"]
        if not all(piece.isascii() for piece in vocabulary):
            return document
        character_of = {byte: character for character, byte in byte_level_alphabet().items()}
        spelled = {
            piece if piece in special else character_of[ord(piece)]: index
            for piece, index in vocabulary.items()
        }
        return document | {"pre_tokenizer": GPT2_SPLIT, "model": model | {"vocab": spelled}}
    return document | (
        {"pre_tokenizer": GPT2_SPLIT} if document["pre_tokenizer"] == UNSPLIT else {}
    )
