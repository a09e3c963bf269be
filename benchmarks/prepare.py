"""Preparing text with flatout and other tools, and the cost of tokenising in the training loop.

    python benchmarks/prepare.py --rows prose.jsonl --ranks gpt2.tiktoken \\
        --vocabulary tokenizer.json --peers .venv/peers/bin/python

Makes a directory of at least 150 MB of JSONL from copies of the rows, and converts it to packed
tokens with every tool in benchmarks/prepare_ways.py, alternating: fresh processes, fresh
directories, 2 workers, timed from the start of Python to its end. `--peers` names the Python of an
environment with `datasets tiktoken datatrove litdata tokenizers`. Nothing is installed, and missing
packages are reported. A first pass, which fills the page cache, is dropped. Then a data loader
reads sequences of the result in one thread, with and without tokenising each sequence's text in the
step. Writes benchmarks/results/prepare.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from loader import plan_of
from measurement import facts, in_turns, markdown, parser, publish, spread, verdict
from measurement import ratios as ratios_of
from prepare_ways import NOT_INSTALLED, WAYS

from flatout.data.load.baseline import TokenisingReader
from flatout.data.load.batches import SequenceReader, SequenceSteps, ShardReader
from flatout.data.load.loader import DirectLoader
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import load_tokenizer

HERE = Path(__file__).parent
CORPUS_MB = 150
OURS, ALONE = "flatout", "flatout, tokenizers alone"
NANOGPT, LITDATA, DATATROVE = (
    "datasets.map, tiktoken, memmap",
    "litdata optimize, tiktoken",
    "datatrove, tokenizers",
)
TARGETS = [
    (OURS, NANOGPT, 5.0),
    (OURS, DATATROVE, 12.0),
    (OURS, LITDATA, 3.5),
    (ALONE, NANOGPT, 2.5),
]
"""Two tools, and how many times faster the first must be."""
TARGET_TOKENS_PER_S = 18e6
SEQ_LEN, ROWS = 1_024, 8
"""Shape of the step that is fed."""


def main() -> None:
    made = parser(__doc__, repeats=5, workers=2)
    made.add_argument(
        "--rows", type=Path, required=True, help='JSONL with a field "text", copied to 150 MB'
    )
    made.add_argument("--ranks", type=Path, required=True, help="gpt2.tiktoken")
    made.add_argument("--vocabulary", type=Path, required=True, help="it as tokenizer.json")
    made.add_argument(
        "--peers", default=sys.executable, help="Python of the environment with the other tools"
    )
    given = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given)
    found |= {**facts(), "workers": given.workers, "repeats": given.repeats}
    publish(given.out, "prepare", found, table(found))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return every result of every repeat; the tools alternate."""
    corpus = make_corpus(folder / "corpus", given.rows)
    missing: dict[str, str] = {}

    def once(way: str) -> dict[str, Any]:
        if way in missing:
            return {}
        row = run(way, corpus, folder / "out", given)
        if "missing" in row:
            missing[way] = row["missing"]
        return row

    rows = in_turns({way: partial(once, way) for way in WAYS}, given.repeats, warm_up=1)
    rows |= {way: [] for way in missing}
    run(OURS, corpus, folder / "out", given)
    return {
        "corpus_bytes": sum(file.stat().st_size for file in corpus.iterdir()),
        "copies": len(list(corpus.iterdir())),
        "rows": rows,
        "missing": missing,
        "loaders": loader_rates(
            folder / "out" / "data", given.vocabulary, given.ranks, given.repeats
        ),
    }


def make_corpus(folder: Path, rows: Path) -> Path:
    """Copy the rows to files in a directory until it is large enough, and return it."""
    folder.mkdir()
    for index in range(-(-CORPUS_MB * 1_000_000 // rows.stat().st_size)):
        shutil.copy(rows, folder / f"rows-{index:02d}.jsonl")
    return folder


def run(way: str, corpus: Path, out: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run a tool once; return the process's seconds, the tokens, and the peak memory."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    python = sys.executable if way in (OURS, ALONE) else given.peers
    words = [python, str(HERE / "prepare_ways.py"), way, str(corpus), str(out)]
    words += ["--workers", str(given.workers), "--ranks", str(given.ranks.resolve())]
    words += ["--vocabulary", str(given.vocabulary.resolve())]
    environment = os.environ | {"HF_HOME": str(out / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    began = time.perf_counter()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    peak: list[int] = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    out_text, err_text = process.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode == NOT_INSTALLED:
        return {"missing": err_text.splitlines()[-1]}
    if process.returncode:
        raise SystemExit(err_text)
    return {"seconds": seconds, "tokens": int(out_text.split()[-1]), "peak_mb": peak[0] / 1e6}


def _watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    """Track the peak of the summed memory of a process and its children, five times a second."""
    while process.poll() is None:
        total = 0
        with contextlib.suppress(psutil.Error):  # one of them has just ended
            top = psutil.Process(process.pid)
            for one in (top, *top.children(recursive=True)):
                total += one.memory_info().rss
        peak[0] = max(peak[0], total)
        time.sleep(0.2)


def loader_rates(data: Path, vocabulary: Path, ranks: Path, repeats: int) -> dict[str, list[float]]:
    """Return the tokens per second of one thread feeding steps.

    Each sequence is tokenised in the step, by two engines, or read from the shards.
    """
    plain, fast = load_tokenizer(vocabulary, end_of_text="<|endoftext|>"), load_tokenizer(ranks)
    readers: dict[str, tuple[int, Callable[[], SequenceReader]]] = {
        f"tokenised in the loop, {engine}": (
            steps,
            partial(TokenisingReader, tokenizer.with_engine(engine)),
        )
        for engine, steps, tokenizer in (
            ("tokenizers", 300, plain),
            ("gigatoken", 1_000, fast),
        )
    }
    readers["packed before"] = (50_000, ShardReader)
    plan = plan_of(SEQ_LEN, ROWS)

    def rate(steps: int, reader: Callable[[], SequenceReader]) -> float:
        loader = DirectLoader(SequenceSteps(Dataset.open(data).split("train"), plan, reader()))
        next(loader)
        began = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return steps * SEQ_LEN * ROWS / (time.perf_counter() - began)

    return in_turns({name: partial(rate, *one) for name, one in readers.items()}, repeats)


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown with their targets."""
    lines: list[tuple[object, ...]] = []
    for way, rows in found["rows"].items():
        if way in found["missing"]:
            lines.append((way, f"not installed ({found['missing'][way]})", "", "", ""))
        elif rows:
            seconds = spread((row["seconds"] for row in rows), 2)
            rate = spread((row["tokens"] / row["seconds"] / 1e6 for row in rows), 1)
            peak = f"{statistics.median(row['peak_mb'] for row in rows):,.0f}"
            lines.append((way, seconds, rate, peak, spread(ratios(found, OURS, way), 1)))
    tools = markdown(
        f"{found['corpus_bytes'] / 1e6:,.0f} MB of JSONL to packed tokens, GPT-2 vocabulary,"
        f" {found['workers']} workers | s | M tokens/s | peak MB | time relative to flatout",
        lines,
        *kept(found),
    )
    return f"{tools}\n" + markdown(
        "one thread feeds steps of 8 sequences of 1,024 | tokens/s",
        [(name, spread(rates)) for name, rates in found["loaders"].items()],
        f"{found['machine']}; {found['copies']} copies of one file of prose, in separate files;"
        f" whole processes including start-up, interleaved, {found['repeats']} repeats; median"
        " (smallest to largest), ratios within a repeat; the peak is the sum over all"
        " processes, shared pages counted in each; every tool wrote"
        f" {found['rows'][OURS][0]['tokens']:,} tokens; commit {found['commit']}; `python"
        " benchmarks/prepare.py`.",
    )


def ratios(found: dict[str, Any], way: str, other: str) -> list[float]:
    """Return the ratio of `other`'s time to `way`'s for each repeat."""
    return ratios_of(*([row["seconds"] for row in found["rows"][one]] for one in (other, way)))


def kept(found: dict[str, Any]) -> list[str]:
    """Return the verdict on each target; rejects a comparison of different tokens."""
    counts = {row["tokens"] for rows in found["rows"].values() for row in rows}
    if len(counts) > 1:
        raise SystemExit(f"The tools wrote different numbers of tokens: {counts}.")
    rate = statistics.median(row["tokens"] / row["seconds"] for row in found["rows"][OURS])
    lines = [
        f"- {OURS}: {rate / 1e6:.1f} M tokens/s; target: {TARGET_TOKENS_PER_S / 1e6:.0f}:"
        f" {verdict(rate >= TARGET_TOKENS_PER_S)}."
    ]
    for way, other, wanted in TARGETS:
        if found["rows"][way] and found["rows"][other]:
            times = ratios(found, way, other)
            lines.append(
                f"- {way} against {other}: {spread(times, 1)} times; target: {wanted:g}:"
                f" {verdict(statistics.median(times) >= wanted)}."
            )
    return lines


if __name__ == "__main__":
    main()
