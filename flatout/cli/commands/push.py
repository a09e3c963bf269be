"""Export a trained model and upload it to the Hugging Face hub."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import CheckpointName, Command, TrustCode
from flatout.cli.commands.export import Dtype, Format, ShardSize
from flatout.config.signature import Argument, Option, checked
from flatout.errors import ConfigError
from flatout.inference.export.destination import DEFAULT_SHARD_MIB, Export
from flatout.inference.export.packages import require_package
from flatout.progress import SILENT, Progress
from flatout.storage.files import writing_run
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import find_run

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@checked
def push(
    run: Annotated[str | Path, Argument("A run directory, or its name under runs/.")],
    repository: Annotated[str, Argument("The repository on the hub, ORG/NAME.")],
    to: Format = "huggingface",
    checkpoint: CheckpointName = None,
    dtype: Dtype = None,
    shard_mib: ShardSize = DEFAULT_SHARD_MIB,
    private: Annotated[bool, Option("Create the repository as a private one.")] = False,
    trust_code: TrustCode = False,
    *,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Export:
    """Export a trained model and upload it to the Hugging Face hub.

    The export is what `flatout export` writes, in one commit. It is made in the run directory and
    deleted afterwards. The token is that of `hf auth login`, or HF_TOKEN.

    Raises: CheckpointError when the run has no such checkpoint; ConfigError when the hub rejects
            the name or the token; RunFailed when it cannot be reached; MissingPackage.
    """
    folder = find_run(run)
    trusted_config(folder, trust_code=trust_code)
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"{repository!r} does not name a repository of the hub.",
            fix="Write ORG/NAME, with your user name or an organisation as ORG.",
        )
    require_package("huggingface_hub", "Uploading needs")
    from flatout.inference.export.export import export_run
    from flatout.inference.export.push import push_folder
    from flatout.inference.export.source import open_source

    began_s = time.perf_counter()
    source = open_source(folder, checkpoint, dtype=dtype, trust_code=trust_code, progress=progress)
    with writing_run(folder), tempfile.TemporaryDirectory(prefix="push-", dir=folder) as work:
        made = export_run(source, Path(work) / "export", to, shard_mib=shard_mib, progress=progress)
        url = push_folder(
            Path(made.path),
            repository,
            private=private,
            message=f"Step {source.step:,} of {folder.absolute().name}",
            endpoint=endpoint,
            progress=progress,
        )
    wall_s = round(time.perf_counter() - began_s, 2)
    uploaded = {"path": url, "url": url, "repository": repository, "wall_s": wall_s}
    return made.model_copy(update=uploaded)


COMMAND = Command(
    push,
    example="flatout push runs/demo my-name/demo --private",
    writes_files=True,
)
