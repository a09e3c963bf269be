"""Write datasets from existing tokens: token files of other tools, or arrays."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from flatout.config.words import name_for
from flatout.data.prepare.pack.range_files import ShardWriter
from flatout.data.prepare.pipeline import Prepared
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.options import NAMED, parse_rule
from flatout.data.prepare.request.request import existing_dataset, refuse_occupied
from flatout.data.store.manifest import SPLITS, Manifest, ShardEntry, SplitName, storable
from flatout.data.store.shards import Dataset
from flatout.data.token_files import (
    METADATA,
    TOKENIZERS,
    Reading,
    check_metadata,
    find_tokens,
    read_metadata,
    read_tokens,
    require_tokens,
)
from flatout.data.tokenizers import Tokenizer, existing_tokenizer, needs_corpus, require_used
from flatout.errors import DataError
from flatout.progress import SILENT, Progress, Task, counted
from flatout.storage.files import Array, expanded, writing
from flatout.storage.json_io import JsonObject

DEFAULT_SPLIT = "tail 0.1"
GPT2 = "openai-community/gpt2"
SHARD_TOKENS = 64 << 20
"""Tokens after which the next shard starts."""
BLOCK_TOKENS = 1 << 20
"""Tokens that are checked and written at a time."""
Documents = Literal["end-of-text", "chunk"]
"""Where documents end: at end-of-text tokens, or with each file."""


@dataclass(frozen=True)
class ImportOptions:
    """How to read the tokens, and how to divide them."""

    tokenizer: str | None = None
    """The tokenizer that made them. None means the one that a metadata.json names."""
    pattern: str | None = None
    """Regular expression that splits text, for an unknown .tiktoken file."""
    end_of_text: str | None = None
    """End-of-text token of a tokenizer.json that has none of the usual names."""
    documents: Documents = "end-of-text"
    """Where documents end."""
    split: str | None = None
    """Split rule. None means DEFAULT_SPLIT, unless there are validation tokens."""
    val: Path | None = None
    """Validation tokens."""
    dtype: str | None = None
    """The type of tokens in files without a header."""
    field: str | None = None
    """The key that contains the tokens."""


@dataclass(frozen=True)
class _Piece:
    """Tokens of one split, and where they come from."""

    split: SplitName
    tokens: Array
    where: str
    first: int = 0
    """The index of the first token there."""
    ends: bool = True
    """Whether the file or the array ends with it."""


class DatasetWriter:
    """Writes a dataset directory. As a context manager, removes it unless it was finished.

    with DatasetWriter(out, tokenizer) as writer:
        writer.append("train", tokens, ends, text_bytes=...)
        manifest = writer.finish(source=..., split_rule=...)

    Raises: DataError when `out` is not empty, another process writes it, or the disk cannot be
            written.
    """

    def __init__(
        self, out: Path | str, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._work = WorkDir(expanded(out))
        refuse_occupied(self._work.out)
        self._work.claim()
        self._work.make()
        self._done: list[ShardEntry] = []
        self._is_open = dict.fromkeys(SPLITS, False)
        self.num_tokens = dict.fromkeys(SPLITS, 0)
        """Tokens of each split so far."""
        self._shard = self._next_shard()

    def _next_shard(self) -> ShardWriter:
        return ShardWriter(self._work.dataset, len(self._done), self._tokenizer.vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard.abandon()
        self._work.clear()
        self._work.close()

    def append(
        self,
        split: SplitName,
        tokens: Array,
        ends: Array | Sequence[int],
        *,
        text_bytes: int,
        mask: Array | None = None,
    ) -> None:
        """Append tokens to a split, as `ShardWriter.append` does. Full shards are written."""
        ends = np.asarray(ends, np.int64)
        start = 0
        while start < len(tokens):
            held = sum(counts.tokens for counts in self._shard.counts.values())
            if held >= self._shard_tokens:
                self._finish_shard()
                self._shard, held = self._next_shard(), 0
            stop = min(start + self._shard_tokens - held, len(tokens))
            inside = ends[(ends > start) & (ends <= stop)] - start
            part = None if mask is None else mask[start:stop]
            self._shard.append(split, tokens[start:stop], inside, text_bytes=text_bytes, mask=part)
            start, text_bytes = stop, 0
        self.num_tokens[split] += len(tokens)
        if len(tokens):
            self._is_open[split] = not len(ends) or int(ends[-1]) < len(tokens)

    def _finish_shard(self) -> None:
        with writing(self._work.out):
            self._done += self._shard.finish()

    def finish(self, *, source: JsonObject, split_rule: str) -> Manifest:
        """Publish the directory, and return its manifest.

        Tokens after the last end of a split form one more document.
        """
        none = np.empty(0, np.uint8)
        for split in SPLITS:
            if self._is_open[split]:
                mask = none if self._shard.is_masked else None
                self._shard.append(split, none, [0], text_bytes=0, mask=mask)
        self._finish_shard()
        return self._work.publish(
            self._tokenizer,
            self._done,
            source=source,
            split_rule=split_rule,
            cut_documents=int(self._is_open["train"] and split_rule != NAMED),
        )


def import_tokens(
    path: Path, out: Path, options: ImportOptions, *, progress: Progress = SILENT
) -> Prepared:
    """Write the tokens of a file or directory to the dataset `out`, piece by piece.

    Tokens are stored unchanged. A directory that already contains this dataset is left unchanged.

    Memory: files are mapped, except those of torch before 1.6.
    Raises: DataError naming the file that is missing or unusable, or the token that is outside the
            vocabulary.
    """
    started, path, out = time.perf_counter(), expanded(path), expanded(out)
    kind, fraction = parse_rule(options.split or DEFAULT_SPLIT)
    if kind != "tail":
        raise DataError(
            f"Tokens cannot be split by {options.split!r}: `hash` needs a document's text.",
            fix="Set --split 'tail 0.1'.",
        )
    found = find_tokens(path, options.val and expanded(options.val), is_raw=bool(options.dtype))
    if found.val and options.split is not None:
        raise DataError(
            f"There are validation tokens, {found.val[0]}, but --split {options.split!r} "
            "takes them from the training tokens.",
            fix="Remove --split, or name the training tokens alone.",
        )
    folder = path if (path / METADATA).is_file() else found.files[0].parent
    metadata = read_metadata(folder)
    known = _tokenizer(path, options, metadata, progress)
    reading = Reading(known.vocab_size, options.dtype, metadata["dtype"], options.field)
    before = _stats(found.files)
    source: JsonObject = {
        "names": [storable(str(path))],
        "chunks": len(found.files),
        "fingerprint": _fingerprint(found.train, before),
        "val": [storable(str(file)) for file in found.val] or None,
        "val_fingerprint": _fingerprint(found.val, before) if found.val else None,
        "dtype": reading.dtype or reading.dtype_beside,
        "field": options.field,
        "tokenizer": known.digest(),
        "documents": options.documents,
        "split": NAMED if found.val else f"tail {fraction}",
    }
    manifest = existed = existing_dataset(out, source, progress)
    if manifest is None:
        opened = {file: read_tokens(file, reading) for file in found.files}
        sizes = {file: len(tokens) for file, (tokens, _) in opened.items()}
        counts, dtype = [*sizes.values()], opened[found.files[0]][0].dtype.name
        facts: JsonObject = {"ids": known.vocab_size, "dtype": dtype, "eot": known.eot_id}
        total, train = sum(counts), sum(counts[: len(found.train)])
        if folder == path and not options.val:
            facts |= {"train": train, "val": total - train}
            if not found.left_out:  # totals are of all files there
                facts |= {"files": len(sizes), "tokens": total, "names": [f.name for f in sizes]}
        check_metadata(folder / METADATA, metadata, facts)
        for note in dict.fromkeys(note for _, note in opened.values() if note):
            progress.say(note)
        del opened
        if found.left_out:
            progress.say(f"Not read: {', '.join(found.left_out[:3])}, for tests.")
        cut = int(train * (1 if found.val else 1 - fraction))

        def pieces() -> Iterator[_Piece]:
            done = 0
            for file in found.files:
                tokens, _ = read_tokens(file, reading)
                inside = min(max(cut - done, 0), len(tokens))
                done += len(tokens)
                yield _Piece("train", tokens[:inside], str(file), ends=inside == len(tokens))
                yield _Piece("val", tokens[inside:], str(file), inside)

        with DatasetWriter(out, known) as writer:
            written = _Written(writer, known, options.documents)
            with progress.task("Importing tokens", total=total, unit="tokens") as task:
                written.write(pieces(), task)
            _require_both(writer, f"{path} contains", "Set --split 'tail 0.5', or import more.")
            if options.documents == "end-of-text" and not written.num_ends:
                by_chunk = " With --documents chunk, each file is a document." * (len(sizes) > 1)
                progress.say(
                    f"No file contains the end-of-text token (id {known.eot_id}), so each split "
                    f"is a single document.{by_chunk}"
                )
            if _stats(found.files) != before:
                raise DataError(
                    f"{path}: a token file was changed during the import.",
                    fix="Run the same command again once nothing writes there.",
                )
            manifest = writer.finish(source=source, split_rule=source["split"])
    return Prepared(out, time.perf_counter() - started, manifest, existed is not None)


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
    known = (
        tokenizer
        if isinstance(tokenizer, Tokenizer)
        else _tokenizer(Path(out), ImportOptions(str(tokenizer)), {}, SILENT)
    )

    def pieces() -> Iterator[_Piece]:
        for split, arrays in zip(SPLITS, (train, val), strict=True):
            for number, array in enumerate(arrays):
                tokens, where = np.asarray(array), f"{split}, array {number}"
                if tokens.size:
                    require_tokens(tokens.dtype, tokens.shape, where)
                    yield _Piece(split, tokens.reshape(-1), where)

    with DatasetWriter(out, known) as writer:
        written = _Written(writer, known, "both")
        written.write(pieces())
        _require_both(
            writer, "The arrays contain", "Pass at least one array of tokens for each split."
        )
        writer.finish(source={"names": ["flatout.write_dataset"]}, split_rule=NAMED)
    return Dataset.open(expanded(out))


def _require_both(writer: DatasetWriter, found: str, fix: str) -> None:
    """Check that both splits have tokens.

    Raises: DataError that starts with `found`.
    """
    for split, count in writer.num_tokens.items():
        if not count:
            total = sum(writer.num_tokens.values())
            raise DataError(f"{found} {counted(total, 'token')}, but none for {split}.", fix=fix)


def _tokenizer(
    path: Path, options: ImportOptions, metadata: JsonObject, progress: Progress
) -> Tokenizer:
    """Return the tokenizer that made the tokens.

    Raises: DataError when none is named and none is found, or it would have to be trained.
    """
    spec = options.tokenizer
    stated = {key: str(metadata[key]) for key in TOKENIZERS if metadata.get(key) is not None}
    if spec is None and stated:
        named, *others = stated.values()
        beside = (path if path.is_dir() else path.parent) / named
        known = [name_for("tokenizer", each, [GPT2]) or each for each in (named, *others)]
        if len({*known}) > 1:
            raise DataError(
                f"metadata.json names different tokenizers: {json.dumps(stated)}.",
                fix="Name the one that made the tokens: --tokenizer FILE.",
            )
        spec = str(beside) if beside.exists() else known[0]
        progress.say(f"metadata.json names the tokenizer {spec}.")
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
    require_used(spec, options.pattern, options.end_of_text)
    return existing_tokenizer(spec, options.pattern, options.end_of_text, progress=progress)


class _Written:
    """Writes pieces to their splits in blocks, and counts their tokens and end-of-text tokens."""

    def __init__(
        self, writer: DatasetWriter, tokenizer: Tokenizer, documents: Documents | Literal["both"]
    ) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._documents = documents
        self._bytes_of = np.array(
            [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)]
        )
        self._bytes_of[tokenizer.eot_id] = 0
        self._knows_bytes: bool | None = None if tokenizer.has_text else False
        """Whether each token decodes to its own bytes. None until the first tokens are seen."""
        self.num_ends = 0

    def write(self, pieces: Iterable[_Piece], task: Task | None = None) -> None:
        """Write pieces in their order.

        Raises: DataError naming the first token that is outside the vocabulary.
        """
        for piece in pieces:
            for start in range(0, len(piece.tokens), BLOCK_TOKENS):
                tokens = np.asarray(piece.tokens[start : start + BLOCK_TOKENS])
                self._require_known(tokens, piece.where, piece.first + start)
                ends = np.empty(0, np.int64)
                if self._documents != "chunk":
                    ends = np.flatnonzero(tokens == self._tokenizer.eot_id) + 1
                is_last = piece.ends and start + len(tokens) == len(piece.tokens)
                if self._documents != "end-of-text" and is_last:
                    ends = np.union1d(ends, len(tokens))
                count = self._num_bytes(tokens)
                self._writer.append(piece.split, tokens, ends, text_bytes=count)
                self.num_ends += len(ends)
                if task is not None:
                    task.advance(len(tokens))

    def _num_bytes(self, tokens: Array) -> int:
        """Return the UTF-8 bytes that tokens decode to. 0 if they are unknown.

        The first call decodes the tokens to verify the count.
        """
        if self._knows_bytes is None:
            text = tokens[tokens != self._tokenizer.eot_id]
            decoded = self._tokenizer.decode_bytes(text.tolist())
            self._knows_bytes = len(decoded) == int(self._bytes_of[text].sum())
        return int(self._bytes_of[tokens].sum()) if self._knows_bytes else 0

    def _require_known(self, tokens: Array, where: str, first: int) -> None:
        """Check that every token is in the vocabulary.

        Raises: DataError naming the first that is not.
        """
        size = self._tokenizer.vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            index = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
            raise DataError(
                f"{where}, token {first + index}: the id {int(tokens[index])} is outside the "
                f"vocabulary of {self._tokenizer.name}, whose ids are below {size}.",
                fix="Name the tokenizer that made the tokens with --tokenizer.",
            )


def _stats(files: Sequence[Path]) -> dict[Path, tuple[int, ...]]:
    """Return each file's size, mtime, ctime and inode: a rewrite changes at least one."""
    return {
        file: (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        for file, found in zip(files, map(Path.stat, files), strict=True)
    }


def _fingerprint(files: Sequence[Path], stats: dict[Path, tuple[int, ...]]) -> str:
    """Return a digest of the names, sizes and modification times of some files."""
    digest = hashlib.sha256()
    for file in files:
        size, mtime_ns, *_ = stats[file]
        digest.update(f"{file.name} {size} {mtime_ns}\n".encode())
    return digest.hexdigest()
