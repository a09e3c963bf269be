"""Corpora for tests, opened with the options as keywords."""

from flatout.data.prepare.request import inputs
from flatout.data.prepare.request.options import Options

TEXT = "To be, or not to be.\n" * 10


def open_corpus(names, *, val=(), include=(), **options):
    """Return the corpus of some sources."""
    access = {
        key: options.pop(key)
        for key in ("from_file", "cache", "spool", "progress")
        if key in options
    }
    shaping = Options(val=tuple(val), include=tuple(include), **options)
    return inputs.open_corpus(names, shaping, **access)


def texts(corpus):
    """Return the texts of a corpus."""
    return [row.text for task in corpus.read_tasks for row in task.rows()]
