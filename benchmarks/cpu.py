"""The ablation of `shakespeare-char` on this machine's CPU: the gain of each optimisation.

    python benchmarks/cpu.py --text shakespeare.txt --repeats 5

Prepares the text, runs `flatout bench shakespeare-char` on it, and writes
benchmarks/results/cpu.json and .md. `--minutes` limits the time, which may reduce the
repeats.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from measurement import flatout, prepared, publish, text_parser

from flatout.storage.json_io import read_json


def main() -> None:
    given = text_parser(__doc__, repeats=5, minutes=40.0).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, out = prepared(Path(folder) / "data", given.text), Path(folder) / "bench"
        limits = ("--repeats", given.repeats, "--minutes", given.minutes)
        flatout("bench", "shakespeare-char", f"data.path={data}", "--out", out, *limits)
        found = read_json(out / "bench.json")
        found["config"]["data"]["path"] = None  # a temporary directory, as is the next
        found["path"] = "bench"
        found["notes"] = [note for note in found["notes"] if folder not in note]
        # the table is part of a section of the document
        table = re.sub(r"^#", "###", (out / "table.md").read_text("utf-8"), flags=re.MULTILINE)
        lines = [line for line in table.splitlines() if folder not in line]
        publish(given.out, "cpu", found, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
