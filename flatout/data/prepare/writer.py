"""Write a dataset from existing tokens, shard by shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from flatout.data.prepare.pack.range_files import ShardWriter
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.request import refuse_occupied
from flatout.data.store.manifest import SPLITS, Manifest, ShardEntry, SplitName
from flatout.data.tokenizers import Tokenizer
from flatout.storage.files import Array, expanded, writing
from flatout.storage.json_io import JsonObject

SHARD_TOKENS = 64 << 20
"""Tokens after which the next shard starts."""


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
        if len(tokens):
            self._is_open[split] = not len(ends) or int(ends[-1]) < len(tokens)

    def _finish_shard(self) -> None:
        with writing(self._work.out):
            shard = self._shard.finish()
        self._done += [] if shard is None else [shard]

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
        return self._work.publish(self._tokenizer, self._done, source=source, split_rule=split_rule)
