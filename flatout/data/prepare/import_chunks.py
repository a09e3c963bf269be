"""Import tokens from another pipeline: a directory of `chunk_NNNNNN.pt` files, one tensor each."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from flatout.data.prepare.chunks.find import METADATA as METADATA
from flatout.data.prepare.chunks.find import check_stated, read_metadata
from flatout.data.prepare.chunks.find import find_chunks as find_chunks
from flatout.data.prepare.chunks.torch_file import load_tensor
from flatout.data.prepare.pack.range_files import SplitWriter
from flatout.data.prepare.pipeline import Prepared
from flatout.data.prepare.request.options import parse_rule
from flatout.data.prepare.request.request import existing_dataset
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.tokenizers import Tokenizer, existing_tokenizer, kind_named
from flatout.errors import DataError
from flatout.files import Array, expanded
from flatout.progress import SILENT, Progress

Documents = Literal["end-of-text", "chunk"]


def import_chunks(
    chunks: Path,
    out: Path,
    *,
    tokenizer: str,
    pattern: str | None = None,
    end_of_text: str | None = None,
    documents: Documents = "end-of-text",
    split: str = "tail 0.1",
    progress: Progress = SILENT,
) -> Prepared:
    """Write the tokens of a directory of chunks to the dataset `out`, one chunk at a time.

    Tokens are stored unchanged. Documents end at end-of-text tokens and may span chunks, or each
    chunk is a document. A directory that already contains this dataset is left unchanged.

    Memory: one chunk.
    Raises: DataError naming the chunk that is missing or unusable, or the token that is outside the
            vocabulary.
    """
    started = time.perf_counter()
    chunks, out = expanded(chunks), expanded(out)
    fraction = _tail_fraction(split)
    files = find_chunks(chunks)
    metadata = read_metadata(chunks)
    check_stated(metadata, chunks, "chunks", len(files))
    kind = kind_named(tokenizer)
    if kind is not None and kind.needs_corpus:
        raise DataError(
            f"The chunks are tokens already: --tokenizer {tokenizer} cannot be trained on them.",
            fix="Name the tokenizer that made them: --tokenizer FILE.",
        )
    known = existing_tokenizer(tokenizer, pattern, end_of_text, progress=progress)
    check_stated(metadata, chunks, "ids", known.vocab_size)
    before = _stats(files)
    source = {
        "names": [str(chunks)],
        "chunks": len(files),
        "fingerprint": _fingerprint(files, before),
        "tokenizer": known.digest(),
        "documents": documents,
        "split": f"tail {fraction}",
        "metadata": metadata,
    }
    manifest = existing_dataset(out, source, progress)
    existed = manifest is not None
    if manifest is None:
        with DatasetWriter(out, vocab_size=known.vocab_size) as writer:
            num_tokens, num_ends = _write(writer, files, known, fraction, documents, progress)
            check_stated(metadata, chunks, "tokens", sum(num_tokens))
            _check_splits(chunks, *num_tokens)
            if documents == "end-of-text" and not num_ends:
                progress.say(_no_end_of_text(known))
            _check_unchanged(chunks, files, before)
            with progress.task("Writing to the disk"):
                rule = f"tail {fraction:g}"
                manifest = writer.finish(tokenizer=known, source=source, split_rule=rule)
    return Prepared(out, manifest, time.perf_counter() - started, existed)


def _write(
    writer: DatasetWriter,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    fraction: float,
    documents: Documents,
    progress: Progress,
) -> tuple[tuple[int, int], int]:
    """Write the chunks; return the tokens of both splits, and the number of end-of-text tokens."""
    first_val = len(files) * (1 - fraction)  # in chunks: 9.5 is the middle of the tenth
    text_bytes = _TextBytes(tokenizer)
    num_train = num_val = num_ends = 0

    def append(split: SplitWriter, tokens: Array) -> int:
        if not len(tokens):
            return 0
        ends = np.flatnonzero(tokens == tokenizer.eot_id) + 1
        split.append(
            tokens,
            [len(tokens)] if documents == "chunk" else ends,
            text_bytes=text_bytes.of(tokens),
        )
        return len(ends)

    with progress.task("Importing chunks", total=len(files), unit="chunks") as task:
        for number, path in enumerate(files):
            tokens = read_chunk(path, tokenizer)
            cut = int(np.clip(first_val - number, 0, 1) * len(tokens))
            num_ends += append(writer.train, tokens[:cut]) + append(writer.val, tokens[cut:])
            num_train += cut
            num_val += len(tokens) - cut
            task.advance()
    return (num_train, num_val), num_ends


def _no_end_of_text(tokenizer: Tokenizer) -> str:
    return (
        f"No chunk contains the end-of-text token (id {tokenizer.eot_id}), so each split is a "
        "single document. With --documents chunk, each chunk is a document."
    )


def _check_splits(folder: Path, num_train: int, num_val: int) -> None:
    """Check that both splits have tokens.

    Raises: DataError.
    """
    if not num_train or not num_val:
        total = num_train + num_val
        raise DataError(
            f"{folder} contains {total} {'token' if total == 1 else 'tokens'}, and none is for "
            f"{'training' if num_val else 'validation'}.",
            fix="Set --split 'tail 0.5', or import more.",
        )


def read_chunk(path: Path, tokenizer: Tokenizer) -> Array:
    """Return one chunk's tokens, without running any code in the file.

    Shapes:  returns (T,), int64.
    Raises: DataError when it is not one 1-D int64 tensor of ids in the vocabulary.
    """
    import torch

    found = load_tensor(path)
    fix = "A chunk is one 1-D int64 tensor: write it again with torch.save(tokens, path)."
    if found.dtype != torch.int64:
        dtype = str(found.dtype).removeprefix("torch.")
        raise DataError(f"{path} contains a tensor of {dtype}, not of int64.", fix=fix)
    if found.dim() != 1:
        raise DataError(
            f"{path} contains a tensor of shape {tuple(found.shape)}, not of one dimension.",
            fix=fix,
        )
    tokens: Array = found.numpy()
    wrong = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))
    if len(wrong):
        raise DataError(
            f"{path}, token {int(wrong[0])}: the id {int(tokens[wrong[0]])} is outside the "
            f"vocabulary of {tokenizer.name}, whose ids are below {tokenizer.vocab_size}.",
            fix="Name the tokenizer that made the chunks with --tokenizer.",
        )
    return tokens


class _TextBytes:
    """Counts the UTF-8 bytes that tokens decode to, if each token decodes to its own bytes.

    For other tokenizers the count is unknown, reported as 0.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = np.array(
            [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)]
        )
        self._bytes_of[tokenizer.eot_id] = 0
        self._known: bool | None = None

    def of(self, tokens: Array) -> int:
        """Return the bytes of some tokens; the first call decodes them to verify the count."""
        if self._known is None:
            text = tokens[tokens != self._tokenizer.eot_id]
            decoded = self._tokenizer.decode_bytes(text.tolist())
            self._known = len(decoded) == int(self._bytes_of[text].sum())
        return int(self._bytes_of[tokens].sum()) if self._known else 0


def _tail_fraction(split: str) -> float:
    kind, fraction = parse_rule(split)
    if kind != "tail":
        raise DataError(
            f"Chunks cannot be split by {split!r}: they are tokens, and `hash` needs a document's "
            "text.",
            fix="Set --split 'tail 0.1'.",
        )
    return fraction


def _stats(files: Sequence[Path]) -> list[tuple[int, int, int, int]]:
    """Return each chunk's size, mtime, ctime and inode: a rewrite changes at least one."""
    return [
        (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        for found in map(Path.stat, files)
    ]


def _check_unchanged(
    folder: Path, files: Sequence[Path], before: list[tuple[int, int, int, int]]
) -> None:
    if _stats(files) != before:
        raise DataError(
            f"{folder}: a chunk was changed during the import.",
            fix="Run the same command again once nothing writes there.",
        )


def _fingerprint(files: Sequence[Path], stats: Sequence[tuple[int, int, int, int]]) -> str:
    """Return a digest of the names, sizes and modification times of the chunks."""
    digest = hashlib.sha256()
    for path, (size, mtime_ns, *_) in zip(files, stats, strict=True):
        digest.update(f"{path.name} {size} {mtime_ns}\n".encode())
    return digest.hexdigest()
