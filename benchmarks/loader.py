"""Reading sequences from packed shards in random order: throughput, first batch and seeking.

    OMP_NUM_THREADS=1 python benchmarks/loader.py --repeats 5

Writes a dataset of 100 shards of random tokens to a temporary directory (or takes --data DIR),
reads it once to fill the page cache, and reads sequences of 1,024 and of 32,768 tokens, 262,144
tokens per batch, in the caller's thread. Each repeat reopens the dataset. The time to the first
batch starts there and includes sizes, the tokenizer, and the checksums of the blocks it touches.
Seeking moves to the last of 10^9 sequences and reads one. Writes benchmarks/results/loader.json and
.md; results are medians over the repeats.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import facts, in_turns, markdown, parser, publish, spread

from flatout.data.load.batches import BatchPlan, SequenceSteps, ShardReader
from flatout.data.load.loader import DirectLoader
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.store.order import shuffled
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import make_tokenizer

SHARDS = 100
BATCH_TOKENS = 262_144
SEQ_LENS = (1_024, 32_768)
NUM_SEQUENCES = 10**9
TARGETS = {"tokens_per_s": 2e9, "first_s": 0.1, "seek_s": 1e-3}
"""Lower bound of the rate; upper bounds of the times."""


def main() -> None:
    made = parser(__doc__, repeats=5, steps=400, shard_mib=4)
    made.add_argument("--data", type=Path, help="dataset to read instead of a generated one")
    given = made.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = given.data or make_data(Path(folder) / "data", given.shard_mib << 20)
        found = measure(data, given.repeats, given.steps) | facts()
    publish(given.out, "loader", found, table(found))


def make_data(
    out: Path, shard_bytes: int, shards: int = SHARDS, *, tokenizer_name: str = "byte"
) -> Path:
    """Write shards of random bytes as tokens, and return their path."""
    tokenizer, rng = make_tokenizer(tokenizer_name, lambda _: iter([])), np.random.default_rng(0)
    with DatasetWriter(out, tokenizer, shard_tokens=shard_bytes // 2) as writer:
        for _ in range(shards):
            tokens = rng.integers(0, 256, shard_bytes // 2, dtype=np.uint16)
            writer.append("train", tokens, [len(tokens)], text_bytes=len(tokens))
        writer.append("val", np.zeros(2, np.uint16), [2], text_bytes=2)
        writer.finish(source={"kind": "random"}, split_rule="named")
    return out


def measure(
    data: Path,
    repeats: int,
    steps: int,
    seq_lens: tuple[int, ...] = SEQ_LENS,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[str, Any]:
    """Return every result of every repeat."""
    manifest = Dataset.open(data).manifest
    ways = {str(length): partial(read, data, length, batch_tokens, steps) for length in seq_lens}
    return {
        "repeats": repeats,
        "steps": steps,
        "batch_tokens": batch_tokens,
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "rows": in_turns(ways, repeats, warm_up=1),  # which fills the page cache
        "seek_s": [seek() for _ in range(max(repeats, 1) * 5)],
    }


def read(data: Path, seq_len: int, batch_tokens: int, steps: int) -> dict[str, float]:
    """Open the dataset, read until each block is checked, then time the rest."""
    began = time.perf_counter()
    plan = plan_of(seq_len, batch_tokens // seq_len)
    loader = DirectLoader(SequenceSteps(Dataset.open(data).split("train"), plan, ShardReader()))
    next(loader)
    first_s = time.perf_counter() - began
    for _ in range(steps // 4):
        next(loader)
    began = time.perf_counter()
    for _ in range(steps):
        next(loader)
    tokens_per_s = steps * batch_tokens / (time.perf_counter() - began)
    return {"first_s": first_s, "tokens_per_s": tokens_per_s}


def plan_of(seq_len: int, rows: int) -> BatchPlan:
    """Return the batch plan of one process that reads `rows` sequences per step."""
    alone = {"accumulate": 1, "dp_rank": 0, "dp_size": 1, "seed": 0, "document_mask": False}
    return BatchPlan(seq_len=seq_len, rows_per_device=rows, prefetch=1, device="cpu", **alone)


class ManySequences:
    """A split of 10^9 sequences that has an order but no tokens."""

    name, num_tokens, has_mask, dtype = "train", NUM_SEQUENCES, False, np.dtype(np.uint16)

    def num_sequences(self, seq_len: int) -> int:
        """Return the number of sequences."""
        return NUM_SEQUENCES

    def sequences_at(self, positions: Any, seq_len: int, *, seed: int) -> Any:
        """Return the sequence at each position."""
        return shuffled(positions, NUM_SEQUENCES, seed=seed)

    def read_sequences(self, indices: Any, seq_len: int, out: Any) -> None:
        """Write zeros."""
        out[:] = 0


def seek() -> float:
    """Return the seconds to seek to the last of 10^9 sequences and read a batch of one."""
    loader = DirectLoader(SequenceSteps(ManySequences(), plan_of(1_024, 1), ShardReader()))
    next(loader)
    began = time.perf_counter()
    loader.seek(NUM_SEQUENCES - 1)
    next(loader)
    return time.perf_counter() - began


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown with their targets."""
    rows = []
    for seq_len, read_rows in found["rows"].items():
        rates = spread(row["tokens_per_s"] / 1e6 for row in read_rows)
        firsts = spread(1e3 * row["first_s"] for row in read_rows)
        rows.append((f"sequences of {int(seq_len):,}", f"**{rates}**", firsts))
    wanted = (f"{TARGETS['tokens_per_s'] / 1e6:,.0f}", f"{1e3 * TARGETS['first_s']:,.0f}")
    return markdown(
        "random order, from the page cache | M tokens/s | first batch, ms after opening",
        [*rows, ("target", *wanted)],
        "Seeking to the last of 10^9 sequences and reading a batch of one:"
        f" {spread((1e3 * seconds for seconds in found['seek_s']), 2)} ms (target"
        f" {1e3 * TARGETS['seek_s']:.0f}). {missed(found)}",
        "",
        f"{found['machine']}, one thread (four check blocks); {found['tokens']:,} tokens in"
        f" {found['shards']} shards, {found['batch_tokens']:,} tokens per batch,"
        f" {found['steps']} batches per repeat, {found['repeats']} repeats; median (smallest to"
        f" largest); commit {found['commit']}; `python benchmarks/loader.py`.",
    )


def missed(found: dict[str, Any]) -> str:
    """Return the targets that the medians miss."""
    short = []
    for what, key in (("tokens per second", "tokens_per_s"), ("the first batch", "first_s")):
        for seq_len, rows in found["rows"].items():
            median = statistics.median(row[key] for row in rows)
            is_short = median < TARGETS[key] if key == "tokens_per_s" else median > TARGETS[key]
            short += [f"{what} at {seq_len}"] * is_short
    short += ["seeking"] * (statistics.median(found["seek_s"]) > TARGETS["seek_s"])
    return f"**Missed: {', '.join(short)}.**" if short else "Every target is met."


if __name__ == "__main__":
    main()
