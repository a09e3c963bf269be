"""Tokenise and pack documents: each is followed by end-of-text, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.data.conversation.rendering import Example
from flatout.data.prepare.pack.range_files import (
    DATASET,
    RANGES,
    RangeRecord,
    ShardWriter,
    count_skipped,
    record_path,
)
from flatout.data.prepare.pack.work_items import WorkItem, num_bytes_of
from flatout.data.prepare.request.options import Options
from flatout.data.sources import BadRow, Document, LeftOut
from flatout.data.store.manifest import SPLITS, SplitName
from flatout.data.tokenizers.tokenizer import NotEncodable, Tokenizer
from flatout.storage.files import Array, sync, write_whole, writing

HELD_TOKENS = 1 << 16
"""Maximum tokens of a split held in memory before they are written."""
_IGNORED = np.zeros(1, np.uint8)
"""The mask of a token that the loss does not count."""


@dataclass(frozen=True)
class Tally:
    """Progress since the last report."""

    num_bytes: int
    """Approximate bytes read."""
    documents: int
    tokens: int


Report = Callable[[Tally], object]


@dataclass(frozen=True)
class Packing:
    """How documents become tokens, and where. Sent to each worker once."""

    tokenizer: Tokenizer
    options: Options
    folder: Path
    """The work directory, for shards and the records of ranges."""


def pack(
    item: WorkItem,
    packing: Packing,
    writer: ShardWriter,
    record: RangeRecord,
    report: Report = lambda _: None,
) -> None:
    """Tokenise an item into a shard, and record the rows omitted.

    Raises: DataError for the first unusable row, unless such rows are skipped.
    """
    packers = {name: _Packer(packing, writer, name) for name in SPLITS}
    on_bad_row = packing.options.on_bad_row
    index = item.first - 1
    documents = tokens = 0
    for task in item.read_tasks:
        for row in task.rows():
            if isinstance(row, LeftOut):
                count_skipped(record.skipped, row.reason, [row.location], row.count)
                continue
            if isinstance(row, BadRow):
                record.skip_bad(row, on_bad_row)
                continue
            index += 1
            sides = list(item.assignment.assign(row, index))
            try:
                _pack_document(row, sides, packing, packers, record)
            except NotEncodable as error:
                what = f"{error.reason}: {error.what.removesuffix('.')}"
                record.skip_bad(BadRow(what, error.fix, error.reason, row.location), on_bad_row)
        before = documents, tokens
        documents = sum(packer.documents for packer in packers.values()) - record.cut_documents
        tokens = sum(packer.tokens for packer in packers.values())
        report(Tally(task.num_bytes, documents - before[0], tokens - before[1]))
    for packer in packers.values():
        packer.flush()


def pack_range(
    item: WorkItem, packing: Packing, report: Report = lambda _: None
) -> Callable[[], RangeRecord]:
    """Pack an item into files, and return a function, callable from any thread, that records them.

    Raises: DataError for the first unusable row, unless such rows are skipped; Unfinished for a
            full disk.
    """
    writer = ShardWriter(packing.folder / DATASET, item.number, packing.tokenizer.vocab_size)
    record = RangeRecord(number=item.number, num_bytes=item.num_bytes)
    try:
        pack(item, packing, writer, record, report)
    except BaseException:
        writer.abandon()
        raise

    def finish() -> RangeRecord:
        try:
            with writing(packing.folder):
                record.shards = writer.finish()
                # After a power cut there must be no record without its files. Files without a
                # record only cost packing the range again.
                sync(packing.folder / DATASET)
                path = record_path(packing.folder / RANGES, record.number)
                write_whole(path, record.model_dump_json() + "\n")
        except BaseException:
            writer.abandon()
            raise
        return record

    return finish


def _pack_document(
    row: Document,
    sides: Sequence[tuple[SplitName, str]],
    packing: Packing,
    packers: Mapping[SplitName, _Packer],
    record: RangeRecord,
) -> None:
    """Pack the sides of a document by split, once all are tokenised: it is packed whole or not."""
    tokenizer = packing.tokenizer
    if row.examples:
        ((name, _),) = sides
        encoded = list(map(tokenizer.encode_example, row.examples))
        for example, found in zip(row.examples, encoded, strict=True):
            packers[name].add_example(example, *found)
        return
    prompt = row.prompt if packing.options.mask_field else ""
    made: list[list[tuple[Array, Array | None]]] = []
    for _, text in sides:
        if prompt and not made:
            whole = prompt + text
            example = Example(whole, ((len(prompt), len(whole)),))
            made.append([tokenizer.encode_example(example)])
        else:
            made.append([(ids, None) for ids in tokenizer.encode_pieces(text)])
    for (name, text), pieces in zip(sides, made, strict=True):
        for ids, mask in pieces:
            packers[name].add(ids, mask)
        packers[name].end_document(text)
    record.cut_documents += len(made) - 1


class _Packer:
    """Collects the documents of one split, and flushes them before they take much memory."""

    def __init__(self, packing: Packing, writer: ShardWriter, split: SplitName) -> None:
        self._writer = writer
        self._split = split
        self._end_of_text = np.array([packing.tokenizer.eot_id], np.uint32)
        self._eot_id = packing.tokenizer.eot_id
        options = packing.options
        self._masked = options.mask_field is not None or options.chat is not None
        self._clear()
        self.documents = self._flushed_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._flushed_tokens + self._held_tokens

    def _clear(self) -> None:
        self._held: list[Array] = []
        self._held_tokens = self._text_bytes = 0
        self._ends: list[int] = []
        self._masks: list[Array] = []

    def add(self, ids: Array, mask: Array | None = None) -> None:
        """Append tokens, and a mask of those that the loss counts. None counts all."""
        self._held.append(ids)
        if self._masked:
            self._masks.append(np.ones(len(ids), np.uint8) if mask is None else mask)
        self._held_tokens += len(ids)
        if self._held_tokens >= HELD_TOKENS:
            self.flush()

    def add_example(self, example: Example, ids: Array, mask: Array) -> None:
        """Append an example of a conversation.

        The loss counts end-of-text only where it ends a turn.
        """
        ends_turn = bool(len(ids)) and ids[-1] == self._eot_id
        stop = len(ids) - ends_turn
        self.add(ids[:stop], mask[:stop])
        is_target = ends_turn and bool(mask[-1])
        self.end_document(example.answers, end=None if is_target else _IGNORED)

    def end_document(self, text: str, *, end: Array | None = None) -> None:
        """Append end-of-text to a document with this text. `end` is the mask of end-of-text."""
        self._text_bytes += num_bytes_of(text)
        self.documents += 1
        self._ends.append(self._held_tokens + 1)
        self.add(self._end_of_text, end)

    def flush(self) -> None:
        """Pass everything collected to the sink."""
        if self._held:
            self._flushed_tokens += self._held_tokens
            self._writer.append(
                self._split,
                np.concatenate(self._held),
                np.array(self._ends, np.int64),
                text_bytes=self._text_bytes,
                mask=np.concatenate(self._masks) if self._masked else None,
            )
        self._clear()
