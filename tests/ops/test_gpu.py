"""GPU kernels against the references on the CPU in fp64."""

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
from op_variants import variants
from torch.nn.attention import SDPBackend

from flatout.ops import attention, cross_entropy

pytestmark = pytest.mark.gpu

ATTENTION = {
    name: function
    for name, function in variants(attention).items()
    if name not in {"reference", "bf16"}
}
"""All variants except the reference, whose plain matmuls round more than kernels, and the one for
CPUs.
"""
EVERY = {
    f"{name} of {kind}": case
    for kind, cases in {"blocks": LONG, "few": CASES}.items()
    for name, case in cases.items()
}
ESSENTIAL = {
    "documents of blocks",
    "heads of 128 of blocks",
    "last queries of blocks",
    "documents, window, grouped of few",
    "square of few",
}
"""Cases for bfloat16 when time is short: each kernel with all its features."""
DTYPES = ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-2))
COMBINATIONS = [
    pytest.param(
        name,
        case,
        dtype,
        limit,
        marks=[pytest.mark.gpu_essential] * (case in ESSENTIAL and dtype == torch.bfloat16),
        id=f"{name}-{case}-{dtype}",
    )
    for name in ATTENTION
    for case in EVERY
    for dtype, limit in DTYPES
]
GPT2 = {"heads": 12, "groups": 12, "queries": 1024, "keys": 1024, "head_dim": 64, "documents": 4}


def on_gpu(tensors, options):
    ids = options["doc_ids_BS"]
    return [tensor.cuda() for tensor in tensors], options | {
        "doc_ids_BS": None if ids is None else ids.cuda()
    }


def with_gradients_on_gpu(function, tensors, options):
    tensors, options = on_gpu(tensors, options)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out))
    return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


@pytest.mark.parametrize(("name", "case", "dtype", "limit"), COMBINATIONS)
def test_values_and_gradients_match_the_reference_in_fp64(name, case, dtype, limit):
    tensors, options = random_inputs(**EVERY[case] | {"dtype": dtype})
    expected = with_gradients(attention.reference, [tensor.double() for tensor in tensors], options)
    actual = with_gradients_on_gpu(ATTENTION[name], tensors, options)
    assert {each.dtype for each in actual} == {dtype}
    assert_close_to_largest(actual, expected, limit)


@pytest.mark.gpu_essential
def test_compiled_results_match_eager_ones_in_the_shape_of_gpt2():
    tensors, options = random_inputs(**GPT2 | {"dtype": torch.bfloat16})
    expected = with_gradients_on_gpu(attention.fused, tensors, options)
    compiled = torch.compile(attention.flex, fullgraph=True, dynamic=False)
    for function in (attention.flex, compiled):
        assert_close_to_largest(with_gradients_on_gpu(function, tensors, options), expected, 1e-2)


@pytest.mark.gpu_essential
def test_the_last_queries_of_a_long_row_need_no_mask_compiled_or_not():
    """A mask of 8,192 x 16,384 would take 256 MiB, and as much again in backward."""
    facts = {"head_dim": 64, "rows": 1, "dtype": torch.bfloat16}
    tensors, options = random_inputs(**case(4, 2, 8192, 16_384, **facts))
    results, peaks = [], []
    for function in (
        attention.fused,
        torch.compile(attention.fused, fullgraph=True, dynamic=False),
    ):
        with_gradients_on_gpu(function, tensors, options)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(with_gradients_on_gpu(function, tensors, options))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert_close_to_largest(*results, 1e-2)
    assert max(peaks) < 2**28


def test_many_alternating_shapes_run_in_eager_mode():
    """Evaluation, short sequences and buckets alternate with training steps."""
    facts = {"documents": 3, "head_dim": 64, "dtype": torch.bfloat16}
    for tokens in (256, 300, 512, 300, 1000, 129, 777, 640, 2048, 333, 256):
        tensors, options = random_inputs(**case(2, 2, tokens, **facts))
        actual = with_gradients_on_gpu(attention.flex, tensors, options)[0]
        expected = attention.reference(*(t.double() for t in tensors), **options)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_replayed_cuda_graph_masks_the_new_documents():
    """A graph captured with one micro-batch must apply the mask of the next one."""
    (q, k, v), options = random_inputs(**GPT2 | {"dtype": torch.bfloat16})
    q, k, v, ids = q.cuda(), k.cuda(), v.cuda(), options["doc_ids_BS"].cuda()
    for _ in range(3):
        attention.flex(q, k, v, doc_ids_BS=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = attention.flex(q, k, v, doc_ids_BS=ids)
    ids.copy_((torch.arange(1024) // 100).int())
    graph.replay()
    torch.testing.assert_close(
        actual, attention.fused(q, k, v, doc_ids_BS=ids), rtol=1e-2, atol=1e-2
    )


@pytest.mark.gpu_essential
@pytest.mark.parametrize("name", ATTENTION)
def test_another_first_document_does_not_change_the_second(name):
    (q, k, v), options = random_inputs(**GPT2 | {"dtype": torch.bfloat16, "rows": 1})
    options["doc_ids_BS"] = (torch.arange(1024) >= 300).int()[None]
    first = (torch.arange(1024) < 300)[:, None]
    plain = with_gradients_on_gpu(ATTENTION[name], (q, k, v), options)
    other = with_gradients_on_gpu(
        ATTENTION[name], [torch.where(first, 1e3 * tensor, tensor) for tensor in (q, k, v)], options
    )
    assert torch.equal(plain[0][:, :, 300:], other[0][:, :, 300:])
    for one, two in zip(
        plain, other, strict=True
    ):  # kernels sum the gradients of queries in any order
        torch.testing.assert_close(one[:, :, 300:], two[:, :, 300:], rtol=1e-2, atol=1e-2)


def test_skipped_blocks_need_no_mask():
    """A mask of 32,768 x 32,768 alone would take 1 GiB."""
    facts = {"head_dim": 64, "documents": 9, "rows": 1, "dtype": torch.bfloat16}
    tensors, options = random_inputs(**case(1, 1, 32_768, **facts))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_gradients_on_gpu(attention.flex, tensors, options)
    assert torch.cuda.max_memory_allocated() - before < 2**29


@pytest.mark.gpu_essential
@pytest.mark.parametrize(
    "extras", [{}, {"softcap": 30.0}, {"z_loss": 1e-2}, {"softcap": 30.0, "z_loss": 1e-2}], ids=str
)
@pytest.mark.parametrize(("dtype", "limit"), DTYPES, ids=str)
def test_a_loss_without_all_logits_matches_the_reference(dtype, limit, extras):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 500, 64, generator=generator).to(dtype)
    # Logits of standard deviation 1: at 8, rounding them to bfloat16 alone costs the reference 2%.
    weight = (torch.randn(3001, 64, generator=generator) / 8).to(dtype)
    targets = torch.randint(3001, (2, 500), generator=generator)
    targets[:, ::3] = cross_entropy.IGNORED

    def results(function, device, dtype):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight)]
        loss_sum, num_valid = function(*leaves, targets.to(device), **extras)
        loss_sum.backward()
        return [loss_sum.detach().cpu(), num_valid.cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    actual = results(cross_entropy.chunked, "cuda", dtype)
    assert_close_to_largest(actual, results(cross_entropy.reference, "cpu", torch.float64), limit)


def test_the_output_weights_gradient_is_as_exact_in_many_chunks_as_in_one(monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, 4096, 64, device="cuda", generator=generator)
    weight = torch.randn(512, 64, device="cuda", generator=generator).div_(8).requires_grad_()
    targets = torch.randint(512, (1, 4096), device="cuda", generator=generator)
    gradients = []
    for chunks in (1, 64):
        monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cuda", 512 * 4096 // chunks)
        weight.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            cross_entropy.chunked(hidden, weight, targets)[0].backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu_essential
@pytest.mark.parametrize("groups", [12, 4])
def test_torch_chooses_cudnn_on_hopper(groups):
    """This makes a separate speedup unnecessary. The test fails if torch changes the order."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch takes flash first on other GPUs")
    for head_dim, is_cudnn in ((64, True), (128, True), (60, False)):
        shape = {"groups": groups, "head_dim": head_dim, "dtype": torch.bfloat16}
        tensors = [tensor.cuda() for tensor in random_inputs(**GPT2 | shape)[0]]
        chosen = torch._fused_sdp_choice(*tensors, is_causal=True, enable_gqa=groups != 12)
        assert (chosen == SDPBackend.CUDNN_ATTENTION.value) == is_cudnn
