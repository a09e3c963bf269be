"""Split weights store all numbers but one tie exactly, and behave as fp32 tensors."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.models import split_weights
from flatout.models.split_weights import SplitTensor, join, split, whole


def random_weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def split_tensor(weight):
    return SplitTensor(*split(weight))


def representable(*shape):
    return join(*split(random_weight(*shape)))


@given(st.integers(-(2**31), 2**31 - 1))
def test_every_number_is_restored_except_one_tie(bits):
    weight = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    high, low = split(weight)
    back = join(high, low)
    if weight.isnan():
        assert back.isnan()
        return
    assert torch.equal(high, weight.bfloat16())
    even_tie = bits & 0xFFFF == 0x8000 and not bits & 0x10000
    assert int(back.view(torch.int32)) == bits - even_tie
    assert torch.equal(join(*split(back)).view(torch.int32), back.view(torch.int32))


@pytest.mark.parametrize(
    "bits", [0x3F808000, 0x3F818000, -0x407F8000, 0, -0x80000000, 0x7F7FFFFF, 0x7F800000, 1]
)
def test_ties_zeros_infinities_and_the_smallest_number(bits):
    weight = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert torch.equal(split(weight)[0], weight.bfloat16())
    assert int(join(*split(weight)).view(torch.int32)) in (bits, bits - 1)


def test_it_is_an_fp32_tensor_with_four_bytes_per_weight():
    tensor = split_tensor(random_weight(3, 5))
    assert (tensor.dtype, tensor.shape, tensor.element_size()) == (torch.float32, (3, 5), 4)
    assert tensor.high.nbytes + tensor.low.nbytes == 4 * 15
    assert "SplitTensor" in repr(tensor)


def test_a_conversion_to_bf16_does_not_copy():
    tensor = split_tensor(random_weight(4, 4))
    assert tensor.bfloat16().data_ptr() == tensor.high.data_ptr()
    assert tensor[1:3].T.bfloat16().data_ptr() == tensor.high[1].data_ptr()
    assert type(tensor.bfloat16()) is torch.Tensor


@pytest.mark.parametrize("change", ["add_", "rows", "copy_", "foreach", "addcdiv_"])
def test_writes_apply_to_the_joined_numbers(change):
    plain, tensor, other = (
        representable(6, 4),
        split_tensor(representable(6, 4)),
        random_weight(6, 4),
    )
    for target in (plain, tensor):
        match change:
            case "add_":
                assert target.add_(other, alpha=0.1) is target
            case "rows":
                target[2:4].add_(other[2:4])
            case "copy_":
                target.copy_(other)
            case "foreach":
                torch._foreach_mul_([target], 0.3)
            case "addcdiv_":
                target.addcdiv_(other, other.abs() + 1, value=-0.01)
    expected = join(*split(plain))
    assert torch.equal(join(tensor.high, tensor.low), expected)
    assert torch.equal(tensor + 0, expected)


def test_a_fused_update_in_pieces_equals_one_of_all_weights(monkeypatch):
    shapes = [(3, 4), (50, 2), (7, 7), (1, 1), (2, 30)]
    plain = [torch.nn.Parameter(representable(*shape)) for shape in shapes]
    parts = [torch.nn.Parameter(split_tensor(p.detach())) for p in plain]
    monkeypatch.setattr(split_weights, "JOINED_AT_ONCE", 60)
    for members in (plain, parts):
        for number, member in enumerate(members):
            member.grad = random_weight(*member.shape) * (number + 1)
        optimizer = torch.optim.AdamW(members, lr=0.1, fused=True)
        optimizer.step()
        optimizer.step()
    for one, other in zip(plain, parts, strict=True):
        assert torch.equal(whole(other), join(*split(one.detach())))


@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_are_fp32_and_match_those_of_the_joined_weight(autocast):
    actual = []
    for make in (lambda w: w, split_tensor):
        table, matrix = (
            torch.nn.Parameter(make(representable(*shape))) for shape in ((11, 8), (5, 8))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for tokens in torch.arange(12).view(2, 6) % 11:
                rows = torch.nn.functional.embedding(tokens, table)
                out = torch.nn.functional.linear(rows, matrix) + (rows @ table.T).sum()
                out.float().square().mean().backward()
        actual.append((out.detach(), table.grad, matrix.grad))
    for one, other in zip(*actual, strict=True):
        assert type(other) is torch.Tensor
        assert torch.equal(one, other)
    assert actual[1][1].dtype == torch.float32


def test_copies_are_independent():
    parameter = torch.nn.Parameter(split_tensor(random_weight(3, 3)))
    twin = copy.deepcopy(parameter)
    with torch.no_grad():
        twin.zero_()
    assert torch.equal(whole(parameter), join(*split(random_weight(3, 3))))
    assert not whole(twin).any()
    assert whole(random_weight(2, 2)).shape == (2, 2)


# torch's compiler uses deprecated features of its own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_splits_and_joins_exactly():
    """A fused kernel may skip rounding to bfloat16 and back, but stored parts must be rounded."""

    def update(tensor, other):
        tensor.copy_(tensor - 0.125 * other)
        return tensor + 0

    plain, compiled = split_tensor(random_weight(8, 16)), split_tensor(random_weight(8, 16))
    read = torch.compile(update)(compiled, random_weight(8, 16))
    expected = update(plain, random_weight(8, 16))
    assert torch.equal(compiled.high, plain.high)
    assert torch.equal(compiled.low, plain.low)
    assert torch.equal(read, expected)


@pytest.mark.gpu
@pytest.mark.gpu_essential
def test_a_gpu_splits_and_joins_exactly_and_updates_up_to_rounding():
    """The AdamW kernel is flatout's; tests/ops/test_split_update.py compares it bit by bit."""
    weight = (
        torch.arange(-(2**31), 2**31, 99_991, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    weight = weight[~weight.isnan()]
    for here, there in zip(split(weight), split(weight.cuda()), strict=True):
        assert torch.equal(here, there.cpu())
    plain = torch.nn.Parameter(representable(64, 48).cuda())
    parts = torch.nn.Parameter(split_tensor(plain.detach()))
    for member in (plain, parts):
        with torch.autocast("cuda", torch.bfloat16):
            torch.nn.functional.linear(
                random_weight(32, 48).cuda(), member
            ).float().square().mean().backward()
        torch.optim.AdamW([member], lr=0.1, fused=True).step()
    assert torch.equal(plain.grad, parts.grad)
    torch.testing.assert_close(whole(parts), plain.detach().cpu(), rtol=1e-6, atol=1e-7)
