"""Tokenise text once: pack it into a data set folder that training reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from flatout.cache import CACHE
from flatout.commands import Command, Result
from flatout.data.prepare.pipeline import (
    Options,
    Prepared,
    PreparedPart,
    engine_named,
    join_parts,
    prepare_dataset,
    prepare_part,
)
from flatout.data.prepare.upload import Uploaded, prepare_upload
from flatout.data.prepare.work_dir import PartOf
from flatout.data.store.manifest import Manifest
from flatout.errors import UsageError
from flatout.progress import SILENT, Progress
from flatout.transfer.urls import is_url


class PrepareResult(Result):
    """What `prepare` wrote."""

    path: Path | str
    """The data set folder, or the address."""
    documents: int
    """Documents of both splits; one that was cut where validation begins is one."""
    tokens: int
    """Tokens of both splits, an end-of-text token a document included."""
    bytes: int
    """UTF-8 bytes of the text."""
    seconds: float
    """Wall time of this call, the tokenizer's training included."""
    tokens_per_s: float
    """Tokens divided by that time; 0 when the folder was there already."""
    skipped: int
    """Rows and files left out; the folder's manifest says which and why."""
    skipped_by_reason: dict[str, int]
    """The same by reason, such as `.png file`, a file of a folder that is not read."""
    closing: str = Field(exclude=True, repr=False)
    """The summary, as text."""

    def summary(self) -> str:
        """Return the closing lines for a person."""
        return self.closing


Places = list[str] | list[Path] | str | Path
"""One or several, as text or as paths; a command line gives a list of text."""


def prepare(
    sources: Annotated[
        Places,
        typer.Argument(
            help="Files, folders, quoted globs, addresses (s3://, https://), - (standard input), sources, data sets."
        ),
    ],
    out: Annotated[
        str | Path,
        typer.Option(
            help="Folder or address (s3://, gs://) to write; it must be empty, absent, or hold this very data set."
        ),
    ],
    tokenizer: Annotated[
        str | Path,
        typer.Option(
            help="char, byte, train:N, a tokenizer.json or .tiktoken file, or a Hugging Face repository, ORG/NAME[@REVISION]."
        ),
    ] = "train:4096",
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
    text_field: Annotated[
        str | None,
        typer.Option(help="Field or column of a row that holds the text; text when not given."),
    ] = None,
    include: Annotated[
        Places | None,
        typer.Option(
            help="Files that folders give besides text and rows, such as '*.py'; may be repeated."
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(help="Encoding of the files that are not UTF-8, such as CP1252 or UTF-16."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="'tail F' or 'hash F': which fraction is for validation, from the end or by document."
        ),
    ] = None,
    val: Annotated[
        Places | None,
        typer.Option(
            help="Text for validation alone, whole whatever the limits; may be given several times."
        ),
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option(help="Take at most so many documents of SOURCE.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Take at most so many bytes of text of SOURCE; the last document is cut there."
        ),
    ] = None,
    on_bad_row: Annotated[
        Literal["raise", "skip"], typer.Option(help="What to do with a row that cannot be used.")
    ] = "raise",
    max_bad_rows: Annotated[
        int | None,
        typer.Option(
            help="With --on-bad-row skip, stop at more than so many; 1%, at least 100, by default."
        ),
    ] = None,
    mask_field: Annotated[
        str | None,
        typer.Option(
            help="Field of a row that is packed before the text and not learned from, such as prompt."
        ),
    ] = None,
    duplicates: Annotated[
        Literal["keep", "drop"],
        typer.Option(help="Keep a document that was there before, or drop it, counted."),
    ] = "keep",
    from_file: Annotated[
        str | Path | None,
        typer.Option("--from", help="The data set's file, where there is no network."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; one a usable core when not given.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="I/N: do only this part of the work, beside others in the same folder, as in a Slurm array; then --join."
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option(
            "--join", help="Join what was done with --part; it says which parts are missing."
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="local, or ray: a Ray cluster whose nodes all see the folder of --out and the sources by the same names."
        ),
    ] = "local",
    *,
    cache: Path | str = CACHE,
    progress: Progress = SILENT,
) -> PrepareResult:
    """Tokenise text once and pack it into a folder, here or at an address, that training reads."""
    names, apart = _names(sources), (_names(val or ()), _names(include or ()), encoding)
    options = Options(
        str(tokenizer),
        pattern,
        end_of_text,
        text_field,
        split,
        max_documents,
        max_bytes,
        on_bad_row,
        max_bad_rows,
        mask_field,
        duplicates,
        *apart,
    )
    given: dict[str, Any] = {
        "from_file": None if from_file is None else str(from_file),
        "cache": Path(cache),
        "progress": progress,
    }
    _check_ways(part, join, engine, str(out))
    if is_url(str(out)):
        return _result(
            prepare_upload(
                names, str(out), options, workers=workers, engine=engine_named(engine), **given
            )
        )
    if part is not None:
        share = PartOf.parse(part)
        return _part_result(
            prepare_part(names, Path(out), options, share, workers=workers, **given), share
        )
    if join:
        return _result(join_parts(names, Path(out), options, **given))
    return _result(
        prepare_dataset(
            names, Path(out), options, workers=workers, engine=engine_named(engine), **given
        )
    )


def _names(given: Sequence[str | Path] | str | Path) -> tuple[str, ...]:
    return tuple(str(name) for name in ([given] if isinstance(given, str | Path) else given))


def _check_ways(part: str | None, join: bool, engine: str, out: str) -> None:
    """Refuse two ways to share the work out at once, and parts that share no folder."""
    if part is not None and join:
        raise UsageError(
            "--part and --join are two steps.",
            fix="Do every part with --part I/N, then --join once, without --part.",
        )
    if engine != "local" and (part is not None or join):
        other = "--join" if part is None else "--part"
        raise UsageError(
            f"--engine {engine} does the whole work; {other} is another way to share it out.",
            fix="Leave one of the two out.",
        )
    if is_url(out) and (part is not None or join):
        raise UsageError(
            f"{'--join' if part is None else '--part'} works in a folder that all parts share, and {out} is an address.",
            fix="Name a shared folder with --out, or leave out --part and --join.",
        )


def _result(made: Prepared | Uploaded) -> PrepareResult:
    manifest = made.manifest
    return PrepareResult(
        path=made.path,
        documents=manifest.documents,
        tokens=manifest.tokens,
        bytes=manifest.text_bytes,
        seconds=round(made.seconds, 3),
        tokens_per_s=0.0 if made.existed else round(manifest.tokens / made.seconds, 1),
        skipped=sum(entry.count for entry in manifest.skipped),
        skipped_by_reason={entry.reason: entry.count for entry in manifest.skipped},
        closing=_closing(made.path, manifest, made.seconds, made.existed),
    )


def _part_result(made: PreparedPart, part: PartOf) -> PrepareResult:
    """Return what one part holds; the folder comes with --join."""
    tokens = sum(record.tokens for record in made.records)
    skipped: Counter[str] = Counter()
    for entry in chain.from_iterable(record.skipped for record in made.records):
        skipped[entry.reason] += entry.count
    left = (
        f"{made.left:,} are left to other parts"
        if made.left
        else "all parts are done: join them with --join"
    )
    return PrepareResult(
        path=made.path,
        documents=sum(record.documents for record in made.records),
        tokens=tokens,
        bytes=sum(record.text_bytes for record in made.records),
        seconds=round(made.seconds, 3),
        tokens_per_s=round(tokens / made.seconds, 1),
        skipped=skipped.total(),
        skipped_by_reason=dict(skipped),
        closing=f"{made.path}  part {part.index}/{part.count} done in {made.seconds:.1f} s: {len(made.records):,} ranges; {left}",
    )


def _closing(path: Path | str, manifest: Manifest, seconds: float, existed: bool) -> str:
    verb = "was there already" if existed else f"written in {seconds:.1f} s"
    lines = [
        f"{path}  {verb}",
        f"  {manifest.tokens:,} tokens of {_documents(manifest)}, {manifest.text_bytes / 1e6:,.2f} MB of text",
        f"  tokenizer {manifest.tokenizer.name}, vocabulary {manifest.vocab_size:,}; split by {manifest.split_rule}: "
        + ", ".join(f"{name} {split.tokens:,}" for name, split in manifest.splits.items()),
    ]
    lines += [
        f"  left out: {entry.count:,} {_counted(entry.reason, entry.count)}{f' (first: {entry.first[0]})' if entry.first else ''}"
        for entry in manifest.skipped
    ]
    return "\n".join(lines)


def _counted(reason: str, count: int) -> str:
    """Return a reason in the plural where it names the kind of what was left out, such as `.py
    file`.
    """
    return reason if count == 1 else re.sub(r"^(\S+ )?(file|document)\b", r"\g<0>s", reason)


def _documents(manifest: Manifest) -> str:
    count = f"{manifest.documents:,} document{'' if manifest.documents == 1 else 's'}"
    return (
        f"{count} ({'its' if manifest.documents == 1 else 'of one, the'} end is for validation)"
        if manifest.cut_documents
        else count
    )


COMMAND = Command(
    call=prepare, example="flatout prepare book.txt --out data/book", writes_files=True
)
