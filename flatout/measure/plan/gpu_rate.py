"""Predicts the time of a step on GPUs: matmuls, attention, memory traffic, communication.

The constants fit 121 published runs of 8 to 2,048 A100 and H100 (benchmarks/published.py).

Letters: L layers, D width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine
from flatout.models.language_model import model_of
from flatout.ops import Ops

MATMUL_SHARE = {8: 0.65, 9: 0.5}
"""Share of the peak that matmuls reach, by major compute capability. Others use the newest."""
ATTENTION_SHARE = 0.5
"""Rate of attention as a share of that of matmuls."""
MOVED_BYTES = {True: 100, False: 300}
"""Bytes that other operations move per token, layer and component of the width, compiled or not."""
RECOMPUTED = {"checkpointing": 1 / 3, "selective-checkpointing": 0.12}
"""Work that is repeated in backward, as a share of the rest, by speedup."""
INSIDE_SHARE, BETWEEN_SHARE = 0.8, 0.8
"""Share of a link's rate that collectives reach."""
PCIE_GB_PER_S = 25.0
"""Rate between GPUs without direct links."""
EXCHANGES = 8
"""Times that a layer gathers or adds up hidden states among ranks that share it: four forward."""
HOST_GB_PER_S = {7: 12.0, 8: 24.0, 9: 48.0}
"""Assumed rate of a GPU to and from pinned memory, by major compute capability. Others: the newest.
PCI Express of 16 lanes moves 16, 32 or 64 GB/s.
"""
ADAMW_BYTES, HOST_MEMORY_GB_PER_S = 28, 100.0
"""Bytes per weight that AdamW reads and writes, and the assumed rate of a machine's memory."""
WEIGHT_BYTES = 14
"""Bytes per weight that a micro-batch of any size moves: 6 to round it to bf16, 4 to read that in
both passes, 4 to write its gradient.
"""
GATHERED, REDUCED, HIDDEN = 2, 4, 4
"""Bytes per weight that are gathered, in bf16, per gradient that are reduced, in fp32, and per
component of hidden states between the stages of a pipeline, in fp32.
"""


@dataclass(frozen=True)
class GpuTime:
    """Seconds of an average step, and what they are made of."""

    compute_s: float
    communication_s: dict[str, float]
    """By what is exchanged."""
    host_s: float = 0.0
    """Seconds of an optimizer's step on the CPU, meanwhile the GPU waits."""
    layers_s: float = 0.0
    """Seconds in which processes that share layers exchange hidden states, while nothing else
    runs.
    """
    idle: float = 0.0
    """Share of the other times that a process of a pipeline waits at the start and the end."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: communication is hidden behind computing as far as that goes."""
        compute_s = (self.compute_s + self.layers_s) * (1 + self.idle)
        return max(compute_s, sum(self.communication_s.values())) + self.host_s

    def describe(self) -> str:
        """Return what the time was predicted from."""
        parts = {"computing": self.compute_s, "shared layers": self.layers_s}
        parts["waiting in the pipeline"] = self.idle * sum(parts.values())
        parts |= {f"{name} meanwhile": value for name, value in self.communication_s.items()}
        parts["AdamW on the CPU"] = self.host_s
        texts = [f"{1e3 * value:.0f} ms of {name}" for name, value in parts.items() if value]
        return f"published runs: {', '.join(texts)}, per step"


def gpu_time(
    config: RunConfig,
    machine: Machine,
    arithmetic: str,
    *,
    world_size: int,
    speedups: Collection[str],
    optimizer_flops: int = 0,
) -> GpuTime | None:
    """Return the time of a step of a resolved configuration, whose matmuls are in `arithmetic`.

    `optimizer_flops` are those of an optimizer like Muon on one GPU. None if the GPU's rate is not
    known, and for a model without an embedding.
    """
    row = machine.row
    peak = row.peak_tflops.get(arithmetic) if row else None
    model_class, model_config = model_of(config)
    model: Any = model_class.on_meta(model_config, Ops.plain())
    kinds, named = model.parameter_kinds(), model.named_parameters()
    width = next((each.shape[1] for name, each in named if kinds[name] == "embedding"), None)
    if row is None or peak is None or width is None:
        return None
    seq_len, parallel, stages = config.data.seq_len, config.parallel, config.parallel.pipeline
    products = float(model.flops_per_token(1).causal_exact)
    attention = float(model.flops_per_token(seq_len).causal_exact) - products
    again = 1 + max((RECOMPUTED.get(name, 0.0) for name in speedups), default=0.0)
    generation = row.compute_capability[0] if row.compute_capability else 0

    def newest(figures: dict[int, float]) -> float:
        """Return the value for this generation of GPUs, or for the newest."""
        return figures.get(generation, figures[max(figures)])

    heads = (each.numel() for name, each in model.named_parameters() if kinds[name] == "head")
    products += (stages - 1) * 6 * sum(heads)  # all wait for the last stage, which has the head
    rate = 1e12 * peak.value * newest(MATMUL_SHARE)
    layers = len(model.layers)
    moved = MOVED_BYTES["compile" in speedups] * layers * width
    token_s = again * (products + attention / ATTENTION_SHARE) / rate
    bandwidth = row.bandwidth_gb_per_s.value * 1e9
    token_s += moved / bandwidth
    tokens = (config.batch.tokens_per_step or 0) / world_size
    accumulate = config.batch.accumulate or 1
    tensor, shard, copies = parallel.tensor, parallel.shard, world_size // parallel.unit
    weights = sum(parameter.numel() for parameter in model.parameters()) / (tensor * stages)
    # a pipeline reduces gradients once per step, and gathers weights once that it then keeps
    reductions = accumulate if stages == 1 else 1
    gathers = 2 * accumulate if parallel.reshard else reductions

    def seconds(num_bytes: float, span: int) -> float:
        """Return the time to exchange bytes in groups that span this many consecutive GPUs."""
        inside = row.link_gb_per_s.value if row.link_gb_per_s else PCIE_GB_PER_S
        gb_per_s = INSIDE_SHARE * inside
        if span > machine.gpus_per_node and machine.network_gbit_per_s:
            gb_per_s = min(gb_per_s, BETWEEN_SHARE * machine.network_gbit_per_s / 8)
        return num_bytes / (1e9 * gb_per_s)

    exchanged: dict[str, float] = {}
    if shard > 1:
        part = (shard - 1) / shard * weights
        exchanged["gathering weights"] = seconds(gathers * GATHERED * part, shard * tensor)
        exchanged["reducing gradients"] = seconds(reductions * REDUCED * part, shard * tensor)
    if copies > 1:
        added = 2 * (copies - 1) / copies * REDUCED * weights / shard
        exchanged["averaging gradients between replicas"] = seconds(added, world_size // stages)
    if stages > 1:
        sent = 2 * HIDDEN * parallel.num_stages * tokens * width
        exchanged["sending hidden states"] = seconds(sent, world_size)
    if parallel.context > 1:
        sent = model.shared_bytes(seq_len // parallel.context) * tokens * (parallel.context - 1)
        exchanged["sharing rows"] = seconds(sent, parallel.context)
    host_s = layers_s = 0.0
    weights_s = accumulate * WEIGHT_BYTES * weights / bandwidth + optimizer_flops / rate
    if tensor > 1:
        hidden = EXCHANGES * again * layers * tokens * (tensor - 1) * width * GATHERED
        layers_s = seconds(hidden, tensor)
    if parallel.offload == "cpu":
        own, gb_per_s = 4 * weights / shard, newest(HOST_GB_PER_S)
        exchanged["copying weights from the host"] = gathers * own / (1e9 * gb_per_s)
        exchanged["copying gradients to the host"] = accumulate * own / (1e9 * gb_per_s)
        here = min(machine.gpus_per_node, world_size)
        host_s = here * ADAMW_BYTES * weights / shard / (1e9 * HOST_MEMORY_GB_PER_S)
    else:
        weights_s += ADAMW_BYTES * weights / shard / bandwidth
    idle = (stages - 1) * stages / (parallel.num_stages * accumulate)
    return GpuTime(tokens * token_s + weights_s, exchanged, host_s, layers_s, idle)
