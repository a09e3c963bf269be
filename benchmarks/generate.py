"""Sampling with a key-value cache against recomputing the whole text for each token.

    OMP_NUM_THREADS=1 python benchmarks/generate.py --repeats 5

Takes a small transformer with fresh weights and a prompt that leaves room for the sampled tokens in
the context, and samples them with and without the cache, alternating in one process on one thread.
Writes benchmarks/results/generate.json and .md. Rates are medians over the repeats, with minimum
and maximum. The sampled tokens are compared too.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from measurement import facts, in_turns, markdown, parser, publish, spread

from flatout.inference.generate import Context, tokens_after
from flatout.models.language_model import LanguageModel
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy

SHAPE = {"vocab_size": 4096, "num_layers": 6, "d_model": 384, "num_heads": 6}
"""11 million weights in the blocks."""


def main() -> None:
    given = parser(__doc__, repeats=5, tokens=16, contexts=[64, 512, 2048]).parse_args()
    torch.set_num_threads(1)
    rows = {str(one): measure(one, given.tokens, given.repeats) for one in given.contexts}
    counts = {"repeats": given.repeats, "tokens": given.tokens, "shape": SHAPE}
    found = {**facts(), **counts, "rows": rows}
    publish(given.out, "generate", found, table(found))


def measure(context: int, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Return rates with and without the cache, and seconds to the first token, per repeat."""
    torch.manual_seed(0)
    model = Transformer(
        Transformer.check(SHAPE, seq_len=context),
        Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused),
    ).eval()
    prompt = torch.randint(
        SHAPE["vocab_size"], (context - num_tokens,), generator=torch.Generator().manual_seed(1)
    ).tolist()

    def anew() -> tuple[dict[str, float], list[int]]:
        model.decoder = partial(LanguageModel.decoder, model)
        try:
            return timed(model, prompt, num_tokens)
        finally:
            del model.decoder

    ways = {"cached": lambda: timed(model, prompt, num_tokens), "anew": anew}
    found = in_turns(ways, repeats, warm_up=1)
    return [
        {
            "cached": cached,
            "anew": uncached,
            "times": cached["tokens_per_s"] / uncached["tokens_per_s"],
            "same_tokens": tokens == other_tokens,
        }
        for (cached, tokens), (uncached, other_tokens) in zip(*found.values(), strict=True)
    ]


def timed(
    model: LanguageModel, prompt: list[int], num_tokens: int
) -> tuple[dict[str, float], list[int]]:
    """Sample after a prompt; return first-token seconds, the rate of the rest, and the tokens."""
    times, drawn = [time.perf_counter()], []
    tokens = tokens_after(Context(model), prompt, lambda logits_V: int(logits_V.argmax()))
    for token in islice(tokens, num_tokens):
        times.append(time.perf_counter())
        drawn.append(token)
    first, *others = [later - earlier for earlier, later in pairwise(times)]
    return {"first_token_s": first, "tokens_per_s": 1 / statistics.median(others)}, drawn


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines, same = [], True
    for context, rows in found["rows"].items():
        rates = [
            spread((row[way]["tokens_per_s"] for row in rows), 1) for way in ("anew", "cached")
        ]
        times = f"**{spread((row['times'] for row in rows), 1)}**"
        first = spread(1000 * row["cached"]["first_token_s"] for row in rows)
        lines.append((f"{int(context):,}", *rates, times, first))
        same = same and all(row["same_tokens"] for row in rows)
    shape = found["shape"]
    return markdown(
        "context, tokens | tokens/s, without cache | tokens/s, with cache | times faster | ms"
        " to the first token",
        lines,
        f"{found['machine']}, one thread, fp32; {shape['num_layers']} layers, d"
        f" {shape['d_model']}, a vocabulary of {shape['vocab_size']:,}, fresh weights; the last"
        f" {found['tokens']} tokens of a full context, greedy,"
        f" {'the tokens are the same' if same else '**the tokens differ**'}; {found['repeats']}"
        " repeats, interleaved in one process; median (smallest to largest); commit"
        f" {found['commit']}; `python benchmarks/generate.py`.",
    )


if __name__ == "__main__":
    main()
