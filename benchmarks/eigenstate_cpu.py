"""The gain of each fast path of an eigenstate network on a CPU, at equal losses.

    OMP_NUM_THREADS=2 python benchmarks/eigenstate_cpu.py --rounds 5

Runs layers of `eigenstate-small-32k` (d 1024, 128 eigenstates, MLP 4096) forward and backward on
one row of 4,096 tokens, and changes one thing at a time: (a) the recurrence alone, token by token
or in chunks; (b) the same in whole layers, then with matmuls in bfloat16 instead of fp32; (c) whole
layers evaluated token by token, as in decoding, with gradients through all of them, against layers
with every fast path. Since the layers are alike, two of them are enough; even so, (c) takes
minutes.

The variants of a comparison alternate in every round, and ratios are within a round. Losses and
input gradients are compared in the same run, which fails if they differ by more than 1e-4, or 2e-2
with bfloat16 matmuls. Writes benchmarks/results/eigenstate_cpu.json and .md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measurement import facts, in_turns, markdown, parser, publish, ratios, seconds_of, spread
from torch import Tensor

from flatout import load_config
from flatout.hardware.machine import probe
from flatout.models.eigenstate import Eigenstate, MemoryState
from flatout.ops import Ops, linear, scan

RECIPE = "eigenstate-small-32k"
EXACT, NARROW = 1e-4, 2e-2
"""Largest relative difference of losses and gradients: in fp32, and with bfloat16 matmuls."""

Evaluate = Callable[[], tuple[float, Tensor]]
"""A forward and backward pass: (loss, gradient of the input)."""


@dataclass(frozen=True)
class Comparison:
    """Variants of one computation. The first is the baseline."""

    name: str
    title: str
    tolerance: float
    ways: dict[str, Evaluate]


def main() -> None:
    sizes = {"layers": 2, "tokens": 4_096, "chunk_size": 32, "threads": 2}
    given = parser(__doc__, rounds=5, **sizes).parse_args()
    torch.set_num_threads(given.threads)
    every = comparisons(shape(given.layers, chunk_size=given.chunk_size), given.tokens)
    found = measure(every, given.rounds) | facts()
    found |= {"torch": torch.__version__, **{name: getattr(given, name) for name in sizes}}
    publish(given.out, "eigenstate_cpu", found, table(found))


def shape(layers: int, **smaller: int) -> dict[str, Any]:
    """Return the recipe's model keys with that many layers and a tiny vocabulary.

    The head is not measured.
    """
    return {**load_config(RECIPE).model.own(), "num_layers": layers, "vocab_size": 8, **smaller}


def comparisons(model: dict[str, Any], tokens: int) -> list[Comparison]:
    """Return the comparisons, on inputs drawn once."""
    config: Any = Eigenstate.check(model, seq_len=tokens)
    torch.manual_seed(0)
    weights = Eigenstate(config, Ops.plain()).state_dict()
    hidden_BTD = torch.randn(1, tokens, config.d_model)
    wanted_BTD = torch.randn(1, tokens, config.d_model)

    def layers(walk: Callable[[Eigenstate, Tensor], Tensor], **ops: Callable[..., Any]) -> Evaluate:
        made = Eigenstate(config, Ops.plain(**ops))
        made.load_state_dict(weights)

        def evaluate() -> tuple[float, Tensor]:
            made.zero_grad(set_to_none=True)
            given_BTD = hidden_BTD.clone().requires_grad_()
            return compared_with(wanted_BTD, walk(made, given_BTD), given_BTD)

        return evaluate

    scans = {"reference": scan.reference, "chunked": scan.chunked}
    products = linear.bf16 if probe().cpu_multiplies_bf16 else linear.onednn
    narrow = NARROW if products is linear.bf16 else EXACT
    fast = layers(at_once, scan=scan.chunked, linear=products)
    by_product = {"fp32": layers(at_once, scan=scan.chunked), products.__name__: fast}
    by_step = {
        "step by step": layers(token_by_token, scan=scan.reference),
        f"chunked, {products.__name__}": fast,
    }
    of_products = "layers with the chunked recurrence, by product"
    of_steps = "layers token by token, against the fast path"
    alone_by_scan = {name: alone(one, config, tokens) for name, one in scans.items()}
    by_scan = {name: layers(at_once, scan=one) for name, one in scans.items()}
    return [
        Comparison("recurrence", "recurrence alone", EXACT, alone_by_scan),
        Comparison("layers", "layers, by recurrence", EXACT, by_scan),
        Comparison("products", of_products, narrow, by_product),
        Comparison("steps", of_steps, narrow, by_step),
    ]


def at_once(model: Eigenstate, hidden_BTD: Tensor) -> Tensor:
    """Apply all layers to all tokens at once, as training does.

    Shapes: hidden_BTD (B, T, D).
    """
    for block in model.blocks:
        hidden_BTD = block(hidden_BTD)
    return hidden_BTD


def token_by_token(model: Eigenstate, hidden_BTD: Tensor) -> Tensor:
    """Apply all layers token by token with their states, as decoding does.

    Shapes: hidden_BTD (B, T, D).
    """
    carried = [[MemoryState() for _ in block.recurrence.memories] for block in model.blocks]
    outputs = []
    for position in range(hidden_BTD.shape[1]):
        token_B1D = hidden_BTD[:, position : position + 1]
        for block, own in zip(model.blocks, carried, strict=True):
            token_B1D = block.decode(token_B1D, own, position)
        outputs.append(token_B1D)
    return torch.cat(outputs, dim=1)


def compared_with(wanted: Tensor, output: Tensor, given: Tensor) -> tuple[float, Tensor]:
    """Return the mean squared error and the gradient of the input; weights get theirs too."""
    loss = (output - wanted).square().mean()
    loss.backward()
    assert given.grad is not None  # it requires a gradient
    return float(loss.detach()), given.grad


def alone(function: Callable[..., Tensor], config: Any, tokens: int) -> Evaluate:
    """Return the recurrence alone, with the eigenvalues and the drive of a fresh layer."""
    generator = torch.Generator().manual_seed(1)
    count = config.num_eigenstates
    share_K = torch.rand(count, generator=generator)
    rate_K = torch.exp(-share_K * torch.log(torch.tensor(float(tokens))))
    angle_K = 6.28 * torch.rand(count, generator=generator)
    scale_E = (-torch.expm1(-2 * rate_K)).sqrt().repeat(2)
    drive_BTE = torch.randn(1, tokens, 2 * count, generator=generator) * scale_E
    wanted_BTE = torch.randn(1, tokens, 2 * count, generator=generator)

    def evaluate() -> tuple[float, Tensor]:
        leaves = [one.clone().requires_grad_() for one in (-rate_K, angle_K, drive_BTE)]
        states_BTE = function(*leaves, chunk_size=config.chunk_size)
        return compared_with(wanted_BTE, states_BTE, leaves[-1])

    return evaluate


def measure(every: list[Comparison], rounds: int) -> dict[str, Any]:
    """Return the seconds of every variant per round, and the differences of losses and gradients.

    The first pass compares losses and is not timed.
    """
    found = {}
    for comparison in every:
        ways = {name: partial(seconds_of, evaluate) for name, evaluate in comparison.ways.items()}
        found[comparison.name] = compared(comparison) | {"seconds": in_turns(ways, rounds)}
    return {"rounds": rounds, "comparisons": found}


def compared(comparison: Comparison) -> dict[str, Any]:
    """Evaluate every variant once; return losses and differences.

    Exits if they differ by more than the tolerance.
    """
    results = {name: evaluate() for name, evaluate in comparison.ways.items()}
    plain_loss, plain_grad = next(iter(results.values()))
    apart = {}
    for name, (loss, grad) in results.items():
        of_gradient = float((grad - plain_grad).norm() / plain_grad.norm())
        apart[name] = {"loss": abs(loss - plain_loss) / abs(plain_loss), "gradient": of_gradient}
        if not max(apart[name].values()) <= comparison.tolerance:
            raise SystemExit(
                f"{comparison.title}: {name} differs by {apart[name]}; the limit is"
                f" {comparison.tolerance:g}."
            )
    return {
        "title": comparison.title,
        "tolerance": comparison.tolerance,
        "losses": {name: loss for name, (loss, _) in results.items()},
        "apart": apart,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for comparison in found["comparisons"].values():
        plain = next(iter(comparison["seconds"].values()))
        for name, seconds in comparison["seconds"].items():
            gain, apart = spread(ratios(plain, seconds), 2), comparison["apart"][name]
            cells = (f"**{gain}**", f"{apart['loss']:.0e}", f"{apart['gradient']:.0e}")
            rows.append(
                (
                    f"{comparison['title']}: {name}",
                    spread(seconds, 3),
                    *(("1", "", "") if seconds is plain else cells),
                )
            )
    return markdown(
        "forward and backward | seconds | speedup | loss difference | gradient difference",
        rows,
        f"{found['machine']}, {found['threads']} threads, torch {found['torch']};"
        f" {found['layers']} layers of `{RECIPE}`, one row of {found['tokens']:,} tokens,"
        f" chunks of {found['chunk_size']}, fp32 unless stated otherwise; {found['rounds']}"
        " rounds, interleaved; median (smallest to largest), ratios within a round; commit"
        f" {found['commit']}; `python benchmarks/eigenstate_cpu.py`.",
    )


if __name__ == "__main__":
    main()
