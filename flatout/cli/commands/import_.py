"""Import tokens that another tool wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command, EndOfText, Pattern
from flatout.cli.commands.prepare import Out, PrepareResult, result_of
from flatout.config.signature import Argument, Option, checked
from flatout.data.prepare.import_tokens import Documents, ImportOptions, import_tokens
from flatout.data.token_files import TokenType
from flatout.progress import SILENT, Progress
from flatout.storage.recognised import require_local


@checked
def import_chunks(
    tokens: Annotated[
        Path | str,
        Argument(
            "Token files, or their directory: train.bin and val.bin, .npy, llm.c, or "
            "chunk_NNNNNN.pt."
        ),
    ],
    out: Out,
    tokenizer: Annotated[
        str | Path | None,
        Option(
            "The tokenizer that made the tokens: a tokenizer.json, a .tiktoken file, a Hugging "
            "Face repository, byte, or ids:N for N ids without text (default: the one that a "
            "metadata.json names)."
        ),
    ] = None,
    pattern: Pattern = None,
    end_of_text: EndOfText = None,
    documents: Annotated[
        Documents, Option("Where documents end: at end-of-text tokens, or with each file.")
    ] = "end-of-text",
    split: Annotated[
        str | None,
        Option(
            "'tail F': use the fraction F at the end for validation; 'tail 0.1' by default, unless "
            "there are validation files."
        ),
    ] = None,
    val: Annotated[Path | str | None, Option("Token files for validation.")] = None,
    dtype: Annotated[
        TokenType | None,
        Option(
            "The type of tokens in files without a header, such as uint16 (default: as a "
            "metadata.json states it, or guessed). With it, a file of any name may be one."
        ),
    ] = None,
    field: Annotated[
        str | None,
        Option(
            "The key with the tokens in .pt files (default: input_ids, tokens or the only one)."
        ),
    ] = None,
    *,
    progress: Progress = SILENT,
) -> PrepareResult:
    """Import tokens that another tool wrote.

    Files and subdirectories with train or val in their names keep that split. What a metadata.json
    beside chunks states must be correct. No pickle is loaded.

    Raises: DataError naming the file that is missing or unusable.
    """
    require_local(out, "--out ")
    options = ImportOptions(
        tokenizer=None if tokenizer is None else str(tokenizer),
        pattern=pattern,
        end_of_text=end_of_text,
        documents=documents,
        split=split,
        val=Path(val) if val else None,
        dtype=dtype,
        field=field,
    )
    return result_of(import_tokens(Path(tokens), Path(out), options, progress=progress))


COMMAND = Command(
    call=import_chunks,
    example="flatout import old/nanogpt --out data/old --tokenizer tokenizer.json",
    writes_files=True,
)
