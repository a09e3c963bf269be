"""Rotary tables: a part of each head, and stretched wavelengths."""

import math

import pytest
import torch
from op_variants import variants

from flatout.models.transformer import Rotary, TransformerConfig, llama3
from flatout.ops import heads


def tables(tokens=32, head_dim=8, **changes):
    return Rotary(config(head_dim=head_dim, max_seq_len=tokens, **changes))([(0, tokens)])


def config(**values):
    return TransformerConfig(vocab_size=1, **values)


def test_all_components_rotate_by_default():
    assert torch.equal(tables()[0], tables(rotary_dims=8)[0])
    assert (tables()[1][1] != 0).all()


def test_a_part_of_each_head_rotates_as_a_head_of_that_size():
    """The rotated components are the first of each half. The others keep their values."""
    cos, sin = tables(rotary_dims=4)
    small_cos, small_sin = tables(head_dim=4)
    for whole, part in ((cos, small_cos), (sin, small_sin)):
        assert torch.equal(whole[:, [0, 1, 4, 5]], part)
    assert (cos[:, [2, 3, 6, 7]] == 1).all()
    assert (sin[:, [2, 3, 6, 7]] == 0).all()


@pytest.mark.parametrize("name", variants(heads))
def test_every_variant_of_the_op_rotates_a_part(name):
    torch.manual_seed(0)
    product = torch.randn(2, 32, 3 * 8, requires_grad=True)
    gain = torch.randn(2, 8)
    results = []
    for function in (variants(heads)[name], heads.reference):
        out = function(product, gain, *tables(rotary_dims=4), counts=(1, 1))
        loss = sum(tensor.square().cumsum(-1).sum() for tensor in out)
        results.append([*out, *torch.autograd.grad(loss, product)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_linear_scaling_moves_positions_closer():
    cos, _ = tables(rotary_scaling="linear", rotary_factor=4.0)
    assert torch.equal(cos[::4], tables(tokens=8)[0])


def test_llama3_stretches_long_wavelengths_only():
    periods = torch.tensor([0.5, 1.0, 2.5, 4.0, 100.0], dtype=torch.float64)
    frequency = periods * 2 * math.pi / 8192
    stretched = config(rotary_scaling="llama3", rotary_factor=8.0, rotary_original_len=8192)
    scaled = llama3(frequency, stretched)
    ratios = (scaled / frequency).tolist()
    assert ratios == pytest.approx([1 / 8, 1 / 8, 0.5 + 0.5 / 8, 1, 1])
