"""Corpora for tests, opened with the options as keywords, and work items."""

from flatout.data.prepare.pack.work_items import ByHash, WorkItem
from flatout.data.prepare.request import inputs
from flatout.data.prepare.request.options import Options
from flatout.data.sources import ReadTask

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


def work_items(*parts, **changes):
    """Return one work item for each function that yields rows and its arguments."""
    fields = {"num_tasks": 1, "first": 0, "assignment": ByHash(0.3)} | changes
    return [
        WorkItem(number=number, read_tasks=(ReadTask(read, tuple(arguments), "x"),), **fields)
        for number, (read, *arguments) in enumerate(parts)
    ]
