"""Records when a compiled model runs backward and reduces gradients, in several processes."""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

warnings.simplefilter("error")
warnings.simplefilter(
    "ignore", DeprecationWarning
)  # torch's own compiler makes objects of its functions
warnings.filterwarnings(
    "ignore", "The .grad attribute of a Tensor that is not a leaf"
)  # and asks tensors for gradients

from flatout.assembly.compiling import compile_model  # noqa: E402
from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect  # noqa: E402
from flatout.models.transformer import Transformer  # noqa: E402
from flatout.ops import Ops  # noqa: E402


def order(mesh, compiled):
    """Return the events in order: "backward" of a compiled graph, "exchange" of a bucket."""
    happened = []

    def recorded(graph, _inputs):
        return make_boxed_func(lambda *args: happened.append("backward") or graph.forward(*args))

    torch.compile = partial(
        torch.compile,
        backend=aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=recorded
        ),
    )
    config = Transformer.check(
        {"vocab_size": 64, "num_layers": 4, "d_model": 128, "num_heads": 2}, seq_len=8
    )  # buckets hold at least 1 MiB
    core = Transformer(config, Ops.plain())
    compiled(core, mesh)
    model = wrap(core, mesh)
    model.register_comm_hook(
        None, lambda group, bucket: happened.append("exchange") or allreduce_hook(group, bucket)
    )
    tokens_BT = torch.zeros(2, 8, dtype=torch.int64)
    core(tokens_BT, tokens_BT.clone())[0].backward()  # as the warm-up does, without DDP
    model.zero_grad()
    for _ in range(2):  # DDP creates its buckets in the first pass, which has one bucket
        happened.clear()
        model(tokens_BT, tokens_BT.clone())[0].backward()
    return happened


def main(report):
    ranks = connect("cpu")
    mesh = make_mesh(ParallelConfig(), "cpu", ranks)
    by_compile = order(mesh, compile_model)
    torch._dynamo.reset()
    whole = order(mesh, lambda core, _mesh: core.compile(dynamic=False))
    mesh.barrier()
    disconnect()
    if mesh.is_main:
        Path(report).write_text(json.dumps({"compile": by_compile, "whole": whole}))


if __name__ == "__main__":
    main(*sys.argv[1:])
