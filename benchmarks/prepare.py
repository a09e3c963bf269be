"""Preparing text with flatout and other tools, and the cost of tokenising in the training loop.

    python benchmarks/prepare.py --rows prose.jsonl --ranks gpt2.tiktoken \\
        --vocabulary tokenizer.json --peers .venv/peers/bin/python

Makes a directory of at least 150 MB of JSONL from copies of the rows, and converts it to packed
tokens with every tool in benchmarks/prepare_ways.py, alternating: fresh processes, fresh
directories, 2 workers, timed from the start of Python to its end. `--peers` names the Python of an
environment with `datasets tiktoken datatrove litdata tokenizers`; nothing is installed, and missing
packages are reported. A first pass, which fills the page cache, is dropped. Then a feed reads
sequences of the result in one thread, with and without tokenising each sequence's text in the step.
Writes benchmarks/results/prepare.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from loader import plan
from main_job import RESULTS, commit, spread
from prepare_ways import NOT_INSTALLED, WAYS

from flatout.data.load.baseline import TokenisingReader
from flatout.data.load.batches import SequenceReader, SequenceSteps, ShardReader
from flatout.data.load.feed import DirectFeed
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import load_tokenizer
from flatout.hardware import probe

HERE = Path(__file__).parent
CORPUS_MB = 150
OURS, ALONE = "flatout", "flatout, tiktoken alone"
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=Path,
        required=True,
        help='JSONL with a field "text"; copied until there is enough',
    )
    parser.add_argument("--ranks", type=Path, required=True, help="gpt2.tiktoken")
    parser.add_argument(
        "--vocabulary", type=Path, required=True, help="the same vocabulary as tokenizer.json"
    )
    parser.add_argument(
        "--peers", default=sys.executable, help="Python of the environment with the other tools"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments)
    found |= {
        "machine": probe().describe(),
        "commit": commit(),
        "workers": arguments.workers,
        "repeats": arguments.repeats,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "prepare.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "prepare.md").write_text(table(found))
    print(table(found))


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    """Return every figure of every repeat; the tools alternate."""
    corpus = make_corpus(folder / "corpus", arguments.rows)
    rows: dict[str, list[dict]] = {way: [] for way in WAYS}
    missing: dict[str, str] = {}
    for repeat in range(-1, arguments.repeats):
        for way in WAYS:
            if way not in missing:
                row = run(way, corpus, folder / "out", arguments)
                if "missing" in row:
                    missing[way] = row["missing"]
                elif repeat >= 0:
                    rows[way].append(row)
                print(f"repeat {repeat + 1}: {way}: {row}", file=sys.stderr)
    run(OURS, corpus, folder / "out", arguments)
    feeds = feed_rates(
        folder / "out" / "data", arguments.vocabulary, arguments.ranks, arguments.repeats
    )
    size = sum(file.stat().st_size for file in corpus.iterdir())
    return {
        "corpus_bytes": size,
        "copies": len(list(corpus.iterdir())),
        "rows": rows,
        "missing": missing,
        "feeds": feeds,
    }


def make_corpus(folder: Path, rows: Path) -> Path:
    """Copy the rows to files in a directory until it is large enough, and return it."""
    folder.mkdir()
    for index in range(-(-CORPUS_MB * 1_000_000 // rows.stat().st_size)):
        shutil.copy(rows, folder / f"rows-{index:02d}.jsonl")
    return folder


def run(way: str, corpus: Path, out: Path, arguments: argparse.Namespace) -> dict:
    """Run a tool once; return the process's seconds, the tokens, and the peak memory."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    python = sys.executable if way in (OURS, ALONE) else arguments.peers
    words = [
        python,
        str(HERE / "prepare_ways.py"),
        way,
        str(corpus),
        str(out),
        "--workers",
        str(arguments.workers),
    ]
    words += [
        "--ranks",
        str(arguments.ranks.resolve()),
        "--vocabulary",
        str(arguments.vocabulary.resolve()),
    ]
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
        with contextlib.suppress(psutil.Error):  # the process has just ended
            top = psutil.Process(process.pid)
            peak[0] = max(
                peak[0], sum(_resident(one) for one in [top, *top.children(recursive=True)])
            )
        time.sleep(0.2)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def feed_rates(data: Path, vocabulary: Path, ranks: Path, repeats: int) -> dict[str, list[float]]:
    """Return the tokens per second of one thread feeding steps.

    Each sequence is tokenised in the step, by three engines, or read from the shards.
    """
    plain, fast = load_tokenizer(vocabulary, end_of_text="<|endoftext|>"), load_tokenizer(ranks)
    readers: dict[str, tuple[int, Callable[[], SequenceReader]]] = {
        "tokenised in the loop, tokenizers": (
            300,
            lambda: TokenisingReader(plain.with_engine("tokenizers")),
        ),
        "tokenised in the loop, tiktoken": (
            300,
            lambda: TokenisingReader(fast.with_engine("tiktoken")),
        ),
        "tokenised in the loop, gigatoken": (
            1_000,
            lambda: TokenisingReader(fast.with_engine("gigatoken")),
        ),
        "packed before": (50_000, ShardReader),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeats):
        for name, (steps, reader) in readers.items():
            feed = DirectFeed(
                SequenceSteps(Dataset.open(data).split("train"), plan(SEQ_LEN, ROWS), reader())
            )
            feed.prime(steps + 1)
            next(feed)
            began = time.perf_counter()
            for _ in range(steps):
                next(feed)
            rates[name].append(steps * SEQ_LEN * ROWS / (time.perf_counter() - began))
    return rates


def table(found: dict) -> str:
    """Return the figures as Markdown with their targets."""
    lines = [
        (
            f"| {found['corpus_bytes'] / 1e6:,.0f} MB of JSONL to packed tokens, GPT-2 vocabulary,"
            f" {found['workers']} workers | s | M tokens/s | peak MB | time relative to flatout |"
        ),
        "|---|---|---|---|---|",
    ]
    for way, rows in found["rows"].items():
        if way in found["missing"]:
            lines.append(f"| {way} | not installed ({found['missing'][way]}) | | | |")
        elif rows:
            rate = [row["tokens"] / row["seconds"] / 1e6 for row in rows]
            seconds = spread([row["seconds"] for row in rows], 2)
            peak = statistics.median(row["peak_mb"] for row in rows)
            lines.append(
                f"| {way} | {seconds} | {spread(rate, 1)} | {peak:,.0f} |"
                f" {spread(ratios(found, OURS, way), 1)} |"
            )
    lines += [
        "",
        *kept(found),
        "",
        "| one thread feeds steps of 8 sequences of 1,024 | tokens/s |",
        "|---|---|",
    ]
    lines += [f"| {name} | {spread(rates)} |" for name, rates in found["feeds"].items()]
    lines += [
        "",
        (
            f"{found['machine']}; {found['copies']} copies of one file of prose, in separate files;"
            f" whole processes including start-up, interleaved, {found['repeats']} repeats; median"
            " (smallest to largest), ratios within a repeat; the peak is the sum over all"
            " processes, shared pages counted in each; every tool wrote"
            f" {found['rows'][OURS][0]['tokens']:,} tokens; commit {found['commit']}; `python"
            " benchmarks/prepare.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


def ratios(found: dict, way: str, other: str) -> list[float]:
    """Return the ratio of `other`'s time to `way`'s for each repeat."""
    return [
        slow["seconds"] / fast["seconds"]
        for fast, slow in zip(found["rows"][way], found["rows"][other], strict=True)
    ]


def kept(found: dict) -> list[str]:
    """Return the verdict on each target; refuses a comparison of different tokens."""
    counts = {row["tokens"] for rows in found["rows"].values() for row in rows}
    if len(counts) > 1:
        raise SystemExit(f"The tools wrote different numbers of tokens: {counts}.")
    rate = statistics.median(row["tokens"] / row["seconds"] for row in found["rows"][OURS])
    lines = [
        f"- {OURS}: {rate / 1e6:.1f} M tokens/s; target: {TARGET_TOKENS_PER_S / 1e6:.0f}:"
        f" {_verdict(rate >= TARGET_TOKENS_PER_S)}."
    ]
    for way, other, wanted in TARGETS:
        if found["rows"][way] and found["rows"][other]:
            times = ratios(found, way, other)
            lines.append(
                f"- {way} against {other}: {spread(times, 1)} times; target: {wanted:g}:"
                f" {_verdict(statistics.median(times) >= wanted)}."
            )
    return lines


def _verdict(is_kept: bool) -> str:
    return "kept" if is_kept else "**missed**"


if __name__ == "__main__":
    main()
