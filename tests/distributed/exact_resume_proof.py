"""Compares the gradients of a model in training with those of a new DDP, in several processes."""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

warnings.simplefilter("error")

from flatout.assembly.parts import zero_in_place  # noqa: E402
from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402

STEPS = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 30)
    )


def backward(model, mesh, step):
    """Return a gradient that differs between processes, so that the order of summation shows."""
    inputs = torch.randn(4, 50, generator=torch.Generator().manual_seed(100 * step + mesh.rank))
    model(inputs).square().sum().backward()


def main(report):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(), "cpu", ranks)
    core = network()
    model = wrap(core, mesh)
    differing = []
    for step in range(STEPS):
        fresh = network()
        fresh.load_state_dict(core.state_dict())
        backward(model, mesh, step)
        backward(wrap(fresh, mesh), mesh, step)
        differing.append(
            sum(
                int((a.grad != b.grad).sum())
                for a, b in zip(core.parameters(), fresh.parameters(), strict=True)
            )
        )
        with torch.no_grad():
            for parameter in core.parameters():
                parameter.add_(parameter.grad, alpha=-0.01)
        zero_in_place(core.parameters())  # as training does with DDP
    mesh.barrier()
    disconnect()
    if mesh.is_main:
        Path(report).write_text(json.dumps(differing))


if __name__ == "__main__":
    main(*sys.argv[1:])
