"""FlexAttention by its plain formula instead of the kernel, which has no backward on a CPU."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_cases import (
    CASES,
    LONG,
    assert_close_to_largest,
    case,
    random_inputs,
    with_gradients,
)
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention as torch_flex

from flatout.assembly.choices import assemble
from flatout.models import transformer
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention

pytestmark = pytest.mark.slow


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Use the GPU kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(attention, "_compiled", lambda: compiled)


# torch itself uses deprecated features when it compiles.
@pytest.mark.quick_cases("documents", "window over a block", "two tokens a document")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", [name for name in LONG if name != "last queries"])
def test_values_and_gradients_match_the_reference(case, as_on_gpu, monkeypatch):
    tensors, options = random_inputs(**LONG[case])
    monkeypatch.setattr(attention, "fused", None)  # the kernel takes all of these
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    actual = with_gradients(attention.flex, tensors, options)
    assert_close_to_largest(actual, expected, 1e-5, 5e-6)


# torch itself uses deprecated features when it compiles.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_first_document_changes_no_bit_of_the_others(as_on_gpu):
    tensors, options = random_inputs(**LONG["documents"] | {"rows": 1})
    first = (options["doc_ids_BS"][0] == 0)[:, None]
    plain = with_gradients(attention.flex, tensors, options)
    changed = [torch.where(first, 1e3 * tensor, tensor) for tensor in tensors]
    other = with_gradients(attention.flex, changed, options)
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one[:, :, ~first[:, 0]], two[:, :, ~first[:, 0]])
        assert not torch.equal(one, two)


def mask(doc_ids_BT, window, tokens):
    return attention.block_mask(torch.empty(1, tokens), doc_ids_BT, window)


def test_masked_blocks_are_skipped():
    halves = (torch.arange(4096) >= 2048).int().expand(1, -1)
    assert int(mask(None, 4096, 4096).to_dense().sum()) == 32 * 33 // 2
    assert int(mask(halves, None, 4096).to_dense().sum()) == 2 * 16 * 17 // 2
    assert int(mask(None, 128, 4096).to_dense().sum()) == 32 + 31


@pytest.fixture
def built(as_on_gpu, monkeypatch):
    """Build masks as on a GPU, and return the windows of those that were built."""
    windows, plain = [], attention.block_mask

    def build(tokens_BT, doc_ids_BT, window):
        windows.append(window)
        return plain(tokens_BT, doc_ids_BT, window)

    monkeypatch.setattr(attention, "block_mask", build)
    monkeypatch.setattr(
        transformer,
        "masks",
        lambda attend, tokens_BT, *inputs: attention.masks(
            attend,
            SimpleNamespace(shape=tokens_BT.shape, device=tokens_BT.device, is_cuda=True)
            if attend is attention.flex
            else tokens_BT,
            *inputs,
        ),
    )
    return windows


# torch itself uses deprecated features when it compiles.
@pytest.mark.quick_cases("way1")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", [(), ("checkpointing",), ("checkpointing", "compile-blocks")])
def test_a_micro_batch_builds_each_mask_once(built, monkeypatch, way):
    """Also if blocks are recomputed, and if each is compiled by itself."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    shape = {"vocab_size": 64, "num_layers": 4, "d_model": 32, "num_heads": 2}
    shape |= {"window": 8, "full_attention_every": 2}
    config = Transformer.check(shape, seq_len=256)
    torch.manual_seed(0)
    model = Transformer(config, Ops.plain(attention=attention.flex))
    plain = Transformer(config, Ops.plain())
    plain.load_state_dict(model.state_dict())
    parts = assemble(way)
    if parts.activations:
        parts.activations(model)
    if parts.compilation:
        parts.compilation(model, None)
    tokens_BT = torch.randint(64, (2, 256), dtype=torch.int64)
    doc_ids_BT = (torch.arange(256) >= 100).int().expand(2, -1)
    losses = [each(tokens_BT, tokens_BT.clone(), doc_ids_BT)[0] for each in (model, plain)]
    for loss in losses:
        loss.backward()
    assert sorted(built, key=str) == [8, None]
    torch.testing.assert_close(*losses)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


# torch itself uses deprecated features when it compiles.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_of_a_compiled_model_share_a_mask(as_on_gpu):
    """Each layer builds the mask, and the compiler eliminates all but one.

    The graph has as many sorts as that of a single layer.
    """
    (q, k, v), options = random_inputs(**LONG["documents"])
    counted = {}
    for layers in (1, 2):

        def count(graph, inputs, layers=layers):
            counted[layers] = sum("sort" in str(node.target) for node in graph.graph.nodes)
            return graph.forward

        def model(q, layers=layers):
            for _ in range(layers):
                q = attention.flex(q, k, v, **options)
            return q

        backend = aot_autograd(
            fw_compiler=count,
            bw_compiler=lambda graph, inputs: graph.forward,
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(model, fullgraph=True, backend=backend)(q.clone().requires_grad_())
    assert counted[1] > 0
    assert counted[2] == counted[1]


def test_unsupported_or_unmasked_inputs_use_fused(monkeypatch):
    called = []
    monkeypatch.setattr(attention, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(attention, "_compiled", lambda: lambda *given, **_: called.append(given))
    long = case(2, 2, 256, head_dim=16)
    unsupported = ({}, {"window": 256}, {"window": 9, "head_dim": 8})
    unsupported += ({"window": 9, "head_dim": 320}, {"window": 9, "dtype": torch.float64})
    for each in (*CASES.values(), *(long | more for more in unsupported)):
        tensors, options = random_inputs(**each)
        actual = attention.flex(*tensors, **options)
        torch.testing.assert_close(actual, attention.fused(*tensors, **options))
    assert called == []
    tensors, options = random_inputs(**long | {"window": 9})
    attention.flex(*tensors, **options)
    assert len(called) == 1
