"""Compares models whose rows several processes share with the same models in one process."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("error")

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed import context  # noqa: E402
from flatout.distributed.mesh import make_mesh  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.models.eigenstate import Eigenstate, EigenstateConfig  # noqa: E402
from flatout.models.transformer import Transformer, TransformerConfig  # noqa: E402
from flatout.ops import Ops  # noqa: E402

ROWS, TOKENS, VOCABULARY = 2, 48, 20
SHAPES = {
    "gpt2": {"positions": "learned", "bias": True},
    "grouped": {"num_kv_heads": 2, "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu"},
    "window": {"window": 9, "full_attention_every": 2},
    "parallel residual": {"parallel_residual": True},
    "eigenstate": {"num_eigenstates": 8},
    "eigenstate, positions": {"num_eigenstates": 8, "positions": "learned"},
}
"""Keys of each model."""


def model_of(keys):
    """Return a model in float64, with random weights everywhere."""
    common = {"vocab_size": VOCABULARY, "num_layers": 2, "d_model": 16, "num_heads": 4}
    if "num_eigenstates" in keys:
        kind, config = Eigenstate, EigenstateConfig(**common | keys)
    else:
        kind, config = Transformer, TransformerConfig(**common | keys)
    torch.manual_seed(3)
    model = kind(kind.fitted(config, TOKENS), Ops.plain()).double()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.05)
    return model


def result_of(model, documents):
    """Return loss, number of targets and gradients of a batch with ragged targets."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[0, 30:] = -1
    ends = torch.tensor([[7, 12, 24, 41], [3, 4, 36, 47]])  # some where parts of rows end
    ids = (torch.arange(TOKENS)[None, None] >= ends[:, :, None]).sum(1) if documents else None
    loss, valid = model(tokens, targets, ids)
    loss.backward()
    return [loss.detach(), valid.double(), *(weights.grad for weights in model.parameters())]


def apart(actual, expected):
    """Return the largest difference, relative to the largest element of its tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
        for a, b in zip(actual, expected, strict=True)
    )


def main(report):
    connect("cpu")
    context.MASKED = 200  # attention takes several pieces
    mesh = make_mesh(ParallelConfig(context=dist.get_world_size()), "cpu")
    found = {}
    for name in SHAPES:
        for documents in (False, True):
            expected = result_of(model_of(SHAPES[name]), documents)
            model = model_of(SHAPES[name])
            mesh.share_rows(model, seq_len=TOKENS)
            actual = result_of(model, documents)
            for tensor in actual:
                dist.all_reduce(tensor)
            found[f"{name}, documents {documents}"] = apart(actual, expected)
    if mesh.is_main:
        report.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
