"""What ranks that share rows exchange, and how long a row they train together.

    python benchmarks/context.py

Bytes: what a rank sends to each other one per token of its part, forward and backward, as models
say (`shared_bytes`), for GPT-2 124M and the eigenstate network of the recipe `small_32k`.
Length: one optimizer step of a small transformer and of a small eigenstate network, on rows that
double in length until a process needs more than `--gib`, alone and on four ranks over gloo.
Writes benchmarks/results/context.json and .md. Takes about ten minutes on 2 cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measurement import facts, markdown, parser, publish

from flatout.config.schema import load_config
from flatout.config.sections import ParallelConfig
from flatout.hardware import GIB
from flatout.models.eigenstate import Eigenstate, EigenstateConfig
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.transformer import Transformer, TransformerConfig
from flatout.ops import Ops, attention, cross_entropy, scan
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import connect, disconnect

LENGTHS = {"32 K": 2**15, "128 K": 2**17, "1 M": 2**20}
RANKS = 4
LONGEST_S = 300.0
"""Seconds after which a longer row is not tried."""


def small(kind: str, tokens: int) -> LanguageModel:
    """Return a small model with fast ops."""
    ops = Ops.plain(
        attention=attention.fused, cross_entropy=cross_entropy.chunked, scan=scan.chunked
    )
    common: dict[str, Any] = {"vocab_size": 512, "num_layers": 4, "d_model": 128}
    if kind == "transformer":
        config = TransformerConfig(**common, num_heads=4, max_seq_len=tokens)
        return Transformer(config, ops)
    return Eigenstate(Eigenstate.fitted(EigenstateConfig(**common), tokens), ops)


def train_once(kind: str, tokens: int) -> None:
    """Take a step on one row, and print the peak memory of this process that it needed."""
    connect("cpu")
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(ParallelConfig(context=size), "cpu")
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // size, 1))
    torch.manual_seed(0)
    model = small(kind, tokens)
    mesh.share_rows(model, seq_len=tokens, has_documents=False)
    optimizer = torch.optim.AdamW(model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = torch.randint(0, 512, (1, tokens + 1))
    loss, _ = model(row[:, :-1], row[:, 1:])
    (loss / tokens).backward()
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    peak_gib = torch.tensor(peak * 1024 / GIB)
    if size > 1:
        dist.all_reduce(peak_gib, dist.ReduceOp.MAX)
    if mesh.is_main:
        print(json.dumps(float(peak_gib)))
    disconnect()


def peak_gib(kind: str, tokens: int, ranks: int) -> float | None:
    """Return the memory that a step needs in its largest process; None if it takes too long."""
    words = [sys.executable, __file__, "--train", kind, str(tokens)]
    if ranks > 1:
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=LONGEST_S, check=True, cwd=Path.cwd()
        )
    except subprocess.TimeoutExpired:
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    made = parser(__doc__, gib=1.0)
    made.add_argument("--train", nargs=2, metavar=("KIND", "TOKENS"), help="one step; for itself")
    options = made.parse_args()
    if options.train:
        train_once(options.train[0], int(options.train[1]))
        return
    sent = {}
    for name in ("gpt2-124m", "eigenstate-small-32k"):
        model_class, config = model_of(load_config(name, ["model.vocab_size=50257"]))
        model = model_class.on_meta(config, Ops.plain())
        sent[name] = {one: model.shared_bytes(n // RANKS) for one, n in LENGTHS.items()}
    needed: dict[str, dict[str, dict[int, float]]] = {}
    for kind in ("transformer", "eigenstate"):
        for ranks in (1, RANKS):
            found = needed.setdefault(kind, {}).setdefault(str(ranks), {})
            tokens = 2048
            while (peak := peak_gib(kind, tokens, ranks)) is not None:
                found[tokens] = peak
                if peak > options.gib:
                    break
                tokens *= 2
    figures = {**facts(), "gib": options.gib, "sent_bytes": sent, "needed_gib": needed}
    publish(options.out, "context", figures, table(figures))


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    limit = found["gib"]
    lines = [
        (name, *(f"{each:,.3g}" for each in by_length.values()))
        for name, by_length in found["sent_bytes"].items()
    ]
    columns = "bytes sent per token, 4 ranks | " + " | ".join(LENGTHS)
    longest = []
    for kind, by_ranks in found["needed_gib"].items():
        fitting = [
            max((int(tokens) for tokens, gib in peaks.items() if gib <= limit), default=0)
            for peaks in by_ranks.values()
        ]
        longest.append((kind, *(f"{tokens:,}" for tokens in fitting)))
    second = f"longest row in {limit:g} GiB per process | 1 rank | {RANKS} ranks"
    where = f"{found['machine']}; commit {found['commit']}; `python benchmarks/context.py`."
    return f"{markdown(columns, lines)}\n{markdown(second, longest, where)}"


if __name__ == "__main__":
    main()
