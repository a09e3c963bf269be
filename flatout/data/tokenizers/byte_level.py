"""Reads and writes tokenizer.json: analyses a byte-level BPE as in GPT-2, Llama 3 and Qwen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from flatout.data.tokenizers.base import END_OF_TEXT, Document, Encode
from flatout.data.tokenizers.engines import (
    after_nfc,
    around_added_tokens,
    cannot_encode,
    gigatoken_of_json,
    grouped,
    tiktoken_of,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the ByteLevel pre-tokeniser of `tokenizers`."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CUT_PATTERNS = frozenset({_GPT2, _LLAMA3, QWEN2})
"""Patterns for which `known_cut` proves where a text can be cut."""
_MODEL_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)
"""Options of a BPE model that the faster engines do not have."""

UNSPLIT: Document = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
"""The step that writes bytes as printable characters. The decoder that reads them is equal."""
GPT2_SPLIT: Document = {**UNSPLIT, "use_regex": True}
"""The same step, after splitting the text by GPT-2's pattern."""


@dataclass(frozen=True)
class Layout:
    """The parts of a byte-level BPE that determine its ids."""

    model: Document
    """The model of the file: vocab, merges, ignore_merges."""
    pre_tokenizer: Document
    pattern: str
    """The regular expression with which the pre-tokeniser splits text."""
    normalizer: Literal["NFC"] | None
    raw_added: Mapping[str, int | None]
    """Added tokens that are matched in the original text. None for special ones, which stay text.
    """
    normalized_added: Mapping[str, int | None]
    """Added tokens that are matched in the normalised text between the others."""
    has_unusual_special: bool
    """Whether a special token takes the white space around it, or is found between words only."""

    @property
    def splits_in_bounds(self) -> bool:
        """Whether the pattern is a known one, whose time and memory the text length bounds."""
        return self.pattern in CUT_PATTERNS

    @property
    def cuts_are_known(self) -> bool:
        """Whether `known_cut` applies: the pattern is known, and no added token has white space."""
        return self.splits_in_bounds and not any(
            index is not None and any(map(str.isspace, content))
            for added in (self.raw_added, self.normalized_added)
            for content, index in added.items()
        )

    def gigatoken(self) -> Encode:
        """Return gigatoken's encoder for this layout.

        Raises: MissingPackage; DataError when it cannot be used.
        """
        bare: Document = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": None,
            "decoder": {"type": "ByteLevel"},
            "model": self.model,
        }
        return self._complete(gigatoken_of_json(bare))

    def tiktoken(self) -> Encode:
        """Return tiktoken's encoder for this layout, with ids as ranks.

        Ids are ranks if they increase along the merges.

        Raises: MissingPackage; DataError when it cannot be used.
        """
        ranks = self._ranks()
        pattern = grouped(self.pattern) if self.splits_in_bounds else self.pattern
        try:
            return self._complete(tiktoken_of("tokenizer.json", ranks, pattern))
        except ValueError as error:
            raise cannot_encode("tiktoken", str(error).rstrip(".")) from error

    def _ranks(self) -> dict[bytes, int]:
        byte_of = byte_level_alphabet()
        vocabulary: dict[str, int] = self.model["vocab"]
        results = [
            "".join(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in self.model["merges"]
        ]
        ids = [vocabulary.get(result, -1) for result in results]
        if (
            any(later <= earlier for earlier, later in pairwise(ids))
            or -1 in ids
            or not byte_of.keys() <= vocabulary.keys()
        ):
            raise cannot_encode("tiktoken", "its ids do not increase along its merges")
        reached = vocabulary if self.model.get("ignore_merges") else [*byte_of, *results]
        return {
            bytes(byte_of[character] for character in piece): vocabulary[piece]
            for piece in reached
            if byte_of.keys() >= set(piece)
        }

    def _complete(self, encode: Encode) -> Encode:
        encode = around_added_tokens(encode, self.normalized_added)
        return around_added_tokens(after_nfc(encode) if self.normalizer else encode, self.raw_added)


def layout_of(definition: Document) -> Layout | None:
    """Return the layout of a parsed tokenizer.json. None when it is not a byte-level BPE."""
    model, pre_tokenizer = definition.get("model") or {}, definition.get("pre_tokenizer") or {}
    pattern, normalizer = _pattern(pre_tokenizer), (definition.get("normalizer") or {}).get("type")
    if (
        model.get("type") != "BPE"
        or any(map(model.get, _MODEL_OPTIONS))
        or pattern is None
        or normalizer not in (None, "NFC")
    ):
        return None
    added = definition.get("added_tokens") or []
    unusual = ["single_word", "lstrip", "rstrip", *(["normalized"] if normalizer else [])]
    if not all(
        entry["content"] and (entry.get("special") or not any(map(entry.get, unusual)))
        for entry in added
    ):
        return None
    raw, normalized = (
        {
            entry["content"]: None if entry.get("special") else int(entry["id"])
            for entry in added
            if bool(entry.get("normalized")) == is_normalized
        }
        for is_normalized in (False, True)
    )
    has_unusual = any(any(map(entry.get, unusual)) for entry in added)
    return Layout(model, pre_tokenizer, pattern, normalizer, raw, normalized, has_unusual)


def _pattern(pre_tokenizer: Document) -> str | None:
    """Return the pattern of a pre-tokeniser that splits by one pattern and then writes bytes.

    None for any other pre-tokeniser.
    """
    if _is_byte_level(pre_tokenizer, use_regex=True):
        return _GPT2
    steps = pre_tokenizer.get("pretokenizers") or []
    if (
        [step.get("type") for step in steps] != ["Split", "ByteLevel"]
        or not _is_byte_level(steps[1], use_regex=False)
        or steps[0].get("behavior") != "Isolated"
        or steps[0].get("invert")
    ):
        return None
    pattern = steps[0].get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def _is_byte_level(step: Document, *, use_regex: bool) -> bool:
    return (
        step.get("type") == "ByteLevel"
        and not step.get("add_prefix_space")
        and bool(step.get("use_regex", True)) == use_regex
    )


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable Latin-1 stands for itself, and the other bytes are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + index): value for index, value in enumerate(rest)
    }


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
