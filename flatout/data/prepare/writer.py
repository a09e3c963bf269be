"""Writes a data set folder from tokens at hand, for data that does not come from text: one range,
joined as `prepare` joins many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flatout.data.prepare.merge import SHARD_BYTES, join
from flatout.data.prepare.ranges import RangeWriter
from flatout.data.prepare.work_dir import WorkFolder, refuse_occupied
from flatout.data.store.manifest import Manifest, SkippedEntry, SplitName
from flatout.files import expanded

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]


class DatasetWriter:
    """A data set folder being written. Use as a context manager: what is not finished is removed.

    with DatasetWriter(out, vocab_size=...) as writer:
        writer.train.append(tokens, ends, text_bytes=...)
        manifest = writer.finish(tokenizer=..., source=..., split_rule=...)

    Raises: DataError when `out` already holds something, another process writes it, or the disk
            refuses.
    """

    def __init__(self, out: Path | str, *, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self._shard_bytes = shard_bytes
        self._work = WorkFolder(expanded(out))
        refuse_occupied(self._work.out)
        self._work.make()
        self._range = RangeWriter(self._work.ranges, 0, vocab_size=vocab_size)
        self.train = SplitWriter(self._range, "train")
        """The training split."""
        self.val = SplitWriter(self._range, "val")
        """The validation split."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._range.abandon()
        self._work.clear()
        self._work.close()

    def finish(
        self,
        *,
        tokenizer: Tokenizer,
        source: Mapping[str, Any],
        split_rule: str,
        skipped: Sequence[SkippedEntry] = (),
    ) -> Manifest:
        """Sync everything, write the manifest, rename the folder into place, and return the
        manifest.
        """
        record = self._range.finish()
        return join(
            self._work,
            [record],
            tokenizer,
            source=source,
            split_rule=split_rule,
            skipped=skipped,
            shard_bytes=self._shard_bytes,
        )


class SplitWriter:
    """Appends tokens and document ends of one split."""

    def __init__(self, writer: RangeWriter, name: SplitName) -> None:
        self._writer = writer
        self._name = name

    def append(
        self,
        tokens: Array,
        ends: Array | Sequence[int],
        *,
        text_bytes: int,
        mask: Array | None = None,
    ) -> None:
        """Append tokens; `ends` are the positions in `tokens` after each document's last token.

        A document may go on in the next call. `mask` is 0 where a token is no target; a split has
        it always or never.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,).
        Raises: DataError for an id the vocabulary does not have.
        """
        self._writer.append(self._name, tokens, ends, text_bytes=text_bytes, mask=mask)
