"""Variable-length attention, with a loop over documents for the kernel, which needs a GPU."""

import pytest
import torch
from attention_cases import CASES, random_inputs, with_gradients

from flatout.ops import attention, variants, varlen_attention

PACKED = {name: case for name, case in CASES.items() if "documents" in case} | {
    "long": {"heads": 4, "groups": 2, "queries": 300, "keys": 300, "documents": 9, "head_dim": 16},
    "wide heads": {
        "heads": 2,
        "groups": 1,
        "queries": 40,
        "keys": 40,
        "documents": 3,
        "head_dim": 128,
    },
}


def looped(
    q_NHC,
    k_NGC,
    v_NGC,
    bounds_q,
    bounds_k,
    longest_q,
    longest_k,
    *,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Compute torch's documented result, with its kernel's signature, document by document.

    A window (w, 0) means the query's own key and w keys before it.
    """
    assert bounds_q.dtype == torch.int32
    assert bounds_q is bounds_k
    assert enable_gqa == (q_NHC.shape[1] != k_NGC.shape[1])
    back, ahead = window_size
    assert ahead == 0
    parts = []
    for start, end in zip(bounds_q[:-1].tolist(), bounds_q[1:].tolist(), strict=True):
        if end > start:
            assert end - start <= longest_q == longest_k
            own = [tensor[None, start:end].transpose(1, 2) for tensor in (q_NHC, k_NGC, v_NGC)]
            parts.append(
                attention.reference(*own, window=None if back < 0 else back + 1)[0].transpose(0, 1)
            )
    return torch.cat(parts)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Use the GPU kernels, and let them accept fp32."""
    monkeypatch.setattr(attention, "_on_gpu", lambda attend, *tensors: attend(*tensors))
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: looped)
    monkeypatch.setattr(varlen_attention, "DTYPES", (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("case", PACKED)
def test_values_and_gradients_match_the_reference(case, as_on_gpu):
    tensors, options = random_inputs(**PACKED[case])
    assert varlen_attention.takes(*tensors[:2], options["doc_ids_BT"], options["window"]) == (
        tensors[0].shape[-1] % 8 == 0
    )
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    for got, want in zip(with_gradients(attention.varlen, tensors, options), expected, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=2e-6 * max(float(want.abs().max()), 1)
        )


def test_documents_are_separate_even_with_nan(as_on_gpu):
    (q, k, v), options = random_inputs(**PACKED["long"])
    first = options["doc_ids_BT"][0] == 0
    plain = with_gradients(attention.varlen, (q, k, v), options)
    poisoned = with_gradients(
        attention.varlen,
        [tensor.masked_fill(first[None, None, :, None], torch.nan) for tensor in (q, k, v)],
        options,
    )
    for one, other in zip(plain, poisoned, strict=True):
        assert torch.equal(one[0][:, ~first], other[0][:, ~first])
        assert torch.isnan(other[0][:, first]).all()


def test_documents_start_at_each_row_and_where_the_id_changes():
    ids = torch.tensor(
        [[0, 0, 1, 2, 2, 2], [2, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]], dtype=torch.int32
    )
    bounds = varlen_attention.cumulative_lengths(ids)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [0, 2, 3, 6, 12, 13, 14, 15, 16, 17] + [18] * (
        varlen_attention.FEWEST_DOCUMENTS + 1 - 10
    )


def test_the_number_of_bounds_does_not_depend_on_the_ids():
    """One shape per micro-batch size: nothing is read back or recompiled."""
    shapes = {
        varlen_attention.cumulative_lengths(torch.randint(n, (4, 2048)).sort(dim=1).values).shape
        for n in (1, 3, 30)
    }
    assert shapes == {(4 * 2048 // varlen_attention.TOKENS_PER_DOCUMENT + 4 + 1,)}
    with torch.device("meta"):
        assert varlen_attention.cumulative_lengths(torch.zeros(2, 64, dtype=torch.int32)).shape == (
            varlen_attention.FEWEST_DOCUMENTS + 1,
        )


def test_too_many_documents_are_rejected():
    with pytest.raises(
        RuntimeError,
        match=r"room for 128 documents in 1 x 129 tokens\. Fix: remove varlen-attention",
    ):
        varlen_attention.cumulative_lengths(torch.arange(129)[None])
    assert varlen_attention.cumulative_lengths(torch.arange(128)[None]).tolist() == list(range(129))


def test_most_documents_returns_the_limit_of_varlen_only():
    expected = {
        variant: varlen_attention.max_documents if variant is attention.varlen else None
        for variant in variants(attention).values()
    }
    assert {variant: attention.most_documents(variant) for variant in expected} == expected
    for rows, num_tokens in [(1, 5), (1, 129), (3, 1000), (64, 1024)]:
        ids = torch.zeros(rows, num_tokens, dtype=torch.int32)
        assert (
            len(varlen_attention.cumulative_lengths(ids))
            == varlen_attention.max_documents(rows, num_tokens) + 1
        )


def test_the_maximum_number_of_one_token_documents_works(as_on_gpu):
    """Each token attends only to itself, so the output is its own value."""
    tensors, options = random_inputs(
        heads=2, groups=1, queries=64, keys=64, documents=1, head_dim=16
    )
    assert varlen_attention.max_documents(2, 64) == 2 * 64
    options["doc_ids_BT"] = torch.arange(64, dtype=torch.int32).expand(2, -1)
    out, *_ = with_gradients(attention.varlen, tensors, options)
    torch.testing.assert_close(out, tensors[2].expand_as(out))


def test_unsupported_inputs_use_flex(monkeypatch):
    called = []
    monkeypatch.setattr(
        attention,
        "_on_gpu",
        lambda attend, *given: called.append(attend.__module__.rpartition(".")[2]),
    )
    packed = {
        "heads": 2,
        "groups": 2,
        "queries": 256,
        "keys": 256,
        "documents": 3,
        "dtype": torch.bfloat16,
        "head_dim": 64,
    }
    for change, expected in [
        ({}, "varlen_attention"),
        ({"window": 9}, "varlen_attention"),
        ({"dtype": torch.float32}, "flex_attention"),
        ({"head_dim": 20}, "flex_attention"),
        ({"head_dim": 256}, "flex_attention"),
        ({"documents": None, "window": 9}, "flex_attention"),
    ]:
        tensors, options = random_inputs(**packed | change)
        attention.varlen(*tensors, **options)
        assert called.pop() == expected
    tensors, options = random_inputs(**packed | {"documents": None})
    attention.varlen(*tensors, **options)
    assert called == []
    monkeypatch.setattr(
        varlen_attention,
        "_kernel",
        lambda: lambda q, k, v, bounds_q, bounds_k, longest_q, longest_k, is_causal: q,
    )
    tensors, options = random_inputs(**packed)
    attention.varlen(*tensors, **options)
    assert called == ["flex_attention"], "a torch whose kernel has no window_size"


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_compiles_without_a_graph_break(as_on_gpu, monkeypatch):
    """The graph contains torch's operator, whose kernel is not called."""
    monkeypatch.undo()
    monkeypatch.setattr(attention, "_on_gpu", lambda attend, *tensors: attend(*tensors))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *given: (given[0],)

    tensors, options = random_inputs(**PACKED["long"] | {"dtype": torch.bfloat16})
    torch.compile(attention.varlen, fullgraph=True, backend=keep)(*tensors, **options)
    assert [str(node.target) for node in graphs[0].graph.nodes].count(
        "torch_attn._varlen_attn"
    ) == 1


def test_torchs_kernel_has_the_expected_parameters():
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    assert list(inspect.signature(varlen_attn).parameters)[:7] == [
        "query",
        "key",
        "value",
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "max_k",
    ]
    assert varlen_attention._kernel_has("window_size")
