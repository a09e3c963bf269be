"""Tokens of another pipeline, a folder of `chunk_NNNNNN.pt` files of one tensor each, to a data set
folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.data.prepare.options import difference
from flatout.data.prepare.split_rule import parse_rule
from flatout.data.prepare.torch_file import load_tensor
from flatout.data.prepare.work_dir import refuse_mount
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.manifest import MANIFEST, Manifest
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import Tokenizer, existing_tokenizer, is_made_of_text
from flatout.errors import DataError
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.recognised import CHUNK_NAME, recognise

Array = np.ndarray[Any, np.dtype[Any]]
Documents = Literal["end-of-text", "chunk"]

METADATA = "metadata.json"
STATED = {
    "chunks": ("num_chunks", "total_chunks", "n_chunks"),
    "tokens": ("num_tokens", "total_tokens", "n_tokens"),
    "ids": ("vocab_size", "vocabulary_size"),
}
"""What a metadata.json may state of the chunks, and the names it goes by; the rest is nobody's to
check.
"""
FIRST_NAMED = 10
"""How many gaps in the numbers are named."""


@dataclass(frozen=True)
class Imported:
    """A data set folder made of chunks, and what it took."""

    manifest: Manifest
    chunks: int
    """Files that were read."""
    seconds: float
    existed: bool
    """Whether the folder held this very data set before."""


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
) -> Imported:
    """Write the data set of a folder of chunks, streamed one at a time, to the folder `out`.

    The tokens stay as they are. A document ends with an end-of-text token, across chunks, or with
    each chunk. A folder that holds this very data set is left as it is.

    Memory: one chunk.
    Raises: DataError naming the chunk that is missing or cannot be used, and the token that the
            vocabulary does not have.
    """
    started = time.perf_counter()
    chunks, out = expanded(chunks), expanded(out)
    refuse_mount(out)
    fraction = _tail(split)
    files = find_chunks(chunks)
    metadata = _metadata(chunks / METADATA)
    _check_stated(metadata, chunks, "chunks", len(files))
    if is_made_of_text(tokenizer):
        raise DataError(
            f"The chunks are tokens already: --tokenizer {tokenizer} cannot be made from them.",
            fix="Name the one that made them: --tokenizer FILE.",
        )
    known = existing_tokenizer(tokenizer, pattern, end_of_text, progress=progress)
    _check_stated(metadata, chunks, "ids", known.vocab_size)
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
    held = _held(out, source)
    if held is not None:
        progress.say(f"{out} already holds this data set: {held.tokens:,} tokens. Nothing to do.")
        return Imported(held, len(files), time.perf_counter() - started, existed=True)
    with DatasetWriter(out, vocab_size=known.vocab_size) as writer:
        _write(
            writer,
            files,
            known,
            _TailAfter(len(files) * (1 - fraction)),
            documents,
            metadata,
            progress,
        )
        if _stats(files) != before:
            raise DataError(
                f"{chunks}: a chunk was changed during the import.",
                fix="Run the same command again when nothing writes there any more.",
            )
        with progress.task("Writing to the disk"):
            manifest = writer.finish(
                tokenizer=known, source=source, split_rule=f"tail {fraction:g}"
            )
    return Imported(manifest, len(files), time.perf_counter() - started, existed=False)


def find_chunks(folder: Path) -> list[Path]:
    """Return the folder's chunks in the order of their numbers, which begin with 0 or 1.

    Raises: DataError when there are none, or numbers are missing or there twice.
    """
    known = recognise(folder)
    if known is not None and not (
        folder.is_dir() and any(CHUNK_NAME.fullmatch(path.name) for path in folder.iterdir())
    ):
        raise DataError(known.instead_of("a folder of chunks"), fix=known.fix)
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder.",
            fix="Name the folder in which the chunk_NNNNNN.pt files lie.",
        )
    numbered = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := CHUNK_NAME.fullmatch(path.name))
    ]
    if not numbered:
        raise DataError(
            f"{folder} has no chunk_NNNNNN.pt files.", fix="Name the folder in which they lie."
        )
    numbered.sort()
    numbers = [number for number, _ in numbered]
    twice = [number for number, times in Counter(numbers).items() if times > 1]
    if twice:
        raise DataError(
            f"{folder} has more than one chunk number {twice[0]}.",
            fix="Remove the one that does not belong there.",
        )
    gaps = [
        (before + 1, after - 1)
        for before, after in itertools.pairwise([min(numbers[0], 1) - 1, *numbers])
        if after > before + 1
    ]
    if gaps:
        named = [
            f"{first}" if first == last else f"{first} to {last}"
            for first, last in gaps[:FIRST_NAMED]
        ]
        more = f" and {len(gaps) - FIRST_NAMED} more gaps" if len(gaps) > FIRST_NAMED else ""
        raise DataError(
            f"{folder} has no chunk {', '.join(named)}{more}.",
            fix="Copy the missing files there, or number the files through.",
        )
    return [path for _, path in numbered]


@dataclass(frozen=True)
class _TailAfter:
    """Where validation begins, in chunks: 9.5 is the middle of the tenth."""

    place: float

    def cut(self, number: int, num_tokens: int) -> int:
        """Return how many tokens of a chunk are for training."""
        return int(np.clip(self.place - number, 0, 1) * num_tokens)


def _write(
    writer: DatasetWriter,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    tail: _TailAfter,
    documents: Documents,
    metadata: Mapping[str, Any],
    progress: Progress,
) -> None:
    text_bytes = _TextBytes(tokenizer)
    num_tokens, num_ends = Counter[str](), 0
    with progress.task("Importing chunks", total=len(files), unit="chunks") as task:
        for number, path in enumerate(files):
            tokens = read_chunk(path, tokenizer)
            cut = tail.cut(number, len(tokens))
            for split, part in ((writer.train, tokens[:cut]), (writer.val, tokens[cut:])):
                if len(part):
                    ends = np.flatnonzero(part == tokenizer.eot_id) + 1
                    num_ends += len(ends)
                    split.append(
                        part,
                        [len(part)] if documents == "chunk" else ends,
                        text_bytes=text_bytes.of(part),
                    )
            num_tokens.update({"train": cut, "val": len(tokens) - cut})
            task.advance()
    _check_stated(metadata, files[0].parent, "tokens", num_tokens.total())
    if not num_tokens["train"] or not num_tokens["val"]:
        lacking = "training" if num_tokens["val"] else "validation"
        unit = "token" if num_tokens.total() == 1 else "tokens"
        raise DataError(
            f"{files[0].parent} holds {num_tokens.total()} {unit}, and none is for {lacking}.",
            fix="Set --split 'tail 0.5', or import more.",
        )
    if documents == "end-of-text" and not num_ends:
        progress.say(
            f"No chunk holds end-of-text, id {tokenizer.eot_id}: each split is one document. --documents chunk makes each chunk one."
        )


def read_chunk(path: Path, tokenizer: Tokenizer) -> Array:
    """Return one chunk's tokens; no code in the file is run.

    Shapes:  returns (T,), int64.
    Raises: DataError when it is not one 1-D int64 tensor of ids that the tokenizer has.
    """
    import torch

    found = load_tensor(path)
    fix = "A chunk is one 1-D int64 tensor: write it again with torch.save(tokens, path)."
    if found.dtype != torch.int64:
        raise DataError(
            f"{path} holds a tensor of {str(found.dtype).removeprefix('torch.')}, not of int64.",
            fix=fix,
        )
    if found.dim() != 1:
        raise DataError(
            f"{path} holds a tensor of shape {tuple(found.shape)}, not of one dimension.", fix=fix
        )
    tokens: Array = found.numpy()
    wrong = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))
    if len(wrong):
        raise DataError(
            f"{path}, token {int(wrong[0])}: the id {int(tokens[wrong[0]])} is beyond the vocabulary of {tokenizer.name}, whose ids are below "
            f"{tokenizer.vocab_size}.",
            fix="Name the tokenizer that made the chunks with --tokenizer.",
        )
    return tokens


class _TextBytes:
    """Counts the UTF-8 bytes of the text that tokens came from, where each token stands for its own
    bytes; 0, unknown, elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = np.array(
            [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)]
        )
        self._bytes_of[tokenizer.eot_id] = 0
        self._known: bool | None = None

    def of(self, tokens: Array) -> int:
        """Return the bytes of some tokens. The first ones are decoded, to see whether counting is
        right.
        """
        if self._known is None:
            shown = tokens[tokens != self._tokenizer.eot_id]
            self._known = len(self._tokenizer.decode_bytes(shown.tolist())) == int(
                self._bytes_of[shown].sum()
            )
        return int(self._bytes_of[tokens].sum()) if self._known else 0


def _tail(split: str) -> float:
    kind, fraction = parse_rule(split)
    if kind != "tail":
        raise DataError(
            f"Chunks cannot be split by {split!r}: they are tokens, and a document's hash is of its text.",
            fix="Set --split 'tail 0.1'.",
        )
    return fraction


def _metadata(path: Path) -> dict[str, Any]:
    """Return what the other pipeline wrote of its chunks; nothing where it wrote nothing."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file.", fix="Take it away: nothing in it is needed."
        )
    try:
        found = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=str, parse_float=_finite
        )
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {error}.",
            fix="Repair it, or take it away: nothing in it is needed.",
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            f"{path} is not a JSON object.",
            fix="Repair it, or take it away: nothing in it is needed.",
        )
    return found


def _finite(text: str) -> float | str:
    """Return a number as the manifest can hold it; one too large stays text, as NaN does: neither
    is in JSON, nor equal to what is read back.
    """
    number = float(text)
    return number if math.isfinite(number) else text


def _check_stated(metadata: Mapping[str, Any], folder: Path, what: str, found: int) -> None:
    """Refuse chunks that are not those their metadata speaks of; a vocabulary may have been padded
    by ids that no text yields.
    """
    for key in STATED[what]:
        stated = metadata.get(key)
        if isinstance(stated, int) and stated != found and not (what == "ids" and stated > found):
            there = f"the tokenizer has {found}" if what == "ids" else f"there are {found}"
            fix = (
                "Name the tokenizer that made the chunks."
                if what == "ids"
                else f"Copy the missing chunks there, or correct {METADATA}."
            )
            raise DataError(f"{folder / METADATA} says {key} {stated}; {there}.", fix=fix)


def _stats(files: Sequence[Path]) -> list[tuple[int, int, int, int]]:
    """Return the size, the times and the inode of each chunk: one of them changes when a chunk is
    written again.
    """
    return [
        (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        for found in map(Path.stat, files)
    ]


def _fingerprint(files: Sequence[Path], stats: Sequence[tuple[int, int, int, int]]) -> str:
    """Return a digest of the names, sizes and modification times of the chunks."""
    digest = hashlib.sha256()
    for path, (size, mtime_ns, *_) in zip(files, stats, strict=True):
        digest.update(f"{path.name} {size} {mtime_ns}\n".encode())
    return digest.hexdigest()


def _held(out: Path, source: Mapping[str, Any]) -> Manifest | None:
    """Return the manifest of the folder when it was made of these very chunks; None when it is no
    data set.

    Raises: DataError when it holds another, naming the difference.
    """
    if not (out / MANIFEST).is_file():
        return None
    held = Dataset.open(out).manifest
    there, asked = (
        {key: value for key, value in one.items() if key != "metadata"}
        for one in (held.source, source)
    )
    said = [difference(there, asked)] + [f"{METADATA} has changed"] * (
        held.source.get("metadata") != source["metadata"]
    )
    different = "; ".join(filter(None, said))
    if different:
        raise DataError(
            f"{out} holds another data set: {different}.",
            fix="Choose another --out, or remove that folder.",
        )
    return held
