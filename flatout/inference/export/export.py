"""Exports a checkpoint into a directory that is complete or absent."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path

from flatout.config.documents import dump_yaml
from flatout.data.conversation.templates import CHAT_TEMPLATE
from flatout.inference.export.destination import (
    DEFAULT_SHARD_MIB,
    Export,
    Format,
    require_free,
)
from flatout.inference.export.huggingface import (
    Written,
    own_config,
    own_names,
    planned,
    write_huggingface,
)
from flatout.inference.export.shards import write_shards
from flatout.inference.export.source import Source
from flatout.models.families.export_mark import CARD, write_mark
from flatout.progress import SILENT, Progress
from flatout.storage.files import copy_whole, folder_bytes, write_whole
from flatout.storage.json_io import JsonObject, finite_numbers, write_json
from flatout.storage.whole import replacing
from flatout.training.checkpoint.catalog import read_info
from flatout.training.run_dir.runlog import RunLog


def export_run(
    source: Source,
    out: Path,
    to: Format,
    *,
    shard_mib: int = DEFAULT_SHARD_MIB,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Export:
    """Write a checkpoint to the directory `out` in a format.

    Raises: OutputInUse when `out` has other files; ConfigError or DataError when the format cannot
            express the model or its tokenizer; OSError of the disk.
    """
    began_s = time.perf_counter()
    require_free(out, overwrite=overwrite)
    version = str(import_module("flatout").__version__)
    with replacing(out) as folder:
        if to == "huggingface":
            written = write_huggingface(source, folder, shard_mib << 20, progress)
        else:
            written = _write_safetensors(source, folder, shard_mib << 20, progress)
        made_from = {
            "to": to,
            "run": source.folder.absolute().name,
            "step": source.step,
            "flatout": version,
            "model_class": written.model_class,
        }
        write_whole(folder / CARD, _model_card(source, written, version))
        files = write_mark(folder, made_from)
    return Export(
        path=str(out),
        format=to,
        run=str(source.folder),
        checkpoint=str(source.checkpoint),
        model_class=written.model_class,
        needs_code=written.needs_code,
        files=files,
        bytes=folder_bytes(out),
        wall_s=round(time.perf_counter() - began_s, 2),
        notes=written.notes,
    )


def _write_safetensors(source: Source, folder: Path, max_bytes: int, progress: Progress) -> Written:
    write_json(folder / "config.json", own_config(source))
    source.tokenizer.save(folder / "tokenizer.json")
    if source.template is not None:
        copy_whole(source.folder / CHAT_TEMPLATE, folder / CHAT_TEMPLATE)
    write_shards(folder, list(planned(source, own_names(source))), max_bytes, progress)
    return Written(None)


def _model_card(source: Source, written: Written, version: str) -> str:
    """Return the README.md: how to load the model, and what was measured at its step."""
    head: JsonObject = {"tags": ["flatout"], "pipeline_tag": "text-generation"}
    usage = (
        "The weights have flatout's names: `flatout train RECIPE train.init_from=DIR` starts from "
        "them."
    )
    if written.model_class:
        head["library_name"] = "transformers"
        trust = ", trust_remote_code=True" if written.needs_code else ""
        usage = (
            f"```python\nfrom transformers import AutoModelForCausalLM, {written.tokenizer_class}"
            f"\n\ntokenizer = {written.tokenizer_class}.from_pretrained(DIR)\n"
            f"model = AutoModelForCausalLM.from_pretrained(DIR{trust})\n```"
        )
    info, summary = read_info(source.checkpoint), RunLog(source.folder).summary or {}
    loss = info.val_loss if info else None
    if summary.get("steps") == source.step:  # evaluated on the whole validation split
        loss = finite_numbers(summary).get("val_loss", loss)
    data = source.config.data
    names = ", ".join(Path(path).name for path in data.mix or [data.path or ""])
    tokens = f" and {info.tokens:,} tokens" if info else ""
    facts = {
        "parameters": f"{source.num_parameters:,}",
        "trained on": f"{names}, {source.step:,} steps{tokens}",
        "validation loss": "not measured" if loss is None else f"{loss:.4f} nats per token",
        "licence": "not stated",
    }
    return "\n".join(
        [
            f"---\n{dump_yaml(head)}---\n",
            f"# {source.folder.absolute().name}\n",
            f"A language model trained with flatout {version}.\n",
            f"{usage}\n",
            *([*(f"- {note}" for note in written.notes), ""] if written.notes else []),
            "| | |\n|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
        ]
    )
