"""What encodes text faster than `tokenizers`, with the same ids: tables of numpy, and gigatoken.

An encoder takes text and returns its ids. It knows no special tokens, and raises UnicodeEncodeError
for half of a surrogate pair.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
from numpy.typing import NDArray

from flatout.data.conversation.rendering import any_of
from flatout.errors import DataError, MissingPackage
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer, SentencePieceTokenizer

Ids = NDArray[np.uint32]
Encode = Callable[[str], Ids]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the ByteLevel pre-tokeniser of `tokenizers`."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|(?>\p{N}{1,3})"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + _O200K_END,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + _O200K_END,
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
KNOWN_PATTERNS = {
    GPT2: GPT2,
    LLAMA3: LLAMA3,
    QWEN2: QWEN2,
    CL100K: CL100K.replace(r"(?>\p{N}{1,3})", r"\p{N}{1,3}+").replace(r"\z", "$") + "+",
    O200K: O200K,
}
"""The patterns for which tests prove that gigatoken gives the ids of `tokenizers`, and that text
can be cut where the tokenizer cuts it. Each with gigatoken's spelling.
"""
_MODEL_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)
"""Options of a BPE model that the faster engines do not have."""
_UNUSUAL = ("single_word", "lstrip", "rstrip")
"""Options of added tokens that make them depend on the text around them."""

AS_BYTES: JsonObject = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
"""The step that writes bytes as printable characters. The decoder that reads them is equal."""

GROWTH_CHECK_BYTES = 1_000_000
"""Bytes of text between two checks of the memory of the process."""
MAX_GROWTH_BYTES = 32 << 20
"""gigatoken caches every word it meets. It is reloaded when the process has grown by this much."""
ABSENT = 0xFFFF_FFFF
"""The id of a character that a table does not have."""


_last_utf8 = ("", b"")


def utf8(text: str, errors: str = "strict") -> bytes:
    """Return the UTF-8 of a text. `errors` is what `str.encode` does about surrogates.

    The last result is kept: packing hashes, measures and tokenises one document after another.
    """
    global _last_utf8
    last = _last_utf8  # another thread may replace it meanwhile
    if last[0] is not text:
        try:
            last = _last_utf8 = text, text.encode()
        except UnicodeEncodeError:
            return text.encode(errors=errors)
    return last[1]


class UnknownCharacter(Exception):
    """A character that is not in the vocabulary, and its index in the text."""

    def __init__(self, character: str, index: int) -> None:
        super().__init__(character, index)
        self.character, self.index = character, index


@dataclass(frozen=True)
class Table:
    """The ids of a tokenizer that has one for each byte, or for each character."""

    name: str
    """byte or char."""
    ids: Ids
    """The id of each byte value or code point. The last one is of all beyond."""

    def __call__(self, text: str) -> Ids:
        """Return the ids of a text.

        Raises: UnknownCharacter.
        """
        is_byte = self.name == "byte"
        data = text.encode("utf-8" if is_byte else "utf-32-le")
        codes = np.frombuffer(data, np.uint8 if is_byte else "<u4")
        ids: Ids = self.ids.take(codes, mode="clip")
        if not is_byte and ids.max(initial=0) == ABSENT:
            index = int((ids == ABSENT).argmax())
            raise UnknownCharacter(text[index], index)
        return ids


def table_of(definition: JsonObject) -> Table | None:
    """Return the table of a valid tokenizer.json that merges nothing. None for any other."""
    model, added = definition["model"], definition.get("added_tokens") or []
    if (
        model.get("type") != "BPE"
        or model["merges"]
        or any(map(model.get, _MODEL_OPTIONS))
        or definition.get("normalizer")
        or not all(each.get("special") for each in added)
        or any(each.get(option) for each in added for option in _UNUSUAL)
    ):
        return None
    vocabulary = dict(model["vocab"])
    for each in added:
        vocabulary.pop(each["content"], None)
    split, byte_of = definition.get("pre_tokenizer"), byte_level_alphabet()
    if split and _is_byte_level(split, use_regex=False) and vocabulary.keys() == byte_of.keys():
        name, codes = "byte", byte_of
    elif not split and all(len(token) == 1 for token in vocabulary):
        name, codes = "char", {token: ord(token) for token in vocabulary}
    else:
        return None
    ids = np.full(max(codes.values(), default=0) + 2, ABSENT, np.uint32)
    for token, index in vocabulary.items():
        ids[codes[token]] = index
    return Table(name, ids)


@dataclass(frozen=True)
class Layout:
    """The parts of a byte-level BPE with a known pattern that determine its ids."""

    model: JsonObject
    """The model of the file: vocab, merges, ignore_merges."""
    pattern: str
    """The regular expression with which the pre-tokeniser splits text, one of KNOWN_PATTERNS."""
    normalizes: bool
    """Whether text is normalised to NFC first."""
    added: tuple[str, ...]
    """Added tokens that are not special."""
    has_unusual_special: bool
    """Whether a special token takes the white space around it, or is found between words only."""

    @property
    def cuts_are_known(self) -> bool:
        """Whether no token crosses the cuts of the pattern, as an added one with a space might."""
        return not any(map(str.isspace, "".join(self.added)))

    def is_normal(self, text: str) -> bool:
        """Return whether normalisation keeps the text.

        Python follows a newer version of Unicode than `tokenizers`, in which normalised text is
        normalised in older ones too.
        """
        return not self.normalizes or unicodedata.is_normalized("NFC", text)

    def splits_at_special(self, text: str) -> bool:
        """Return whether text can be encoded separately between its special tokens."""
        return not self.has_unusual_special and self.is_normal(text)

    def gigatoken(self, reference: Encode) -> Encode:
        """Return gigatoken's encoder for this layout.

        The `reference` encodes text that it does not know: text with an added token, or that is not
        normalised.

        Raises: MissingPackage; DataError when it cannot be used.
        """
        bare: JsonObject = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": split_by(KNOWN_PATTERNS[self.pattern]),
            "post_processor": None,
            "decoder": {"type": "ByteLevel"},
            "model": self.model,
        }
        encode = Gigatoken(json.dumps(bare))
        if not self.added and not self.normalizes:
            return encode
        added = any_of(self.added)

        def encode_known(text: str) -> Ids:
            is_known = added.search(text) is None and self.is_normal(text)
            return encode(text) if is_known else reference(text)

        return encode_known


def known_layout(definition: JsonObject) -> Layout | None:
    """Return the layout of a valid tokenizer.json. None without a known pattern."""
    model, pre_tokenizer = definition["model"], definition.get("pre_tokenizer") or {}
    pattern, normalizer = _pattern(pre_tokenizer), (definition.get("normalizer") or {}).get("type")
    added = definition.get("added_tokens") or []
    unusual = [*_UNUSUAL, *(["normalized"] if normalizer else [])]
    if (
        model.get("type") != "BPE"
        or any(map(model.get, _MODEL_OPTIONS))
        or pattern not in KNOWN_PATTERNS
        or normalizer not in (None, "NFC")
        or not all(
            each["content"] and (each.get("special") or not any(map(each.get, unusual)))
            for each in added
        )
    ):
        return None
    kept = tuple(each["content"] for each in added if not each.get("special"))
    has_unusual = any(any(map(each.get, unusual)) for each in added)
    return Layout(model, pattern, normalizer is not None, kept, has_unusual)


def _pattern(pre_tokenizer: JsonObject) -> str:
    """Return the pattern of a pre-tokeniser that splits by one pattern and then writes bytes.

    Empty for any other pre-tokeniser.
    """
    if _is_byte_level(pre_tokenizer, use_regex=True):
        return GPT2
    steps = pre_tokenizer.get("pretokenizers") or []
    if (
        [step.get("type") for step in steps] != ["Split", "ByteLevel"]
        or not _is_byte_level(steps[1], use_regex=False)
        or steps[0].get("behavior") != "Isolated"
        or steps[0].get("invert")
    ):
        return ""
    return str(steps[0]["pattern"].get("Regex", ""))


def _is_byte_level(step: JsonObject, *, use_regex: bool) -> bool:
    return (
        step.get("type") == "ByteLevel"
        and not step.get("add_prefix_space")
        and bool(step.get("use_regex", True)) == use_regex
    )


def split_by(pattern: str) -> JsonObject:
    """Return the pre-tokeniser that splits text by a pattern, then writes bytes."""
    if pattern == GPT2:
        return AS_BYTES | {"use_regex": True}
    split: JsonObject = {"type": "Split", "pattern": {"Regex": pattern}}
    split |= {"behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, AS_BYTES]}


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable Latin-1 stands for itself, and the other bytes are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + index): value for index, value in enumerate(rest)
    }


class Gigatoken:
    """gigatoken on the calling thread for a tokenizer.json, reloaded when its cache has grown.

    Raises: MissingPackage; DataError when gigatoken cannot read the file.
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        self._loaded: BPETokenizer | SentencePieceTokenizer | None = None
        try:
            self._reload()
        except ImportError as error:
            raise MissingPackage(
                "gigatoken is not installed.", fix="Install it with `pip install gigatoken`."
            ) from error
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            reason = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"gigatoken cannot encode for this tokenizer: {reason}.",
                fix="Encode with tokenizers: the ids are the same.",
            ) from error

    def _reload(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._loaded = None  # first, so that two are never in memory
        self._loaded = load_hf_json(self._definition)
        self._resident_bytes = psutil.Process().memory_info().rss
        self._bytes_to_check = GROWTH_CHECK_BYTES

    def __call__(self, text: str) -> Ids:
        """Return the ids of a text."""
        data = utf8(text)
        self._bytes_to_check -= len(data)
        if self._bytes_to_check < 0:
            self._bytes_to_check = GROWTH_CHECK_BYTES
            if psutil.Process().memory_info().rss - self._resident_bytes > MAX_GROWTH_BYTES:
                self._reload()
        assert self._loaded is not None
        return self._loaded.encode(data)
