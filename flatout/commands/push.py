"""Export a trained model and upload it to the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

from flatout.commands import Argument, CheckpointName, Command, Option, TrustCode
from flatout.commands.export import DEFAULT_SHARD_MIB, Dtype, Format, ShardSize
from flatout.errors import ConfigError
from flatout.files import writing_run
from flatout.json_io import Result
from flatout.progress import SILENT, Progress, readable_size
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import find_run

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


class PushResult(Result):
    """A model on the hub."""

    repository: str
    """ORG/NAME."""
    url: str
    """The commit."""
    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint that was uploaded."""
    model_class: str | None
    """The class of transformers, or the family of llama.cpp; null for safetensors."""
    needs_code: bool
    """Whether transformers needs trust_remote_code=True: the class is in a file of the export."""
    bytes: int
    """Size of the files."""
    wall_s: float
    """Seconds that it took."""
    notes: list[str]
    """What to know about the export."""

    def summary(self) -> str:
        """Return the commit, the size, and what to know."""
        head = f"{self.url}  ({readable_size(self.bytes)}, {self.wall_s:.1f} s)"
        return "\n".join([head, *self.notes])


def push(
    run: Annotated[str | Path, Argument("A run directory, or its name under runs/.")],
    repository: Annotated[str, Argument("The repository on the hub, ORG/NAME.")],
    to: Format = "huggingface",
    checkpoint: CheckpointName = "best",
    dtype: Dtype = None,
    shard_mib: ShardSize = DEFAULT_SHARD_MIB,
    private: Annotated[bool, Option("Create the repository as a private one.")] = False,
    trust_code: TrustCode = False,
    *,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> PushResult:
    """Export a trained model and upload it to the Hugging Face hub.

    The export is what `flatout export` writes, in one commit; it is made in the run directory and
    deleted afterwards. The token is that of `hf auth login`, or HF_TOKEN.

    Raises: CheckpointError when the run has no such checkpoint; ConfigError when the hub refuses
            the name or the token; RunFailed when it cannot be reached; MissingPackage.
    """
    from flatout.inference.export.export import export_run
    from flatout.inference.export.push import push_folder
    from flatout.inference.export.source import open_source

    began_s = time.perf_counter()
    check(run, repository, trust_code)
    folder = find_run(run)
    source = open_source(folder, checkpoint, dtype=dtype, trust_code=trust_code, progress=progress)
    with writing_run(folder), tempfile.TemporaryDirectory(prefix="push-", dir=folder) as work:
        made = export_run(source, Path(work) / "export", to, shard_mib=shard_mib, progress=progress)
        url = push_folder(
            made.path,
            repository,
            private=private,
            message=f"Step {source.step:,} of {folder.absolute().name}",
            endpoint=endpoint,
            progress=progress,
        )
    return PushResult(
        repository=repository,
        url=url,
        run=str(folder),
        checkpoint=str(source.checkpoint),
        model_class=made.written.model_class,
        needs_code=made.written.needs_code,
        bytes=made.num_bytes,
        wall_s=round(time.perf_counter() - began_s, 2),
        notes=made.written.notes,
    )


def check(run: str | Path, repository: str, trust_code: bool = False) -> None:
    """Check the run, the name of the repository, and that the hub's package is installed.

    Raises: CheckpointError with the nearest run; ConfigError; MissingPackage; UntrustedCode.
    """
    from flatout.inference.export.packages import require_package

    trusted_config(find_run(run), trust_code=trust_code)
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"{repository!r} does not name a repository of the hub.",
            fix="Write ORG/NAME, with your user name or an organisation as ORG.",
        )
    require_package("huggingface_hub", "Uploading needs")


COMMAND = Command(
    push,
    example="flatout push runs/demo my-name/demo --private",
    check=check,
    needs_torch=True,
    writes_files=True,
)
