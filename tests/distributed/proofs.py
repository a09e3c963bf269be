"""Compares the results of several processes with those of one process."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

warnings.simplefilter("error")

from flatout.config.sections import OptimConfig, ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.ops.newton_schulz import batched  # noqa: E402
from flatout.optim import adamw, muon  # noqa: E402
from flatout.optim.groups import OptimizerParts  # noqa: E402
from flatout.optim.step_guard import step_with_flag  # noqa: E402

VOCABULARY, WIDTH, ROWS, TOKENS, ACCUMULATE = 11, 6, 2, 5, 3
CONFIG = OptimConfig(lr=0.02, weight_decay=0.1)
BUILDERS = {
    "adamw": (adamw.build, adamw.per_parameter),
    "adamw-fused": (adamw.build, adamw.fused),
    "muon": (muon.build, adamw.per_parameter),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)  # 9 and 11 rows do not divide evenly
        self.down = nn.Linear(9, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Tiny(nn.Module):
    """A model that meets the contract of the step: forward contains the loss."""

    def __init__(self, seed, dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.layers = [*self.blocks]
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(dtype)

    def logits(self, tokens):
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def forward(self, tokens, targets, doc_ids=None):
        loss = nn.functional.cross_entropy(
            self.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return loss, (targets >= 0).sum()

    def parameter_kinds(self):
        kinds = {name: "vector" if p.ndim == 1 else "hidden" for name, p in self.named_parameters()}
        return kinds | {"table.weight": "embedding", "head.weight": "head"}

    def stacked_rows(self):
        return {
            f"blocks.{number}.up.weight": (4, 3, 2) for number in range(2)
        }  # the parts end inside shards


def batches(world_size, step):
    """Return tokens and targets per rank and micro-batch.

    The numbers of valid targets differ widely, and one of them is zero.
    """
    generator = torch.Generator().manual_seed(100 + step)
    shape = (world_size, ACCUMULATE, ROWS, TOKENS)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    share = torch.rand((world_size, ACCUMULATE, 1, 1), generator=generator)
    targets[torch.rand(shape, generator=generator) > share] = -1
    targets[-1, 0] = -1
    targets[0, 0, 0, 0] = 1
    return tokens, targets


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward_together(model, mesh, step):
    """Run the arithmetic of a step: divide by a constant, then correct by the valid targets."""
    tokens, targets = (each[mesh.rank] for each in batches(mesh.world_size, step))
    nominal = mesh.world_size * ACCUMULATE * ROWS * TOKENS
    valid = torch.zeros((), dtype=torch.int64)
    for number in range(ACCUMULATE):
        loss, count = model(tokens[number], targets[number])
        (loss / nominal).backward()
        valid += count
    (valid,) = mesh.sum(valid)
    for parameter in model.parameters():
        parameter.grad.mul_(mesh.world_size * nominal / valid.item())


def backward_alone(model, world_size, step):
    tokens, targets = (each.flatten(0, 2) for each in batches(world_size, step))
    loss, count = model(tokens, targets)
    (loss / count).backward()


def distance(actual, expected):
    """Return the largest relative distance between tensors of two lists, by norm."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def gradients(mesh, dtype):
    alone = Tiny(0, dtype)
    backward_alone(alone, mesh.world_size, 0)
    core = Tiny(mesh.rank, dtype)
    model = wrap(core, mesh)
    backward_together(model, mesh, 0)
    return distance(
        [whole(p.grad) for p in core.parameters()], [p.grad for p in alone.parameters()]
    )


def averaged_naively(mesh):
    """Return the error of the mean of means, which shows that the comparison can fail."""
    alone, naive = Tiny(0, torch.float64), Tiny(0, torch.float64)
    backward_alone(alone, mesh.world_size, 0)
    tokens, targets = (each.flatten(0, 1) for each in batches(mesh.world_size, 0))
    for number in range(len(tokens)):
        loss, count = naive(tokens[number], targets[number])
        (loss / count.clamp(min=1) / len(tokens)).backward()
    return distance([p.grad for p in naive.parameters()], [p.grad for p in alone.parameters()])


def weights_after_training(mesh, builder, factory):
    """Return how far weights and Muon's state are from those of one process after four steps."""
    alone, core = Tiny(0, torch.float64), Tiny(mesh.rank, torch.float64)
    model = wrap(core, mesh)
    pairs = [
        (alone, builder(alone, CONFIG, OptimizerParts(factory, batched))),
        (core, builder(core, CONFIG, OptimizerParts(factory, batched))),
    ]
    for step in range(4):
        backward_alone(alone, mesh.world_size, step)
        backward_together(model, mesh, step)
        for _, optimizers in pairs:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    (_, expected_optimizers), (_, found_optimizers) = pairs
    states = [
        [whole(value) for o in optimizers for state in o.state.values() for value in state.values()]
        for optimizers in (found_optimizers, expected_optimizers)
    ]
    return {
        "weights": distance(
            [whole(p.detach()) for p in core.parameters()], [p.detach() for p in alone.parameters()]
        ),
        "state": distance(*states),
    }


def resumed_with_sharded_state(mesh):
    """Return the distance between two steps in a row and two with a restored optimizer between."""
    straight, broken = Tiny(0, torch.float64), Tiny(0, torch.float64)
    models = [wrap(straight, mesh), wrap(broken, mesh)]
    optimizers = [
        muon.build(core, CONFIG, OptimizerParts(adamw.fused, batched))
        for core in (straight, broken)
    ]
    for step in range(2):
        for model, each in zip(models, optimizers, strict=True):
            backward_together(model, mesh, step)
            for optimizer in each:
                optimizer.step()
                optimizer.zero_grad()
        fresh = muon.build(broken, CONFIG, OptimizerParts(adamw.fused, batched))
        for new, old in zip(fresh, optimizers[1], strict=True):
            new.load_state_dict(old.state_dict())
        optimizers[1] = fresh
    return distance(
        [whole(p.detach()) for p in broken.parameters()],
        [whole(p.detach()) for p in straight.parameters()],
    )


def skipped(mesh, builder, factory):
    """Return whether a step that the device skips keeps every bit of this rank's shards."""
    core = Tiny(0, torch.float32)
    model = wrap(core, mesh)
    optimizers = builder(core, CONFIG, OptimizerParts(factory, batched))

    def bits():
        states = [value for o in optimizers for s in o.state.values() for value in s.values()]
        tensors = [*core.parameters(), *states]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return [tensor.detach().numpy().tobytes() for tensor in local]

    for step in range(2):
        backward_together(model, mesh, step)
        for optimizer in optimizers:
            step_with_flag(optimizer, torch.tensor(0.0))
        before = bits()
        for parameter in core.parameters():
            parameter.grad.mul_(torch.nan)
        for optimizer in optimizers:
            step_with_flag(optimizer, torch.tensor(1.0))
            optimizer.zero_grad()
        (equal,) = mesh.sum(torch.tensor(float(bits() == before)))
    return equal.item() == mesh.world_size


def exchanges(mesh):
    loss, count = mesh.sum(torch.tensor(0.5 + mesh.rank), torch.tensor([2**40 + 1, mesh.rank]))
    mesh.barrier()
    return {
        "loss": loss.item(),
        "loss_dtype": str(loss.dtype),
        "count": count.tolist(),
        "count_dtype": str(count.dtype),
        "object": mesh.broadcast_object({"from": mesh.rank}),
        "mains": int(mesh.sum(torch.tensor(int(mesh.is_main)))[0]),
        "group": dist.get_world_size(),
    }


def logits_called_beside_forward(mesh):
    alone, core = Tiny(0, torch.float64), Tiny(mesh.rank, torch.float64)
    wrap(core, mesh)
    tokens = batches(mesh.world_size, 0)[0][0, 0]
    with torch.no_grad():
        return distance([core.logits(tokens)], [alone.logits(tokens)])


def main(report, shard):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(shard=int(shard)), "cpu", ranks)
    actual = {
        "replicate": mesh.replicate,
        "fp32": gradients(mesh, torch.float32),
        "fp64": gradients(mesh, torch.float64),
        "naive": averaged_naively(mesh),
        "exchanges": exchanges(mesh),
        "logits": logits_called_beside_forward(mesh),
        "resumed": resumed_with_sharded_state(mesh),
        "skipped": {
            "adamw-fused": skipped(mesh, adamw.build, adamw.fused),
            "muon": skipped(mesh, muon.build, adamw.fused),
        },
        "trained": {name: weights_after_training(mesh, *parts) for name, parts in BUILDERS.items()},
    }
    mesh.barrier()
    disconnect()
    disconnect()
    actual["left"] = not dist.is_initialized()
    if mesh.is_main:
        Path(report).write_text(json.dumps(actual))


if __name__ == "__main__":
    main(*sys.argv[1:])
