"""The memory estimate agrees with real tensors, and says what fits. Letters: B rows, T tokens."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from kept import kept_bytes

from flatout.assembly.choices import assemble
from flatout.assembly.memory import GIB, Live, Workload, estimate, free_bytes, workload_of
from flatout.assembly.parts import two_in_fp32
from flatout.config.registry import MODELS
from flatout.config.sections import LoraConfig, OptimConfig, ParallelConfig
from flatout.hardware.machine import Machine, machine_named, probe
from flatout.measure.plan.prediction import most_rows
from flatout.models.lora import with_adapters
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy, newton_schulz, scan

pytestmark = pytest.mark.slow

OPS = {
    "plain": Ops.plain(),
    "fused": Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused),
}
PLAIN = {
    "moments": two_in_fp32,
    "parallel": ParallelConfig(),
    "gathers": None,
    "activations": None,
    "gradients_stay": False,
    "optim": OptimConfig(),
    "newton_schulz": newton_schulz.reference,
    "adamw_copies": 0,
    "lora": LoraConfig(),
    "on_gpu": True,
}
"""A run without speedups of its memory, on one GPU."""
SHAPES = {
    "default": {},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "tied_head": False},
    "gpt2 with dropout": {"positions": "learned", "bias": True, "dropout": 0.1},
    "qk norm, window": {"qk_norm": True, "activation": "relu2", "window": 7},
    "gpt_neox": {
        "parallel_residual": True,
        "rotary_dims": 4,
        "activation": "gelu_exact",
        "qkv_bias": True,
        "logit_scale": 0.5,
    },
    "windows in some layers": {
        "norm": "rmsnorm",
        "activation": "geglu",
        "window": 7,
        "full_attention_every": 2,
    },
}


def workload(ops="fused", *, seq_len=33, autocast=None, document_mask=False, **own):
    config = Transformer.check(
        {"vocab_size": 101, "num_layers": 3, "d_model": 64, "num_heads": 4} | own, seq_len=seq_len
    )
    return Workload(
        Transformer, config, seq_len, OPS[ops], autocast, document_mask=document_mask, **PLAIN
    )


def real(work, rows):
    model = work.model_class(work.model_config, work.ops)
    tokens = torch.randint(model.config.vocab_size, (rows, work.seq_len + 1))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


VARIANTS = [*product(OPS, (None, torch.bfloat16), (False, True))]


@pytest.mark.parametrize(
    ("shape", "ops", "autocast", "document_mask"),
    # each shape with three of the eight variants
    [(s, *VARIANTS[(3 * i + 5 * k) % 8]) for i, s in enumerate(SHAPES) for k in range(3)],
)
def test_activations_equal_what_autograd_keeps(shape, ops, autocast, document_mask):
    """Within 1%: whole model, real tensors, every saved storage once."""
    work = workload(ops, autocast=autocast, document_mask=document_mask, **SHAPES[shape])
    model, tokens_BT, _ = real(work, 4)
    doc_ids_BT = None
    if document_mask:
        doc_ids_BT = (torch.arange(work.seq_len, dtype=torch.int32) // 9).repeat(4, 1)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        kept, _ = kept_bytes(
            lambda: model.through(model.blocks, None, tokens_BT, doc_ids_BT),
            apart_from=[*model.parameters(), *model.buffers()],
        )
    if (
        document_mask and ops == "plain"
    ):  # the mask lives as long as the blocks run; autograd needs none
        shared = model.shared_by_blocks(tokens_BT, doc_ids_BT)
        kept += sum(each.nbytes for each in shared[0].values())
    assert estimate(work, 4).activations == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("name", ["checkpointing", "selective-checkpointing"])
def test_recomputed_activations_are_not_counted(name):
    """Full checkpointing keeps a block's input only; selective less than all, as estimated."""
    recompute = assemble([name]).activations
    whole = workload(seq_len=64)
    work = replace(whole, activations=recompute)
    model, tokens_BT, _ = real(work, 4)
    inputs_bytes = len(model.blocks) * 4 * 64 * model.config.d_model * 4
    estimated = estimate(work, 4).activations
    assert estimated < 0.75 * estimate(whole, 4).activations
    if name == "checkpointing":
        assert estimated == pytest.approx(inputs_bytes, rel=0.05)
    losses = []
    for change in (lambda _: None, recompute):
        change(model)
        model.zero_grad()
        loss, _ = model(tokens_BT, tokens_BT)
        loss.backward()
        losses.append((loss.detach(), *(each.grad.clone() for each in model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))


def test_gathers_in_bf16_leave_no_copies_of_weights():
    """Autocast makes a copy of each fp32 matrix in a block, which backward keeps."""
    work = replace(workload(autocast=torch.bfloat16), parallel=ParallelConfig(shard=2))
    narrow = replace(work, gathers=torch.bfloat16)
    wide, found = estimate(work, 4), estimate(narrow, 4)
    model = Transformer(work.model_config, Ops.plain())
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    copies = 2 * sum(p.numel() for p in matrices)
    assert wide.activations - found.activations == pytest.approx(copies, rel=0.02)
    assert found.peak.transient < wide.peak.transient
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(found, name) == getattr(wide, name)


@pytest.mark.parametrize(
    ("vocab_size", "ops", "tied_head", "accumulate"),
    [
        (16, "plain", True, 1),
        (16, "fused", False, 2),
        (3000, "plain", False, 1),
        (3000, "fused", True, 1),
        (3000, "fused", True, 2),
    ],
)
def test_the_estimated_peak_is_that_of_a_real_step(ops, vocab_size, tied_head, accumulate):
    """To 1%, with real tensors. The head, the blocks or the optimizer need most."""
    work = workload(ops, vocab_size=vocab_size, tied_head=tied_head)
    model, tokens_BT, targets_BT = real(work, 8)
    with Live() as live:
        for _ in range(accumulate):
            loss_sum, _ = model(tokens_BT, targets_BT)
            loss_sum.backward()
    before = torch.get_rng_state()
    found = estimate(work, 8, accumulate)
    assert torch.equal(torch.get_rng_state(), before)
    inputs = tokens_BT.nbytes + targets_BT.nbytes
    assert found.peak.total == pytest.approx(live.peak + inputs, rel=0.01)
    if accumulate == 1:
        # the trace's own, 4 or 5 in each part
        in_passes = found.operations - found.in_optimizer
        assert in_passes == pytest.approx(live.operations, abs=25)
    else:
        three, four = (estimate(work, 8, count).operations for count in (3, 4))
        assert four - three == three - found.operations > 100


@pytest.mark.parametrize(
    ("kind", "speedups"), [("adamw", "none"), ("muon", "none"), ("adamw", "fused-adamw")]
)
def test_the_peak_of_the_optimizers_step_is_that_of_a_real_one(
    kind, speedups, build_run, tiny_config
):
    """With one short row, the step needs more than the loss. The fused one needs nothing."""
    wide = {"model__d_model": 256, "model__num_layers": 3, "batch__rows_per_device": 1}
    run = build_run(tiny_config(**wide, optim__kind=kind, speedups=speedups))
    for parameter in run.core.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in run.optimizers:
        optimizer.step()
    with Live() as live:
        for optimizer in run.optimizers:
            optimizer.step()
    found = estimate(workload_of(run.config), 1)
    if speedups == "none":
        assert found.peak.name == "the optimizer's step"
        assert found.peak.transient == pytest.approx(live.peak, rel=0.02)
    else:
        assert found.peak.name != "the optimizer's step"
        assert live.peak < 1000


def test_the_document_mask_of_fused_attention_is_counted():
    """All blocks share one T x T mask in the dtype of the weights."""
    masked, crossing = (
        estimate(workload(seq_len=2048, document_mask=mask), 4) for mask in (True, False)
    )
    assert masked.activations - crossing.activations == pytest.approx(4 * 2048 * 2048 * 4, rel=0.01)


@pytest.mark.parametrize("limits", [{"document_mask": True}, {"window": 256}])
def test_attention_that_skips_masked_blocks_keeps_no_mask(monkeypatch, limits):
    """The estimate counts what the kernel keeps on a GPU, not what its CPU stand-in keeps."""
    flex = Ops.plain(attention=attention.flex, cross_entropy=cross_entropy.fused)
    monkeypatch.setitem(OPS, "flex", flex)
    facts = {"seq_len": 2048, "autocast": torch.bfloat16}
    crossing = estimate(workload(**facts), 4)
    found = estimate(workload("flex", **facts, **limits), 4)
    assert found.total == crossing.total


@pytest.mark.quick_cases("default", "llama", "gpt_neox")
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_gradients_and_optimizer_are_exact(shape):
    work = workload(**SHAPES[shape])
    model, tokens_BT, targets_BT = real(work, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(tokens_BT, targets_BT)[0].backward()
    optimizer.step()
    found, parameters = estimate(work, 2), dict(model.named_parameters())
    assert found.weights == sum(each.nbytes for each in parameters.values()) + tables_of(model)
    assert found.gradients == sum(each.grad.nbytes for each in parameters.values())
    states = [state[name] for state in optimizer.state.values() for name in state.keys() - {"step"}]
    assert found.optimizer == sum(each.nbytes for each in states)
    muon = estimate(replace(work, optim=OptimConfig(kind="muon")), 2)
    assert muon.optimizer == found.optimizer - hidden_bytes(model)


def tables_of(model):
    """Bytes of the buffers of a model, each once."""
    return sum({buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}.values())


def hidden_bytes(model):
    kinds = model.parameter_kinds()
    return sum(p.nbytes for name, p in model.named_parameters() if kinds[name] == "hidden")


@pytest.mark.parametrize("targets", [("all-linear",), ("q", "v")])
@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_weights_have_no_gradients_and_no_optimizer_state(shape, targets):
    lora = LoraConfig(rank=4, targets=targets)
    work = replace(workload(**SHAPES[shape]), lora=lora)
    model, tokens_BT, targets_BT = real(work, 2)
    with_adapters(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with Live() as live:
        model(tokens_BT, targets_BT)[0].backward()
    found = estimate(work, 2)
    assert found.gradients == sum(parameter.grad.nbytes for parameter in trained)
    assert found.optimizer == 2 * found.gradients
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert found.weights == weights + tables_of(model)
    peak = live.peak + tokens_BT.nbytes + targets_BT.nbytes
    assert peak <= 1.01 * (found.peak.total)  # the first block needs a little less
    first = found.activations // len(model.blocks) if shape == "gpt_neox" else 0
    # Beside attention, the first block's MLP depends on no adapter and keeps nothing.
    assert found.peak.total - first < 1.1 * peak


def test_shards_split_weights_gradients_and_optimizer():
    whole, half = (
        estimate(workload(), 2),
        estimate(replace(workload(), parallel=ParallelConfig(shard=2)), 2),
    )
    parameters = real(workload(), 1)[0].parameters()
    assert half.gradients == sum((p.shape[0] + 1) // 2 * p[0].numel() * 4 for p in parameters)
    assert half.optimizer == 2 * half.gradients
    assert half.weights < whole.weights
    assert half.activations == whole.activations
    assert half.peak.transient > whole.peak.transient


def test_a_process_of_a_pipeline_has_its_blocks_and_several_micro_batches():
    whole = workload(num_layers=4, tied_head=False)
    parameters = dict(real(whole, 1)[0].named_parameters())
    sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
    ends = sum(size for name, size in sizes.items() if "blocks" not in name)
    blocks, ours = sum(sizes.values()) - ends, sizes["token_embedding.weight"]
    alone = estimate(whole, 2, 8)
    for stages in (2, 4):
        work = replace(whole, parallel=ParallelConfig(pipeline=stages))
        found, few = estimate(work, 2, 8), estimate(work, 2, stages)
        assert found.gradients == blocks // stages + ours
        assert found.optimizer == 2 * found.gradients
        assert found.peak.gradients >= found.gradients, "until the end of the step"
        # stages times the activations of 1 / stages of the blocks
        assert found.peak.activations > 0.9 * alone.peak.activations
        hidden = 2 * 2 * 4 * whole.seq_len * whole.model_config.d_model
        assert found.peak.activations - few.peak.activations == hidden * (8 - stages)


def test_offload_moves_the_state_to_the_host_and_leaves_two_blocks():
    whole = estimate(workload(num_layers=8), 1)
    work = replace(workload(num_layers=8), parallel=ParallelConfig(offload="cpu"))
    keeping = replace(work, parallel=ParallelConfig(offload="cpu", reshard=False))
    found, kept = estimate(work, 1), estimate(keeping, 1)
    assert found.host == pytest.approx(4 * whole.gradients, rel=0.01)
    buffers = real(workload(num_layers=8), 1)[0].buffers()
    assert found.weights + found.optimizer == sum(buffer.nbytes for buffer in buffers)
    assert found.gradients == found.optimizer == 0
    assert estimate(work, 1, accumulate=2).peak.gradients == 0
    block = hidden_bytes(real(workload(num_layers=1), 1)[0])
    assert kept.peak.total - found.peak.total == pytest.approx(6 * block, rel=0.1)
    assert found.total < whole.total


@pytest.mark.parametrize(
    ("kind", "ops"),
    [("transformer", {"attention": attention.fused}), ("eigenstate", {"scan": scan.chunked})],
)
def test_memory_grows_in_proportion_to_seq_len(kind, ops):
    """As docs/models.md states for both models."""
    model, shape = MODELS.get(kind), {"vocab_size": 101, "num_layers": 1, "d_model": 32}

    def bytes_a_token(seq_len):
        config = model.check(shape | {"num_heads": 2}, seq_len=seq_len)
        ways = Ops.plain(**ops)
        work = Workload(model, config, seq_len, ways, None, document_mask=False, **PLAIN)
        need = estimate(work, 1)
        return (need.peak.activations + need.peak.transient) / seq_len

    assert bytes_a_token(16_384) == pytest.approx(bytes_a_token(1024), rel=0.03)


def test_a_model_too_large_for_this_machine_can_be_estimated():
    """GPT-2 124M, fp32, plain ops, T = 1024: on a GPU, 1 row took 3.4 GiB and 8 rows 16.7 GiB."""
    sizes = {"vocab_size": 50257, "num_layers": 12, "d_model": 768, "num_heads": 12}
    gpt2 = sizes | {"positions": "learned", "bias": True}
    work = workload("plain", seq_len=1024, **gpt2)
    assert estimate(work, 1).total / GIB == pytest.approx(3.4, rel=0.15)
    assert estimate(work, 8).total / GIB == pytest.approx(16.7, rel=0.15)
    assert estimate(work, 8).largest == 8 * 1024 * 50257 * 4, "the logits"
    assert estimate(workload(seq_len=32_768, **gpt2, autocast=torch.bfloat16), 64).total > 100 * GIB


def test_the_most_rows_are_found():
    work = workload()
    for rows in (1, 7, 1000):
        assert most_rows(work, estimate(work, rows, 2).total) == rows
        assert most_rows(work, estimate(work, rows + 1, 2).total - 1) == rows
    assert most_rows(work, estimate(work, 1, 2).total - 1) == 0


def test_the_memory_of_a_machine_elsewhere_is_that_of_its_data_sheet(monkeypatch):
    assert free_bytes(machine_named("2x RTX 4090"), "cuda", 2) == pytest.approx(24e9)
    one, two = (free_bytes(probe(), "cpu", count) for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1), "the ranks of a CPU share it"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert free_bytes(Machine("a CPU", 2, 8.0, (), "3.11"), "cuda", 1) is None
