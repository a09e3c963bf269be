"""Import tokens that another pipeline wrote: a folder of chunk_NNNNNN.pt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.commands import Command, Result
from flatout.data.prepare.import_chunks import Documents, find_chunks
from flatout.data.prepare.import_chunks import import_chunks as write_chunks
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local


class ImportResult(Result):
    """What `import` wrote."""

    path: str
    """The data set folder."""
    chunks: int
    """Files that were read."""
    documents: int
    """Documents of both splits."""
    tokens: int
    """Tokens of both splits."""
    seconds: float
    """Wall time of this call."""
    tokens_per_s: float
    """Tokens divided by that time; 0 when the folder was there already."""

    def summary(self) -> str:
        """Return the closing lines for a person."""
        verb = f"written in {self.seconds:.1f} s" if self.tokens_per_s else "was there already"
        return f"{self.path}  {verb}\n  {self.tokens:,} tokens of {self.documents:,} documents, from {self.chunks:,} chunks"


def import_chunks(
    chunks: Annotated[
        Path | str,
        typer.Argument(help="Folder of chunk_NNNNNN.pt files, one 1-D int64 tensor each."),
    ],
    out: Annotated[
        Path | str,
        typer.Option(help="Folder to write; it must be empty, absent, or hold this very data set."),
    ],
    tokenizer: Annotated[
        str | Path,
        typer.Option(
            help="The tokenizer that made the tokens: a tokenizer.json, a .tiktoken file, a Hugging Face repository, or byte."
        ),
    ],
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Regular expression that splits text, for a .tiktoken file that is not a known one."
        ),
    ] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="End-of-text token of a tokenizer.json, when it is not a usual one."),
    ] = None,
    documents: Annotated[
        Documents,
        typer.Option(help="What ends a document: an end-of-text token, or each chunk's end."),
    ] = "end-of-text",
    split: Annotated[
        str, typer.Option(help="'tail F': which fraction, from the end, is for validation.")
    ] = "tail 0.1",
    *,
    progress: Progress = SILENT,
) -> ImportResult:
    """Import tokens that another pipeline wrote: a folder of chunk_NNNNNN.pt files.

    A metadata.json beside them is kept in the manifest; where it states chunks, tokens or a
    vocabulary size, these must be right.

    Raises: DataError naming the chunk that is missing or cannot be used.
    """
    chunks, out = expanded(chunks), expanded(out)
    made = write_chunks(
        chunks,
        out,
        tokenizer=str(tokenizer),
        pattern=pattern,
        end_of_text=end_of_text,
        documents=documents,
        split=split,
        progress=progress,
    )
    return ImportResult(
        path=str(out),
        chunks=made.chunks,
        documents=made.manifest.documents,
        tokens=made.manifest.tokens,
        seconds=round(made.seconds, 3),
        tokens_per_s=0.0 if made.existed else round(made.manifest.tokens / made.seconds, 1),
    )


def check(chunks: Path, out: Path) -> None:
    """Do nothing when all chunks are there.

    Raises: DataError with those that are not.
    """
    require_local(out, "--out ")
    find_chunks(expanded(chunks))


COMMAND = Command(
    call=import_chunks,
    example="flatout import old/chunks --out data/old --tokenizer tokenizer.json",
    check=check,
    needs_torch=True,
    writes_files=True,
)
