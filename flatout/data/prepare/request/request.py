"""A request to prepare a dataset: its text and options, opened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from flatout.cache import CACHE
from flatout.data.prepare.request.destination import refuse_mount
from flatout.data.prepare.request.identity import describe
from flatout.data.prepare.request.inputs import Corpus, in_both_splits, open_corpus
from flatout.data.prepare.request.options import Options
from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.sources.encodings import codec_of


class Access(TypedDict, total=False):
    """Arguments that do not shape the dataset: how sources are accessed."""

    from_file: str | None
    """A local copy of the dataset card's file, used instead of downloading it."""
    cache: Path
    progress: Progress


@dataclass(frozen=True)
class Request:
    """An opened corpus, and the options to prepare it with."""

    corpus: Corpus
    options: Options
    source: dict[str, Any]
    """The description of both in the manifest."""
    cache: Path
    progress: Progress

    @property
    def names(self) -> str:
        """The sources, as named in messages."""
        return " ".join(self.corpus.names)


def open_request(
    sources: Sequence[str], out: Path, options: Options, **access: Unpack[Access]
) -> Request:
    """Return the request to prepare some sources.

    Raises: DataError for invalid options and an unusable `out`, before anything is read, and for
            sources that cannot be opened.
    """
    options.check()
    options = replace(options, encoding=codec_of(options.encoding))
    refuse_mount(out)
    corpus = open_corpus(sources, options, spool=out.resolve().parent, **access)
    shared = in_both_splits(corpus) if options.duplicates == "keep" else None
    if shared is not None:
        raise DataError(
            f"{shared} is both training and validation text: validating on training text measures "
            "nothing.",
            fix="Leave it out of one of them, or add --duplicates drop to remove validation "
            "documents from the training text.",
        )
    return Request(
        corpus,
        options,
        describe(corpus, options),
        access.get("cache", CACHE),
        access.get("progress", SILENT),
    )
