"""Import tokens: in any of the formats of `token_formats`, or from arrays."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from flatout.data.prepare.pipeline import Prepared
from flatout.data.prepare.request.options import NAMED, parse_rule
from flatout.data.prepare.request.request import existing_dataset
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.manifest import SPLITS, SplitName
from flatout.data.store.shards import Dataset
from flatout.data.token_formats import Documents, Piece, Reading, Tokens, require_tokens
from flatout.data.token_formats.find import Found, find_tokens
from flatout.data.tokenizers import Tokenizer, existing_tokenizer, needs_corpus
from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.storage.files import Array, expanded
from flatout.storage.json_io import JsonObject

DEFAULT_SPLIT = "tail 0.1"
BLOCK_TOKENS = 1 << 20
"""Tokens that are checked and written at a time."""


@dataclass(frozen=True)
class ImportOptions:
    """How to read the tokens, and how to divide them."""

    tokenizer: str | None = None
    """The tokenizer that made them."""
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

    Memory: one chunk. Other files are mapped.
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
        with DatasetWriter(out, known) as writer:
            written = _Written(writer, known)
            _write(written, train, val, fraction, documents, progress)
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
            rule = NAMED if val else f"tail {fraction:g}"
            manifest = writer.finish(source=source, split_rule=rule)
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
    if spec is None:
        raise DataError(
            f"{path} contains tokens, and it is not known which tokenizer made them.",
            fix="Name it: --tokenizer FILE, or openai-community/gpt2 for GPT-2's tokens, or "
            "ids:N for N ids without text. For nanoGPT's characters, prepare its input.txt with "
            "`flatout prepare input.txt --tokenizer char`.",
        )
    if needs_corpus(spec):
        raise DataError(
            f"The input is tokens already: --tokenizer {spec} cannot be trained on them.",
            fix="Name the tokenizer that made them: --tokenizer FILE.",
        )
    return existing_tokenizer(spec, options.pattern, options.end_of_text, progress=progress)


def write_dataset(
    out: Path | str,
    train: Iterable[ArrayLike],
    val: Iterable[ArrayLike],
    *,
    tokenizer: Tokenizer | Path | str,
) -> Dataset:
    """Write tokens from anywhere as a dataset, and return it.

    `train` and `val` are arrays of integers, of which one at a time is in memory. A document ends
    after each end-of-text token, and at the end of each array. `tokenizer` made the tokens: a
    tokenizer.json, a .tiktoken file, a Hugging Face repository, byte, `ids:N` for N ids without
    text, or a tokenizer of `flatout.data.tokenizers`.

    Raises: DataError for other arrays, a token outside the vocabulary, a split without tokens, or
            an `out` that is not empty.
    """
    known = tokenizer
    if not isinstance(known, Tokenizer):
        known = _tokenizer(Path(out), ImportOptions(str(tokenizer)), SILENT)
    with DatasetWriter(out, known) as writer:
        written = _Written(writer, known)
        for split, arrays in zip(SPLITS, (train, val), strict=True):
            for number, array in enumerate(arrays):
                tokens, where = np.asarray(array), f"{split}, array {number}"
                if not tokens.size:
                    continue
                require_tokens(tokens.dtype, tokens.shape, where)
                piece = Piece(tokens.reshape(-1), where)
                for first, block in _blocks_of(piece, 0, tokens.size):
                    ends = np.flatnonzero(block == known.eot_id) + 1
                    if first + len(block) == tokens.size:
                        ends = np.union1d(ends, len(block))
                    written.append(split, block, ends, piece, first)
            if not written.num_tokens[split]:
                raise DataError(
                    f"There are no tokens for {split}.",
                    fix="Pass at least one array of tokens for each split.",
                )
        source: JsonObject = {"names": ["flatout.write_dataset"]}
        writer.finish(source=source, split_rule=NAMED)
    return Dataset.open(expanded(out))


def _blocks_of(piece: Piece, start: int, stop: int) -> Iterator[tuple[int, Array]]:
    """Yield the tokens start..stop of a piece in blocks, each with the index of its first."""
    for first in range(start, stop, BLOCK_TOKENS):
        yield first, np.asarray(piece.tokens[first : min(first + BLOCK_TOKENS, stop)])


def _write(
    written: _Written,
    train: Sequence[Tokens],
    val: Sequence[Tokens],
    fraction: float,
    documents: Documents,
    progress: Progress,
) -> None:
    """Write all tokens. Without validation tokens, `fraction` of them, at the end, are."""
    weight = sum(tokens.weight for tokens in train)
    # in units of weight: of 10 chunks, 9.5 is the middle of the tenth
    cut = math.inf if val else weight * (1 - fraction)
    total = weight + sum(tokens.weight for tokens in val)
    unit = train[0].unit
    with progress.task(f"Importing {unit}", total=total, unit=unit) as task:

        def write(split: SplitName, piece: Piece, start: int, stop: int) -> None:
            size = len(piece.tokens)
            for first, tokens in _blocks_of(piece, start, stop):
                last = first + len(tokens)
                ends = np.array([len(tokens)] if last == size else [], np.int64)
                if documents == "end-of-text":
                    ends = np.flatnonzero(tokens == written.tokenizer.eot_id) + 1
                written.append(split, tokens, ends, piece, first)
                task.advance(piece.weight * len(tokens) / size)

        done = 0
        for piece in chain.from_iterable(tokens.pieces() for tokens in train):
            share = min(max((cut - done) / piece.weight, 0), 1)
            size = int(share * len(piece.tokens))
            write("train", piece, 0, size)
            write("val", piece, size, len(piece.tokens))
            done += piece.weight
        for piece in chain.from_iterable(tokens.pieces() for tokens in val):
            write("val", piece, 0, len(piece.tokens))


class _Written:
    """Writes the splits, and counts their tokens and end-of-text tokens."""

    def __init__(self, writer: DatasetWriter, tokenizer: Tokenizer) -> None:
        self._writer = writer
        self.tokenizer = tokenizer
        self._bytes_of = np.array(
            [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)]
        )
        self._bytes_of[tokenizer.eot_id] = 0
        self._knows_bytes: bool | None = None if tokenizer.has_text else False
        """Whether each token decodes to its own bytes. None until the first tokens are seen."""
        self.num_tokens = dict.fromkeys(SPLITS, 0)
        self.num_ends = 0

    def append(
        self, split: SplitName, tokens: Array, ends: Array, piece: Piece, first: int
    ) -> None:
        """Write tokens of a piece, from index `first` on. `ends` are of documents in them."""
        _require_known(tokens, piece, first, self.tokenizer)
        self._writer.append(split, tokens, ends, text_bytes=self._num_bytes(tokens))
        self.num_tokens[split] += len(tokens)
        self.num_ends += len(ends)

    def _num_bytes(self, tokens: Array) -> int:
        """Return the UTF-8 bytes that tokens decode to. 0 if they are unknown.

        The first call decodes the tokens to verify the count.
        """
        if self._knows_bytes is None:
            text = tokens[tokens != self.tokenizer.eot_id]
            decoded = self.tokenizer.decode_bytes(text.tolist())
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
