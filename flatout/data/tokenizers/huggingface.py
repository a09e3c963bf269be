"""A Hugging Face tokenizer.json, of any model: the ids of `tokenizers`, by whichever engine gives
the same.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from flatout.data.tokenizers.base import (
    Encode,
    Ids,
    NotEncodable,
    StoredTokenizer,
    failures_named,
    is_panic,
    join_pieces,
    not_text,
    require_ids,
)
from flatout.data.tokenizers.bpe import byte_level_alphabet
from flatout.data.tokenizers.byte_level import Layout, layout_of
from flatout.data.tokenizers.cut_points import confirmed_cut, known_cut
from flatout.data.tokenizers.engines import falling_back
from flatout.errors import DataError
from flatout.registry import nearest

if TYPE_CHECKING:
    import tokenizers

USUAL_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
)
"""What end-of-text is called, the likelier first."""


class HuggingFaceTokenizer(StoredTokenizer):
    """The tokenizer of a tokenizer.json, without what it adds around a text (a beginning token,
    truncation, padding).

    Special tokens written out in a text are text: they are split like any other words.
    """

    kind: ClassVar[str] = "huggingface"

    def __init__(self, name: str, definition: dict[str, Any], eot_id: int) -> None:
        self.layout: Layout | None = layout_of(definition)
        self.engines = ("gigatoken", "tiktoken", "tokenizers") if self.layout else ("tokenizers",)
        self.engine = "tokenizers"
        self.name = name
        self.definition = definition
        self.eot_id = eot_id
        self.proven = is_proven(definition)
        self.vocab_size = self._largest_id() + 1
        require_ids(name, self.vocab_size)

    def _largest_id(self) -> int:
        """Return the largest id; a byte-level BPE is not loaded for that, since another engine may
        do its work.
        """
        added = [int(entry["id"]) for entry in self.definition.get("added_tokens") or []]
        known: dict[str, int] = (
            self.layout.model["vocab"]
            if self.layout
            else self._tokenizer.get_vocab(with_added_tokens=True)
        )
        return max([*known.values(), *added])

    @cached_property
    def encoder(self) -> Encode:
        """What encodes, by the engine of this tokenizer."""
        if self.layout is None or self.engine == "tokenizers":
            return self._encode_by_reference
        if self.engine == "gigatoken":
            return self.layout.gigatoken()
        return falling_back(self.layout.tiktoken(), self._encode_by_reference)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        made = _loaded(self.definition)
        made.encode_special_tokens = True
        return made

    @cached_property
    def _special(self) -> dict[str, int]:
        """The tokens that text must not become; an unknown-token is what unknown text honestly
        becomes.
        """
        model = self.definition.get("model", {})
        unknown = {model.get("unk_token"), "<unk>", "[UNK]"}
        tokens = {
            entry["content"]: int(entry["id"])
            for entry in self.definition.get("added_tokens", [])
            if entry.get("special")
        }
        ends = {self._token_of(self.eot_id): self.eot_id}
        return {
            content: index for content, index in tokens.items() if content not in unknown
        } | ends

    def _token_of(self, index: int) -> str:
        named = (
            entry["content"]
            for entry in self.definition.get("added_tokens") or []
            if int(entry["id"]) == index
        )
        return next(named, None) or str(self._tokenizer.id_to_token(index))

    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text."""
        try:
            with failures_named(self.name):
                ids = self.encoder(text)
        except UnicodeEncodeError as error:
            raise not_text(error, start) from error
        if not self._has_special(ids):
            return ids
        literal = "|".join(
            re.escape(content) for content in sorted(self._special, key=len, reverse=True)
        )
        cuts = [0, *(match.start() + 1 for match in re.finditer(literal, text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        ids = np.concatenate([self.encoder(piece) for piece in pieces])
        if self._has_special(ids):
            raise NotEncodable(
                f"The tokenizer {self.name!r} turns plain text into a special token.",
                fix="Use another tokenizer, or skip such documents with --on-bad-row skip.",
            )
        return ids

    def _encode_by_reference(self, text: str) -> Ids:
        text.encode()
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(found.ids, np.uint32)

    @cached_property
    def _lowest_special(self) -> int:
        return min(self._special.values())

    def _has_special(self, ids: Ids) -> bool:
        """Return whether a special token is among the ids; mostly they are the last of a
        vocabulary, so that the largest id tells.
        """
        return bool(ids.max(initial=0) >= self._lowest_special) and bool(
            np.isin(ids, list(self._special.values())).any()
        )

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The bytes of each id, when the model writes bytes; other models only decode whole
        sequences.
        """
        decoder = self.definition.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        byte_of = byte_level_alphabet()
        added = {int(entry["id"]) for entry in self.definition.get("added_tokens", [])}
        table = [b"\xef\xbf\xbd"] * self.vocab_size
        for piece, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            plain = index in added or not all(character in byte_of for character in piece)
            table[index] = (
                piece.encode() if plain else bytes(byte_of[character] for character in piece)
            )
        return table

    def next_cut(self, text: str, place: int, end: int) -> int | None:
        """Return the next place that no token crosses, by a known way to split text or as tried
        out; None without a pre-tokeniser.
        """
        if self.layout is not None and self.layout.cuts_are_known:
            return known_cut(text, place, end)
        if not self.definition.get("pre_tokenizer"):
            return None
        return confirmed_cut(lambda piece: self.encode_piece(piece, 0), text, place, end)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of some ids."""
        if self._bytes is not None:
            return join_pieces(self._bytes, ids)
        with failures_named(self.name):
            text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text.encode()

    def document(self) -> dict[str, Any]:
        """Return end-of-text and the whole definition."""
        return {"eot_id": self.eot_id, "tokenizer": self.definition}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""
        return cls(str(document["name"]), dict(document["tokenizer"]), int(document["eot_id"]))

    @classmethod
    def from_file(
        cls, definition: dict[str, Any], name: str, *, end_of_text: str | None = None
    ) -> HuggingFaceTokenizer:
        """Return the tokenizer of a parsed tokenizer.json.

        Raises: DataError when it is not one, or end-of-text is neither named nor called by a usual
                name.
        """
        vocabulary = vocabulary_of(definition, name)
        token = end_of_text or next((usual for usual in USUAL_NAMES if usual in vocabulary), None)
        if token is None or token not in vocabulary:
            guess = nearest(token, vocabulary) if token else None
            raise DataError(
                f"{name} has no token {token!r}."
                if token
                else f"{name} has none of the usual end-of-text tokens.",
                fix=f"Did you mean {guess!r}?"
                if guess
                else "Name its end-of-text token with --end-of-text.",
            )
        added = [
            entry | {"special": True} if entry["content"] == token else entry
            for entry in definition.get("added_tokens") or []
        ]
        stem = name.rpartition("/")[2].removesuffix(".json")
        return cls(stem, definition | {"added_tokens": added}, vocabulary[token])


def vocabulary_of(definition: dict[str, Any], name: str) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens.

    Raises: DataError when it is not one.
    """
    try:
        vocabulary: dict[str, int] = _loaded(definition).get_vocab(with_added_tokens=True)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(
            f"{name} is not a tokenizer: {error}.",
            fix="Give a file that flatout saved, a Hugging Face tokenizer.json, or a .tiktoken file.",
        ) from error
    return vocabulary


def _loaded(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    # What surrounds a text changes no id, and may be nested without end.
    return Tokenizer.from_str(
        json.dumps(definition | {"post_processor": None, "truncation": None, "padding": None})
    )


def is_proven(definition: Any) -> bool:
    """Return whether a tokenizer.json is of a kind whose time and memory a text's length bounds: as
    GPT-2, Llama 3 and Qwen have.
    """
    try:
        layout, decoder = layout_of(definition), definition.get("decoder") or {}
        return layout is not None and layout.splits_in_bounds and decoder.get("type") == "ByteLevel"
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
