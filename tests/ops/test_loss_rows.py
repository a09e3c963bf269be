"""The loss by the Triton kernel, in Triton's interpreter, against the reference.

Letters: N targets, C targets of a chunk, D width, V vocabulary.
"""

import math

import pytest
import torch
from test_cross_entropy import (
    CASES,
    EXTRAS,
    random_inputs,
    scaled_gradients,
    sure_of_their_targets,
    with_gradients,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.assembly.memory import Live
from flatout.errors import MissingPackage
from flatout.models.transformer import Transformer
from flatout.ops import Ops, cross_entropy, loss_chunks

triton = pytest.importorskip("triton", reason="the package triton is not installed")

from flatout.ops import loss_kernels, loss_rows  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about uninitialised padding
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=[False, True], ids=["one chunk", "small chunks"])
def chunks(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(loss_rows.LOGITS_AT_ONCE, "cpu", 700)


def assert_near(actual, expected, limit):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            got.double(),
            want.double(),
            rtol=limit,
            atol=limit * max(float(want.double().abs().max()), 1),
        )


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "odd"])
def test_values_and_gradients_match_the_reference_in_fp64(
    interpreted, poisoned_memory, case, extras
):
    hidden, weight, targets = random_inputs(**CASES[case])
    expected = with_gradients(
        cross_entropy.reference, hidden.double(), weight.double(), targets, **EXTRAS[extras]
    )
    actual = with_gradients(cross_entropy.triton, hidden, weight, targets, **EXTRAS[extras])
    assert actual[0].dtype == torch.float32
    assert torch.equal(actual[1], expected[1])
    assert_near(actual, expected, 1e-5)
    with torch.no_grad():
        assert_near(
            cross_entropy.triton(hidden, weight, targets, **EXTRAS[extras]), expected[:2], 1e-5
        )


def test_chunks_of_odd_lengths_match_the_reference(interpreted, poisoned_memory, chunks):
    hidden, weight, targets = random_inputs(**CASES["odd"])
    expected = with_gradients(
        cross_entropy.reference, hidden.double(), weight.double(), targets, **EXTRAS["both"]
    )
    assert_near(
        with_gradients(cross_entropy.triton, hidden, weight, targets, **EXTRAS["both"]),
        expected,
        1e-5,
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_narrow_products_give_an_fp32_loss_and_gradients_in_the_dtypes_of_the_leaves(
    interpreted, poisoned_memory, dtype
):
    hidden, weight, targets = random_inputs(**CASES["odd"])
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected = with_gradients(cross_entropy.reference, hidden.double(), weight.double(), targets)
    actual = with_gradients(cross_entropy.triton, hidden, weight, targets)
    assert [tensor.dtype for tensor in actual] == [torch.float32, torch.int64, dtype, dtype]
    assert_near(actual, expected, LIMITS[dtype])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        mixed = with_gradients(cross_entropy.triton, hidden.float(), weight.float(), targets)
    assert [tensor.dtype for tensor in mixed] == [
        torch.float32,
        torch.int64,
        torch.float32,
        torch.float32,
    ]
    assert_near(mixed, expected, LIMITS[dtype])


@pytest.mark.parametrize(
    "vocab",
    [1, 2, 31, loss_rows.BLOCK, loss_rows.BLOCK + 1, 2 * loss_rows.BLOCK * loss_rows.AT_ONCE + 77],
)
def test_vocabularies_that_do_not_fill_blocks(interpreted, poisoned_memory, vocab):
    hidden, weight, targets = random_inputs(rows=1, tokens=5, width=4, vocab=vocab, ignored=0.2)
    extras = {"softcap": 3.0, "z_loss": 1e-2}
    expected = with_gradients(
        cross_entropy.reference, hidden.double(), weight.double(), targets, **extras
    )
    assert_near(
        with_gradients(cross_entropy.triton, hidden, weight, targets, **extras), expected, 1e-5
    )


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_distant_logits_neither_overflow_nor_vanish(interpreted, order):
    """A lane's maximum changes with each block, or never after the first."""
    hidden, weight = (
        torch.full((1, 2, 1), 1.0),
        torch.linspace(-80.0 * order, 300.0 * order, 3 * loss_rows.BLOCK)[:, None],
    )
    targets = torch.tensor([[0, 3 * loss_rows.BLOCK - 1]])
    expected = with_gradients(cross_entropy.reference, hidden.double(), weight.double(), targets)
    assert_near(with_gradients(cross_entropy.triton, hidden, weight, targets), expected, 1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_ignored_targets_affect_neither_loss_nor_gradients(interpreted, poison):
    hidden, weight, targets = random_inputs(**CASES["some ignored"])
    ignored = targets == cross_entropy.IGNORED
    plain = with_gradients(cross_entropy.triton, hidden, weight, targets)
    poisoned = with_gradients(
        cross_entropy.triton, hidden.masked_fill(ignored[..., None], poison), weight, targets
    )
    for got, want in zip(poisoned, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("stride", [11, 13, 16, 32])
def test_an_ignored_row_is_not_read_and_only_padding_is_overwritten(interpreted, stride):
    buffer_CV = torch.full((3, stride), math.nan)
    product_CV = buffer_CV[:, :11]
    product_CV[0] = product_CV[2] = torch.arange(11.0)
    losses_C = loss_rows.overwrite(product_CV, torch.tensor([4, -1, -1]), None, 0.0, 1.0)
    assert not losses_C[1:].any()
    assert not product_CV[1:].any()
    torch.testing.assert_close(product_CV[0], torch.arange(11.0).softmax(0) - torch.eye(11)[4])
    assert buffer_CV[:, loss_rows.ALIGNED :].isnan().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nan_and_infinity_propagate(interpreted, broken):
    hidden, weight, targets = random_inputs(**CASES["plain"])
    hidden[0, 3] = broken
    loss_sum, _, grad_hidden, grad_weight = with_gradients(
        cross_entropy.triton, hidden, weight, targets
    )
    assert not torch.isfinite(loss_sum)
    assert not torch.isfinite(grad_hidden[0, 3]).all()
    assert not torch.isfinite(grad_weight).all()


def test_float16_keeps_small_gradients_that_the_loss_scale_preserves(interpreted, chunks):
    hidden, weight, targets = sure_of_their_targets()
    expected = scaled_gradients(
        cross_entropy.reference, hidden, weight, targets, scale=2.0**15, dtype=torch.float32
    )
    actual = scaled_gradients(
        cross_entropy.triton, hidden, weight, targets, scale=2.0**15, dtype=torch.float16
    )
    torch.testing.assert_close(actual[1][1:, 0], expected[1][1:, 0], rtol=1e-2, atol=0)
    torch.testing.assert_close(
        actual[0][..., 1:],
        expected[0][..., 1:],
        rtol=1e-2,
        atol=1e-2 * float(expected[0][..., 1:].abs().max()),
    )


def test_the_weight_gradient_is_not_rounded_per_chunk(interpreted, monkeypatch):
    """The gradients of logits do not depend on the chunks, but bfloat16 products would round."""
    hidden, weight, targets = random_inputs(rows=1, tokens=128, width=8, vocab=16, ignored=0.0)
    actual = []
    for at_once in (16 * 128, 16 * 16):
        monkeypatch.setitem(loss_rows.LOGITS_AT_ONCE, "cpu", at_once)
        actual.append(
            loss_rows.loss_and_gradients(
                hidden[0].bfloat16(), weight.bfloat16(), targets[0], None, 0.0
            )[2]
        )
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-5)


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_model_calls_one_op_and_never_holds_all_logits(interpreted, monkeypatch, dtype):
    """The kernel never gets more than 110 of the 40 x 11 logits."""
    monkeypatch.setitem(loss_rows.LOGITS_AT_ONCE, "cpu", 11 * 10)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator).to(dtype) for size in ((1, 40, 8), (11, 8))
    )
    targets, seen = torch.randint(11, (1, 40), generator=generator), []
    overwrite = loss_rows.overwrite
    monkeypatch.setattr(
        loss_rows,
        "overwrite",
        lambda product_CV, *others: (
            seen.append(product_CV.numel()),
            overwrite(product_CV, *others),
        )[1],
    )

    def model(hidden, weight, targets):
        loss_sum, num_valid = cross_entropy.triton(hidden * 2, weight, targets)
        return loss_sum * 3, num_valid

    actual, expected = (
        with_gradients(function, hidden, weight, targets)
        for function in (torch.compile(model, fullgraph=True), model)
    )
    assert seen == [110] * 8
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert expected[2].any()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, fullgraph=True)(hidden, weight, targets)[0], expected[0]
        )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_ops_return_the_shapes_that_they_declare(interpreted, dtype):
    hidden, weight, targets = random_inputs(**CASES["one target"])
    hidden, weight, targets = hidden.flatten(0, 1).to(dtype), weight.to(dtype), targets.flatten()
    for operation in (
        loss_rows._gradients_op,
        loss_rows._loss_op,
        loss_chunks._gradients_op,
        loss_chunks._loss_op,
    ):
        torch.library.opcheck(
            operation,
            (hidden, weight, targets, 3.0, 1e-2),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("dtype", "bytes_of_hidden"), [(torch.bfloat16, 2), (torch.float16, 4)], ids=str
)
def test_memory_holds_one_chunk_of_logits_and_both_gradients(monkeypatch, dtype, bytes_of_hidden):
    """Fake tensors show a GPU's memory: one chunk of logits, both gradients and little else."""
    monkeypatch.setitem(loss_rows.LOGITS_AT_ONCE, "cuda", 2**22)
    with FakeTensorMode():
        hidden, weight = torch.empty(1, 4096, 64, dtype=dtype), torch.empty(4099, 64, dtype=dtype)
        targets = torch.zeros(1, 4096, dtype=torch.int64)
        hidden.requires_grad_(), weight.requires_grad_()
        with Live() as live:
            cross_entropy.triton(hidden, weight, targets)
    chunk = 512 * 4112 * 2
    kept = 4096 * 64 * bytes_of_hidden + 4099 * 64 * 4
    masked = 4096 * 64 * 2 + 4096 * 64
    assert chunk + kept <= live.peak <= chunk + kept + masked + 2**16


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "scored"])
@pytest.mark.parametrize(("vocab", "cap"), [(50_304, 0.0), (50_257, 30.0)])
def test_the_kernel_compiles_for_a_gpu(dtype, learned, vocab, cap):
    """It compiles to the binary for an H100 or H200."""
    kernel = loss_kernels.losses_and_gradient
    constants = {"Z_LOSS": 1e-4, "SCALE": 4096.0, "GRADIENT": learned, "CAP": cap, "VOCAB": vocab}
    constants |= dict.fromkeys(("PADDED", "STRIDE"), -(-vocab // 16) * 16)
    constants |= {"AT_ONCE": loss_rows.AT_ONCE, "BLOCK": loss_rows.BLOCK}
    types = {"product": f"*{dtype}", "targets": "*i64", "losses": "*fp32"} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = triton.compiler.ASTSource(
        kernel, {key: types[key] for key in kernel.arg_names}, constants, aligned
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(
        source, target=target, options={"num_warps": loss_rows.BLOCK // (32 * loss_rows.PER_THREAD)}
    )
    assert compiled.asm["cubin"]
    assert "ld.global.L1::evict_last" in compiled.asm["ptx"]
    assert ".v4.b32" in compiled.asm["ptx"]  # 16 bytes at a time


def test_it_is_chunked_where_triton_does_not_run():
    hidden, weight, targets = random_inputs(**CASES["some ignored"])
    for actual, expected in zip(
        *(
            with_gradients(way, hidden, weight, targets)
            for way in (cross_entropy.triton, cross_entropy.chunked)
        ),
        strict=True,
    ):
        assert torch.equal(actual, expected)


def test_missing_triton_names_the_install_command(without_triton):
    with pytest.raises(MissingPackage, match="pip install triton"):
        cross_entropy.triton(*random_inputs(**CASES["plain"]))


# torch's compiler uses deprecated features of its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_has_the_same_gradients(interpreted, monkeypatch):
    torch._dynamo.reset()  # other tests compile the same forward
    monkeypatch.setitem(loss_rows.LOGITS_AT_ONCE, "cpu", 65 * 8)
    model = Transformer(
        Transformer.check(
            {"vocab_size": 65, "num_layers": 1, "d_model": 16, "num_heads": 2}, seq_len=12
        ),
        Ops.plain(cross_entropy=cross_entropy.triton),
    )
    tokens = torch.randint(65, (2, 13), generator=torch.Generator().manual_seed(0))
    actual = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_sum, _ = call(tokens[:, :-1], tokens[:, 1:])
        loss_sum.backward()
        actual.append([loss_sum.detach(), *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(*actual, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
