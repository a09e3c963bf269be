"""Import tokens that another pipeline wrote: a directory of chunk_NNNNNN.pt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.commands import Argument, Command, EndOfText, Option, Pattern, Result
from flatout.data.prepare.import_chunks import Documents, find_chunks
from flatout.data.prepare.import_chunks import import_chunks as write_chunks
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.recognised import require_local

Chunks = Annotated[
    Path | str, Argument("Directory of chunk_NNNNNN.pt files, one 1-D int64 tensor each.")
]
Out = Annotated[
    Path | str,
    Option("Directory to write; it must be absent, empty, or contain this same dataset."),
]
TokenizerName = Annotated[
    str | Path,
    Option(
        "The tokenizer that made the tokens: a tokenizer.json, a .tiktoken file, a Hugging Face "
        "repository, or byte."
    ),
]
DocumentEnds = Annotated[
    Documents, Option("Where documents end: at an end-of-text token, or at the end of each chunk.")
]
Split = Annotated[str, Option("'tail F': use the fraction F at the end for validation.")]


class ImportResult(Result):
    """The dataset that `import` wrote."""

    path: str
    """The dataset directory."""
    chunks: int
    """Files that were read."""
    documents: int
    """Documents of both splits."""
    tokens: int
    """Tokens of both splits."""
    seconds: float
    """Wall time of this call."""
    tokens_per_s: float
    """Tokens divided by that time; 0 when the dataset already existed."""

    def summary(self) -> str:
        """Return the path, the time and the counts."""
        verb = f"written in {self.seconds:.1f} s" if self.tokens_per_s else "already exists"
        counts = f"{self.tokens:,} tokens of {self.documents:,} documents"
        return f"{self.path}  {verb}\n  {counts}, from {self.chunks:,} chunks"


def import_chunks(
    chunks: Chunks,
    out: Out,
    tokenizer: TokenizerName,
    pattern: Pattern = None,
    end_of_text: EndOfText = None,
    documents: DocumentEnds = "end-of-text",
    split: Split = "tail 0.1",
    *,
    progress: Progress = SILENT,
) -> ImportResult:
    """Import tokens that another pipeline wrote: a directory of chunk_NNNNNN.pt files.

    A metadata.json beside them is copied into the manifest; the numbers of chunks and tokens and
    the vocabulary size that it states must be correct.

    Raises: DataError naming the chunk that is missing or unusable.
    """
    out = expanded(out)
    made = write_chunks(
        expanded(chunks),
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
        chunks=made.manifest.source["chunks"],
        documents=made.manifest.documents,
        tokens=made.manifest.tokens,
        seconds=round(made.seconds, 3),
        tokens_per_s=made.tokens_per_s,
    )


def check(chunks: Path, out: Path) -> None:
    """Check that no chunk is missing.

    Raises: DataError naming the missing ones.
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
