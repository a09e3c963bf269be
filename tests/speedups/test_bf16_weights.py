"""bf16 weights with an fp32 update equal fp32 weights under autocast, bit for bit, off ties."""

from __future__ import annotations

import json

import pytest
import torch
from kept import kept_bytes

from flatout.assembly.memory import estimate
from flatout.assembly.recipe import baseline
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import speedup_named
from flatout.models.split_weights import SplitTensor, join, split
from flatout.training.checkpoint import read_write
from flatout.training.step import train_step

pytestmark = pytest.mark.slow

SPLIT = "bf16-weights"


def move_off_ties(run):
    with torch.no_grad():
        for parameter in run.core.parameters():
            if parameter.ndim == 2:
                parameter.copy_(join(*split(parameter)))


def steps(run, count, *, ties=False):
    losses = []
    if ties:
        move_off_ties(run)
    for _ in range(count):
        result = train_step(run, next(run.feed))
        losses.append((float(result.loss), float(result.grad_norm)))
        run.step += 1
        if ties:
            move_off_ties(run)
    return losses


def state_of(run):
    names = {parameter: name for name, parameter in run.core.named_parameters()}
    weights = {name: parameter.detach() + 0 for parameter, name in names.items()}
    return weights | {
        f"{names[p]}/{key}": value
        for o in run.optimizers
        for p, kept in o.state.items()
        for key, value in kept.items()
    }


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert (
            torch.equal(value, other[key])
            if isinstance(value, torch.Tensor)
            else value == other[key]
        ), key


@pytest.mark.parametrize("speedups", ["bf16", "bf16,fused-adamw,chunked-ce"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_a_run_equals_one_with_fp32_weights_bit_for_bit(
    kind, optim, speedups, build_run, tiny_config, ragged_set
):
    """Losses, norms, weights and moments; with clipping, accumulation and masked targets.

    Without fused-adamw, AdamW's decay is a separate write whose result is moved off ties too, so
    the comparison uses no decay.
    """
    one_write = "fused-adamw" in speedups
    config = tiny_config(
        model__kind=kind,
        optim__kind=optim,
        optim__clip=0.5,
        train__precision="auto",
        data__path=str(ragged_set),
    )
    config = config.with_values({"optim.weight_decay": 0.1 if one_write else 0.0})
    plain = build_run(config.with_values({"speedups": speedups}))
    fast = build_run(config.with_values({"speedups": f"{speedups},{SPLIT}"}))
    assert fast.config.batch.accumulate > 1
    matrices = [p for p in fast.core.parameters() if p.ndim == 2]
    assert all(isinstance(p, SplitTensor) for p in matrices)
    assert len(matrices) < len(list(fast.core.parameters()))
    assert steps(fast, 8) == steps(plain, 8, ties=True)
    assert_equal_states(state_of(fast), state_of(plain))


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_resuming_after_five_steps_equals_ten_steps(optim, build_run, tiny_config, tmp_path):
    config = tiny_config(
        optim__kind=optim,
        train__steps=10,
        train__precision="auto",
        speedups=f"bf16,fused-adamw,{SPLIT}",
    )
    whole, half = build_run(config, tmp_path / "whole"), build_run(config, tmp_path / "half")
    losses = steps(whole, 10)
    assert steps(half, 5) == losses[:5]
    saved = read_write.save(half)
    again = build_run(config, tmp_path / "half")
    steps(again, 2)
    read_write.load(again, saved)
    assert steps(again, 5) == losses[5:]
    assert_equal_states(state_of(again), state_of(whole))


def test_a_checkpoint_holds_fp32_weights_and_fits_both_ways(build_run, tiny_config, tmp_path):
    config = tiny_config(train__precision="auto", speedups=f"bf16,{SPLIT}")
    fast = build_run(config, tmp_path / "fast")
    steps(fast, 3)
    saved = read_write.save(fast)
    stored = read_write.read_weights(saved)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert any((tensor.bfloat16() != tensor).any() for tensor in stored.values())
    plain = build_run(config.with_values({"speedups": "bf16"}), tmp_path / "plain")
    read_write.load(plain, saved)
    assert_equal_states(state_of(plain), state_of(fast))
    plain_saved = read_write.save(plain)
    assert read_write.weights_sha256(plain_saved) == read_write.weights_sha256(saved)
    assert (
        json.loads((plain_saved / "index.json").read_text())["tensors"].keys()
        == json.loads((saved / "index.json").read_text())["tensors"].keys()
    )
    back = build_run(config, tmp_path / "back")
    read_write.load(back, plain_saved)
    assert steps(back, 2) == steps(fast, 2)
    begun = build_run(config, tmp_path / "begun")
    read_write.load_weights(begun, saved)
    assert all(
        torch.equal(tensor.detach() + 0, stored[name])
        for name, tensor in begun.core.named_parameters()
    )


@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_the_memory_estimate_counts_no_rounded_copy(kind, build_run, tiny_config):
    config = tiny_config(model__kind=kind, train__precision="auto", speedups=f"bf16,{SPLIT}")
    run = build_run(config)
    recipe = baseline().with_speedup(speedup_named("bf16"))
    plain, fast = (
        estimate(workload_of(run.config, made), 4)
        for made in (recipe, recipe.with_speedup(speedup_named(SPLIT)))
    )
    assert (fast.weights, fast.gradients, fast.optimizer) == (
        plain.weights,
        plain.gradients,
        plain.optimizer,
    )
    in_blocks = sum(p.numel() for p in run.core.blocks.parameters() if p.ndim == 2)
    assert plain.activations - fast.activations == pytest.approx(2 * in_blocks, rel=0.1)
    assert fast.logits <= plain.logits
    tokens_BT = torch.zeros(4, config.data.seq_len, dtype=torch.int64)

    def to_the_last_block():
        hidden_BTD = run.core.embed(tokens_BT)
        for block in run.core.blocks:
            hidden_BTD = block(hidden_BTD)
        return hidden_BTD

    parts = [
        part
        for p in run.core.parameters()
        for part in ((p.high, p.low) if isinstance(p, SplitTensor) else (p,))
    ]
    with run.autocast():
        kept, _ = kept_bytes(to_the_last_block, apart_from=[*parts, *run.core.buffers()])
    assert fast.activations == pytest.approx(kept, rel=0.01)


def test_sharded_weights_are_refused_with_a_fix(tiny_config):
    refused = speedup_named(SPLIT).why_not(None, tiny_config(parallel__shard=2))
    assert "parallel.shard=1" in refused
    frozen = speedup_named(SPLIT).why_not(None, tiny_config(lora__rank=2))
    assert "lora.base_dtype=bf16" in frozen
    assert speedup_named(SPLIT).why_not(None, tiny_config()) is None
