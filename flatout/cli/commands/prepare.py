"""Tokenise text once, and pack it into a dataset for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flatout.cli.commands import Command, EndOfText, Pattern
from flatout.config.schema import load_config
from flatout.config.signature import Argument, Option, checked, one_of, texts
from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pipeline import (
    Options,
    Prepared,
    engine_named,
    prepare_dataset,
)
from flatout.data.prepare.plan.work_dir import WorkPart
from flatout.data.store.manifest import Manifest
from flatout.display import Display, amount
from flatout.errors import UsageError
from flatout.progress import SILENT, Progress, counted
from flatout.storage.json_io import Result
from flatout.storage.recognised import require_local
from flatout.storage.streams import shortened

Paths = list[str] | list[Path] | str | Path
"""One or several, as strings or paths. The command line passes a list of strings."""
Sources = Annotated[
    Paths,
    Argument(
        "Files, directories, quoted globs, URLs (s3://, https://), - (standard input), sources, "
        "datasets."
    ),
]
Out = Annotated[
    str | Path,
    Option("Directory to write. It must be absent, empty, or contain this same dataset."),
]
TokenizerName = Annotated[
    str | Path | None,
    Option(
        "char, byte, train:N, a tokenizer.json or .tiktoken file, a Hugging Face repository, "
        "ORG/NAME[@REVISION], or ids:N for numbers (default: train:4096)."
    ),
]
ForRecipe = Annotated[
    str | Path | None, Option("Use the tokenizer that this recipe names (data.tokenizer).")
]
TextField = Annotated[
    str | None, Option("Field or column of a row that contains the text (default: 'text').")
]
Include = Annotated[
    Paths | None,
    Option(
        "Files to read from directories in addition to text and rows, such as '*.py' (repeatable)."
    ),
]
Split = Annotated[
    str | None,
    Option("'tail F' or 'hash F': the fraction used for validation, from the end or by document."),
]
Val = Annotated[
    Paths | None, Option("Text for validation only, exempt from the limits (repeatable).")
]
MaxBytes = Annotated[
    int | None,
    Option("Take at most this many bytes of text. The last document is cut there.", min=1),
]
MaxBadRows = Annotated[
    int | None,
    Option("With --on-bad-row skip, fail above this many (default: 1%, but at least 100).", min=0),
]
MaskField = Annotated[
    str | None,
    Option("Field of a row that precedes the text and is excluded from the loss, such as prompt."),
]
Chat = Annotated[
    str | None,
    Option(
        "Rows are chat data in the form of OpenAI or ShareGPT, and only the assistant's turns "
        "count in the loss. The chat template: auto (the tokenizer's own), chatml, plain, or a "
        "Jinja file.",
        "--chat",
        "--chat-template",
    ),
]
FromFile = Annotated[
    str | Path | None,
    Option("The dataset's downloaded file, for a machine without network.", "--from"),
]
Part = Annotated[
    str | None,
    Option(
        "I/N: do only this part of the work, along with other processes that share the directory, "
        "as in a Slurm array. Then use --join."
    ),
]
Join = Annotated[bool, Option("Join the parts made with --part. Reports missing ones.")]


Cache = Annotated[
    Path | str | None,
    Option("Directory for downloads. FLATOUT_CACHE or ~/.cache/flatout by default."),
]


PARTS_DONE = "all parts are done. Join them with --join"


class PrepareResult(Result):
    """The dataset that `prepare` wrote."""

    path: Path | str
    """The dataset directory."""
    documents: int
    """Documents of both splits. One that is cut where validation starts counts once."""
    tokens: int
    """Tokens of both splits, including one end-of-text token per document."""
    bytes: int
    """UTF-8 bytes of the text."""
    seconds: float
    """Wall time of this call, including the training of a tokenizer."""
    tokens_per_s: float
    """Tokens divided by that time, 0 when the dataset already existed."""
    skipped: int
    """Omitted rows and files. The manifest lists which and why."""
    skipped_by_reason: dict[str, int]
    """The same by reason, such as `.png file` for a file that is not read from directories."""
    shown: Display = Field(exclude=True, repr=False)
    """What a person sees of it."""

    def display(self) -> Display:
        """Return the path and the counts."""
        return self.shown


@checked
def prepare(
    sources: Sources,
    out: Out,
    tokenizer: TokenizerName = None,
    pattern: Pattern = None,
    end_of_text: EndOfText = None,
    text_field: TextField = None,
    include: Include = None,
    split: Split = None,
    val: Val = None,
    max_documents: Annotated[
        int | None, Option("Take at most this many documents from SOURCES.", min=1)
    ] = None,
    max_bytes: MaxBytes = None,
    on_bad_row: Annotated[
        Literal["raise", "skip"], Option("What to do with an unusable row.")
    ] = "raise",
    max_bad_rows: MaxBadRows = None,
    mask_field: MaskField = None,
    from_file: FromFile = None,
    workers: Annotated[
        int | None, Option("Processes (default: one per usable core).", min=1)
    ] = None,
    part: Part = None,
    join: Join = False,
    engine: Annotated[
        str,
        Option(
            "local, or ray: a Ray cluster whose nodes all see --out and the sources at the same "
            "paths."
        ),
    ] = "local",
    chat: Chat = None,
    cache: Cache = None,
    recipe: ForRecipe = None,
    *,
    progress: Progress = SILENT,
) -> PrepareResult:
    """Tokenise text once and pack it into a dataset that training reads."""
    one_of({"--tokenizer": tokenizer, "--recipe": recipe})
    one_of({f"--engine {engine}": engine != "local", "--part": part, "--join": join})
    if tokenizer is None:
        tokenizer = "train:4096" if recipe is None else load_config(recipe).data.tokenizer
        if tokenizer is None:
            raise UsageError(
                f"The recipe {recipe} names no tokenizer.",
                fix="Name one with --tokenizer, or set data.tokenizer in the recipe.",
            )
    # fmt: off
    options = Options(
        str(tokenizer), pattern, end_of_text, text_field, split, max_documents, max_bytes,
        on_bad_row, max_bad_rows, mask_field, texts(val), texts(include), chat,
    )
    # fmt: on
    require_local(cache or "", "--cache ")
    made = prepare_dataset(
        texts(sources),
        Path(out),
        options,
        part=None if part is None else WorkPart.parse(part),
        join=join,
        workers=workers,
        engine=engine_named(engine),
        from_file=None if from_file is None else str(from_file),
        cache=None if cache is None else Path(cache),
        progress=progress,
    )
    if made.manifest is None:
        left = f"{made.left:,} are left for other parts" if made.left else PARTS_DONE
        head = f"part {part} done in {made.seconds:.1f} s"
        shown = Display(f"{made.path}  {head}: {len(made.records):,} ranges; {left}")
        return _counted(made, made.records, shown)
    return result_of(made)


def result_of(made: Prepared) -> PrepareResult:
    """Return the result of writing a dataset, or of finding it."""
    manifest = made.manifest
    assert manifest is not None, "a part is shown otherwise"
    # Of masked text, a manifest has the size of what counts alone, and of imported ids none
    has_size = manifest.text_bytes and not manifest.is_masked
    size = f", {amount(manifest.text_bytes, 'bytes')} of text" if has_size else ""
    splits = ", ".join(f"{name} {split.tokens:,}" for name, split in manifest.splits.items())
    values = [
        ("tokens", f"{manifest.tokens:,} of {counted(manifest.documents, 'document')}{size}"),
        ("tokenizer", f"{manifest.tokenizer.name}, vocabulary {manifest.vocab_size:,}"),
        ("split", f"{manifest.split_rule}: {splits}"),
    ]
    if "chunks" in manifest.source:
        values.append(("from", counted(manifest.source["chunks"], "file")))
    omitted = [
        f"{entry.count:,} x {entry.reason}" + f" (first: {entry.first[0]})" * bool(entry.first)
        for entry in sorted(manifest.skipped, key=lambda entry: -entry.count)
    ]
    if omitted:
        values.append(("omitted", shortened(omitted, between="\n")))
    done = "already exists" if made.existed else f"written in {made.seconds:.1f} s"
    shown = Display(f"{made.path}  {done}", values)
    return _counted(made, [manifest], shown)


def _counted(
    made: Prepared, parts: Sequence[Manifest | RangeRecord], shown: Display
) -> PrepareResult:
    """Return the result with the sums of a dataset, or of the ranges of a part."""
    skipped, tokens = Counter[str](), sum(part.tokens for part in parts)
    for part in parts:
        skipped.update({entry.reason: entry.count for entry in part.skipped})
    return PrepareResult(
        path=made.path,
        documents=sum(part.documents for part in parts),
        tokens=tokens,
        bytes=sum(part.text_bytes for part in parts),
        seconds=round(made.seconds, 3),
        tokens_per_s=0.0 if made.existed else round(tokens / made.seconds, 1),
        skipped=skipped.total(),
        skipped_by_reason=dict(skipped),
        shown=shown,
    )


COMMAND = Command(
    call=prepare,
    example="flatout prepare book.txt --out data/book",
    writes_files=True,
)
