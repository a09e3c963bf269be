"""The ladder of `shakespeare-char` on this machine's CPU: the gain of each optimisation.

    python benchmarks/cpu.py --text shakespeare.txt --repeats 5

Prepares the text, runs `flatout bench shakespeare-char` on it, and writes
benchmarks/results/cpu.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

from main_job import RESULTS, flatout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="text file named by the dataset card `shakespeare`",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--minutes", type=float, default=40, help="time limit, which may reduce the repeats"
    )
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "bench"
        flatout(
            "prepare",
            "shakespeare",
            "--from",
            str(arguments.text),
            "--tokenizer",
            "char",
            "--out",
            str(data),
        )
        limits = ("--repeats", str(arguments.repeats), "--minutes", str(arguments.minutes))
        flatout("bench", "shakespeare-char", f"data.path={data}", "--out", str(out), *limits)
        written = (out / "table.md").read_text(encoding="utf-8")
        found = json.loads((out / "bench.json").read_text(encoding="utf-8"))
        found["config"]["data"]["path"] = None  # a temporary directory, as is the next
        found["path"] = "bench"
        (RESULTS / "cpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(out / "bench.svg", RESULTS / "cpu.svg")
    # the table is part of a section of the document
    table = re.sub(r"^#", "####", written, flags=re.MULTILINE)
    (RESULTS / "cpu.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
