"""Exports a checkpoint into a directory that is complete or absent."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Literal

from flatout.data.conversation.templates import CHAT_TEMPLATE
from flatout.display import amount
from flatout.errors import HardwareError
from flatout.inference.export import card
from flatout.inference.export.destination import (
    DEFAULT_SHARD_MIB,
    Export,
    require_free,
    whole_folder,
)
from flatout.inference.export.huggingface import (
    Written,
    own_config,
    own_tensors,
    write_huggingface,
    write_weights,
)
from flatout.inference.export.source import Source
from flatout.models.families.export_mark import write_mark
from flatout.progress import SILENT, Progress
from flatout.storage.files import copy_whole, folder_bytes, write_whole
from flatout.storage.json_io import write_json

Format = Literal["huggingface", "safetensors"]


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
            express the model or its tokenizer; HardwareError without enough disk; MissingPackage;
            OSError of the disk.
    """
    began_s = time.perf_counter()
    require_free(out, overwrite=overwrite)
    _require_disk(source, out)
    with whole_folder(out) as folder:
        written = _write(source, folder, to, shard_mib << 20, progress)
        made_from = {
            "to": to,
            "run": source.folder.absolute().name,
            "step": source.step,
            "flatout": card.version(),
            "model_class": written.model_class,
        }
        write_mark(folder, made_from)
        library = "transformers" if to == "huggingface" else None
        text = card.model_card(source, _usage(to, written), written.notes, library=library)
        write_whole(folder / "README.md", text)
        files = sum(path.is_file() for path in folder.iterdir())
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


def _write(source: Source, folder: Path, to: Format, max_bytes: int, progress: Progress) -> Written:
    template = source.template.text if source.template else None
    if to == "huggingface":
        return write_huggingface(source, folder, max_bytes, template, progress)
    write_json(folder / "config.json", own_config(source))
    source.tokenizer.save(folder / "tokenizer.json")
    if template is not None:
        copy_whole(source.folder / CHAT_TEMPLATE, folder / CHAT_TEMPLATE)
    write_weights(list(own_tensors(source)), folder, max_bytes, progress)
    return Written(None)


def _usage(to: Format, written: Written) -> str:
    if to == "safetensors":
        return (
            "The weights have flatout's names: `flatout train RECIPE train.init_from=DIR` "
            "starts from them."
        )
    trust = ", trust_remote_code=True" if written.needs_code else ""
    return (
        f"```python\nfrom transformers import AutoModelForCausalLM, {written.tokenizer_class}\n\n"
        f"tokenizer = {written.tokenizer_class}.from_pretrained(DIR)\n"
        f"model = AutoModelForCausalLM.from_pretrained(DIR{trust})\n```"
    )


def _require_disk(source: Source, out: Path) -> None:
    disk = out.absolute().parent
    while not disk.exists():
        disk = disk.parent
    needed = source.num_bytes
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise HardwareError(
            f"The export needs {amount(needed, 'bytes')}. The disk of {disk} has "
            f"{amount(free, 'bytes')} free.",
            fix="Free space there, choose --out DIR on a different disk, or add --dtype bfloat16.",
        )
