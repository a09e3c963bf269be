"""Accumulates gradients with and without a reduction per micro-batch, in several processes."""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from proofs import ACCUMULATE, Tiny, batches, whole
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

warnings.simplefilter("error")


from flatout.assembly.run import Run  # noqa: E402
from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402

SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The function by which fully_shard reduces gradients, which torch 2.13 renamed."""


def trained(mesh, exchange, steps):
    """Return the weights after some steps of gradient descent, and the last step's reductions."""
    core = Tiny(0, torch.float32)
    model = wrap(core, mesh)
    exchanged, scatter = [], getattr(dist, SCATTER)
    if mesh.shard == 1:
        model.register_comm_hook(
            None, lambda group, bucket: exchanged.append(1) or allreduce_hook(group, bucket)
        )
    setattr(dist, SCATTER, lambda *args, **kwargs: exchanged.append(1) or scatter(*args, **kwargs))
    for step in range(steps):
        tokens, targets = (each[mesh.rank] for each in batches(mesh.world_size, step))
        exchanged.clear()
        for number in range(ACCUMULATE):
            with exchange(model, number == ACCUMULATE - 1):
                loss, _ = model(tokens[number], targets[number])
                (loss / 100).backward()
        with torch.no_grad():
            for parameter in core.parameters():
                parameter.add_(parameter.grad, alpha=-0.5)
                parameter.grad = None
    setattr(dist, SCATTER, scatter)
    return [whole(p.detach()).tolist() for p in core.parameters()], len(exchanged)


def of_a_run(model, is_last):
    return Run.grad_sync(SimpleNamespace(model=model), is_last)


def main(report, shard):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(shard=int(shard)), "cpu", ranks)
    ways = {"always": lambda *_: nullcontext(), "grad_sync": of_a_run}
    actual = {
        name: dict(zip(("weights", "exchanges"), trained(mesh, way, 4), strict=True))
        for name, way in ways.items()
    }
    mesh.barrier()
    disconnect()
    if mesh.is_main:
        Path(report).write_text(json.dumps(actual))


if __name__ == "__main__":
    main(*sys.argv[1:])
