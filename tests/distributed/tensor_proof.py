"""Compares models whose layers several processes share with the same models in one process."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("error")

from context_proof import SHAPES, TOKENS, apart, model_of, result_of  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.distributed.tensor import boxes_of, cut_dim  # noqa: E402

MORE = {
    "neox": {"norm": "layernorm", "bias": True, "parallel_residual": True},
    "geglu": {"activation": "geglu", "bias": True, "logit_scale": 0.5},
    "capped": {"tied_head": False, "logit_softcap": 3.0, "z_loss": 0.01},
    "eigenstate-bias": {"num_eigenstates": 8, "bias": True, "positions": "learned"},
}


def assembled(tensor, cut, like):
    """Return a whole tensor from the parts of all ranks."""
    whole, seen = torch.zeros_like(like), torch.zeros_like(like)
    for offset, values in boxes_of(tensor, cut):
        box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
        whole[box] = values
        seen[box] = 1
    dist.all_reduce(whole)
    dist.all_reduce(seen)
    assert seen.min() > 0, "every element has an owner"
    return whole / seen


def shared(keys, mesh):
    """Return the model on the meta device, divided among ranks, with the weights of one process."""
    plain = model_of(keys)
    model = type(plain).on_meta(plain.config, plain.ops).double()
    mesh.share_layers(model, seq_len=TOKENS)
    cuts = model.tensor_cuts()
    wrapped = wrap(model, mesh)
    fill(model, plain, cuts)
    return wrapped, cuts


def fill(model, plain, cuts):
    """Allocate a divided model, with the weights of one in one process."""
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "_tables"):
            module.cos, module.sin = module._tables(torch.device("cpu"))
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            for offset, part in boxes_of(parameter, cuts.get(key)):
                box = (slice(a, a + n) for a, n in zip(offset, part.shape, strict=True))
                part.copy_(weights[key][tuple(box)])


def main(report):
    connect("cpu")
    size = dist.get_world_size()
    found = {}
    for shard in sorted({1, size // 2}):
        mesh = make_mesh(ParallelConfig(shard=shard, tensor=size // shard), "cpu")
        copies = shard  # they read the same rows here
        for name, keys in {**SHAPES, **MORE}.items():
            if keys.get("num_kv_heads", mesh.tensor) % mesh.tensor:
                continue
            for documents in (False, True):
                whole = model_of(keys)
                expected = result_of(whole, documents)
                model, cuts = shared(keys, mesh)
                loss, valid, *gradients = result_of(model, documents)
                parts = [g.to_local() for g in gradients if cut_dim(g) is None]
                model.split.add_parts(parts)
                sums = [torch.as_tensor(each).double() for each in (loss, valid)]
                for each in sums:
                    dist.all_reduce(each)
                actual = [each / copies for each in sums]
                for (key, like), gradient in zip(whole.named_parameters(), gradients, strict=True):
                    actual.append(assembled(gradient, cuts.get(key), like.detach()))
                found[f"shard {shard}, {name}, documents {documents}"] = apart(actual, expected)
    if mesh.is_main:
        report.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
