"""What ranks that share rows exchange, and how long a row they train together.

    python benchmarks/context.py

Bytes: what a rank sends to each other one per token of its part, forward and backward, in bf16:
what models say (`shared_bytes`), for GPT-2 124M and the eigenstate network of the recipe
`eigenstate-small-32k`, and beside it what the collectives of a small model of each kind were given.
Length: one optimizer step in fp32 of a small transformer and of a small eigenstate network, on rows
of growing length, alone and on four ranks over gloo. After loading torch, building the model and
connecting, each process may map `--gib` more memory (RLIMIT_AS). A longer row does not train.
Writes benchmarks/results/context.json and .md. Takes about ten minutes on 2 cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import psutil
import torch
import torch.distributed as dist
from measurement import facts, markdown, parser, publish

from flatout.config.schema import load_config
from flatout.config.sections import ParallelConfig
from flatout.distributed import context
from flatout.distributed.mesh import make_mesh
from flatout.distributed.rendezvous import connect, disconnect
from flatout.hardware.machine import GIB
from flatout.models.eigenstate import Eigenstate, EigenstateConfig
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.transformer import Transformer, TransformerConfig
from flatout.ops import Ops, attention, cross_entropy, scan

LENGTHS = {"32 K": 2**15, "128 K": 2**17, "1 M": 2**20}
KINDS = ("transformer", "eigenstate")
RANKS = 4
COUNTED_TOKENS = 8192
LONGEST_S = 300.0
"""Seconds after which a row counts as too long."""
NO_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


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


def train_once(kind: str, tokens: int, gib: float) -> None:
    """Take a step on one row in `gib` more memory, if not 0, and print the bytes it exchanges."""
    connect("cpu")
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(ParallelConfig(context=size), "cpu")
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // size, 1))
    torch.manual_seed(0)
    model = small(kind, tokens)
    mesh.share_rows(model, seq_len=tokens, has_documents=False)
    optimizer = torch.optim.AdamW(model.parameters())
    row = torch.randint(0, 512, (1, tokens + 1))
    sent = [0]

    def counted(collective: Any, whole: int) -> Any:
        def call(*tensors: torch.Tensor, **options: Any) -> Any:
            sent[0] += tensors[whole].nbytes // size
            return collective(*tensors, **options)

        return call

    context.ALL_GATHER = counted(context.ALL_GATHER, 0)
    context.REDUCE_SCATTER = counted(context.REDUCE_SCATTER, 1)
    model(row[:, :1024], row[:, 1:1025])[0].backward()  # creates threads, whose stacks are mapped
    sent[0] = 0
    if gib:
        mapped = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(gib * GIB),) * 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=not gib):
        loss, _ = model(row[:, :-1], row[:, 1:])
        (loss / tokens).backward()
    optimizer.step()
    if mesh.is_main:
        print(json.dumps([sent[0] / (tokens // size), model.shared_bytes(tokens // size)]))
    disconnect()


def step(kind: str, tokens: int, ranks: int, gib: float = 0.0) -> list[float] | None:
    """Return the bytes sent per token and those predicted; None without memory, or with no time."""
    words = [sys.executable, __file__, "--train", kind, str(tokens), "--gib", str(gib)]
    if ranks > 1:
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        print(f"{kind}, {tokens} tokens, {ranks} ranks: no time", file=sys.stderr)
        return None
    if done.returncode and not any(text in done.stderr for text in NO_MEMORY):
        raise SystemExit(done.stderr)
    print(f"{kind}, {tokens} tokens, {ranks} ranks: {done.stdout}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else None


def longest(kind: str, ranks: int, gib: float) -> int:
    """Return the most tokens, a power of 2 or 1.5 times one, of a row that trains."""
    tokens = 2048
    while step(kind, 2 * tokens, ranks, gib):
        tokens *= 2
    return tokens * 3 // 2 if step(kind, tokens * 3 // 2, ranks, gib) else tokens


def main() -> None:
    made = parser(__doc__, gib=1.0)
    made.add_argument("--train", nargs=2, metavar=("KIND", "TOKENS"), help="one step; for itself")
    options = made.parse_args()
    if options.train:
        train_once(options.train[0], int(options.train[1]), options.gib)
        return
    sent = {}
    for name in ("gpt2-124m", "eigenstate-small-32k"):
        model_class, config = model_of(load_config(name, ["model.vocab_size=50257"]))
        model = model_class.on_meta(config, Ops.plain())
        sent[name] = {one: model.shared_bytes(n // RANKS) for one, n in LENGTHS.items()}
    counted = {kind: step(kind, COUNTED_TOKENS, RANKS) for kind in KINDS}
    fits = {
        kind: {ranks: longest(kind, ranks, options.gib) for ranks in (1, RANKS)} for kind in KINDS
    }
    figures = {**facts(), "gib": options.gib, "sent": sent, "counted": counted, "longest": fits}
    publish(options.out, "context", figures, table(figures))


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    sent = [
        (name, *(f"{each:,.0f}" if each > 100 else f"{each:g}" for each in by_length.values()))
        for name, by_length in found["sent"].items()
    ]
    counts = "; ".join(
        f"{kind} {measured:,.4g} counted, {predicted:,.4g} predicted"
        for kind, (measured, predicted) in found["counted"].items()
    )
    fits = [
        (kind, *(f"{tokens:,}" for tokens in by_ranks.values()), f"{most / least:.2g}")
        for kind, by_ranks in found["longest"].items()
        for least, most in [by_ranks.values()]
    ]
    where = f"{found['machine']}; commit {found['commit']}; `python benchmarks/context.py`."
    return markdown(
        f"bytes a rank sends to each of {RANKS - 1} others, per token | "
        + " | ".join(f"rows of {name} tokens" for name in LENGTHS),
        sent,
        f"Small models on rows of {COUNTED_TOKENS:,} tokens: {counts}.",
        "",
    ) + markdown(
        f"longest row that trains with {found['gib']:g} GiB per process | 1 process | "
        f"{RANKS} processes | times",
        fits,
        "4 layers of width 128, fp32, without checkpointing; lengths tried are powers of 2 and 1.5 "
        f"times these. {where}",
    )


if __name__ == "__main__":
    main()
