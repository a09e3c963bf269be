"""A small run without dataset or recipe, with all the state that a resume needs."""

import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from flatout.distributed.mesh import Mesh
from flatout.optim.loss_scale import LossScaler
from flatout.optim.step_guard import StepGuard
from flatout.training.step import seed_step

WIDTH = 8
ALONE = Mesh()


class Loader:
    """Generates batches that depend only on its position."""

    def __init__(self):
        self.position = 0

    def seek(self, position):
        self.position = position

    def __next__(self):
        self.position += 4
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(4, WIDTH, generator=generator)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x_BD):
        return x_BD + self.dropout(torch.tanh(self.matrix(self.norm(x_BD))))


class Core(nn.Module):
    """Has tied weights, a buffer that counts calls, and sizes that are odd for two ranks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 5, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x_BD):
        self.calls += 1
        for block in self.blocks:
            x_BD = block(x_BD)
        return torch.nn.functional.cross_entropy(
            self.head(x_BD), self.embedding(x_BD).argmax(-1)
        ) * (1 + 1e-3 * self.calls)


def build(folder: Path, *, seed=0, mesh=ALONE, scaler=True, shard=None) -> SimpleNamespace:
    """Return a new run at step 0: two optimizers of different kinds, several parameter groups."""
    torch.manual_seed(seed)
    core = Core().to(mesh.device)
    if shard is not None:
        shard(core)
    matrices = [block.matrix.weight for block in core.blocks]
    vectors = [p for block in core.blocks for p in block.norm.parameters()]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "peak_lr": 0.01},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": 0.02},
    ]
    optimizers = (
        torch.optim.AdamW(groups, lr=0.01, fused=True, foreach=False),
        torch.optim.SGD([core.embedding.weight], lr=0.05, momentum=0.9),
    )
    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(seed=0)),
        core=core,
        model=core,
        optimizers=optimizers,
        scaler=LossScaler(1024.0, growth_interval=4) if scaler else None,
        guard=StepGuard(device=mesh.device),
        loader=Loader(),
        mesh=mesh,
        machine=SimpleNamespace(memory_gib=1e6),
        folder=folder,
        step=0,
        tokens=0,
        elapsed_s=0.0,
        best_val_loss=None,
        best_step=None,
        evaluations_since_best=0,
        evaluation_due=False,
        base=None,
    )


def train(run, num_steps) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for _ in range(num_steps):
        seed_step(run)
        loss = run.model(next(run.loader).to(run.mesh.device))
        scale = run.scaler.scale if run.scaler else 1.0
        (loss * scale).backward()
        for p in run.core.parameters():
            if p.grad is not None:
                p.grad /= scale
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if run.scaler:
            run.scaler.update(True)
        norm = torch.full_like(loss, math.nan if run.step % 4 == 3 else 1)
        run.guard.judge(loss.detach(), norm, torch.ones(()))
        run.step += 1
        run.tokens += 4
        run.elapsed_s += 0.1
        losses.append(loss.item())
        if run.best_val_loss is None or losses[-1] < run.best_val_loss:
            run.best_val_loss, run.best_step = losses[-1], run.step
    return losses


def outcome(run, num_steps) -> dict:
    """Return the outcome of further training, which must be equal bit for bit after a resume.

    It is read without state.py.
    """
    losses = train(run, num_steps)
    return {
        "losses": losses,
        "weights": {
            name: tensor.detach().cpu().numpy().tobytes()
            for name, tensor in run.core.state_dict().items()
        },
        "moments": [
            [
                tensor.cpu().numpy().tobytes()
                for p in group["params"]
                for _, tensor in sorted(optimizer.state[p].items())
            ]
            for optimizer in run.optimizers
            for group in optimizer.param_groups
        ],
        "numbers": (
            run.step,
            run.tokens,
            run.elapsed_s,
            run.best_val_loss,
            run.best_step,
            run.loader.position,
        ),
        "scale": run.scaler and run.scaler.state_dict(),
        "guard": run.guard.state_dict(),
    }
