"""Show what a prepared dataset contains."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from flatout.cli.commands import Command
from flatout.config.signature import Argument, Option, checked
from flatout.data.store.manifest import MANIFEST
from flatout.data.store.remote import open_dataset
from flatout.data.store.shards import Dataset, Split
from flatout.display import Column, Display, Table, plain
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.remote.urls import is_url
from flatout.storage.streams import printable

MAIN = (
    *("tokens", "targets", "documents", "size_bytes", "bytes_per_token", "tokenizer"),
    *("vocab_size", "train", "val", "median_document", "longest_document", "skipped"),
)
"""Facts that are shown without --all."""
OF_THE_MANIFEST = (
    *("documents", "cut_documents", "tokens", "text_bytes", "vocab_size", "dtype", "source"),
    *("split_rule", "format_version"),
)
"""Facts that the manifest states, `text_bytes` of the text in the loss."""
SHOWN_LINES = 3
"""Lines of the first text that are shown without --all."""
MASK_CHUNK = 1 << 24
"""Mask values read at a time."""
MASKED = "«{}»"
"""Marks text that the model reads, but that is excluded from the loss."""


class Fact(Stored):
    """One fact about the dataset."""

    name: str
    """The name, with the unit."""
    value: object
    """A number, a string, or a list or mapping of these."""


class InspectResult(Result):
    """What a dataset contains."""

    path: str
    """The directory, or the URL."""
    items: list[Fact]
    """The facts, in reading order."""
    shows_all: bool = Field(default=False, exclude=True, repr=False)
    """Whether `summary` has every fact."""

    def value(self, name: str) -> Any:
        """Return the value of the fact called `name`, or None when there is none."""
        return next((fact.value for fact in self.items if fact.name == name), None)

    def display(self) -> Display:
        """Return what matters on one screen. With --all, every fact and all of the text."""
        facts: JsonObject = {fact.name: fact.value for fact in self.items}
        text, lengths = printable(facts.pop("beginning")), facts.pop("document_lengths", [])
        lines = text.splitlines()[: None if self.shows_all else SHOWN_LINES]
        names = facts if self.shows_all else [name for name in MAIN if facts.get(name)]
        columns = [Column("tokens per document", "right"), Column("documents", "right")]
        rows = [
            (f"{one['shortest']:,} to {one['longest']:,}", f"{one['documents']:,}")
            for one in lengths
        ]
        tables = [Table(columns, rows)] if self.shows_all and rows else []
        is_masked = self.value("targets") is not None
        mask = f" (text in {MASKED.format('')} is excluded from the loss)" if is_masked else ""
        notes = [f"first text{mask}", *(f"| {line}" for line in lines)] if lines else []
        notes += [] if self.shows_all else ["--all shows more."]
        values = [(name, _shown(facts[name])) for name in names]
        return Display(f"Dataset {self.path}", values, tables, notes)


@checked
def inspect(
    data: Annotated[str | Path, Argument("Directory written by `flatout prepare`, or its URL.")],
    tokens: Annotated[int, Option("How many of the first tokens to show as text.", min=0)] = 64,
    all: Annotated[
        bool, Option("Show every fact in the output of --json, and document lengths.")
    ] = False,
    *,
    progress: Progress = SILENT,
) -> InspectResult:
    """Show the size, splits, vocabulary, document lengths and first tokens of a dataset.

    It also shows special tokens and skipped rows. A dataset at a URL is downloaded, unless it is in
    the cache.

    Raises: DataError when it is not a complete dataset.
    """
    dataset = open_dataset(data, progress=progress)
    manifest, splits = dataset.manifest, [dataset.split(name) for name in dataset.manifest.splits]
    with progress.task(f"Reading documents of {data}"):
        lengths = np.concatenate([np.diff(each.document_ends, prepend=0) for each in splits])
        targets = sum(map(_targets, splits))
    files = [entry.size_bytes for entry in manifest.files]
    files += [(dataset.path / n).stat().st_size for n in (manifest.tokenizer.file, MANIFEST)]
    written = datetime.fromtimestamp((dataset.path / MANIFEST).stat().st_mtime).astimezone()
    since = written.isoformat(timespec="seconds")
    is_copy = is_url(dataset.origin)  # a remote dataset may be older than its copy
    facts: JsonObject = {
        **({"copy": str(dataset.path), "copied": since} if is_copy else {"prepared": since}),
        "size_bytes": sum(files),
        **{name: getattr(manifest, name) for name in OF_THE_MANIFEST},
        **({"targets": targets} if any(split.has_mask for split in splits) else {}),
        "bytes_per_token": round(manifest.text_bytes / targets, 3) if targets else None,
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_sha256": manifest.tokenizer.digest,
        **{
            name: entry.model_dump(include={"documents", "tokens", "text_bytes"})
            | {"shards": len(entry.shards), "loss_mask": bool(entry.masks)}
            for name, entry in manifest.splits.items()
        },
        **_length_facts(lengths),
        "special_tokens": dict(sorted(dataset.tokenizer.special_tokens().items())),
        "skipped": {entry.reason: entry.count for entry in manifest.skipped},
        "skipped_first": {rows.reason: list(map(str, rows.first)) for rows in manifest.skipped},
        "beginning": _first_text(dataset, tokens),
    }
    items = [Fact(name=name, value=value) for name, value in facts.items()]
    return InspectResult(path=dataset.origin, items=items, shows_all=all)


def _targets(split: Split) -> int:
    """Return the number of tokens of a split that count in the loss."""
    if not split.has_mask:
        return split.num_tokens
    size = split.num_tokens
    masks = (
        split.read_mask_range(at, min(at + MASK_CHUNK, size)) for at in range(0, size, MASK_CHUNK)
    )
    return sum(int(mask.sum()) for mask in masks)


def _length_facts(lengths: np.ndarray[Any, Any]) -> JsonObject:
    if not len(lengths):
        return {}
    order = np.frexp(lengths.astype(np.float64))[1]  # a length in [2**(k - 1), 2**k) has exponent k
    counts = np.bincount(order)
    bins = [
        {"shortest": 1 << (k - 1), "longest": (1 << k) - 1, "documents": int(counts[k])}
        for k in range(int(order.min()), int(order.max()) + 1)
    ]
    return {
        "shortest_document": int(lengths.min()),
        "median_document": int(np.median(lengths)),
        "longest_document": int(lengths.max()),
        "document_lengths": bins,
    }


def _first_text(dataset: Dataset, tokens: int) -> str:
    train = dataset.split("train")
    split = train if train.num_tokens else dataset.split("val")
    shown = min(tokens, split.num_tokens)
    ids, decode = split.read_tokens(0, shown), dataset.tokenizer.decode
    if not split.has_mask or not shown:
        return decode(ids.tolist())
    learned = split.read_mask_range(0, shown)
    spans = np.split(np.arange(shown), np.flatnonzero(np.diff(learned)) + 1)
    pieces = ((decode(ids[span].tolist()), bool(learned[span[0]])) for span in spans)
    return "".join(text if is_learned else MASKED.format(text) for text, is_learned in pieces)


def _shown(value: object) -> str:
    """Return a fact as text, with the name of a chat template in place of its many lines."""
    if isinstance(value, dict) and isinstance(template := value.get("chat_template"), dict):
        value = value | {"chat_template": template.get("name")}
    return plain(value) or "none"


COMMAND = Command(call=inspect, example="flatout inspect data/book")
