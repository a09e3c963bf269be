"""Import tokens that another tool wrote, in any of the formats of `token_formats`."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.data.prepare.pipeline import Prepared
from flatout.data.prepare.request.options import NAMED, parse_rule
from flatout.data.prepare.request.request import existing_dataset
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.token_formats import Documents, Piece, Reading, Tokens
from flatout.data.token_formats.find import Found, find_tokens
from flatout.data.token_formats.meta_pickle import META, characters_in
from flatout.data.tokenizers import Tokenizer, existing_tokenizer, kind_named
from flatout.data.tokenizers.char import CharTokenizer
from flatout.errors import DataError
from flatout.progress import SILENT, Progress, Task
from flatout.storage.files import Array, expanded
from flatout.storage.json_io import JsonObject

DEFAULT_SPLIT = "tail 0.1"
BLOCK_TOKENS = 1 << 20
"""Tokens that are checked and written at a time."""


@dataclass(frozen=True)
class ImportOptions:
    """How to read the tokens, and how to divide them."""

    tokenizer: str | None = None
    """The tokenizer that made them. NanoGPT's meta.pkl may replace it."""
    pattern: str | None = None
    """Regular expression that splits text, for an unknown .tiktoken file."""
    end_of_text: str | None = None
    """End-of-text token of a tokenizer.json that has none of the usual names."""
    documents: Documents | None = None
    """Where documents end. None means the format's own rule."""
    split: str | None = None
    """Split rule. None means DEFAULT_SPLIT, unless there are validation tokens."""
    val: Path | None = None
    """Validation tokens."""
    format: str | None = None
    """The format. It is detected by default."""
    dtype: str | None = None
    """The type of tokens in files without a header."""
    field: str | None = None
    """The array, key or column that contains the tokens."""


def import_tokens(
    path: Path, out: Path, options: ImportOptions, *, progress: Progress = SILENT
) -> Prepared:
    """Write the tokens of a file or directory to the dataset `out`, piece by piece.

    Tokens are stored unchanged. A directory that already contains this dataset is left unchanged.

    Memory: one chunk or one array of an .npz. Other files are mapped.
    Raises: DataError naming the file that is missing or unusable, or the token that is outside the
            vocabulary.
    """
    started = time.perf_counter()
    path, out = expanded(path), expanded(out)
    kind, fraction = parse_rule(options.split or DEFAULT_SPLIT)
    if kind != "tail":
        raise DataError(
            f"Tokens cannot be split by {options.split!r}: `hash` needs a document's text.",
            fix="Set --split 'tail 0.1'.",
        )
    found = find_tokens(path, options.val and expanded(options.val), options.format)
    if found.val and options.split is not None:
        raise DataError(
            f"There are validation tokens, {found.val[0].path}, but --split {options.split!r} "
            "takes them from the training tokens.",
            fix="Remove --split, or name the training tokens alone.",
        )
    known = _tokenizer(path, options, progress)
    first = found.train[0]
    if options.documents == "stored" and first.format.documents != "stored":
        raise DataError(
            f"--documents stored: the format {first.name} does not store where documents end.",
            fix="Use --documents end-of-text or chunk.",
        )
    documents = options.documents or first.format.documents
    reading = Reading(known.vocab_size, options.dtype, options.field)
    train, val = (
        [one.format.open(one.path, reading) for one in split] for split in (found.train, found.val)
    )
    before = _stats(found.files)
    source = _describe(path, options, found, before) | {
        "tokenizer": known.digest(),
        "documents": documents,
        "split": NAMED if val else f"tail {fraction}",
        "metadata": train[0].metadata,
    }
    optional: JsonObject = {"val": None, "val_fingerprint": None, "dtype": None, "field": None}
    manifest = existing_dataset(out, optional | source, progress)
    existed = manifest is not None
    if manifest is None:
        for note in dict.fromkeys(tokens.note for tokens in [*train, *val] if tokens.note):
            progress.say(note)
        if found.left_out:
            progress.say(f"Not read: {', '.join(found.left_out[:3])}, for tests.")
        with DatasetWriter(out, vocab_size=known.vocab_size) as writer:
            written = _Written(writer, known, documents)
            written.write(train, val, fraction, progress)
            written.check(path)
            if documents == "end-of-text" and not written.num_ends:
                by_chunk = " With --documents chunk, each chunk is a document."
                progress.say(
                    f"No {'chunk' if first.name == 'chunks' else 'file'} contains the end-of-text "
                    f"token (id {known.eot_id}), so each split is a single document."
                    + by_chunk
                    * (len(found.files) > 1)
                )
            if _stats(found.files) != before:
                raise DataError(
                    f"{path}: a token file was changed during the import.",
                    fix="Run the same command again once nothing writes there.",
                )
            with progress.task("Writing to the disk"):
                rule = NAMED if val else f"tail {fraction:g}"
                manifest = writer.finish(tokenizer=known, source=source, split_rule=rule)
    return Prepared(out, manifest, time.perf_counter() - started, existed)


def _describe(
    path: Path, options: ImportOptions, found: Found, stats: Sequence[tuple[int, int, int, int]]
) -> JsonObject:
    """Return what identifies the input, for the manifest."""
    train = sum(len(one.files) for one in found.train)
    described: JsonObject = {
        "names": [str(path)],
        "chunks": len(found.files),
        "fingerprint": _fingerprint(found.files[:train], stats[:train]),
    }
    if found.val:
        described["val"] = [str(one.path) for one in found.val]
        described["val_fingerprint"] = _fingerprint(found.files[train:], stats[train:])
    if options.dtype is not None:
        described["dtype"] = options.dtype
    if options.field is not None:
        described["field"] = options.field
    return described


def _tokenizer(path: Path, options: ImportOptions, progress: Progress) -> Tokenizer:
    """Return the tokenizer that made the tokens.

    Raises: DataError when none is named and none is found, or it would have to be trained.
    """
    spec = options.tokenizer
    meta = (path if path.is_dir() else path.parent) / META
    characters = characters_in(meta) if spec in (None, CharTokenizer.kind) else None
    if characters is not None:
        progress.say(
            f"The tokenizer is char, with the {len(characters)} characters in {meta}. No code in "
            "that file is run."
        )
        return CharTokenizer(characters)
    if spec is None:
        unread = f" {meta} lists no characters, and a pickle is never loaded." * meta.is_file()
        raise DataError(
            f"{path} contains tokens, and it is not known which tokenizer made them.{unread}",
            fix="Name it: --tokenizer FILE, or openai-community/gpt2 for GPT-2's tokens, or "
            "ids:N for N ids without text.",
        )
    kind = kind_named(spec)
    if kind is not None and kind.needs_corpus:
        raise DataError(
            f"The input is tokens already: --tokenizer {spec} cannot be trained on them.",
            fix="Name the tokenizer that made them: --tokenizer FILE.",
        )
    return existing_tokenizer(spec, options.pattern, options.end_of_text, progress=progress)


class _Written:
    """Writes the splits, and counts their tokens and end-of-text tokens."""

    def __init__(self, writer: DatasetWriter, tokenizer: Tokenizer, documents: Documents) -> None:
        self._splits = {"train": writer.train, "val": writer.val}
        self._tokenizer = tokenizer
        self._documents = documents
        self._bytes_of = np.array(
            [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)]
        )
        self._bytes_of[tokenizer.eot_id] = 0
        self._knows_bytes: bool | None = None if tokenizer.has_text else False
        """Whether each token decodes to its own bytes. None until the first tokens are seen."""
        self.num_tokens = {"train": 0, "val": 0}
        self.num_ends = 0

    def write(
        self,
        train: Sequence[Tokens],
        val: Sequence[Tokens],
        fraction: float,
        progress: Progress,
    ) -> None:
        """Write all tokens. Without validation tokens, `fraction` of them, at the end, are."""
        weight = sum(tokens.weight for tokens in train)
        # in units of weight: of 10 chunks, 9.5 is the middle of the tenth
        cut = math.inf if val else weight * (1 - fraction)
        total = weight + sum(tokens.weight for tokens in val)
        unit = train[0].unit
        with progress.task(f"Importing {unit}", total=total, unit=unit) as task:
            done = 0
            for piece in chain.from_iterable(tokens.pieces() for tokens in train):
                share = min(max((cut - done) / piece.weight, 0), 1)
                size = int(share * len(piece.tokens))
                self._append("train", piece, 0, size, task)
                self._append("val", piece, size, len(piece.tokens), task)
                done += piece.weight
            for piece in chain.from_iterable(tokens.pieces() for tokens in val):
                self._append("val", piece, 0, len(piece.tokens), task)

    def _append(self, split: str, piece: Piece, start: int, stop: int, task: Task) -> None:
        """Write the tokens start..stop of a piece, block by block."""
        for first in range(start, stop, BLOCK_TOKENS):
            last = min(first + BLOCK_TOKENS, stop)
            tokens = np.asarray(piece.tokens[first:last])
            _require_known(tokens, piece, first, self._tokenizer)
            ends = self._ends(tokens, piece, first, last)
            self._splits[split].append(tokens, ends, text_bytes=self._num_bytes(tokens))
            self.num_ends += len(ends)
            task.advance(piece.weight * len(tokens) / len(piece.tokens))
        self.num_tokens[split] += stop - start

    def _ends(self, tokens: Array, piece: Piece, first: int, last: int) -> Array:
        """Return the positions in a block after each document's last token."""
        if self._documents == "end-of-text":
            return np.flatnonzero(tokens == self._tokenizer.eot_id) + 1
        if self._documents == "stored" and piece.ends is not None:
            low, high = np.searchsorted(piece.ends, (first, last), side="right")
            return piece.ends[low:high] - first
        return np.array([len(tokens)] if last == len(piece.tokens) else [], np.int64)

    def _num_bytes(self, tokens: Array) -> int:
        """Return the UTF-8 bytes that tokens decode to. 0 if they are unknown.

        The first call decodes the tokens to verify the count.
        """
        if self._knows_bytes is None:
            text = tokens[tokens != self._tokenizer.eot_id]
            decoded = self._tokenizer.decode_bytes(text.tolist())
            self._knows_bytes = len(decoded) == int(self._bytes_of[text].sum())
        return int(self._bytes_of[tokens].sum()) if self._knows_bytes else 0

    def check(self, path: Path) -> None:
        """Check that both splits have tokens.

        Raises: DataError.
        """
        train, val = self.num_tokens["train"], self.num_tokens["val"]
        if not train or not val:
            total = train + val
            raise DataError(
                f"{path} contains {total} {'token' if total == 1 else 'tokens'}, but none is for "
                f"{'training' if val else 'validation'}.",
                fix="Set --split 'tail 0.5', or import more.",
            )


def _require_known(tokens: Array, piece: Piece, first: int, tokenizer: Tokenizer) -> None:
    """Check that every token is in the vocabulary.

    Shapes:  tokens (T,), integers.
    Raises: DataError naming the first that is not.
    """
    if int(tokens.min()) >= 0 and int(tokens.max()) < tokenizer.vocab_size:
        return
    index = int(np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))[0])
    raise DataError(
        f"{piece.name}, token {first + index}: the id {int(tokens[index])} is "
        f"outside the vocabulary of {tokenizer.name}, whose ids are below {tokenizer.vocab_size}.",
        fix="Name the tokenizer that made the tokens with --tokenizer.",
    )


def _stats(files: Sequence[Path]) -> list[tuple[int, int, int, int]]:
    """Return each file's size, mtime, ctime and inode: a rewrite changes at least one."""
    return [
        (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        for found in map(Path.stat, files)
    ]


def _fingerprint(files: Sequence[Path], stats: Sequence[tuple[int, int, int, int]]) -> str:
    """Return a digest of the names, sizes and modification times of some files."""
    digest = hashlib.sha256()
    for path, (size, mtime_ns, *_) in zip(files, stats, strict=True):
        digest.update(f"{path.name} {size} {mtime_ns}\n".encode())
    return digest.hexdigest()
