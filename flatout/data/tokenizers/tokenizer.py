"""A tokenizer: a tokenizer.json, whose ids are those of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.conversation.rendering import Example, any_of
from flatout.data.conversation.templates import CONFIG_FILE
from flatout.data.tokenizers.engines import (
    Encode,
    Ids,
    UnknownCharacter,
    byte_level_alphabet,
    known_layout,
    table_of,
)
from flatout.errors import DataError
from flatout.storage.files import sync, write_text
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARACTERS = 1 << 18
"""Longer texts are encoded in pieces of this size, to save memory."""
MAX_VOCAB_SIZE = 1 << 24
"""Tables of this length must fit in memory. Real vocabularies have a few hundred thousand ids."""
UNKNOWN = "\ufffd".encode()
"""The bytes that an unknown id decodes to."""
SKIP_DOCUMENTS = "skip such documents with --on-bad-row skip."
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

CUT = re.compile(r"(?<=\S)(?= )|(?<=[A-Za-z0-9])(?=[\r\n])|(?<=\S\n)(?=[^\s/])")
r"""Positions where a text can be cut without changing its ids, for the known patterns.

Those (GPT-2's, cl100k's and its relatives in Llama 3 and Qwen 2, o200k's) look ahead and never
behind. When a split falls on a cut, the right side therefore splits as before. The left side does
too if its last piece ends in the same way without what follows. By the patterns, both hold
- before a space that follows a non-space, since no alternative matches across the two,
- before a line end that follows an ASCII letter or digit, for the same reason,
- after a single line end and before a character that is neither white space nor a slash, since only
  o200k continues after a line end, and only with a slash.
Python's \s includes all white space of Unicode.
"""

Mask = NDArray[np.uint8]
Places = NDArray[np.int64]


class NotEncodable(DataError):
    """A tokenizer has no ids for a text. The text is at fault, so its document may be skipped."""

    reason = "cannot be tokenised"
    """Reason under which the row is counted."""


class WritesSpecial(NotEncodable):
    """A text from a row in which the tokenizer finds a special token."""

    reason = "contains a special token"


class Tokenizer:
    """Converts text to ids below `vocab_size` and back, as `tokenizers` does with the same file.

    Special tokens that appear in a text count as text: they are split like other words. The file's
    post-processing, truncation and padding are kept, and not applied. `end_of_text` is the token
    that packing appends to each document, and `named` are special tokens by the names that tools
    give them, such as bos_token. `definition` is the content, if it is parsed. The engine changes
    no id: "table" for tokenizers with one id per byte or character, "tokenizers", or "gigatoken"
    for those with a layout.

    Raises: DataError when the file has an id that is too large.
    """

    def __init__(
        self,
        content: bytes,
        end_of_text: str,
        named: Mapping[str, str] | None = None,
        engine: str | None = None,
        definition: JsonObject | None = None,
    ) -> None:
        self.content = content
        """The tokenizer.json, as it is."""
        self.end_of_text = end_of_text
        self.named = dict(named or {})
        self._definition: JsonObject = definition or json.loads(content)
        self.vocabulary = vocabulary_of(self._definition)
        """The id of each token."""
        self.eot_id = self.vocabulary[end_of_text]
        self.vocab_size = max(self.vocabulary.values()) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(
                f"The tokenizer has the id {self.vocab_size - 1:,}. "
                f"Ids must be below {MAX_VOCAB_SIZE:,}.",
                fix="Number its ids from 0 without gaps.",
            )
        self._table = table_of(self._definition)
        self.layout = None if self._table else known_layout(self._definition)
        """What other engines than `tokenizers` need to know. None when they cannot be used."""
        self.engine = engine or ("table" if self._table else "tokenizers")
        model = str(self._definition["model"].get("type", "tokenizer")).lower()
        self.name = self._table.name if self._table else f"{model}-{self.vocab_size}"
        """What it is called in messages and manifests."""

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[object, ...]]:
        return _unpickled, (self.content, self.end_of_text, (*self.named.items(),), self.engine)

    def with_engine(self, engine: str) -> Tokenizer:
        """Return this tokenizer with a different engine."""
        return Tokenizer(self.content, self.end_of_text, self.named, engine, self._definition)

    @property
    def has_text(self) -> bool:
        """Whether ids stand for text: without a decoder, all tokens are separated by spaces."""
        return self._definition.get("decoder") is not None

    @property
    def settings(self) -> str:
        """The tokenizer_config.json. Empty when the tokenizer.json alone has the same meaning."""
        if not self.named and self.end_of_text == usual_end_of_text(self.vocabulary):
            return ""
        named = self.named | {"eos_token": self.end_of_text}
        return json.dumps(named, indent=1, sort_keys=True) + "\n"

    def save(self, path: Path) -> None:
        """Write the tokenizer.json to `path`, and its settings, if it has any, beside it.

        Both are synced.
        """
        if self.settings:
            write_text(path.with_name(CONFIG_FILE), self.settings)
        path.write_bytes(self.content)
        sync(path)

    def digest(self) -> str:
        """Return the SHA-256 of the files that `save` writes, one after the other."""
        return hashlib.sha256(self.content + self.settings.encode()).hexdigest()

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens with their ids, which text is never encoded as.

        The unknown token is not among them, since unknown text is encoded as that token.
        """
        return dict(self._special)

    @cached_property
    def _special(self) -> dict[str, int]:
        unknown = {self._definition["model"].get("unk_token"), "<unk>", "[UNK]"}
        return {
            entry["content"]: int(entry["id"])
            for entry in self._added
            if entry.get("special") and entry["content"] not in unknown
        } | {self.end_of_text: self.eot_id}

    def opening(self) -> list[int]:
        """Return the special tokens that the file's post-processing puts before a text."""
        ids = library_tokenizer(self.content, post_process=True).encode("a").ids
        return [*itertools.takewhile({*self._special.values()}.__contains__, ids)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [index for ids in self.encode_pieces(text) for index in ids.tolist()]

    def encode_pieces(self, text: str) -> Iterator[Ids]:
        """Yield the ids of a text, piece by piece.

        Raises: NotEncodable when the vocabulary cannot express the text.
        """
        start = 0
        while (cut := self._next_cut(text, start + PIECE_CHARACTERS)) is not None:
            yield self.encode_piece(text[start:cut], start)
            start = cut
        yield self.encode_piece(text[start:], start)

    def _next_cut(self, text: str, start: int) -> int | None:
        """Return the first position from `start` that no token crosses. None if none is known."""
        if self._table is not None:
            return start if start < len(text) else None
        if self.layout is not None and self.layout.cuts_are_known:
            return known_cut(text, start, len(text))
        return None

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text, none of them special.

        `offset` is the position of the piece in its document, for error messages.

        Raises: NotEncodable when the vocabulary cannot express the text.
        """
        with self._failures(offset):
            ids = self._encode(text)
        if not self._has_special(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self._literal.finditer(text)), len(text)]
        pieces = [self._encode(text[start:end]) for start, end in itertools.pairwise(cuts)]
        ids = np.concatenate(pieces)
        if self._has_special(ids):
            raise NotEncodable(
                f"The tokenizer {self.name!r} encodes plain text as a special token.",
                fix=f"Use a different tokenizer, or {SKIP_DOCUMENTS}",
            )
        return ids

    def encode_example(self, example: Example) -> tuple[Ids, Mask]:
        """Return the ids of a whole text, and a mask that is 1 for those that the loss counts.

        Shapes:  returns (T,), (T,).
        Raises:  WritesSpecial when a text in it, not the template, writes a special token;
                 NotEncodable when the vocabulary cannot express the text.
        """
        text, names = example.text, {*(example.names or ())}
        for match in self._literal.finditer(text) if example.names is not None else ():
            if match.span() not in names:
                raise self._writes(match[0])
        if self._table or (
            self.engine == "gigatoken" and self.layout and self.layout.splits_at_special(text)
        ):
            return self._encode_between(example)
        with self._failures():
            text.encode()
            self._tokenizer.encode_special_tokens = example.names is None
            try:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
            finally:
                self._tokenizer.encode_special_tokens = True
        ids = np.array(encoding.ids, np.uint32)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for index in np.flatnonzero(np.isin(ids, self._special_ids)):
            # without the white space that the token takes with it
            part = text[starts[index] : stops[index]]
            starts[index] += len(part) - len(part.lstrip())
            stops[index] = starts[index] + len(part.strip())
            if (starts[index], stops[index]) not in names:
                raise self._writes(part.strip())
        return ids, counted(starts, stops, example.targets)

    def _encode_between(self, example: Example) -> tuple[Ids, Mask]:
        """Return what `encode_example` does, by encoding the text between special tokens."""
        text, names = example.text, {*(example.names or ())}
        edges = sorted({0, len(text), *itertools.chain.from_iterable(names)})
        ids = np.concatenate(
            [
                np.zeros(0, np.uint32),
                *(
                    part
                    for start, stop in itertools.pairwise(edges)
                    for part in (
                        [np.array([self._special[text[start:stop]]], np.uint32)]
                        if (start, stop) in names
                        else self.encode_pieces(text[start:stop])
                    )
                ),
            ]
        )
        sizes = self._num_bytes[ids]
        stops = np.cumsum(sizes)
        at = len if text.isascii() else lambda part: len(part.encode())
        targets = ((at(text[:start]), at(text[:stop])) for start, stop in example.targets)
        return ids, counted(stops - sizes, stops, targets)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`, which may end inside a character.

        An unknown id becomes U+FFFD.
        """
        pieces = self._pieces
        if pieces is not None:
            size = len(pieces)
            return b"".join([pieces[i] if 0 <= i < size else UNKNOWN for i in map(int, ids)])
        with self._failures():
            text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text.encode()

    @cached_property
    def _added(self) -> list[JsonObject]:
        return self._definition.get("added_tokens") or []

    @cached_property
    def _encode(self) -> Encode:
        if self._table is not None:
            return self._table
        if self.engine == "gigatoken" and self.layout is not None:
            return self.layout.gigatoken(self._encode_by_reference)
        return self._encode_by_reference

    def _encode_by_reference(self, text: str) -> Ids:
        text.encode()  # where it cannot be, `tokenizers` raises a TypeError
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.uint32)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        """The object of `tokenizers`, in which end-of-text is special even if the file differs."""
        entry = next((one for one in self._added if one["content"] == self.end_of_text), None)
        if entry is None or entry.get("special"):
            loaded = library_tokenizer(self.content)
        else:
            entries = [one | {"special": one is entry or one["special"]} for one in self._added]
            changed = self._definition | {"added_tokens": entries}
            loaded = library_tokenizer(json.dumps(changed).encode())
        loaded.encode_special_tokens = True
        return loaded

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        """The bytes of each id. None when they depend on other ids."""
        decoder = (self._definition.get("decoder") or {}).get("type")
        return self._spelled(decoder) if decoder in ("ByteLevel", "Fuse") else None

    def _spelled(self, decoder: str) -> list[bytes]:
        """Return the bytes of each id for a decoder: ByteLevel, or Fuse."""
        byte_of = byte_level_alphabet() if decoder == "ByteLevel" else {}
        added = {int(entry["id"]) for entry in self._added}
        pieces = [UNKNOWN] * self.vocab_size
        for piece, index in self.vocabulary.items():
            is_bytes = byte_of and index not in added and byte_of.keys() >= set(piece)
            pieces[index] = bytes(map(byte_of.__getitem__, piece)) if is_bytes else piece.encode()
        return pieces

    @cached_property
    def _num_bytes(self) -> Places:
        """The number of bytes of text that each id of a table or a layout stands for."""
        decoder = "Fuse" if self.name == "char" else "ByteLevel"
        return np.array([*map(len, self._spelled(decoder))])

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        """Matches the names of special tokens, the unknown one included."""
        special = (one["content"] for one in self._added if one.get("special"))
        return any_of({*self._special, *special})

    @cached_property
    def _special_ids(self) -> Ids:
        return np.array(sorted(self._special.values()), np.uint32)

    def _has_special(self, ids: Ids) -> bool:
        """Return whether a special token is among the ids.

        Special tokens usually have the largest ids, so the largest id is checked first.
        """
        lowest = self._special_ids[0]
        return bool(ids.max(initial=0) >= lowest) and bool(np.isin(ids, self._special_ids).any())

    def _writes(self, name: str) -> WritesSpecial:
        return WritesSpecial(
            f"{name!r} in the text is a special token of the tokenizer {self.name!r}, which no "
            "text may become.",
            fix=f"Remove it from the text, or {SKIP_DOCUMENTS}",
        )

    @contextmanager
    def _failures(self, offset: int = 0) -> Iterator[None]:
        """Convert what an engine raises to an error that names the character or the tokenizer.

        `offset` is the position of the text in its document.

        Raises: NotEncodable.
        """
        try:
            yield
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise NotEncodable(
                f"Character {offset + error.start} is U+{code:04X}, half of a surrogate pair, "
                "which is not text.",
                fix=f"Repair the document, or {SKIP_DOCUMENTS}",
            ) from error
        except UnknownCharacter as error:
            raise NotEncodable(
                f"Character {offset + error.index}, {error.character!r} "
                f"(U+{ord(error.character):04X}), is not one of the {self.vocab_size - 1} "
                "characters of this char tokenizer.",
                fix="Remove it, or prepare with --tokenizer byte or train:N, "
                "which can encode any text.",
            ) from error
        except BaseException as error:
            if type(error) is not Exception and not is_panic(error):
                raise
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            if not self.has_text:
                reason = "it has no text, only ids separated by spaces"
            raise NotEncodable(
                f"The tokenizer {self.name!r} fails: {reason}.",
                fix=f"Use a different tokenizer, or {SKIP_DOCUMENTS}",
            ) from error


@lru_cache(maxsize=1)
def _unpickled(
    content: bytes, end_of_text: str, named: tuple[tuple[str, str], ...], engine: str
) -> Tokenizer:
    """Return a tokenizer. One that a process has received before is loaded already."""
    return Tokenizer(content, end_of_text, dict(named), engine)


def vocabulary_of(definition: JsonObject, name: str = "The tokenizer") -> dict[str, int]:
    """Return the id of each token in a valid tokenizer.json. Messages call it `name`.

    Raises: DataError when two tokens share an id, so that text would be lost.
    """
    vocabulary = definition["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # of a Unigram model, with scores
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    added = {one["content"]: int(one["id"]) for one in definition.get("added_tokens") or []}
    token_of: dict[int, str] = {}
    for token, index in itertools.chain(vocabulary.items(), added.items()):
        if token_of.setdefault(index, token) != token:
            raise DataError(
                f"{name} gives {token_of[index]!r} and {token!r} the same id, {index}, so "
                "that text is lost.",
                fix="Give each token a separate id, or use a different tokenizer.",
            )
    return vocabulary | added


def usual_end_of_text(vocabulary: Mapping[str, int]) -> str | None:
    """Return the first of the usual names of the end-of-text token in a vocabulary."""
    return next(filter(vocabulary.__contains__, USUAL_NAMES), None)


def library_tokenizer(content: bytes, *, post_process: bool = False) -> tokenizers.Tokenizer:
    """Return the object of `tokenizers` for a tokenizer.json, without truncation and padding."""
    from tokenizers import Tokenizer as Library

    loaded = Library.from_buffer(content)
    loaded.no_truncation()
    loaded.no_padding()
    if not post_process:  # which would also move the offsets of tokens
        loaded.post_processor = None
    return loaded


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic, which is not an Exception.

    Each package defines its own class for it.
    """
    return type(error).__name__ == "PanicException"


def counted(starts: Places, stops: Places, targets: Iterable[Sequence[int]]) -> Mask:
    """Return 1 for each token with a character in a target, else 0.

    A token without characters belongs to the text that follows it.

    Shapes:  starts (T,), stops (T,); returns (T,).
    """
    mask = np.zeros(len(starts), np.bool_)
    for first, last in targets:
        mask |= (starts < last) & ((stops > first) | (starts >= first))
    return mask.astype(np.uint8)


def known_cut(text: str, start: int, end: int) -> int | None:
    """Return the first position in `start`..`end` that no known pattern matches across."""
    match = CUT.search(text, start, end)
    return match.start() if match else None
