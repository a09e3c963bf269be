import itertools
import math

import pytest
import torch
from attention_cases import CASES, LONG, assert_close_to_largest, random_inputs, with_gradients
from op_variants import variants
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.errors import ShapeError
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention

VARIANTS = variants(attention)
CLOSE = {"bf16": 2e-2}
"""Tolerance of a variant against fp64, relative to the largest value; fp32 rounding if not listed.
"""


def by_loops(tensors, options):
    """Compute each query separately in fp64, as the docstring defines it."""
    q, k, v = (tensor.double() for tensor in tensors)
    out, ids, window = torch.zeros_like(q), options["doc_ids_BS"], options["window"]
    (rows, heads, queries, head_dim), (_, groups, keys, _) = q.shape, k.shape
    for row, head, query in itertools.product(range(rows), range(heads), range(queries)):
        at = keys - queries + query
        seen = [
            key
            for key in range(at + 1)
            if (window is None or key > at - window)
            and (ids is None or ids[row, key] == ids[row, at])
        ]
        group = head // (heads // groups)
        scores = k[row, group, seen] @ q[row, head, query] / math.sqrt(head_dim)
        out[row, head, query] = scores.softmax(0) @ v[row, group, seen]
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_reference_matches_its_docstring(case):
    tensors, options = random_inputs(**CASES[case])
    double = [tensor.double() for tensor in tensors]
    torch.testing.assert_close(
        attention.reference(*double, **options), by_loops(tensors, options), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_match_the_reference_in_fp64(name, case, poisoned_memory):
    tensors, options = random_inputs(**CASES[case])
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    actual = with_gradients(VARIANTS[name], tensors, options)
    assert {each.dtype for each in actual} == {torch.float32}
    assert_close_to_largest(actual, expected, CLOSE.get(name, 1e-5), CLOSE.get(name, 2e-6))


@pytest.mark.parametrize("case", CASES)
def test_long_sequences_are_rounded_for_the_fused_kernel(case, monkeypatch):
    tensors, options = random_inputs(**CASES[case])
    kernel, dtypes = attention.fused, []
    monkeypatch.setattr(attention, "MOST_KEYS", 0)
    monkeypatch.setattr(
        attention, "fused", lambda q, *a, **k: (dtypes.append(q.dtype), kernel(q, *a, **k))[1]
    )
    actual = with_gradients(attention.bf16, tensors, options)
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    may_round = tensors[0].shape[2] >= attention.FEWEST_QUERIES
    assert dtypes == [torch.bfloat16 if may_round else torch.float32]
    assert {each.dtype for each in actual} == {torch.float32}
    assert_close_to_largest(actual, expected, CLOSE["bf16"], CLOSE["bf16"])


@pytest.mark.parametrize("name", VARIANTS)
def test_low_precision_is_close_to_fp64(name, poisoned_memory):
    tensors, options = random_inputs(
        heads=4, groups=2, queries=33, keys=33, documents=3, dtype=torch.bfloat16
    )
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    for got, want in zip(with_gradients(VARIANTS[name], tensors, options), expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"doc_ids_BS": torch.tensor([[0] * 10 + [1] * 11] * 2)}],
    ids=["causal", "window", "documents"],
)
def test_masked_keys_affect_neither_outputs_nor_gradients(name, options):
    """Replacing masked keys and values with huge numbers changes no bit."""
    tensors, _ = random_inputs(heads=2, groups=2, queries=21, keys=21)
    masked, seeing = (slice(12, 21), slice(0, 12)) if not options else (slice(0, 6), slice(10, 21))
    others = [*range(masked.start), *range(masked.stop, 21)]
    results = []
    for poison in (1.0, 1e4):
        q, k, v = (tensor.clone() for tensor in tensors)
        for tensor in (k, v):
            tensor[:, :, masked] *= poison
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = VARIANTS[name](*leaves, **options)[:, :, seeing]
        out.square().sum().backward()
        kept = [tensor.grad[:, :, others] for tensor in (k, v)]
        results.append([out.detach(), q.grad[:, :, seeing], *kept])
        assert not any(tensor.grad[:, :, masked].any() for tensor in (k, v))
    for plain, poisoned in zip(*results, strict=True):
        assert torch.equal(plain, poisoned)


# torch itself uses deprecated features when it compiles.
@pytest.mark.quick_cases("fused-documents", "flex-window", "bf16-documents")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["documents", "window"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_compiles_without_a_graph_break(name, case):
    """The cases include sequences longer than a block of tokens."""
    torch._dynamo.reset()
    tensors, options = random_inputs(**LONG[case])
    compiled = torch.compile(VARIANTS[name], fullgraph=True, backend="aot_eager")
    results = [with_gradients(each, tensors, options) for each in (compiled, VARIANTS[name])]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_mismatched_shapes_are_rejected_with_a_fix():
    (q, k, v), _ = random_inputs(heads=4, groups=2, queries=6, keys=6)
    wrong = [
        ((q, k, v[:, :, :3]), {}),
        ((q, k[:1], v[:1]), {}),
        ((q, k[:, :, :3], v[:, :, :3]), {}),
        ((q[:, :3], k, v), {}),
        ((q, k, v), {"doc_ids_BS": torch.zeros(2, 5, dtype=torch.int32)}),
        ((q[:, :, :3], k, v), {"doc_ids_BS": torch.zeros(2, 3, dtype=torch.int32)}),
    ]
    for function in VARIANTS.values():
        for tensors, options in wrong:
            with pytest.raises(ShapeError, match="Fix:"):
                function(*tensors, **options)


@pytest.mark.parametrize("name", ["reference", "fused", "bf16"])
def test_all_layers_share_the_mask_of_a_micro_batch(name, monkeypatch):
    """The mask of documents is built once per window, not once per layer."""
    built, compare = [], torch.Tensor.__eq__
    monkeypatch.setattr(
        torch.Tensor, "__eq__", lambda *pair: built.append(pair[0].shape) or compare(*pair)
    )
    shape = {"vocab_size": 64, "num_layers": 4, "d_model": 32, "num_heads": 2}
    shape |= {"window": 8, "full_attention_every": 2}
    config = Transformer.check(shape, seq_len=32)
    model = Transformer(config, Ops.plain(attention=VARIANTS[name]))
    tokens_BT = torch.zeros(2, 32, dtype=torch.int64)
    model(tokens_BT, tokens_BT, (torch.arange(32) >= 10).int().expand(2, -1))
    assert [list(one) for one in built if len(one) == 4] == [[2, 1, 32, 1]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("changes", "is_flash"),
    [
        ({}, True),
        ({"head_dim": 20}, False),
        ({"head_dim": 264}, False),
        ({"documents": 3}, False),
        ({"window": 8}, False),
        ({"window": 30}, True),
        ({"queries": 30}, False),
        ({"queries": 1}, False),
    ],
)
def test_the_last_queries_need_no_mask_where_the_flash_kernel_runs(
    dtype, changes, is_flash, monkeypatch
):
    facts = {"queries": 6, "head_dim": 16, "window": None, "documents": None} | changes
    with FakeTensorMode():
        ids = torch.zeros(2, 30, dtype=torch.int32) if facts["documents"] else None
        for device, expected in {"cpu": False, "cuda": is_flash and dtype != torch.float32}.items():
            monkeypatch.setattr(attention, "_has_flash", lambda _, here=device: here == "cuda")
            shapes = (4, facts["queries"]), (2, 30), (2, 30)
            q, k, v = (
                torch.zeros(2, *shape, facts["head_dim"], dtype=dtype, requires_grad=True)
                for shape in shapes
            )
            with Called() as called:
                attention.fused(q, k, v, doc_ids_BS=ids, window=facts["window"]).sum().backward()
            flash = torch.ops.aten._scaled_dot_product_flash_attention.default
            assert (flash in called.seen) == expected
            assert k.grad.shape == k.shape


class Called(TorchDispatchMode):
    """Remembers the operators that are called inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_a_mask_of_long_sequences_has_the_dtype_of_the_kernel(monkeypatch):
    """Otherwise each layer would keep a separate copy."""
    monkeypatch.setattr(attention, "MOST_KEYS", 8)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    for length, attend, dtype in (
        (16, attention.bf16, torch.bfloat16),
        (8, attention.bf16, torch.float32),
        (16, attention.fused, torch.float32),
    ):
        found = attention.masks(
            attend, ids[:, :length], ids[:, :length], [None], dtype=torch.float32
        )
        assert found[None].dtype == dtype
