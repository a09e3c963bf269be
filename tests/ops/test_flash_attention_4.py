"""FlashAttention 4 with a stand-in for its kernels, which need a GPU and the package.

The stand-in computes plain attention with the signatures of 4.0.0b36.

Letters: B rows, T tokens, H query heads, G key and value heads, C head size.
"""

import sys
from unittest import mock

import pytest
import torch
from attention_cases import random_inputs, with_gradients

from flatout.errors import MissingPackage
from flatout.models.transformer import Transformer, TransformerConfig
from flatout.ops import Ops, attention, flash_attention_4, heads

pytestmark = pytest.mark.slow

CAUSAL = {
    "equal": {"heads": 4, "groups": 4, "queries": 16, "keys": 16},
    "grouped, odd": {"heads": 6, "groups": 2, "queries": 37, "keys": 37, "head_dim": 24},
    "one key head": {"heads": 4, "groups": 1, "queries": 19, "keys": 19, "window": 19},
    "heads of 128": {"heads": 2, "groups": 1, "queries": 9, "keys": 9, "head_dim": 128},
}


class Kernels:
    """The functions of `flash_attn.cute.interface` that flatout calls."""

    def __init__(self):
        self.called = []

    def _flash_attn_fwd(
        self, q, k, v, qv=None, *, softmax_scale=None, causal=False, return_lse=False
    ):
        assert causal
        assert return_lse
        assert q.shape[:2] == k.shape[:2] == v.shape[:2]
        assert q.stride(3) == k.stride(3) == v.stride(3) == 1
        out = (
            attention.reference(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
            .transpose(1, 2)
            .contiguous()
        )
        self.called.append("forward")
        return (
            out,
            q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32),
            None,
            None,
            None,
        )

    def _flash_attn_bwd(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        *,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
    ):
        assert causal
        assert lse.dtype == torch.float32
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert out.shape == dout.shape == q.shape
        for given, like, grad in zip(
            (dq, dk, dv), (q, k, v), by_hand(q, k, v, out, dout), strict=True
        ):
            assert given.shape == like.shape
            assert given.stride()[2:] == (q.shape[3], 1)
            given.copy_(grad)
        assert (
            dq.untyped_storage().data_ptr()
            == dk.untyped_storage().data_ptr()
            == dv.untyped_storage().data_ptr()
        )
        self.called.append(f"backward, deterministic={deterministic}")
        return dq, dk, dv


def by_hand(q_BTHC, k_BTGC, v_BTGC, out_BTHC, grad_BTHC):
    """Return the gradients of causal attention; inside an operator autograd is off."""
    each = q_BTHC.shape[2] // k_BTGC.shape[2]
    k_BTHC, v_BTHC = k_BTGC.repeat_interleave(each, dim=2), v_BTGC.repeat_interleave(each, dim=2)
    scale = q_BTHC.shape[3] ** -0.5
    future_TT = torch.ones(q_BTHC.shape[1], q_BTHC.shape[1], dtype=torch.bool).triu(1)
    weights_BHTT = (
        (torch.einsum("bthc,bshc->bhts", q_BTHC, k_BTHC) * scale)
        .masked_fill(future_TT, float("-inf"))
        .softmax(dim=-1)
    )
    along_BHT1 = (out_BTHC * grad_BTHC).sum(dim=-1).transpose(1, 2)[..., None]
    scores_BHTT = (
        weights_BHTT * (torch.einsum("bthc,bshc->bhts", grad_BTHC, v_BTHC) - along_BHT1) * scale
    )
    shared = (
        torch.einsum("bhts,bthc->bshc", part, given)
        for part, given in ((scores_BHTT, q_BTHC), (weights_BHTT, grad_BTHC))
    )
    return torch.einsum("bhts,bshc->bthc", scores_BHTT, k_BTHC), *(
        grad.unflatten(2, (-1, each)).sum(dim=3) for grad in shared
    )


@pytest.fixture
def kernels(monkeypatch):
    """Install the stand-in where a GPU would run the kernels, and accept fp32 too."""
    actual = Kernels()
    monkeypatch.setattr(attention, "_on_gpu", lambda attend, *tensors: attend(*tensors))
    monkeypatch.setattr(
        flash_attention_4, "import_module", lambda name: {"flash_attn.cute.interface": actual}[name]
    )
    monkeypatch.setattr(flash_attention_4, "DTYPES", (torch.float32, torch.float64))
    return actual


@pytest.mark.parametrize("case", CAUSAL)
def test_values_and_gradients_match_the_reference(case, kernels, poisoned_memory):
    tensors, options = random_inputs(**CAUSAL[case])
    expected = with_gradients(attention.reference, tensors, options)
    for got, want in zip(with_gradients(attention.flash4, tensors, options), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    assert kernels.called == ["forward", "backward, deterministic=True"]


def test_gradients_reach_the_product_that_heads_are_split_from(kernels):
    product = torch.randn(2, 12, 3 * 4 * 8, requires_grad=True)
    cut = heads.reference(product, None, None, None, counts=(4, 4))
    (plain,) = torch.autograd.grad(attention.reference(*cut).sum(), product)
    cut = heads.reference(product, None, None, None, counts=(4, 4))
    (actual,) = torch.autograd.grad(attention.flash4(*cut).sum(), product)
    torch.testing.assert_close(actual, plain, rtol=1e-5, atol=2e-6)
    assert kernels.called == ["forward", "backward, deterministic=False"]


def test_unsupported_inputs_use_flex(monkeypatch):
    called = []
    monkeypatch.setattr(
        attention,
        "_on_gpu",
        lambda attend, *given: called.append(attend.__module__.rpartition(".")[2]),
    )
    monkeypatch.setattr(attention, "fused", lambda *given, **options: called.append("fused"))
    causal = {
        "heads": 2,
        "groups": 2,
        "queries": 256,
        "keys": 256,
        "dtype": torch.bfloat16,
        "head_dim": 64,
    }
    for change, expected in [
        ({}, "flash_attention_4"),
        ({"window": 256}, "flash_attention_4"),
        ({"window": 255}, "flex_attention"),
        ({"documents": 2}, "flex_attention"),
        ({"dtype": torch.float32}, "fused"),
        ({"head_dim": 20}, "fused"),
        ({"head_dim": 136}, "fused"),
        ({"queries": 1}, "fused"),
    ]:
        tensors, options = random_inputs(**causal | change)
        attention.flash4(*tensors, **options)
        assert called.pop() == expected, change


def count_concatenations(function, *inputs):
    """Return how often each graph that Inductor compiles concatenates tensors."""
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    counts, run = [], GraphLowering.run

    def counted(graph, *given):
        counts.append(
            sum(node.target is torch.ops.aten.cat.default for node in graph.module.graph.nodes)
        )
        return run(graph, *given)

    with (
        mock.patch.object(GraphLowering, "run", counted),
        config.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
    ):
        torch.compile(function, fullgraph=True)(*inputs).sum().backward()
    return counts


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("variant", "expected"), [("flash4", 0), ("fused", 1)])
def test_compiled_gradients_are_not_concatenated_again(variant, expected, kernels):
    torch._dynamo.reset()
    product = torch.randn(2, 12, 3 * 4 * 8, requires_grad=True)

    def function(product):
        return (
            getattr(attention, variant)(
                *heads.reference(product * 2, None, None, None, counts=(4, 4))
            )
            * 3
        )

    assert count_concatenations(function, product)[-1] == expected


def test_a_model_has_the_same_gradients_with_it(kernels):
    config = TransformerConfig(
        vocab_size=64,
        num_layers=2,
        d_model=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_seq_len=24,
        qk_norm=True,
    )
    tokens = torch.arange(48).view(2, 24) % 64
    actual = []
    for op in (attention.reference, attention.flash4):
        torch.manual_seed(0)
        model = Transformer(config, Ops.plain(attention=op))
        loss, _ = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        actual.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, fast in zip(*actual, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    assert kernels.called.count("forward") == 2


def test_a_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(attention, "_on_gpu", lambda attend, *tensors: attend(*tensors))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    tensors, options = random_inputs(heads=2, groups=2, queries=8, keys=8, dtype=torch.bfloat16)
    with pytest.raises(MissingPackage, match=r'pip install "flatout\[flash-attention-4\]"'):
        attention.flash4(*tensors, **options)
