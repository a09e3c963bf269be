"""A Hugging Face tokenizer: its file, directory or repository. `tokenizers` defines its ids."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from flatout.config.registry import nearest
from flatout.data.conversation.rendering import Example
from flatout.data.tokenizers.base import (
    SKIP_DOCUMENTS,
    UNKNOWN,
    Document,
    Encode,
    Ids,
    Mask,
    NotEncodable,
    Tokenizer,
    TokenizerFile,
    WritesSpecial,
    confirmed_cut,
    counted,
    engine_failures,
    is_panic,
    join_pieces,
    known_cut,
    require_ids,
)
from flatout.data.tokenizers.byte_level import Layout, byte_level_alphabet, layout_of
from flatout.data.tokenizers.engines import with_fallback
from flatout.errors import DataError

if TYPE_CHECKING:
    import tokenizers

LISTED_AS = "tokenizer.json, ORG/NAME"
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
"""Usual names of the end-of-text token, most likely first."""
UNUSED = {"post_processor": None, "truncation": None, "padding": None}
"""Parts of a tokenizer.json that flatout does not apply. They may be nested without limit."""


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json, without its post-processing (BOS, truncation, padding).

    Special tokens that appear in a text count as text: they are split like other words.
    """

    kind: ClassVar[str] = "huggingface"

    def __init__(
        self, name: str, definition: Document, eot_id: int, named: Mapping[str, str] | None = None
    ) -> None:
        self.layout: Layout | None = layout_of(definition)
        self.engines = ("tokenizers",)
        if self.layout and self.layout.splits_in_bounds:
            self.engines = ("gigatoken", "tiktoken", "tokenizers")
        self.engine = "tokenizers"
        self.name = name
        self.definition = definition
        self.eot_id = eot_id
        self.named = dict(named or {})
        """Special tokens by the names that tools give them, such as bos_token."""
        self.vocab_size = self._largest_id() + 1
        require_ids(name, self.vocab_size)

    @classmethod
    def from_file(cls, file: TokenizerFile) -> HuggingFaceTokenizer:
        """Return the tokenizer of a parsed tokenizer.json.

        Its end-of-text token is the one of the given name, else the one that a file beside it
        states, else the first of the usual ones. An id that such a file states counts if it is that
        of an added token.

        Raises: DataError when it is not one, or has no such token.
        """
        definition = file.document or {}
        vocabulary = _vocabulary_of(definition, file.name)
        named = {name: each for name, each in (file.named or {}).items() if each in vocabulary}
        usual = next(filter(vocabulary.__contains__, USUAL_NAMES), None)
        token = file.end_of_text or named.get("eos_token") or usual
        if file.stated and not file.end_of_text:
            path, key, value = file.stated
            if isinstance(value, int):  # of a model's config, where it may be a default
                entries = definition.get("added_tokens") or []
                token = next((e["content"] for e in entries if e.get("id") == value), token)
            else:
                token = value
                if token not in vocabulary:
                    raise DataError(
                        f"{path} has the {key} {value!r}, but {file.name} has no such token.",
                        fix="Correct it, or name the end-of-text token with --end-of-text NAME.",
                    )
        if token not in vocabulary:
            guess = nearest(token, vocabulary) if token else None
            raise DataError(
                f"{file.name} has no token {token!r}."
                if token
                else f"{file.name} has none of the usual end-of-text tokens.",
                fix=f"Did you mean {guess!r}?"
                if guess
                else "Name its end-of-text token with --end-of-text.",
            )
        added = [
            entry | {"special": True} if entry["content"] == token else entry
            for entry in definition.get("added_tokens") or []
        ]
        return cls(file.stem, definition | {"added_tokens": added}, vocabulary[token], named)

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Return the tokenizer that `document` describes."""
        definition, named = dict(document["tokenizer"]), document.get("named")
        return cls(str(document["name"]), definition, int(document["eot_id"]), named)

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens of the file, with their ids. The unknown token is not one."""
        return dict(self._special)

    def document(self) -> Document:
        """Return the end-of-text id, the whole definition, and named tokens if there are any."""
        named = {"named": self.named} if self.named else {}
        return {"eot_id": self.eot_id, "tokenizer": self.definition} | named

    def named_tokens(self) -> dict[str, tuple[str, int]]:
        """Return the tokens that the files beside it named, each with its id."""
        return {
            name: (token, index)
            for name, token in self.named.items()
            if (index := self._tokenizer.token_to_id(token)) is not None
        }

    def tokenizer_json(self) -> Document:
        """Return the definition without the parts that are not applied."""
        return self.definition | UNUSED

    def _largest_id(self) -> int:
        """Return the largest id.

        A byte-level BPE is not loaded for this, since a different engine may encode.
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
        """The encoder of this tokenizer's engine."""
        if self.layout is None or self.engine == "tokenizers":
            return self._encode_by_reference
        if self.engine == "gigatoken":
            return self.layout.gigatoken()
        return with_fallback(self.layout.tiktoken(), self._encode_by_reference)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        tokenizer = _loaded(self.definition)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _special(self) -> dict[str, int]:
        """The ids that text must not be encoded as, by token.

        The unknown token is not among them, since unknown text is encoded as that token.
        """
        unknown = {self.definition.get("model", {}).get("unk_token"), "<unk>", "[UNK]"}
        entries = self.definition.get("added_tokens") or []
        by_id = {int(entry["id"]): entry["content"] for entry in reversed(entries)}
        end = by_id.get(self.eot_id) or str(self._tokenizer.id_to_token(self.eot_id))
        return {
            entry["content"]: int(entry["id"])
            for entry in entries
            if entry.get("special") and entry["content"] not in unknown
        } | {end: self.eot_id}

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text."""
        with engine_failures(self.name, offset):
            ids = self.encoder(text)
        if not self._has_special(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self._literal.finditer(text)), len(text)]
        ids = np.concatenate(
            [self.encoder(text[start:end]) for start, end in itertools.pairwise(cuts)]
        )
        if self._has_special(ids):
            raise NotEncodable(
                f"The tokenizer {self.name!r} encodes plain text as a special token.",
                fix=f"Use a different tokenizer, or {SKIP_DOCUMENTS}",
            )
        return ids

    def encode_example(self, example: Example) -> tuple[Ids, Mask]:
        """Return the ids that `tokenizers` gives for the whole text, and their mask.

        Shapes:  returns (T,), (T,).
        Raises:  WritesSpecial when a text in it, not the template, writes a special token.
        """
        text, names = example.text, {*(example.names or ())}
        for match in self._literal.finditer(text) if example.names is not None else ():
            if match.span() not in names:
                raise self._writes(match[0])
        if self.engine != "tokenizers" and self._splits_at_special(text):
            return super().encode_example(example)
        with engine_failures(self.name):
            text.encode()
            self._tokenizer.encode_special_tokens = example.names is None
            try:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
            finally:
                self._tokenizer.encode_special_tokens = True
        ids = np.array(encoding.ids, np.uint32)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for index in np.flatnonzero(np.isin(ids, list(self._special.values()))):
            # without the white space that the token takes with it
            part = text[starts[index] : stops[index]]
            starts[index] += len(part) - len(part.lstrip())
            stops[index] = starts[index] + len(part.strip())
            if (starts[index], stops[index]) not in names:
                raise self._writes(part.strip())
        return ids, counted(starts, stops, example.targets)

    def _splits_at_special(self, text: str) -> bool:
        """Return whether text can be encoded separately between its special tokens."""
        return (
            self.layout is not None
            and self._bytes is not None
            and not self.layout.has_unusual_special
            and (self.layout.normalizer is None or unicodedata.is_normalized("NFC", text))
        )

    def _writes(self, name: str) -> WritesSpecial:
        return WritesSpecial(
            f"{name!r} in the text is a special token of the tokenizer {self.name!r}, which no "
            "text may become.",
            fix=f"Remove it from the text, or {SKIP_DOCUMENTS}",
        )

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        """Matches the names of special tokens, the unknown one included."""
        entries = self.definition.get("added_tokens") or []
        names = {*self._special, *(each["content"] for each in entries if each.get("special"))}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def _encode_by_reference(self, text: str) -> Ids:
        text.encode()
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.uint32)

    @cached_property
    def _lowest_special(self) -> int:
        return min(self._special.values())

    def _has_special(self, ids: Ids) -> bool:
        """Return whether a special token is among the ids.

        Special tokens usually have the largest ids, so the largest id is checked first.
        """
        return bool(ids.max(initial=0) >= self._lowest_special) and bool(
            np.isin(ids, list(self._special.values())).any()
        )

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The bytes of each id of a byte-level model. None for other models."""
        if (self.definition.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        byte_of = byte_level_alphabet()
        added = {int(entry["id"]) for entry in self.definition.get("added_tokens", [])}
        table = [UNKNOWN] * self.vocab_size
        for piece, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            is_bytes = index not in added and byte_of.keys() >= set(piece)
            table[index] = bytes(map(byte_of.__getitem__, piece)) if is_bytes else piece.encode()
        return table

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Return the next position that no token crosses, by proof or by trial.

        None without a pre-tokeniser.
        """
        if self.layout is not None and self.layout.cuts_are_known:
            return known_cut(text, start, end)
        if not self.definition.get("pre_tokenizer"):
            return None
        return confirmed_cut(lambda piece: self.encode_piece(piece, 0), text, start, end)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`."""
        if self._bytes is not None:
            return join_pieces(self._bytes, ids)
        with engine_failures(self.name):
            text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text.encode()


TOKENIZER = HuggingFaceTokenizer


def _vocabulary_of(definition: Document, name: str) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens.

    Raises: DataError when it is not one, or when tokens share an id, so that text would be lost.
    """
    try:
        vocabulary: dict[str, int] = _loaded(definition).get_vocab(with_added_tokens=True)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(
            f"{name} is not a tokenizer: {error}.",
            fix="Give a file that flatout saved, a Hugging Face tokenizer.json, "
            "or a .tiktoken file.",
        ) from error
    added = definition.get("added_tokens") or []
    known = {*vocabulary.items(), *((one["content"], int(one["id"])) for one in added)}
    if len({index for _, index in known}) < len(known):
        pairs = itertools.pairwise(sorted(known, key=lambda each: (each[1], each[0])))
        one, other, index = next((one, two, i) for (one, i), (two, j) in pairs if i == j)
        raise DataError(
            f"{name} gives {one!r} and {other!r} the same id, {index}, so that text is lost.",
            fix="Give each token a separate id, or use a different tokenizer.",
        )
    return vocabulary


def _loaded(definition: Document) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(definition | UNUSED))
