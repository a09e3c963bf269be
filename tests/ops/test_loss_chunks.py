"""What is the operations' alone; that values and gradients are right is in test_cross_entropy.py.
Letters: N targets, D width, V vocabulary.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.ops import cross_entropy, loss_chunks


def drawn(targets=40, width=8, vocab=11):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator) for size in ((targets, width), (vocab, width))
    )
    return hidden, weight, torch.randint(vocab, (targets,), generator=generator)


@pytest.mark.parametrize(
    ("targets", "lengths"), [(64, [16] * 4), (40, [20] * 2), (41, [11] * 3 + [8]), (1, [1])]
)
def test_chunks_are_halves_of_halves_and_no_target_is_left_out(monkeypatch, targets, lengths):
    monkeypatch.setitem(loss_chunks.LOGITS_AT_ONCE, "cpu", 11 * 20)
    hidden, _, wanted = drawn(targets)
    found = list(loss_chunks.chunks(hidden, wanted, 11, loss_chunks.LOGITS_AT_ONCE))
    assert [len(chunk) for _, chunk, _ in found] == lengths
    assert torch.equal(torch.cat([chunk for _, chunk, _ in found]), hidden)
    assert torch.equal(torch.cat([chunk for _, _, chunk in found]), wanted)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
def test_a_compiled_model_calls_one_operation_however_many_chunks(monkeypatch):
    """And what is done to a chunk is compiled once for all of them."""
    monkeypatch.setitem(loss_chunks.LOGITS_AT_ONCE, "cpu", 11 * 10)
    inside = CompileCounterWithBackend("eager")
    loss_chunks._compiled.cache_clear()
    compile_as_before = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compile_as_before(function, backend=inside, **options),
    )
    hidden, weight, targets = drawn()
    outside = CompileCounterWithBackend("aot_eager")
    loss = compile_as_before(cross_entropy.chunked, backend=outside, fullgraph=True)
    found, _ = loss(hidden[None].requires_grad_(), weight, targets[None])
    found.backward()
    loss_chunks._compiled.cache_clear()
    wanted, _ = cross_entropy.reference(hidden[None], weight, targets[None])
    torch.testing.assert_close(found.detach(), wanted)
    assert (outside.frame_count, inside.frame_count) == (1, 1)
    called = [
        node.target
        for graph in outside.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    assert sum("autograd_function" in str(target) for target in called) == 1


def test_the_operations_say_what_they_return():
    hidden, weight, targets = drawn()
    for operation in (loss_chunks._learned, loss_chunks._scored):
        torch.library.opcheck(
            operation,
            (hidden.bfloat16(), weight.bfloat16(), targets, None, 1e-2),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_bytes_are_counted_for_a_gpu(monkeypatch):
    monkeypatch.setitem(loss_chunks.LOGITS_AT_ONCE, "cpu", 11)
    monkeypatch.setitem(loss_chunks.LOGITS_AT_ONCE, "cuda", 11 * 20)
    with FakeTensorMode():
        hidden, targets = torch.empty(40, 8), torch.empty(40, dtype=torch.int64)
        assert [
            len(chunk)
            for _, chunk, _ in loss_chunks.chunks(hidden, targets, 11, loss_chunks.LOGITS_AT_ONCE)
        ] == [20, 20]
