"""bf16-stream narrows the hidden states and compiles; test_promises.py checks the losses."""

import pytest
import torch

from flatout.progress import SILENT
from flatout.training.step import train_step
from flatout.training.warmup import warm_up

pytestmark = pytest.mark.slow


class NoLog:
    progress = SILENT

    def __init__(self):
        self.events = []

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def compiled(self, seconds):
        self.seconds = seconds


@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_blocks_add_to_bfloat16_and_weights_stay_fp32(build_run, tiny_config, kind):
    seen = {}
    for speedups in ("bf16", "bf16,bf16-stream"):
        run = build_run(tiny_config(model__kind=kind, train__precision="auto", speedups=speedups))
        types = seen.setdefault(speedups, set())
        for block in run.core.blocks:
            block.register_forward_hook(
                lambda _block, given, left, types=types: types.update((given[0].dtype, left.dtype))
            )
        train_step(run, next(run.feed))
    assert seen == {"bf16": {torch.float32}, "bf16,bf16-stream": {torch.bfloat16}}
    assert all(parameter.dtype == torch.float32 for parameter in run.core.parameters())


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
def test_the_narrowing_is_compiled_with_the_model(build_run, tiny_config):
    run = build_run(
        tiny_config(
            train__precision="auto", speedups="bf16,bf16-stream,compile", model__num_layers=1
        )
    )
    log = NoLog()
    warm_up(run, log)
    assert log.events == []
    assert train_step(run, next(run.feed)).loss.isfinite()
