"""Export a trained model for transformers or as plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from flatout.cli.commands import CheckpointName, Command, RunName, TrustCode
from flatout.config.signature import Option, checked
from flatout.inference.export.destination import DEFAULT_SHARD_MIB, Export, Format, require_free
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded, writing
from flatout.storage.recognised import require_local
from flatout.training.run_dir.lookup import run_or_newest


@checked
def export(
    run: RunName = None,
    to: Annotated[
        Format,
        Option(
            "huggingface (a directory that transformers loads and llama.cpp converts) or "
            "safetensors (flatout's own names)."
        ),
    ] = "huggingface",
    out: Annotated[
        Path | str | None,
        Option("Directory to write (default: export-FORMAT in the run directory)."),
    ] = None,
    checkpoint: CheckpointName = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option("Convert the weights (default: the type of the checkpoint)."),
    ] = None,
    shard_mib: Annotated[
        int, Option("Size of the largest safetensors file, in MiB.", min=1)
    ] = DEFAULT_SHARD_MIB,
    overwrite: Annotated[bool, Option("Replace an earlier export in that directory.")] = False,
    trust_code: TrustCode = False,
    *,
    progress: Progress = SILENT,
) -> Export:
    """Export a trained model for transformers, or for any reader of safetensors.

    The directory has the weights, the configuration, the tokenizer, and a model card with the
    numbers that the run measured. A shape that no class of transformers has is exported with a
    file that wraps flatout's own model. Weights are read one file of the export at a time
    (--shard-mib), so the size of the model does not matter. The directory is complete or absent.

    Raises: CheckpointError when the run has no such checkpoint; OutputInUse when the directory has
            other files; ConfigError or DataError when the format cannot express the model.
    """
    require_local(out or "", "--out ")
    folder = run_or_newest(run, progress=progress)
    target = folder / f"export-{to}" if out is None else expanded(out)
    require_free(target, overwrite=overwrite)
    from flatout.inference.export.export import export_run
    from flatout.inference.export.source import open_source

    source = open_source(folder, checkpoint, dtype=dtype, trust_code=trust_code, progress=progress)
    with writing(target):
        return export_run(
            source, target, to, shard_mib=shard_mib, overwrite=overwrite, progress=progress
        )


COMMAND = Command(
    export,
    example="flatout export runs/demo --out demo-hf",
    writes_files=True,
)
