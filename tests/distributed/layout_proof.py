"""Saves a model in every layout of four processes, and loads each into every other one."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("error")

from context_proof import SHAPES, model_of  # noqa: E402
from tensor_proof import shared  # noqa: E402

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.training.checkpoint import tensors  # noqa: E402
from flatout.training.checkpoint.tensors import local_part  # noqa: E402

LAYOUTS = {
    "shard": {"shard": 4},
    "hsdp": {"replicate": 2, "shard": 2},
    "tensor x shard": {"tensor": 2, "shard": 2},
    "tensor x replicate": {"tensor": 2, "replicate": 2},
}
MODELS = {
    "grouped": {"num_kv_heads": 2, "activation": "swiglu", "bias": True, "tied_head": False},
    "eigenstate": {"num_eigenstates": 8, "bias": True},
}


def built(keys, layout):
    """Return the weights of a model in a layout, and how ranks share them."""
    mesh = make_mesh(ParallelConfig(**layout), "cpu")
    model, cuts = shared(keys, mesh)
    return dict(model.named_parameters()), cuts if mesh.tensor > 1 else {}


def saved(weights, cuts, folder):
    """Write a checkpoint's tensors from all ranks; return their index."""
    rank = dist.get_rank()
    mine = tensors.owned(weights, rank=rank, world_size=dist.get_world_size())
    name = f"model-{rank}.safetensors"
    parts = {own: part for _, own, _, part in tensors.pieces(mine, cuts)}
    tensors.write(folder / name, parts)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensors.entries(name, mine, cuts))
    return tensors.merge(every)


def main(report):
    connect("cpu")
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, src=0)
    found = {}
    for kind, keys in (MODELS | {"learned": SHAPES["gpt2"]}).items():
        whole = {name: weight.detach() for name, weight in model_of(keys).named_parameters()}
        layouts = {name: built(keys, layout) for name, layout in LAYOUTS.items()}
        layouts["one process"] = whole, {}
        for before, (weights, cuts) in layouts.items():
            folder = Path(box[0]) / f"{kind} {before}"
            folder.mkdir(exist_ok=True)
            index = saved(weights, cuts, folder)
            for after, (own, own_cuts) in layouts.items():
                expected = {name: local_part(each).clone() for name, each in own.items()}
                for each in own.values():
                    local_part(each).fill_(torch.nan)
                tensors.fill(own, index, folder, cuts=own_cuts)
                same = all(torch.equal(local_part(own[name]), expected[name]) for name in own)
                equal = torch.tensor(float(same))
                dist.all_reduce(equal, op=dist.ReduceOp.MIN)
                found[f"{kind}: {before} -> {after}"] = bool(equal)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
