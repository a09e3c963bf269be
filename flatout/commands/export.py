"""Export a trained model for transformers, llama.cpp, or any reader of safetensors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

from flatout.commands import CheckpointName, Command, Option, RunName, TrustCode
from flatout.files import expanded, writing
from flatout.json_io import Result
from flatout.progress import SILENT, Progress, readable_size
from flatout.recognised import require_local
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import run_or_newest

DEFAULT_SHARD_MIB = 4096

Format = Annotated[
    Literal["huggingface", "safetensors", "gguf"],
    Option(
        "huggingface (a directory that transformers loads), safetensors (flatout's own names) or "
        "gguf (one file for llama.cpp)."
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Option("Convert the weights; by default they keep the type of the checkpoint."),
]
ShardSize = Annotated[int, Option("Size of the largest safetensors file, in MiB.", min=1)]


class ExportResult(Result):
    """An exported model."""

    path: str
    """The directory."""
    format: str
    """huggingface, safetensors or gguf."""
    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint that was exported."""
    model_class: str | None
    """The class of transformers, or the family of llama.cpp; null for safetensors."""
    needs_code: bool
    """Whether transformers needs trust_remote_code=True: the class is in a file of the export."""
    files: int
    """Files in the directory."""
    bytes: int
    """Their size."""
    wall_s: float
    """Seconds that it took."""
    notes: list[str]
    """What to know about the export."""

    def summary(self) -> str:
        """Return the path, the class that loads it, and what to know."""
        kind = f", {self.model_class}" if self.model_class else ""
        size = f"{readable_size(self.bytes)} in {self.files} files"
        head = f"{self.path}  ({self.format}{kind}; {size}, {self.wall_s:.1f} s)"
        return "\n".join([head, *self.notes])


def export(
    run: RunName = None,
    to: Format = "huggingface",
    out: Annotated[
        Path | str | None,
        Option("Directory to write; by default export-FORMAT in the run directory."),
    ] = None,
    checkpoint: CheckpointName = "best",
    dtype: Dtype = None,
    shard_mib: ShardSize = DEFAULT_SHARD_MIB,
    overwrite: Annotated[bool, Option("Replace an earlier export in that directory.")] = False,
    trust_code: TrustCode = False,
    *,
    progress: Progress = SILENT,
) -> ExportResult:
    """Export a trained model for transformers, llama.cpp, or any reader of safetensors.

    The directory has the weights, the configuration, the tokenizer, and a model card with the
    figures that the run measured. A shape that no class of transformers has is exported with a
    file that wraps flatout's own model. Weights are read one file of the export at a time (--shard-mib),
    so the size of the model does not matter. The directory is complete or absent.

    Raises: CheckpointError when the run has no such checkpoint; OutputInUse when the directory has
            other files; ConfigError or DataError when the format cannot express the model.
    """
    from flatout.inference.export.export import export_run
    from flatout.inference.export.source import open_source

    began_s = time.perf_counter()
    folder = run_or_newest(run, progress=progress)
    source = open_source(folder, checkpoint, dtype=dtype, trust_code=trust_code, progress=progress)
    target = destination(folder, to, out)
    with writing(target):
        made = export_run(
            source, target, to, shard_mib=shard_mib, overwrite=overwrite, progress=progress
        )
    return ExportResult(
        path=str(target),
        format=to,
        run=str(folder),
        checkpoint=str(source.checkpoint),
        model_class=made.written.model_class,
        needs_code=made.written.needs_code,
        files=made.files,
        bytes=made.num_bytes,
        wall_s=round(time.perf_counter() - began_s, 2),
        notes=made.written.notes,
    )


def destination(folder: Path, to: str, out: Path | str | None) -> Path:
    """Return the directory of the export.

    Raises: UsageError when `out` is a URL.
    """
    if out is None:
        return folder / f"export-{to}"
    require_local(out, "--out ")
    return expanded(out)


def check(
    run: RunName, to: str, out: Path | None, overwrite: bool, trust_code: bool = False
) -> None:
    """Check that the run exists, and that the directory is free.

    Raises: CheckpointError with the nearest run; OutputInUse; MissingPackage; UntrustedCode.
    """
    from flatout.inference.export.destination import require_free
    from flatout.inference.export.packages import require_package

    folder = run_or_newest(run)
    trusted_config(folder, trust_code=trust_code)
    require_free(destination(folder, to, out), overwrite=overwrite)
    if to == "gguf":
        require_package("gguf", "GGUF files are written with")


COMMAND = Command(
    export,
    example="flatout export runs/demo --to huggingface --out demo-hf",
    check=check,
    needs_torch=True,
    writes_files=True,
)
