"""Compares weights gathered in bfloat16 and in fp32, in several processes."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

warnings.simplefilter("error")

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.models.transformer import Transformer  # noqa: E402
from flatout.ops import Ops  # noqa: E402

STEPS, ACCUMULATE = 6, 2


def trained(mesh, gathers):
    """Return losses, the gradients of the first step, and the dtypes seen."""
    seen = set()

    def linear(hidden, weight, bias, *, activation=None):
        seen.add((str(weight.dtype), str(hidden.dtype)))
        return plain.linear(hidden, weight, bias, activation=activation)

    torch.manual_seed(mesh.rank)
    sizes = {
        "vocab_size": 101,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "bias": True,
        "norm": "layernorm",
        "qk_norm": True,
    }
    plain = Ops.plain()
    core = Transformer(Transformer.check(sizes, seq_len=16), replace(plain, linear=linear))
    model = wrap(core, mesh, gathers=gathers)
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2, fused=True)
    tokens = torch.randint(
        101, (ACCUMULATE, 2, 17), generator=torch.Generator().manual_seed(mesh.rank)
    )
    losses, gradients = [], {}
    for step in range(STEPS):
        for number, tokens_BT in enumerate(tokens, 1):
            model.set_requires_gradient_sync(number == ACCUMULATE)
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
            loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {
                name: parameter.grad.full_tensor() for name, parameter in core.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    kept = {
        str(tensor.dtype) for p in core.parameters() for tensor in (p, *optimizer.state[p].values())
    }
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    return losses, gradients, sorted(seen), sorted(kept)


def main(report, shard):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(shard=int(shard)), "cpu", ranks)
    wide, narrow = (trained(mesh, gathers) for gathers in (None, torch.bfloat16))
    names = {
        "equal": sorted(name for name in wide[1] if torch.equal(wide[1][name], narrow[1][name])),
        "other": sorted(
            name for name in wide[1] if not torch.equal(wide[1][name], narrow[1][name])
        ),
    }
    if mesh.is_main:
        Path(report).write_text(
            json.dumps(
                names
                | {
                    "wide": wide[0],
                    "narrow": narrow[0],
                    "seen": [wide[2], narrow[2]],
                    "kept": narrow[3],
                }
            )
        )
    mesh.barrier()
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
