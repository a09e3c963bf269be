"""Show what a prepared data set holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from pydantic import BaseModel, ConfigDict

from flatout.commands import Command, Result
from flatout.data.store.manifest import MANIFEST, Manifest
from flatout.data.store.remote import open_dataset
from flatout.data.store.shards import Dataset, Split
from flatout.data.tokenizers import Tokenizer
from flatout.hardware import probe
from flatout.progress import SILENT, Progress
from flatout.recommended import recommend
from flatout.transfer.urls import is_url

BAR_WIDTH = 40
MASK_READ = 1 << 24
"""Mask values that are read at a time."""
NOT_LEARNED = "«{}»"
"""How text that is read but not learned from is marked."""


class LengthBin(NamedTuple):
    """How many documents have a length from `shortest` to `longest`, in tokens."""

    shortest: int
    longest: int
    documents: int


class Fact(BaseModel):
    """One thing that is known about the data set."""

    model_config = ConfigDict(frozen=True)

    name: str
    """What it is; the unit is in the name."""
    value: Any
    """A number, a text, or a list or mapping of them."""


class InspectResult(Result):
    """What a data set folder holds."""

    path: str
    """The folder, or the address."""
    items: list[Fact]
    """The facts, in reading order."""

    def value(self, name: str) -> Any:
        """Return the value of the fact called `name`, or None when there is none."""
        return next((fact.value for fact in self.items if fact.name == name), None)

    def summary(self) -> str:
        """Return the facts as text: short ones a line each, then the document lengths as bars and
        the beginning of the text.
        """
        own_place = {"document_lengths", "beginning"}
        plain = [fact for fact in self.items if fact.name not in own_place]
        width = max(len(fact.name) for fact in plain)
        lines = [
            f"Data set {self.path}",
            "",
            *(f"  {fact.name:<{width}}  {_one_line(fact.value)}" for fact in plain),
        ]
        if self.value("document_lengths"):
            lines += ["", "  tokens in a document", *_bars(self.value("document_lengths"))]
        if self.value("beginning"):
            marked = (
                f"; what is in {NOT_LEARNED.format('')} is not learned from"
                if self.value("targets") is not None
                else ""
            )
            lines += [
                "",
                f"  it begins{marked}",
                *(f"  | {line}" for line in _printable(self.value("beginning")).splitlines()),
            ]
        return "\n".join(lines)


def inspect(
    data: Annotated[
        str | Path, typer.Argument(help="Folder written by `flatout prepare`, or its address.")
    ],
    tokens: Annotated[
        int, typer.Option(help="How many of the first tokens to show as text.", min=0)
    ] = 64,
    *,
    progress: Progress = SILENT,
) -> InspectResult:
    """Show a data set's size, documents, tokens, vocabulary, splits, document lengths, special
    tokens, skipped rows and first tokens.

    What lies at an address is fetched, unless it is in the cache.

    Raises: DataError when it is not a whole data set.
    """
    dataset = open_dataset(data, progress=progress)
    with progress.task(f"Reading document lengths of {data}"):
        lengths = np.concatenate(
            [
                np.diff(dataset.split(name).document_ends, prepend=0)
                for name in dataset.manifest.splits
            ]
        )
    targets = _targets(dataset, progress)
    facts = {
        **_whereabouts(dataset),
        **_overview(dataset, targets),
        **_splits(dataset),
        **_length_facts(lengths),
        "special_tokens": _special_tokens(dataset.tokenizer),
        "skipped": {entry.reason: entry.count for entry in dataset.manifest.skipped},
        "skipped_first": {entry.reason: list(entry.first) for entry in dataset.manifest.skipped},
        "recipe": _recipe(dataset),
        "beginning": _beginning(dataset, tokens),
    }
    return InspectResult(
        path=dataset.origin, items=[Fact(name=name, value=value) for name, value in facts.items()]
    )


def _recipe(dataset: Dataset) -> dict[str, Any] | str:
    """Return a run to begin with on this machine."""
    found = recommend(
        dataset.origin,
        dataset.manifest.splits["train"].tokens,
        dataset.manifest.vocab_size,
        probe(),
    )
    return (
        "too little text to train on: prepare a few kilobytes or more"
        if found is None
        else asdict(found)
    )


def _whereabouts(dataset: Dataset) -> dict[str, Any]:
    """Return since when the folder is there; what lies at an address may be older than its copy
    here.
    """
    since = (
        datetime.fromtimestamp((dataset.path / MANIFEST).stat().st_mtime)
        .astimezone()
        .isoformat(timespec="seconds")
    )
    return (
        {"copy": str(dataset.path), "copied": since}
        if is_url(dataset.origin)
        else {"prepared": since}
    )


def _targets(dataset: Dataset, progress: Progress) -> int | None:
    """Return how many tokens are learned from; None where all are."""
    splits = [dataset.split(name) for name in dataset.manifest.splits]
    if not any(split.has_mask for split in splits):
        return None
    found = 0
    with progress.task(
        f"Reading the mask of {dataset.origin}", total=dataset.manifest.tokens, unit="tokens"
    ) as task:
        for split in splits:
            for start in range(0, split.num_tokens, MASK_READ):
                stop = min(start + MASK_READ, split.num_tokens)
                found += (
                    int(split.read_mask_range(start, stop).sum())
                    if split.has_mask
                    else stop - start
                )
                task.advance(stop - start)
    return found


def _overview(dataset: Dataset, targets: int | None) -> dict[str, Any]:
    """Return sizes and origin; the bytes of text are those of what is learned from, so they are
    divided by those tokens.
    """
    manifest = dataset.manifest
    counted = manifest.tokens if targets is None else targets
    return {
        "size_bytes": _size_bytes(dataset.path, manifest),
        "documents": manifest.documents,
        **({"cut_documents": manifest.cut_documents} if manifest.cut_documents else {}),
        "tokens": manifest.tokens,
        **({} if targets is None else {"targets": targets}),
        "text_bytes": manifest.text_bytes,
        "bytes_per_token": round(manifest.text_bytes / counted, 3) if counted else None,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_sha256": manifest.tokenizer.digest,
        "source": manifest.source,
        "split_rule": manifest.split_rule,
        "format_version": manifest.format_version,
    }


def _size_bytes(folder: Path, manifest: Manifest) -> int:
    own = (manifest.tokenizer.file, MANIFEST)
    return sum(entry.size_bytes for entry in manifest.files) + sum(
        (folder / name).stat().st_size for name in own
    )


def _splits(dataset: Dataset) -> dict[str, Any]:
    return {
        name: {
            "documents": entry.documents,
            "tokens": entry.tokens,
            "text_bytes": entry.text_bytes,
            "shards": len(entry.shards),
            "loss_mask": bool(entry.masks),
        }
        for name, entry in dataset.manifest.splits.items()
    }


def _length_facts(lengths: np.ndarray[Any, Any]) -> dict[str, Any]:
    if not len(lengths):
        return {}
    order = np.frexp(lengths.astype(np.float64))[1]  # a length in [2**(k - 1), 2**k) has exponent k
    counts = np.bincount(order)
    bins = [
        LengthBin(1 << (k - 1), (1 << k) - 1, int(counts[k]))
        for k in range(int(order.min()), int(order.max()) + 1)
    ]
    return {
        "shortest_document": int(lengths.min()),
        "median_document": int(np.median(lengths)),
        "longest_document": int(lengths.max()),
        "document_lengths": [entry._asdict() for entry in bins],
    }


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that no text becomes, end-of-text first."""
    end = {tokenizer.decode([tokenizer.eot_id]): tokenizer.eot_id}
    definition: dict[str, Any] = getattr(
        tokenizer, "definition", {}
    )  # of a tokenizer.json, which may have more of them
    return end | {
        entry["content"]: int(entry["id"])
        for entry in definition.get("added_tokens", [])
        if entry.get("special")
    }


def _beginning(dataset: Dataset, tokens: int) -> str:
    split: Split = (
        dataset.split("train") if dataset.split("train").num_tokens else dataset.split("val")
    )
    shown = min(tokens, split.num_tokens)
    ids, decode = split.read_tokens(0, shown), dataset.tokenizer.decode
    if not split.has_mask or not shown:
        return decode(ids.tolist())
    learned = split.read_mask_range(0, shown)
    spans = np.split(np.arange(shown), np.flatnonzero(np.diff(learned)) + 1)
    pieces = ((decode(ids[span].tolist()), bool(learned[span[0]])) for span in spans)
    return "".join(text if is_learned else NOT_LEARNED.format(text) for text, is_learned in pieces)


def _one_line(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_one_line(inner)}" for key, inner in value.items()) or "none"
    return _printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _bars(bins: list[dict[str, int]]) -> list[str]:
    most = max(entry["documents"] for entry in bins)
    ranges = [f"{entry['shortest']:,} to {entry['longest']:,}" for entry in bins]
    width = max(len(text) for text in ranges)
    bars = (
        "█" * max(round(BAR_WIDTH * entry["documents"] / most), entry["documents"] > 0)
        for entry in bins
    )
    return [
        f"  {text:>{width}}  {bar} {entry['documents']:,}"
        for text, bar, entry in zip(ranges, bars, bins, strict=True)
    ]


def _printable(text: str) -> str:
    """Text from outside may hold control characters, which a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


COMMAND = Command(call=inspect, example="flatout inspect data/book")
