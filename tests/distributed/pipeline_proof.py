"""Compares models whose blocks several processes have with the same models in one process."""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("error")

from context_proof import TOKENS, VOCABULARY, apart, model_of  # noqa: E402
from tensor_proof import fill  # noqa: E402

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.data.load.loader import MicroBatch  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.pipeline import Pipeline, stages_of  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.distributed.tensor import boxes_of, cut_dim  # noqa: E402

ACCUMULATE, ROWS, SCALE = 4, 2, 0.25
COMMON = {"num_layers": 8, "tied_head": False}
MODELS = {
    "learned": {"positions": "learned", "bias": True},
    "llama": {"num_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "z_loss": 0.01},
    "eigenstate": {"num_eigenstates": 8},
}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
LAYOUTS = {
    2: [{"pipeline": 2}, {"pipeline": 2, **INTERLEAVED}],
    4: [
        {"pipeline": 4},
        {"pipeline": 4, **INTERLEAVED},
        {"pipeline": 2, "shard": 2},
        {"pipeline": 2, "shard": 2, "reshard": False, **INTERLEAVED},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 2, **INTERLEAVED},
        {"pipeline": 2, "shard": 2, "context": 2},
    ],
}
"""By the number of processes."""


def micro_batches(documents):
    """Return the micro-batches of a step. Their numbers of targets differ."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(ACCUMULATE):
        tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
        targets = tokens.roll(-1, 1)
        targets[0, 10 * number :] = -1
        ids = torch.arange(TOKENS).div(7 + number, rounding_mode="floor").expand(ROWS, -1)
        found.append(MicroBatch(tokens, targets, ids.int() if documents else None))
    return found


def alone(keys, steps):
    """Return loss, number of targets and gradients of steps in one process, and a score."""
    model = model_of(keys)
    losses = []
    for step in steps:
        for micro in step:
            loss, valid = model(micro.tokens_BT, micro.targets_BT, micro.doc_ids_BT)
            (loss * SCALE).backward()
            losses += [loss.detach(), valid.double()]
    model.eval()
    with torch.no_grad():
        score, _ = model(*vars(steps[0][0]).values())
    sums = [sum(losses[0::2]), sum(losses[1::2]), score]
    return sums, {name: p.grad for name, p in model.named_parameters()}


def together(keys, mesh, steps):
    """Return the same of all processes."""
    plain = model_of(keys)
    model = type(plain).on_meta(plain.config, plain.ops).double()
    stages = stages_of(model, mesh, nullcontext)
    mesh.share_rows(model, seq_len=TOKENS)
    mesh.share_layers(model, seq_len=TOKENS)
    cuts = model.tensor_cuts() if mesh.tensor > 1 else {}
    wrap(model, mesh, stages=stages)
    fill(model, plain, cuts)
    pipeline = Pipeline(model, stages, mesh)
    sums = torch.zeros(3, dtype=torch.float64)
    for step in steps:
        loss, valid = pipeline.step(step, SCALE)
        sums[:2] += torch.stack([loss.double(), valid.double()])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if model.split is not None:
        model.split.add_parts([g.to_local() for g in gradients.values() if cut_dim(g) is None])
    pipeline.eval()
    with torch.no_grad():
        sums[2] = pipeline(*vars(steps[0][0]).values())[0]
    dist.all_reduce(sums)
    found = {}
    for name, whole in plain.named_parameters():
        value, seen = torch.zeros_like(whole), torch.zeros_like(whole)
        for offset, part in boxes_of(gradients[name], cuts.get(name)) if name in gradients else ():
            box = tuple(slice(a, a + n) for a, n in zip(offset, part.shape, strict=True))
            value[box], seen[box] = part, 1
        dist.all_reduce(value)
        dist.all_reduce(seen)
        assert seen.min() > 0, f"{name} has an owner"
        found[name] = value.detach() / seen * mesh.context
    return [each / mesh.dp_size for each in sums], found


def main(report):
    connect("cpu")
    found = {}
    for layout in LAYOUTS[dist.get_world_size()]:
        mesh = make_mesh(ParallelConfig(**layout), "cpu")
        for name, own in MODELS.items():
            keys, documents = COMMON | own, name != "learned"
            steps = [micro_batches(documents)] * 2
            expected, gradients = alone(keys, steps)
            actual, theirs = together(keys, mesh, steps)
            label = " ".join(f"{key}={value}" for key, value in layout.items())
            found[f"{label}, {name}"] = max(
                apart(actual, expected), apart(theirs.values(), gradients.values())
            )
    if mesh.is_main:
        report.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
