"""The estimated peak of each way to train one model in two processes is the measured one."""

import json

import pytest
import torch

from flatout.assembly.memory import Workload, estimate
from flatout.assembly.parts import two_in_fp32
from flatout.config.sections import LoraConfig, OptimConfig, ParallelConfig
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy, newton_schulz

pytestmark = pytest.mark.slow


SIZES = {"vocab_size": 512, "num_layers": 6, "d_model": 128, "num_heads": 4, "tied_head": False}
ROWS, TOKENS = 2, 64
MODES = {
    "copies": ({}, None),
    "sharded": ({"shard": 2}, None),
    "kept": ({"shard": 2, "reshard": False}, None),
    "narrow": ({"shard": 2}, "bfloat16"),
    "narrow and kept": ({"shard": 2, "reshard": False}, "bfloat16"),
}


@pytest.mark.quick_cases("sharded", "narrow and kept")
@pytest.mark.parametrize("mode", MODES)
def test_the_estimated_peak_is_the_measured_one(launch, mode):
    """To 15%: gloo's threads free what they have sent a little earlier or later."""
    values, name = MODES[mode]
    shape = {"sizes": SIZES, "rows": ROWS, "seq_len": TOKENS}
    (measured,) = launch(
        "memory_proof.py", 2, json.dumps([shape | {"values": values, "gathers": name}])
    )
    dtype = getattr(torch, name) if name else None
    work = Workload(
        Transformer,
        Transformer.check(SIZES, seq_len=TOKENS),
        TOKENS,
        Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused),
        autocast=dtype,
        moments=two_in_fp32,
        gathers=dtype,
        activations=None,
        document_mask=False,
        gradients_stay=False,
        optim=OptimConfig(),
        newton_schulz=newton_schulz.reference,
        adamw_copies=0,
        lora=LoraConfig(),
        on_gpu=False,
        parallel=ParallelConfig(**values),
    )
    found = estimate(work, ROWS)
    assert found.peak.total == pytest.approx(measured, rel=0.15)
