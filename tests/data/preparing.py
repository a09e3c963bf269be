"""Test program: prepare a file with small ranges, and perhaps a limit on file size.

python preparing.py SOURCE OUT WORKERS [LARGEST_FILE]
"""

import resource
import sys
from pathlib import Path

from flatout.data.prepare import pipeline
from flatout.data.prepare.plan import make
from flatout.data.sources import files
from flatout.errors import FlatoutError

files.PART_BYTES = 4_000
make.range_bytes = lambda _: 8_000


def main(source: str, out: str, workers: str, largest: str = "") -> str:
    """Return an error message, or an empty string."""
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
    options = pipeline.Options(tokenizer="byte", split="hash 0.1")
    try:
        pipeline.prepare_dataset([source], Path(out), options, workers=int(workers))
    except FlatoutError as error:
        notes = getattr(error, "__notes__", [])  # the command line prints them too
        return "\n".join([*notes, f"{type(error).__name__}: {error}"])
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
