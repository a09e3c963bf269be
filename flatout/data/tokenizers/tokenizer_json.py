"""Writes tokenizers as a tokenizer.json, the format of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.data.tokenizers.base import END_OF_TEXT, Document
from flatout.data.tokenizers.byte_level import byte_level_alphabet

UNSPLIT: Document = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
"""The step that writes bytes as printable characters; the decoder that reads them is equal."""
GPT2_SPLIT: Document = {**UNSPLIT, "use_regex": True}
"""The same step, after splitting the text by GPT-2's pattern."""


def bpe_document(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    eot_id: int,
    *,
    pre_tokenizer: Document | None,
    decoder: Document,
) -> Document:
    """Return the tokenizer.json of a BPE with these pieces, and END_OF_TEXT as its special token.

    A word that is a piece is encoded as that piece, whatever the merges.
    """
    special = {
        "id": eot_id,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {**vocabulary, END_OF_TEXT: eot_id},
            "merges": [" ".join(merge) for merge in merges],
        },
    }


def byte_level_document(
    pieces: Mapping[bytes, int], eot_id: int, pre_tokenizer: Document
) -> Document:
    """Return the tokenizer.json of a byte-level BPE with these pieces.

    Any two neighbours merge whose bytes together are a piece, lowest id first, so each piece gets a
    merge for every pair that makes it.
    """
    character_of = {byte: character for character, byte in byte_level_alphabet().items()}
    spelled = {piece: "".join(map(character_of.__getitem__, piece)) for piece in pieces}
    merges = [
        (spelled[left], spelled[right])
        for piece in sorted(pieces, key=pieces.__getitem__)
        for left, right in _pairs(piece, pieces)
    ]
    vocabulary = {spelled[piece]: index for piece, index in pieces.items()}
    return bpe_document(vocabulary, merges, eot_id, pre_tokenizer=pre_tokenizer, decoder=UNSPLIT)


def split_by(pattern: str) -> Document:
    r"""Return the pre-tokeniser that splits text by a pattern of tiktoken, then writes bytes.

    In the regular expressions of `tokenizers`, `$` is the end of a line, and `+` after an interval
    repeats it.
    """
    onig = pattern.replace(r"\s++$", r"\s++\z").replace(r"\p{N}{1,3}+", r"(?>\p{N}{1,3})")
    split = {
        "type": "Split",
        "pattern": {"Regex": onig},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, UNSPLIT]}


def _pairs(piece: bytes, pieces: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of pieces that make up a piece, lowest ids first."""
    pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
    known = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
    return sorted(known, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
