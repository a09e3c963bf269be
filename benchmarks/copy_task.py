"""The copy task for the eigenstate network: recall one of eight symbols after thousands of tokens.

    OMP_NUM_THREADS=1 python benchmarks/copy_task.py

A row is a symbol, filler, and a token that queries the symbol. Only the answer counts in the loss.
There is a row for each of the eight symbols, so a step covers the whole task, and guessing has a
loss of log 8 = 2.079. One layer is trained with Muon from each initialisation and each seed, for
all the steps or until every answer is right with a loss below 0.02. Writes
benchmarks/results/copy_task.json and .md. Losses and steps are measured, not times, so the machine
may be busy.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from measurement import facts, markdown, parser, publish, spread
from torch import Tensor

from flatout.config.sections import OptimConfig
from flatout.models.eigenstate import Eigenstate
from flatout.ops import Ops, cross_entropy, newton_schulz, scan
from flatout.optim import muon
from flatout.optim.adamw import per_parameter
from flatout.optim.groups import OptimizerParts

SYMBOLS, FILLER, QUERY = 8, 8, 9
SHAPE = {"vocab_size": 10, "num_layers": 1, "d_model": 16, "d_ff": 16}
SHAPE |= {"num_eigenstates": 32, "num_heads": 4, "chunk_size": 32}
LEARNING_RATE = 0.02
LEARNED = 0.02
"""Training stops below this loss."""
FAR = 4096
"""Beyond this distance, only one seed and some of the forms are tried."""


def forms(distance: int) -> dict[str, dict]:
    """Return the forms of the network to try at a distance, with their keys under `model.`."""
    beside = (
        {"hierarchical": {"scales": [1, 2, 4, 8]}, "selective": {"eigenvalues": "selective"}}
        if distance <= FAR
        else {}
    )
    long = {"": {}, "memory of four sequences": {"memory": 4 * (distance + 1)}} | beside
    return {", ".join(filter(None, ("long-memory", name))): keys for name, keys in long.items()} | {
        "published": {"initialisation": "published"}
    }


def main() -> None:
    distances = [256, 1024, 4096, 16384]
    given = parser(__doc__, seeds=3, steps=200, distances=distances).parse_args()
    torch.set_num_threads(1)
    runs = []
    for distance in given.distances:
        for form, keys in forms(distance).items():
            for seed in range(given.seeds if distance <= FAR else 1):
                result = trained(distance, keys, seed, given.steps)
                runs.append({"distance": distance, "form": form, "seed": seed} | result)
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    counts = {"seeds": given.seeds, "steps": given.steps, "shape": SHAPE}
    found = {**facts(), **counts, "runs": runs}
    publish(given.out, "copy_task", found, table(found))


def rows_of(distance: int) -> Tensor:
    """Return one row per symbol, which precedes the query by `distance` tokens.

    Returns: tokens_BT.
    """
    tokens_BT = torch.full((SYMBOLS, distance + 1), FILLER)
    tokens_BT[:, 0], tokens_BT[:, -1] = torch.arange(SYMBOLS), QUERY
    return tokens_BT


def trained(distance: int, keys: dict, seed: int, steps: int) -> dict:
    """Train one model; return its last loss and accuracy, and the step when all answers were right.

    The step is None if that never happened.
    """
    torch.manual_seed(seed)
    ops = Ops.plain(scan=scan.chunked, cross_entropy=cross_entropy.fused)
    model = Eigenstate(Eigenstate.check(SHAPE | keys, seq_len=distance + 1), ops)
    config = OptimConfig(kind="muon", lr=LEARNING_RATE, weight_decay=0.0)
    optimizers = muon.build(model, config, OptimizerParts(per_parameter, newton_schulz.reference))
    tokens_BT, answers_B = rows_of(distance), torch.arange(SYMBOLS)
    right_after = None
    for step in range(steps + 1):
        logits_BV = model.next_logits(tokens_BT)
        loss = torch.nn.functional.cross_entropy(logits_BV, answers_B)
        accuracy = float((logits_BV.argmax(dim=-1) == answers_B).float().mean())
        if accuracy == 1 and right_after is None:
            right_after = step
        if step == steps or (accuracy == 1 and float(loss.detach()) < LEARNED):
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return {
        "steps": step,
        "loss": float(loss.detach()),
        "accuracy": accuracy,
        "right_after_steps": right_after,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for distance, form in dict.fromkeys((run["distance"], run["form"]) for run in found["runs"]):
        runs = [run for run in found["runs"] if (run["distance"], run["form"]) == (distance, form)]
        right = [run["right_after_steps"] for run in runs if run["right_after_steps"] is not None]
        learned = (f"{len(right)} of {len(runs)}", spread(right) if right else "never")
        loss = spread((run["loss"] for run in runs), 3)
        accuracy = statistics.mean(run["accuracy"] for run in runs)
        rows.append((f"{distance:,}", form, *learned, loss, f"{accuracy:.0%}"))
    shape = found["shape"]
    return markdown(
        "distance, tokens | initialisation, form | seeds that learn it | steps until all eight"
        " are right | final loss | final accuracy",
        rows,
        f"{found['machine']}, one thread, fp32; one layer, d {shape['d_model']},"
        f" {shape['num_eigenstates']} eigenstates, constant filler, Muon with a learning rate"
        f" of {LEARNING_RATE}, at most {found['steps']} steps, until the loss is below"
        f" {LEARNED}; chance is 2.079 and 1 in 8; {found['seeds']} seeds, 1 beyond {FAR:,};"
        f" median (smallest to largest), mean of the accuracy; commit {found['commit']};"
        " `python benchmarks/copy_task.py`.",
    )


if __name__ == "__main__":
    main()
