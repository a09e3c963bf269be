"""The corpus: everything that `prepare SOURCE...` and `--val` name, opened and checked."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from flatout.cache import default_cache
from flatout.conversation.rendering import Renderer
from flatout.data.prepare.request.cards import load_card
from flatout.data.prepare.request.names import STANDARD_INPUT, SourceReader, source_tasks
from flatout.data.prepare.request.options import Options
from flatout.errors import DataError, in_shell
from flatout.progress import SILENT, Progress
from flatout.registry import DATASETS
from flatout.sources import ReadTask
from flatout.sources.files import files_of, first_changed, has_rows, shared_file, skipped_files_in
from flatout.sources.local import matches


@dataclass(frozen=True)
class Corpus:
    """The opened sources, in the order in which they were named."""

    names: tuple[str, ...]
    read_tasks: tuple[ReadTask, ...]
    split: str | None = None
    """The requested split rule, or the card's when the corpus is one card."""
    validation: Corpus | None = None
    """Separate validation text; with it, no split rule applies."""
    mtime_digest: str = ""
    """Digest of the sizes and mtimes of local files, validation included; empty without any.

    Standard input and cards' files are excluded: checksums identify them.
    """

    @property
    def all_read_tasks(self) -> tuple[ReadTask, ...]:
        """All read tasks in the order they are packed: those of validation text come first."""
        return (*(self.validation.read_tasks if self.validation else ()), *self.read_tasks)

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the documents change."""
        marks = "\n".join(task.fingerprint for task in self.read_tasks if task.fingerprint)
        return hashlib.sha256(marks.encode("utf-8", errors="surrogateescape")).hexdigest()


def open_corpus(
    names: Sequence[str],
    options: Options | None = None,
    *,
    from_file: str | None = None,
    cache: Path | None = None,
    spool: Path | None = None,
    progress: Progress = SILENT,
    chat: Renderer | None = None,
) -> Corpus:
    """Return the corpus of the named sources and of `options.val`.

    A card's file is downloaded unless it is in the cache or given as `from_file`. The split rule
    and validation files of a card apply when it is the only source and the options name none.
    Standard input, `-`, is kept in the directory `spool` until the process ends.

    Raises: DataError when a name is unknown, or nothing is found there.
    """
    options = options or Options()
    cards = [name for name in names if name in DATASETS.names()]
    _check_names(names, options.val, cards, from_file)
    reader = SourceReader(options, from_file, cache or default_cache(), spool, progress, chat)
    train = [reader.card(name) if name in cards else reader.text(name) for name in names]
    val = [reader.text(name) for name in options.val]
    opened = list(zip([*names, *options.val], [*train, *val], strict=True))
    tasks = [task for _, found in opened for task in found]
    _check_fields(tasks, " ".join([*names, *options.val]), options)
    for name, found in opened:
        _report_passed_over(name, found, progress)
    card = load_card(cards[0]) if len(names) == len(cards) == 1 else None
    validation = Corpus(options.val, tuple(chain(*val))) if val else None
    if validation is None and card is not None and card.validation and options.split is None:
        url = card.url_of(card.validation)
        found = source_tasks(card.source, {"path": url}, {**card.fields, **reader.fields})
        validation = Corpus((url,), tuple(found))
    return Corpus(
        tuple(names),
        tuple(chain(*train)),
        options.split or (card.split if card else None),
        validation,
        _mtime_digest(found for name, found in opened if name not in (*cards, STANDARD_INPUT)),
    )


def _check_names(
    names: Sequence[str], val: Sequence[str], cards: Sequence[str], from_file: str | None
) -> None:
    """Check the combination of sources before any is opened.

    Raises: DataError.
    """
    if not names:
        raise DataError(
            "No source is named.",
            fix="Name a file, a directory, a source or a dataset, for example `flatout prepare "
            "book.txt --out data/book`.",
        )
    if [*names, *val].count(STANDARD_INPUT) > 1:
        raise DataError(
            "Standard input is named twice.", fix="Name `-` once: it can be read only once."
        )
    if from_file is not None and len(cards) != 1:
        raise DataError(
            "--from replaces the download of one dataset card.",
            fix=f"Name one of {', '.join(DATASETS.names())}, or name the file as the source.",
        )
    for name in val:
        if name in DATASETS.names():
            raise DataError(
                f"--val {name} is a dataset card, not text.",
                fix=f"Name the card as the source, or write ./{name} for the local file or "
                "directory.",
            )


def _check_fields(tasks: Sequence[ReadTask], names: str, options: Options) -> None:
    """Check that there are rows if a field is named, and that each --include pattern has a match.

    Raises: DataError.
    """
    if options.text_field is not None and tasks and not any(map(has_rows, tasks)):
        raise DataError(
            f"{names} has no rows, so it has no field {options.text_field!r}.",
            fix="Leave --text-field out, or rename files that hold a JSON object per line to "
            "end in .jsonl.",
        )
    for pattern in options.include:
        if not any(matches(path, pattern) for task in tasks for path in files_of(task)):
            raise DataError(
                f"--include {pattern!r} matches no file.",
                fix=f"Quote the pattern, and check it with `find FOLDER -name {in_shell(pattern)}`"
                "; it applies to directories that are named as sources.",
            )


def _report_passed_over(name: str, tasks: Sequence[ReadTask], progress: Progress) -> None:
    """Report the files of a directory that are not read, before the work starts."""
    counts: Counter[str] = Counter()
    for left_out in skipped_files_in(tasks):
        counts[left_out.reason.removesuffix(" file")] += left_out.count
    if counts:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        suffix = next((kind for kind in counts if kind.startswith(".")), "")
        progress.say(
            f"{name}: {counts.total():,} of its files are not read: {kinds}. "
            f"--include '*{suffix}' reads them too."
        )


def _mtime_digest(opened: Iterable[Sequence[ReadTask]]) -> str:
    """Return a digest of the sizes and mtimes of the local files that are read; empty if none."""
    found = {
        file.path: file.stat
        for tasks in opened
        for task in tasks
        for file in task.files
        if file.stat is not None
    }
    marks = "".join(f"{stat.st_size} {stat.st_mtime_ns}\n" for stat in found.values())
    return hashlib.sha256(marks.encode()).hexdigest() if marks else ""


def require_unchanged(corpus: Corpus) -> None:
    """Check that the files read have not changed since they were listed.

    Raises: DataError naming the first that changed; Unreachable.
    """
    changed = first_changed(corpus.all_read_tasks)
    if changed is not None:
        raise DataError(
            f"{changed} was changed or deleted while it was being prepared: the dataset would mix "
            "two versions of the text.",
            fix="Run the same command again once nothing writes to that file, or prepare a copy "
            "of it.",
        )


def in_both_splits(corpus: Corpus) -> str | None:
    """Return the first validation file or source that is also training text; None if there is none.

    Local files are compared by content, whatever their names; remote files by URL; other sources
    by fingerprint.
    """
    if corpus.validation is None:
        return None
    validation = corpus.validation.read_tasks
    known = {task.fingerprint for task in corpus.read_tasks if not files_of(task)} - {""}
    again = (task.fingerprint for task in validation if task.fingerprint in known)
    return shared_file(corpus.read_tasks, validation) or next(again, None)
