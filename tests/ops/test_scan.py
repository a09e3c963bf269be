"""Letters: B rows, T tokens, K eigenstates."""

import cmath
import itertools
import math

import pytest
import torch
from op_variants import variants
from torch.autograd import gradcheck

from flatout.errors import ShapeError
from flatout.ops import scan

VARIANTS = variants(scan)
LIMITS = {"states": 1e-5, "drive": 1e-5, "log_decay": 1e-4, "angle": 1e-4, "start": 1e-5}
"""Largest error in fp32, relative to the norm."""
FAST = sorted(set(VARIANTS) - {"reference"})
TRITON = {"triton"}
KINDS = {
    "fixed": {},
    "documents": {"documents": True},
    "start": {"start": True},
    "documents, start": {"documents": True, "start": True},
}
SIZES = [(1, 4), (5, 128), (37, 8), (64, 64), (129, 128), (300, 7)]
"""Tokens and chunk sizes: odd lengths, and chunks that do not divide them."""
INTERPRETED = [(1, 4), (5, 128), (23, 4)]
"""Sizes that Triton's interpreter handles in a second or two: one token, one chunk, three levels of
chunks. A GPU tests the others.
"""
CASES = [(name, *size) for name in VARIANTS for size in (INTERPRETED if name in TRITON else SIZES)]


@pytest.fixture(autouse=True)
def triton_interpreted(request):
    """Run Triton variants in the interpreter, except in GPU tests."""
    cases = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if cases.get("name") in TRITON and not request.node.get_closest_marker("gpu"):
        request.getfixturevalue("interpreted")


def random_inputs(rows, tokens, eigenstates, *, documents=False, start=False, dtype=torch.float64):
    """Return the inputs of a recurrence, the same numbers in every dtype.

    Time constants range from 1 to the number of tokens.
    """
    generator = torch.Generator().manual_seed(tokens)
    memory = torch.exp(torch.rand(eigenstates, generator=generator) * math.log(tokens + 1))
    given = {
        "log_decay": -1 / memory,
        "angle": torch.rand(eigenstates, generator=generator) * 2 * math.pi,
        "drive": torch.randn(rows, tokens, 2 * eigenstates, generator=generator),
    }
    if start:
        given["start"] = torch.randn(rows, 2 * eigenstates, generator=generator)
    doc_ids = None
    if documents:
        doc_ids = (torch.rand(rows, tokens, generator=generator) < 0.1).cumsum(dim=1)
    weights = torch.randn(rows, tokens, 2 * eigenstates, generator=generator).to(dtype)
    return cast(given, dtype), doc_ids, weights


def cast(given, to):
    """Return the inputs in a different dtype, or on a different device."""
    return {name: tensor.to(to) for name, tensor in given.items()}


def with_gradients(function, given, doc_ids, weights, chunk_size=128):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in given.items()}
    states = function(
        leaves["log_decay"],
        leaves["angle"],
        leaves["drive"],
        doc_ids_BT=doc_ids,
        start_BE=leaves.get("start"),
        chunk_size=chunk_size,
    )
    states.backward(weights.to(states.dtype))
    return {"states": states.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def relative_errors(actual, expected):
    """Return the error of each quantity, relative to its norm."""
    assert actual.keys() == expected.keys()
    norms = {name: tensor.norm().clamp_min(1e-30) for name, tensor in expected.items()}
    return {
        name: float((actual[name].double() - expected[name]).norm() / norms[name])
        for name in expected
    }


def assert_within(errors, **limits):
    for name, error in errors.items():
        assert error < (LIMITS | limits)[name], name


def by_complex_numbers(given, doc_ids):
    """Compute the recurrence with Python's complex numbers, token by token."""
    rows, tokens, parts = given["drive"].shape
    count, start = parts // 2, given.get("start")
    states = torch.empty(rows, tokens, parts, dtype=torch.float64)
    for b, k in itertools.product(range(rows), range(count)):
        state = complex(start[b, k], start[b, count + k]) if start is not None else 0j
        for t in range(tokens):
            if doc_ids is not None and t and doc_ids[b, t] != doc_ids[b, t - 1]:
                state = 0j
            state *= cmath.rect(math.exp(given["log_decay"][k]), float(given["angle"][k]))
            state += complex(given["drive"][b, t, k], given["drive"][b, t, count + k])
            states[b, t, k], states[b, t, count + k] = state.real, state.imag
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_matches_its_docstring(kind):
    given, doc_ids, weights = random_inputs(2, 23, 3, **KINDS[kind])
    actual = with_gradients(scan.reference, given, doc_ids, weights)["states"]
    torch.testing.assert_close(actual, by_complex_numbers(given, doc_ids), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "tokens", "chunk_size"), CASES)
def test_values_and_gradients_match_the_reference_in_fp64(
    name, kind, tokens, chunk_size, poisoned_memory
):
    given, doc_ids, weights = random_inputs(2, tokens, 3, **KINDS[kind])
    expected = with_gradients(scan.reference, given, doc_ids, weights)
    exact = with_gradients(VARIANTS[name], given, doc_ids, weights, chunk_size)
    assert max(relative_errors(exact, expected).values()) < 1e-11
    narrow = cast(given, torch.float32)
    actual = with_gradients(VARIANTS[name], narrow, doc_ids, weights, chunk_size)
    assert_within(relative_errors(actual, expected))


LONG = 32_768 if torch.cuda.is_available() else 4_096
"""Tokens of a long text: the reference takes a step for each."""
LONG_LIMITS = {"log_decay": 1e-3, "angle": 1e-3}
LONG_TEXTS = ("one document", "one document, then another")


@pytest.fixture(scope="module", params=LONG_TEXTS)
def long_text(request):
    """Return inputs of a long text and the expected results; memory spans thousands of tokens."""
    given, _, weights = random_inputs(1, LONG, 4, dtype=torch.float32)
    doc_ids = (torch.arange(LONG) >= LONG // 4).int()[None] if "then" in request.param else None
    # `chunked` equals the reference to 1e-11 in fp64, and is much faster
    exactly = scan.reference if request.param == "one document" else scan.chunked
    expected = with_gradients(exactly, cast(given, torch.float64), doc_ids, weights)
    return given, doc_ids, weights, expected


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FAST} - TRITON))  # Triton variants are tested on a GPU
def test_eigenvalues_keep_their_gradients_over_long_texts(name, long_text):
    given, doc_ids, weights, expected = long_text
    actual = with_gradients(VARIANTS[name], given, doc_ids, weights)
    assert_within(relative_errors(actual, expected), **LONG_LIMITS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_bf16_drive_gives_fp32_states(name):
    given, doc_ids, weights = random_inputs(2, 30, 3, dtype=torch.bfloat16)
    expected = with_gradients(scan.reference, cast(given, torch.float64), doc_ids, weights)
    actual = with_gradients(VARIANTS[name], given, doc_ids, weights)
    assert actual["states"].dtype == torch.float32
    assert actual["drive"].dtype == torch.bfloat16
    assert max(relative_errors(actual, expected).values()) < 1e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_autocast_does_not_affect_it(name):
    given, doc_ids, weights = random_inputs(1, 20, 2, dtype=torch.float32)
    plain = with_gradients(VARIANTS[name], given, doc_ids, weights, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(VARIANTS[name], given, doc_ids, weights, 8)
    assert all(torch.equal(actual[key], plain[key]) for key in plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_documents_are_separate_even_with_nan(name, dtype):
    given, _, _ = random_inputs(1, 40, 2, dtype=dtype)
    doc_ids = (torch.arange(40) >= 17).int()[None]

    def gradients(weights):
        leaves = [tensor.clone().requires_grad_() for tensor in given.values()]
        actual = VARIANTS[name](*leaves, doc_ids_BT=doc_ids, chunk_size=8)
        return actual.detach(), *torch.autograd.grad(actual, leaves, weights)

    of_second = torch.cat((torch.zeros(1, 17, 4), torch.ones(1, 23, 4)), dim=1).to(dtype)
    kept, *kept_gradients = gradients(of_second)
    given["drive"][:, :17] = float("nan")
    actual, *found_gradients = gradients(of_second)
    assert torch.equal(actual[:, 17:], kept[:, 17:])
    assert not found_gradients[-1][:, :17].any()
    for gradient, expected in zip(found_gradients, kept_gradients, strict=True):
        assert gradient.dim() == 1 or torch.equal(gradient[:, 17:], expected[:, 17:])
    given["drive"][:, :17] = 1.0
    _, *kept_gradients = gradients(torch.ones_like(of_second))
    _, *found_gradients = gradients(torch.where(of_second > 0, float("nan"), 1.0))
    assert torch.equal(found_gradients[-1][:, :17], kept_gradients[-1][:, :17])


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_match_finite_differences(name):
    given, doc_ids, _ = random_inputs(1, 9, 2, documents=True, start=True)
    leaves = [tensor.requires_grad_() for tensor in given.values()]

    def call(decay, angle, drive, start):
        return VARIANTS[name](decay, angle, drive, doc_ids_BT=doc_ids, start_BE=start, chunk_size=4)

    assert gradcheck(call, leaves)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_a_document_in_pieces_gives_the_same_states(name, dtype, limit):
    given, _, _ = random_inputs(1, 50, 3, dtype=dtype)
    whole = VARIANTS[name](given["log_decay"], given["angle"], given["drive"])
    start, states = None, []
    for piece in given["drive"].split([1, 30, 19], dim=1):
        states.append(VARIANTS[name](given["log_decay"], given["angle"], piece, start_BE=start))
        start = states[-1][:, -1]
    torch.testing.assert_close(torch.cat(states, dim=1), whole, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"angle": torch.zeros(4)}, "decays"),
        ({"drive": torch.zeros(2, 5, 7)}, "drive"),
        ({"doc_ids_BT": torch.zeros(2, 4)}, "document ids .2, 4."),
        ({"start_BE": torch.zeros(2, 3)}, "start"),
    ],
)
def test_mismatched_shapes_are_rejected(name, change, message):
    given, _, _ = random_inputs(2, 5, 3)
    log_decay, angle, drive, *_ = (given | change).values()
    options = {key: value for key, value in change.items() if key.endswith(("_BT", "_BE"))}
    with pytest.raises(ShapeError, match=message):
        VARIANTS[name](log_decay, angle, drive, **options)


def on_gpu(given, doc_ids, weights):
    doc_ids = None if doc_ids is None else doc_ids.cuda()
    return cast(given, "cuda"), doc_ids, weights.cuda()


LONG_SIZES = [(1_025, 128), (5_000, 2), (32_768, 256)]
ESSENTIAL = {(37, 8), (1_025, 128), (32_768, 256)}
"""Sizes for the Triton kernels on a GPU when time is short."""
ON_GPU = [
    pytest.param(
        name, *size, marks=[pytest.mark.gpu_essential] * (name == "triton" and size in ESSENTIAL)
    )
    for name in FAST
    for size in [*SIZES, *LONG_SIZES]
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "tokens", "chunk_size"), ON_GPU)
def test_values_and_gradients_on_a_gpu(name, kind, tokens, chunk_size, poisoned_memory):
    inputs = random_inputs(2, tokens, 40, dtype=torch.float32, **KINDS[kind])
    given, doc_ids, weights = on_gpu(*inputs)
    expected = with_gradients(scan.chunked, cast(given, torch.float64), doc_ids, weights)
    actual = with_gradients(VARIANTS[name], given, doc_ids, weights, chunk_size)
    limits = LONG_LIMITS if tokens > 10_000 else {}
    assert_within(relative_errors(actual, expected), **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAST)
def test_eigenvalues_keep_their_gradients_over_long_texts_on_a_gpu(name, long_text):
    *inputs, expected = long_text
    actual = with_gradients(VARIANTS[name], *on_gpu(*inputs))
    assert_within(relative_errors(actual, cast(expected, "cuda")), **LONG_LIMITS)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.gpu_essential] * (name == "triton")) for name in FAST],
)
def test_a_compiled_recurrence_in_bf16_on_a_gpu(name, kind):
    """It has no graph break and all gradients, and a second call gives the same bits."""
    inputs = random_inputs(2, 1_000, 40, dtype=torch.bfloat16, **KINDS[kind])
    given, doc_ids, weights = on_gpu(*inputs)
    expected = with_gradients(scan.chunked, cast(given, torch.float64), doc_ids, weights)
    compiled = torch.compile(
        lambda *args, **more: 2 * VARIANTS[name](*args, **more), fullgraph=True
    )
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual, again = (with_gradients(compiled, given, doc_ids, weights / 2) for _ in range(2))
    actual["states"] /= 2
    assert max(relative_errors(actual, expected).values()) < 1e-2
    assert all(torch.equal(actual[key], again[key]) for key in actual if key != "states")
