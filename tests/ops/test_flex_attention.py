"""FlexAttention by its plain formula instead of the kernel, which has no backward on a CPU."""

import gc

import pytest
import torch
from attention_cases import CASES, LONG, random_inputs, with_gradients
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention as torch_flex

from flatout.ops import attention, flex_attention

pytestmark = pytest.mark.slow


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Use the GPU kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_on_gpu", lambda attend, *tensors: attend(*tensors))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex_attention, "_compiled", lambda: compiled)


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", LONG)
def test_values_and_gradients_match_the_reference(case, as_on_gpu):
    tensors, options = random_inputs(**LONG[case])
    assert flex_attention.takes(tensors[0], tensors[1], options["doc_ids_BT"], options["window"])
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    for got, want in zip(with_gradients(attention.flex, tensors, options), expected, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=5e-6 * max(float(want.abs().max()), 1)
        )


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_first_document_changes_no_bit_of_the_others(as_on_gpu):
    (q, k, v), options = random_inputs(**LONG["documents"] | {"rows": 1})
    first = (options["doc_ids_BT"][0] == 0)[:, None]
    plain = with_gradients(attention.flex, (q, k, v), options)
    other = with_gradients(
        attention.flex, [torch.where(first, 1e3 * tensor, tensor) for tensor in (q, k, v)], options
    )
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one[:, :, ~first[:, 0]], two[:, :, ~first[:, 0]])
        assert not torch.equal(one, two)


def mask_of(options, tokens):
    return flex_attention.block_mask(
        options["doc_ids_BT"], options["window"], tokens, torch.device("cpu")
    )


@pytest.mark.parametrize("case", LONG)
def test_the_blocks_match_those_of_the_full_mask(case):
    """torch derives them from a T x T mask; flatout from bounds."""
    tensors, options = random_inputs(**LONG[case])
    rows, _, tokens, _ = tensors[0].shape
    actual = mask_of(options, tokens)
    rows = 1 if options["doc_ids_BT"] is None else rows
    expected = torch_flex.create_block_mask(
        actual.mask_mod, rows, None, tokens, tokens, device="cpu"
    )
    assert torch.equal(actual.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices"):
        count = getattr(expected, name.replace("indices", "num_blocks"))
        listed = torch.arange(getattr(expected, name).shape[-1]) < count[..., None]
        assert torch.equal(getattr(actual, name)[listed], getattr(expected, name)[listed]), name


def test_ids_in_any_order_skip_no_visible_pair():
    ids = torch.randint(3, (2, 520), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    actual = flex_attention.block_mask(ids, None, 520, torch.device("cpu"))
    expected = torch_flex.create_block_mask(actual.mask_mod, 2, None, 520, 520, device="cpu")
    assert not (expected.to_dense() > actual.to_dense()).any()


def test_masked_blocks_are_skipped():
    halves = (torch.arange(4096) >= 2048).int().expand(1, -1)
    device = torch.device("cpu")
    assert int(flex_attention.block_mask(None, 4096, 4096, device).to_dense().sum()) == 32 * 33 // 2
    assert (
        int(flex_attention.block_mask(halves, None, 4096, device).to_dense().sum())
        == 2 * 16 * 17 // 2
    )
    assert int(flex_attention.block_mask(None, 128, 4096, device).to_dense().sum()) == 32 + 31


def test_layers_share_a_mask_while_the_ids_are_unchanged(monkeypatch):
    ids = torch.zeros(1, 256, dtype=torch.int32)
    device = torch.device("cpu")
    first = flex_attention.shared_block_mask(ids, None, 256, device)
    assert flex_attention.shared_block_mask(ids, None, 256, device) is first
    assert flex_attention.shared_block_mask(ids, 8, 256, device) is not first
    ids[:, 128:] = 1
    other = flex_attention.shared_block_mask(ids, None, 256, device)
    assert (int(first.to_dense().sum()), int(other.to_dense().sum())) == (3, 2)
    assert flex_attention.shared_block_mask(
        None, 8, 256, device
    ) is flex_attention.shared_block_mask(None, 8, 256, device)
    with monkeypatch.context() as capture:
        capture.setattr(flex_attention, "_is_captured", lambda device: True)
        assert flex_attention.shared_block_mask(ids, None, 256, device) is not other
    assert flex_attention.shared_block_mask(ids, None, 256, device) is other
    kept = len(flex_attention._KEPT)
    del ids
    gc.collect()
    assert len(flex_attention._KEPT) == kept - 1


# torch's compiler uses deprecated features of its own.
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
    monkeypatch.setattr(attention, "_on_gpu", lambda *given: called.append(given))
    for case in CASES.values():
        tensors, options = random_inputs(**case)
        torch.testing.assert_close(
            attention.flex(*tensors, **options), attention.fused(*tensors, **options)
        )
    long = {"heads": 2, "groups": 2, "queries": 256, "keys": 256, "head_dim": 16}
    for case in [
        long,
        long | {"window": 256},
        long | {"window": 9, "head_dim": 8},
        long | {"window": 9, "head_dim": 320},
        long | {"window": 9, "dtype": torch.float64},
    ]:
        tensors, options = random_inputs(**case)
        attention.flex(*tensors, **options)
    assert called == []
    tensors, options = random_inputs(**long | {"window": 9})
    attention.flex(*tensors, **options)
    assert len(called) == 1
