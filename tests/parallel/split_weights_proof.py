"""Compares copies with split weights and with fp32 weights, in several processes."""

import json
import sys
from pathlib import Path

import torch

from flatout.config.sections import ParallelConfig
from flatout.models.split_weights import join, split, split_weights
from flatout.models.transformer import Transformer
from flatout.ops import Ops
from flatout.parallel.mesh import make_mesh, wrap
from flatout.parallel.rendezvous import connect, disconnect

STEPS, ACCUMULATE = 4, 2


def move_off_ties(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(join(*split(parameter)))


def trained(mesh, *, in_parts):
    """Return losses and weights; the initial weights differ, but the main process's count."""
    torch.manual_seed(mesh.rank)
    config = Transformer.check(
        {"vocab_size": 101, "num_layers": 2, "d_model": 32, "num_heads": 2}, seq_len=16
    )
    core = Transformer(config, Ops.plain())
    if in_parts:
        split_weights(core, mesh)
    model = wrap(core, mesh)
    move_off_ties(core)
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2, fused=True)
    micro_batches = torch.randint(
        101, (ACCUMULATE, 2, 17), generator=torch.Generator().manual_seed(mesh.rank)
    )
    losses = []
    for _ in range(STEPS):
        for tokens_BT in micro_batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        move_off_ties(core)
    return losses, [parameter.detach() + 0 for parameter in core.parameters()]


def main(report: Path):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(), "cpu", ranks)
    (plain_losses, plain), (losses, parts) = (
        trained(mesh, in_parts=in_parts) for in_parts in (False, True)
    )
    (equal,) = mesh.sum(
        torch.tensor(
            float(all(torch.equal(one, other) for one, other in zip(plain, parts, strict=True)))
        )
    )
    if mesh.is_main:
        report.write_text(
            json.dumps({"losses": losses, "plain_losses": plain_losses, "equal": equal.item()})
        )
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
