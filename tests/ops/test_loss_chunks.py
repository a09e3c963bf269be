"""The chunks and custom ops of the loss; test_cross_entropy.py tests values and gradients.

Letters: N targets, D width, V vocabulary.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flatout.ops import cross_entropy

pytestmark = pytest.mark.slow


def random_inputs(targets=40, width=8, vocab=11):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator) for size in ((targets, width), (vocab, width))
    )
    return hidden, weight, torch.randint(vocab, (targets,), generator=generator)


@pytest.mark.parametrize(
    ("targets", "lengths"), [(64, [16] * 4), (40, [20] * 2), (41, [11] * 3 + [8]), (1, [1])]
)
def test_chunks_have_equal_lengths_and_cover_all_targets(monkeypatch, targets, lengths):
    monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", 11 * 20)
    hidden, _, expected = random_inputs(targets)
    actual = list(cross_entropy._chunks(hidden, expected, 11))
    assert [len(chunk) for _, chunk, _ in actual] == lengths
    assert torch.equal(torch.cat([chunk for _, chunk, _ in actual]), hidden)
    assert torch.equal(torch.cat([chunk for _, _, chunk in actual]), expected)


# torch itself uses deprecated features when it compiles.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_calls_one_op_for_all_chunks(monkeypatch):
    """The work on a chunk is compiled once for all of them."""
    monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", 11 * 10)
    inside = CompileCounterWithBackend("eager")
    cross_entropy._compiled.cache_clear()
    compile_as_before = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compile_as_before(function, backend=inside, **options),
    )
    hidden, weight, targets = random_inputs()
    outside = CompileCounterWithBackend("aot_eager")
    loss = compile_as_before(cross_entropy.chunked, backend=outside, fullgraph=True)
    actual, _ = loss(hidden[None].requires_grad_(), weight, targets[None])
    actual.backward()
    cross_entropy._compiled.cache_clear()
    expected, _ = cross_entropy.reference(hidden[None], weight, targets[None])
    torch.testing.assert_close(actual.detach(), expected)
    assert (outside.frame_count, inside.frame_count) == (1, 1)
    called = [
        node.target
        for graph in outside.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    assert sum("autograd_function" in str(target) for target in called) == 1


def test_the_ops_return_the_shapes_that_they_declare():
    hidden, weight, targets = random_inputs()
    for wanted in ((True, True), (True, False), (False, False)):
        torch.library.opcheck(
            cross_entropy._opaque_loop,
            (hidden.bfloat16(), weight.bfloat16(), targets, None, 1e-2, *wanted),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_the_estimate_takes_a_few_chunks_of_a_device():
    hidden, targets = torch.empty(40, 8), torch.empty(40, dtype=torch.int64)
    sizes = [len(chunk) for _, chunk, _ in cross_entropy._chunks(hidden, targets, 11, 11 * 10, 3)]
    assert sizes == [10, 10, 10]
