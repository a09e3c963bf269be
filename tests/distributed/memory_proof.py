"""Measures the peak of the tensors of a step in several processes."""

import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

warnings.simplefilter("error")

from flatout.config.sections import ParallelConfig  # noqa: E402
from flatout.distributed.mesh import make_mesh, wrap  # noqa: E402
from flatout.distributed.rendezvous import connect, disconnect, silence_profiler  # noqa: E402
from flatout.models.transformer import Transformer  # noqa: E402
from flatout.ops import Ops, attention, cross_entropy  # noqa: E402


def peak_of(sizes, rows, seq_len, values, gathers):
    """Return the bytes of tensors at the peak of four steps that did not exist before each."""
    ops = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused)
    mesh = make_mesh(ParallelConfig(**values), "cpu")
    core = Transformer(Transformer.check(sizes, seq_len=seq_len), ops)
    gathers = getattr(torch, gathers) if gathers else None
    model = wrap(core, mesh, gathers=gathers)
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    tokens_BT = torch.randint(sizes["vocab_size"], (rows, seq_len))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=gathers is not None):
            loss, _ = model(tokens_BT, tokens_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def peak():
        gc.collect()
        options = {"profile_memory": True, "acc_events": True}  # torch 2.11 warns without
        with profile(activities=[ProfilerActivity.CPU], **options) as found:
            step()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            found.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        sizes = [event["args"] for event in events if event["name"] == "[memory]"]
        before = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
        return max(size["Total Allocated"] for size in sizes) - before

    step()
    step()
    return max(peak() for _ in range(4))  # gloo may free earlier what it has sent


def main(report, cases):
    silence_profiler()
    ranks = connect("cpu")
    found = [peak_of(**case) for case in json.loads(cases)]
    if ranks.rank == 0:
        Path(report).write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
