"""What needs float64 moves to the CPU for a device without it, and nowhere else."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.models.transformer import Rotary, TransformerConfig
from flatout.ops import float64_device, in_float64


@pytest.mark.parametrize(
    ("device", "exact"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("meta", "meta"), ("mps", "cpu")]
)
def test_only_mps_is_without_float64(device, exact):
    assert float64_device(torch.device(device)) == torch.device(exact)


def test_a_value_keeps_its_device_and_bits():
    value = torch.tensor([0.1, 3e38], dtype=torch.float32)
    assert in_float64(value).dtype == torch.float64
    assert in_float64(value).tolist() == value.tolist()


def test_tensors_on_mps_are_read_and_tabulated_on_the_cpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(3, device="mps")
        assert in_float64(value).device.type == "cpu"
        with torch.device("mps"):
            rotary = Rotary(TransformerConfig(vocab_size=1, head_dim=8, max_seq_len=16))
        assert (rotary.cos.device.type, rotary.cos.dtype) == ("mps", torch.float32)
