"""Write a dataset from existing tokens, as one range, joined as `prepare` joins many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from flatout.data.prepare.join import join
from flatout.data.prepare.pack.range_files import RangeWriter
from flatout.data.prepare.plan.make import SHARD_BYTES
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.request import refuse_occupied
from flatout.data.store.manifest import Manifest, SkippedRows
from flatout.data.tokenizers import Tokenizer
from flatout.storage.files import expanded
from flatout.storage.json_io import JsonObject


class DatasetWriter:
    """Writes a dataset directory. As a context manager, removes it unless it was finished.

    with DatasetWriter(out, vocab_size=...) as writer:
        writer.train.append(tokens, ends, text_bytes=...)
        manifest = writer.finish(tokenizer=..., source=..., split_rule=...)

    Raises: DataError when `out` is not empty, another process writes it, or the disk cannot be
            written.
    """

    def __init__(self, out: Path | str, *, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self._shard_bytes = shard_bytes
        self._work = WorkDir(expanded(out))
        refuse_occupied(self._work.out)
        self._work.make()
        self._range = RangeWriter(self._work.ranges, 0, vocab_size=vocab_size)
        self.train = self._range.splits["train"]
        """Writer of the training split."""
        self.val = self._range.splits["val"]
        """Writer of the validation split."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._range.abandon()
        self._work.clear()
        self._work.close()

    def finish(
        self,
        *,
        tokenizer: Tokenizer,
        source: JsonObject,
        split_rule: str,
        skipped: Sequence[SkippedRows] = (),
    ) -> Manifest:
        """Join the splits, write the manifest, publish the directory, and return the manifest."""
        return join(
            self._work,
            [self._range.finish()],
            tokenizer,
            source=source,
            split_rule=split_rule,
            skipped=skipped,
            shard_bytes=self._shard_bytes,
        )
