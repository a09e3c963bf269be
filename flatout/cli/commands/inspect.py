"""Show what a prepared dataset contains."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from flatout.cli.commands import Command
from flatout.config.signature import Argument, Option, checked
from flatout.data.store.manifest import MANIFEST, Manifest
from flatout.data.store.shards import Dataset, Split
from flatout.display import Display, plain
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored, folder_bytes
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.streams import printable

STATED: Any = {
    **dict.fromkeys(("dtype", "vocab_size", "split_rule", "source", "skipped"), True),
    "tokenizer": {"name", "digest"},
}
"""Facts as the manifest states them."""
DIGEST = re.compile("[0-9a-f]{64}")
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
    """The directory."""
    items: list[Fact]
    """The facts, in reading order."""

    def value(self, name: str) -> Any:
        """Return the value of the fact called `name`, or None when there is none."""
        return next((fact.value for fact in self.items if fact.name == name), None)

    def display(self) -> Display:
        """Return the facts, and the first text."""
        facts: JsonObject = {fact.name: fact.value for fact in self.items}
        lines = printable(facts.pop("beginning")).splitlines()
        mask = f" (text in {MASKED.format('')} is excluded from the loss)"
        notes = [
            f"first text{mask if 'targets' in facts else ''}",
            *(f"| {line}" for line in lines),
        ]
        values = [(name, _shown(value)) for name, value in facts.items()]
        return Display(f"Dataset {self.path}", values, (), notes if lines else ())


@checked
def inspect(
    data: Annotated[str | Path, Argument("Directory written by `flatout prepare`.")],
    tokens: Annotated[int, Option("How many of the first tokens to show as text.", min=0)] = 64,
    *,
    progress: Progress = SILENT,
) -> InspectResult:
    """Show the size, splits, vocabulary, document lengths and first tokens of a dataset.

    It also shows special tokens and skipped rows.

    Raises: DataError when it is not a complete dataset.
    """
    dataset = Dataset.open(data)
    manifest, splits = dataset.manifest, [dataset.split(name) for name in dataset.manifest.splits]
    with progress.task(f"Reading documents of {data}"):
        lengths = _lengths(manifest, splits)
        targets = sum(map(_targets, splits))
    written = datetime.fromtimestamp((dataset.path / MANIFEST).stat().st_mtime).astimezone()
    stated = manifest.model_dump(mode="json", include=STATED)
    facts: JsonObject = {
        "prepared": written.isoformat(timespec="seconds"),
        "size_bytes": folder_bytes(dataset.path),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "text_bytes": manifest.text_bytes,
        **({"targets": targets} if any(split.has_mask for split in splits) else {}),
        **({"bytes_per_token": round(manifest.text_bytes / targets, 3)} if targets else {}),
        **{name: counts.model_dump() for name, counts in manifest.splits.items()},
        **lengths,
        **stated,
        "special_tokens": dict(sorted(dataset.tokenizer.special_tokens().items())),
        "beginning": "",
    }
    first = next((split for split in splits if split.num_tokens), None)
    if first is not None and tokens:
        facts["beginning"] = _text(first, min(tokens, first.num_tokens), dataset.tokenizer.decode)
    items = [Fact(name=name, value=value) for name, value in facts.items()]
    return InspectResult(path=str(dataset.path), items=items)


def _targets(split: Split) -> int:
    """Return the number of tokens of a split that count in the loss."""
    size = split.num_tokens
    chunks = range(0, size, MASK_CHUNK) if split.has_mask else ()
    counts = (int(split.read_mask_range(at, min(at + MASK_CHUNK, size)).sum()) for at in chunks)
    return sum(counts) if split.has_mask else size


def _lengths(manifest: Manifest, splits: list[Split]) -> JsonObject:
    """Return the tokens of the shortest, the median and the longest document."""
    lengths = np.concatenate([np.diff(split.document_ends, prepend=0) for split in splits])
    if manifest.cut_documents:  # its end is the first document of the validation text
        at = splits[0].num_documents
        lengths[at - 1] += lengths[at]
        lengths = np.delete(lengths, at)
    shares = {"shortest": 0.0, "median": 0.5, "longest": 1.0} if len(lengths) else {}
    return {f"{name}_document": int(np.quantile(lengths, at)) for name, at in shares.items()}


def _text(split: Split, size: int, decode: Callable[[list[int]], str]) -> str:
    """Return the first tokens of a split as text, with marks around what is not in the loss."""
    ids = split.read_tokens(0, size)
    learned = split.read_mask_range(0, size) if split.has_mask else np.ones(size, bool)
    spans = np.split(np.arange(size), np.flatnonzero(np.diff(learned)) + 1)
    pieces = ((decode(ids[span].tolist()), learned[span].any()) for span in spans)
    return "".join(text if is_learned else MASKED.format(text) for text, is_learned in pieces)


def _shown(value: object) -> str:
    """Return a fact as text, with the name of a chat template, and without digests."""
    if isinstance(value, dict):
        value = {
            key: each.get("name", each) if isinstance(each, dict) else each
            for key, each in value.items()
            if each is not None and not DIGEST.fullmatch(str(each))
        }
    return plain(value) or "none"


COMMAND = Command(call=inspect, example="flatout inspect data/book")
