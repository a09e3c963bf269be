"""Checkpoints that cannot be listed, kept, deleted or read."""

import shutil

from case import Case, table
from cases_folders import replace_text, run_in_use

CASES = [
    *table("""
the checkpoints of a run that does not exist
    runs runs/firts
    no run directory runs/firts -> Did you mean runs/first?
a file instead of a run, for `runs`
    runs book.txt
    book.txt is a file, not a run directory -> flatout runs
a checkpoint instead of its run
    runs runs/first/checkpoints/step-2
    is a checkpoint of the run runs/first -> Name runs/first
a URL as the run of `runs`
    runs s3://bucket/run
    s3://bucket/run is a URL -> a local path
"""),
    Case(
        "no run with a checkpoint",
        "eval",
        ("No run under runs/ has a checkpoint",),
        ("flatout demo",),
        lambda w: shutil.rmtree(w.path / "runs/first/checkpoints"),
    ),
    Case(
        "deleting every checkpoint",
        "runs runs/first --keep 0",
        ("--keep", "0"),
        ("Delete the run",),
    ),
    Case(
        "deleting checkpoints of a run that trains",
        "runs runs/first --keep 1",
        ("runs/first is in use",),
        ("Wait until it finishes", "checkpoint.keep"),
        run_in_use,
    ),
    Case(
        "a run that is to keep no checkpoint",
        "train my.yaml checkpoint.keep=0",
        ("checkpoint.keep=0", "at least 1 or 'all'"),
        ("default, 2",),
    ),
    Case(
        "a checkpoint of a newer version of flatout",
        "generate runs/first",
        ("step-2 has format 9, of a newer version",),
        ("Install a newer flatout",),
        lambda w: replace_text(
            w,
            "runs/first/checkpoints/step-2/manifest.json",
            '"format_version": 2',
            '"format_version": 9',
        ),
    ),
]
