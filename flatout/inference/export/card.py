"""The README.md of an export: what the model is, how to load it, and what was measured."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

from flatout.config.documents import dump_yaml
from flatout.inference.export.source import Source
from flatout.storage.json_io import JsonObject, finite_numbers
from flatout.training.run_dir import layout

PROJECT = "https://github.com/flatout-train/flatout"
NOT_MEASURED = "not measured"


def model_card(source: Source, usage: str, notes: list[str], *, library: str | None) -> str:
    """Return the card as Markdown, with the metadata that the Hugging Face hub reads.

    `usage` is a code block. `library` is the hub's name of the library that loads the model.
    """
    head: JsonObject = {"tags": ["flatout"], "pipeline_tag": "text-generation"}
    head |= {"library_name": library} if library else {}
    table = [f"| {name} | {value} |" for name, value in figures(source).items()]
    return "\n".join(
        [
            f"---\n{dump_yaml(head)}---\n",
            f"# {source.folder.absolute().name}\n",
            f"A language model trained with [flatout]({PROJECT}) {version()}.\n",
            f"{usage}\n",
            *([*(f"- {note}" for note in notes), ""] if notes else []),
            "| measured in the run | |\n|---|---|",
            *table,
            "",
        ]
    )


def figures(source: Source) -> dict[str, str]:
    """Return the numbers of the run that produced the weights, by name."""
    summary = _summary(source)
    start = _start(source)
    loss = validation_loss(source, summary)
    measured = finite_numbers(summary)
    rate, mfu, seconds = (measured.get(key) for key in ("tokens_per_s", "mfu", "elapsed_s"))
    tokens = _tokens(source)
    bits = measured.get("bits_per_byte") if source.step == summary.get("steps") else None
    found = {
        "parameters": f"{source.num_parameters:,}",
        "step": f"{source.step:,}",
        "tokens trained on": f"{tokens:,}" if tokens else NOT_MEASURED,
        "validation loss": f"{loss:.4f} nats per token" if loss is not None else NOT_MEASURED,
        "perplexity": f"{math.exp(min(loss, 700.0)):,.2f}" if loss is not None else NOT_MEASURED,
        "bits per byte": f"{bits:.4f}" if bits is not None else NOT_MEASURED,
        "tokens per second": f"{rate:,.0f}" if rate else NOT_MEASURED,
        "share of the peak FLOP/s": f"{100 * mfu:.1f}%" if mfu else NOT_MEASURED,
        "training time": f"{seconds / 3600:.2f} h" if seconds else NOT_MEASURED,
        "machine": str(start.get("machine", NOT_MEASURED)),
        "precision": source.config.train.precision,
    }
    data, environment = source.config.data, start.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    return found | {
        "dataset": ", ".join(Path(path).name for path in data.mix or [str(data.path)]),
        "tokenizer": f"{source.tokenizer.name}, {source.tokenizer.vocab_size:,} tokens",
        "sequence length": f"{data.seq_len:,}",
        "torch": str(environment.get("torch", NOT_MEASURED)),
    }


def validation_loss(source: Source, summary: JsonObject) -> float | None:
    """Return the validation loss at the step of the weights, or None if it was not measured.

    At the last step it is the loss on the whole validation split.
    """
    final = finite_numbers(summary).get("val_loss")
    if source.step == summary.get("steps") and final is not None:
        return final
    losses = [
        record["val/loss"]
        for record in layout.read_records(source.folder)
        if record["step"] == source.step and "val/loss" in record
    ]
    return losses[-1] if losses else None


def _tokens(source: Source) -> int | None:
    """Return how many tokens the model had seen at the step of the weights."""
    seen = [
        int(record["tokens"])
        for record in layout.read_records(source.folder)
        if record["step"] == source.step and "tokens" in record
    ]
    summary = _summary(source)
    if not seen and source.step == summary.get("steps"):
        seen = [int(finite_numbers(summary).get("tokens", 0))]
    return seen[-1] if seen else None


def _summary(source: Source) -> JsonObject:
    """Return the run's summary. Empty when the run has not finished."""
    return layout.read_summary(source.folder) or {}


def _start(source: Source) -> JsonObject:
    """Return the event of the run's last start. Empty when there is none."""
    starts = [event for event in layout.read_events(source.folder) if event["event"] == "start"]
    return starts[-1] if starts else {}


def version() -> str:
    """Return the version of flatout."""
    return str(import_module("flatout").__version__)
