"""Sampling with a key-value cache against recomputing the whole text for each token.

    OMP_NUM_THREADS=1 python benchmarks/generate.py --repeats 5

Takes a small transformer with fresh weights and a prompt that leaves room for the sampled tokens in
the context, and samples them with and without the cache, alternating in one process on one thread.
Writes benchmarks/results/generate.json and .md. Rates are medians over the repeats, with minimum
and maximum; the sampled tokens are compared too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise

import torch
from main_job import RESULTS, commit, spread

from flatout.hardware import probe
from flatout.inference.generate import tokens_after
from flatout.models.language_model import Decoder, LanguageModel
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy

SHAPE = {"vocab_size": 4096, "num_layers": 6, "d_model": 384, "num_heads": 6}
"""11 million weights in the blocks."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument(
        "--tokens", type=int, default=16, help="tokens drawn at the end of each context"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        str(context): measure(context, arguments.tokens, arguments.repeats)
        for context in arguments.contexts
    }
    found = {
        "machine": probe().describe(),
        "commit": commit(),
        "repeats": arguments.repeats,
        "tokens": arguments.tokens,
        "shape": SHAPE,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "generate.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "generate.md").write_text(table(found))
    print(table(found))


def measure(context: int, num_tokens: int, repeats: int) -> list[dict]:
    """Return rates with and without the cache, and seconds to the first token, per repeat."""
    torch.manual_seed(0)
    model = Transformer(
        Transformer.check(SHAPE, seq_len=context),
        Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused),
    ).eval()
    prompt = torch.randint(
        SHAPE["vocab_size"], (context - num_tokens,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    rows = []
    for repeat in range(-1, repeats):  # the first turn warms up and is dropped
        cached, cached_tokens = timed(model, prompt, num_tokens)
        with decoder_replaced(model, partial(LanguageModel.decoder, model)):
            anew, anew_tokens = timed(model, prompt, num_tokens)
        row = {
            "cached": cached,
            "anew": anew,
            "times": cached["tokens_per_s"] / anew["tokens_per_s"],
            "same_tokens": cached_tokens == anew_tokens,
        }
        if repeat >= 0:
            rows.append(row)
            print(
                f"context {context}, repeat {repeat + 1}: {row['times']:.1f} times", file=sys.stderr
            )
    return rows


def timed(model: LanguageModel, prompt: list[int], num_tokens: int) -> tuple[dict, list[int]]:
    """Sample after a prompt; return first-token seconds, the rate of the rest, and the tokens."""
    times, drawn = [time.perf_counter()], []
    for token in islice(
        tokens_after(model, prompt, lambda logits_V: int(logits_V.argmax())), num_tokens
    ):
        times.append(time.perf_counter())
        drawn.append(token)
    first, *others = [later - earlier for earlier, later in pairwise(times)]
    return {"first_token_s": first, "tokens_per_s": 1 / statistics.median(others)}, drawn


@contextmanager
def decoder_replaced(model: LanguageModel, decoder: Callable[..., Decoder]) -> Iterator[None]:
    """Replace the model's decoding for the duration of the context."""
    model.decoder = decoder
    try:
        yield
    finally:
        del model.decoder


def table(found: dict) -> str:
    """Return the figures as Markdown."""
    lines = [
        (
            "| context, tokens | tokens/s, without cache | tokens/s, with cache | times faster | ms"
            " to the first token |"
        ),
        "|---|---|---|---|---|",
    ]
    for context, rows in found["rows"].items():
        rates = [
            spread([row[way]["tokens_per_s"] for row in rows], 1) for way in ("anew", "cached")
        ]
        first = spread([1000 * row["cached"]["first_token_s"] for row in rows])
        lines.append(
            f"| {int(context):,} | {rates[0]} | {rates[1]} |"
            f" **{spread([row['times'] for row in rows], 1)}** | {first} |"
        )
    shape, all_rows = found["shape"], [row for rows in found["rows"].values() for row in rows]
    same = (
        "the tokens are the same"
        if all(row["same_tokens"] for row in all_rows)
        else "**the tokens differ**"
    )
    lines += [
        "",
        (
            f"{found['machine']}, one thread, fp32; {shape['num_layers']} layers, d"
            f" {shape['d_model']}, a vocabulary of {shape['vocab_size']:,}, fresh weights; the last"
            f" {found['tokens']} tokens of a full context, greedy, {same}; {found['repeats']}"
            " repeats, interleaved in one process; median (smallest to largest); commit"
            f" {found['commit']}; `python benchmarks/generate.py`."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
