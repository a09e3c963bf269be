"""Show what a prepared dataset contains."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from flatout.cli.commands import Command
from flatout.cli.recommended import recommend
from flatout.config.signature import Argument, Option, checked
from flatout.data.store.manifest import MANIFEST, TOKENIZER
from flatout.data.store.remote import open_dataset
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import kind_named
from flatout.data.tokenizers.hub import is_repository
from flatout.hardware.machine import probe
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored, sha256
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.remote.urls import is_url
from flatout.storage.streams import printable
from flatout.training.run_dir.layout import list_runs
from flatout.training.run_dir.lookup import RUNS

BAR_WIDTH = 40
DIGEST = re.compile("[0-9a-f]{64}")
"""A SHA-256, of which `summary` shows the beginning."""
MAIN = (
    *("recipe", "tokens", "targets", "documents", "size_bytes", "bytes_per_token", "tokenizer"),
    *("vocab_size", "train", "val", "median_document", "longest_document", "skipped"),
)
"""Facts that are shown without --all."""
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

    def summary(self) -> str:
        """Return what matters on one screen. With --all, every fact and all of the text."""
        facts: JsonObject = {fact.name: fact.value for fact in self.items}
        beginning, lengths = printable(facts.pop("beginning")).splitlines(), []
        if self.shows_all:
            lengths = facts.pop("document_lengths", [])
        else:
            facts = {name: facts[name] for name in MAIN if facts.get(name)}
            beginning = beginning[:SHOWN_LINES]
        recipe = facts.pop("recipe", None)
        lines = [f"Dataset {self.path}", ""]
        if isinstance(recipe, dict):  # the command on a separate line, to be copied
            rest = {name: value for name, value in recipe.items() if name != "command"}
            lines += [f"  {recipe['command']}", f"  {_one_line(rest)}", ""]
        elif recipe:
            facts["recipe"] = recipe
        width = max(map(len, facts))
        lines += [
            *(f"  {name:<{width}}  {_one_line(value)}" for name, value in facts.items()),
            *(["", "  tokens per document", *_bars(lengths)] if lengths else []),
        ]
        if beginning:
            is_masked = self.value("targets") is not None
            mask = f" (text in {MASKED.format('')} is excluded from the loss)" if is_masked else ""
            lines += ["", f"  first text{mask}", *(f"  | {line}" for line in beginning)]
        if not self.shows_all:
            lines += ["", "--all shows more."]
        return "\n".join(lines)


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

    It also shows special tokens, skipped rows, and a recipe for this machine. A dataset at a URL is
    downloaded, unless it is in the cache.

    Raises: DataError when it is not a complete dataset.
    """
    dataset = open_dataset(data, progress=progress)
    manifest = dataset.manifest
    with progress.task(f"Reading document lengths of {data}"):
        ends = [dataset.split(name).document_ends for name in manifest.splits]
        lengths = np.concatenate([np.diff(each, prepend=0) for each in ends])
    targets = _targets(dataset, progress)
    counts = manifest.tokens if targets is None else targets
    files = [entry.size_bytes for entry in manifest.files]
    files += [(dataset.path / n).stat().st_size for n in (manifest.tokenizer.file, MANIFEST)]
    written = datetime.fromtimestamp((dataset.path / MANIFEST).stat().st_mtime).astimezone()
    since = written.isoformat(timespec="seconds")
    is_copy = is_url(dataset.origin)  # a remote dataset may be older than its copy
    facts: JsonObject = {
        **({"copy": str(dataset.path), "copied": since} if is_copy else {"prepared": since}),
        "size_bytes": sum(files),
        "documents": manifest.documents,
        **({"cut_documents": manifest.cut_documents} if manifest.cut_documents else {}),
        "tokens": manifest.tokens,
        **({} if targets is None else {"targets": targets}),
        "text_bytes": manifest.text_bytes,  # of the text in the loss
        "bytes_per_token": round(manifest.text_bytes / counts, 3) if counts else None,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_sha256": manifest.tokenizer.digest,
        "source": manifest.source,
        "split_rule": manifest.split_rule,
        "format_version": manifest.format_version,
        **{
            name: entry.model_dump(include={"documents", "tokens", "text_bytes"})
            | {"shards": len(entry.shards), "loss_mask": bool(entry.masks)}
            for name, entry in manifest.splits.items()
        },
        **_length_facts(lengths),
        "special_tokens": dict(sorted(dataset.tokenizer.special_tokens().items())),
        "skipped": {entry.reason: entry.count for entry in manifest.skipped},
        "skipped_first": {rows.reason: list(map(str, rows.first)) for rows in manifest.skipped},
        "recipe": _recipe(dataset),
        "beginning": _first_text(dataset, tokens),
    }
    items = [Fact(name=name, value=value) for name, value in facts.items()]
    return InspectResult(path=dataset.origin, items=items, shows_all=all)


def _recipe(dataset: Dataset) -> JsonObject | str:
    """Return a recommended run for this machine."""
    found = recommend(
        dataset.origin,
        dataset.manifest.splits["train"].tokens,
        dataset.manifest.vocab_size,
        probe(),
        is_chat="chat_template" in dataset.manifest.source,
        init_from=_model_of(dataset),
    )
    if found:
        return {name: value for name, value in asdict(found).items() if value is not None}
    return "too little text to train on: use a few kilobytes or more"


def _model_of(dataset: Dataset) -> str | None:
    """Return the model whose tokenizer wrote the conversations of a dataset, None without one.

    It is a repository, the newest run with that tokenizer, or else MODEL.
    """
    made_with = dataset.manifest.source.get("tokenizer")
    if "chat_template" not in dataset.manifest.source or made_with is None:
        return None
    if kind_named(made_with) is not None:
        return None
    if is_repository(made_with):
        return f"hf:{made_with}"
    digest = dataset.manifest.tokenizer.digest
    runs = (path for path in reversed(list_runs(RUNS)) if (path / TOKENIZER).is_file())
    return next((str(run) for run in runs if sha256(run / TOKENIZER) == digest), "MODEL")


def _targets(dataset: Dataset, progress: Progress) -> int | None:
    """Return the number of tokens that count in the loss, None when all of them do."""
    splits = [dataset.split(name) for name in dataset.manifest.splits]
    if not any(split.has_mask for split in splits):
        return None
    what, found = f"Reading the mask of {dataset.origin}", 0
    with progress.task(what, total=dataset.manifest.tokens, unit="tokens") as task:
        for split in splits:
            for start in range(0, split.num_tokens, MASK_CHUNK):
                stop = min(start + MASK_CHUNK, split.num_tokens)
                learned = split.read_mask_range(start, stop).sum() if split.has_mask else None
                found += stop - start if learned is None else int(learned)
                task.advance(stop - start)
    return found


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


def _one_line(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        if isinstance(template := value.get("chat_template"), dict):  # its text has many lines
            value = value | {"chat_template": template.get("name")}
        shown = (f"{k}: {_one_line(inner)}" for k, inner in value.items() if inner is not None)
        return ", ".join(shown) or "none"
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return f"{value[:16]}..."
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


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


COMMAND = Command(call=inspect, example="flatout inspect data/book")
