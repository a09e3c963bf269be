"""FLOPs and bytes from recorded shapes. What has no formula is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatout.measure.steps.cost import Call, bytes_of, flops_of
from flatout.measure.steps.trace import exported, profiling, read_trace


def call(name, shapes, dtype="float", values=()):
    dtypes = [dtype if shape else "" for shape in shapes]
    return Call(name, shapes, dtypes, [*values])


def test_products_count_two_operations_per_pair():
    for made, pairs in (
        (call("aten::mm", [[8, 64], [64, 32]]), 1),
        (call("aten::addmm", [[32], [8, 64], [64, 32]]), 1),
        (call("aten::bmm", [[5, 8, 64], [5, 64, 32]]), 5),
        (call("mkldnn::_linear_pointwise", [[4, 2, 64], [32, 64], [32]]), 1),
        (call("mkldnn::_linear_pointwise", [[8, 64], [8, 32], [32, 64], []]), 1),
    ):
        assert flops_of(made) == pairs * 2 * 8 * 64 * 32
    assert flops_of(call("aten::mm", [])) is flops_of(call("aten::gelu", [[8, 64]])) is None


def test_causal_attention_counts_half_of_the_pairs():
    name, shape = "aten::_scaled_dot_product_flash_attention", [2, 3, 16, 8]
    full = flops_of(call(name, [shape] * 3, values=["", "", "", "0.", "False"]))
    causal = flops_of(call(name, [shape] * 3, values=["", "", "", "0.", "True"]))
    assert full == 4 * 2 * 3 * 16 * 16 * 8
    assert causal == 4 * 2 * 3 * (16 * 17 // 2) * 8
    assert flops_of(call(name, [])) is None
    backward = call(f"{name}_backward", [shape] * 5, values=[""] * 11 + ["True"])
    assert flops_of(backward) == causal * 5 // 2


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call("aten::mm", [[8, 64], [64, 32]]), 4 * (8 * 64 + 64 * 32 + 8 * 32)),
        (call("aten::add", [[8, 64], [64]]), 4 * (8 * 64 + 64 + 8 * 64)),
        (call("aten::gelu", [[8, 64]], "c10::BFloat16"), 2 * 2 * 8 * 64),
        (call("aten::copy_", [[8, 64], [8, 64]]), 4 * 2 * 8 * 64),
        (call("aten::zero_", [[8, 64]]), 4 * 8 * 64),
        (call("aten::sum", [[8, 64]]), 4 * 8 * 64),
        (call("aten::view", [[8, 64]]), 0),
        (call("aten::masked_fill_", [[8, 64], [8, 64]]), 4 * 3 * 8 * 64),
        (call("aten::linalg_vector_norm", [[8, 64]]), 4 * 8 * 64),
        (call("aten::nll_loss_forward", [[8, 64], [8]]), 4 * 8),
        (call("aten::nll_loss_backward", [[8], [8, 64], [8]]), 4 * 8 * 64),
        (call("aten::native_layer_norm", [[8, 64], [64], [64]]), 4 * (2 * 8 * 64 + 2 * 64)),
        (call("triton_poi_fused_add_0", [[8, 64], [8, 64], [8, 64]]), 4 * 3 * 8 * 64),
        (call("aten::something_new", [[8, 64]]), None),
        (call("aten::gelu", []), None),
    ],
)
def test_bytes_are_what_must_be_read_and_written(made, expected):
    assert bytes_of(made) == expected


def test_an_optimiser_reads_and_writes_its_lists():
    shapes = [[[64, 64], [64]]] * 4 + [[], [[]] * 2]
    kinds = ["TensorList"] * 4 + ["", "TensorList"]
    made = Call("aten::_fused_adamw_", shapes, kinds, [], list_item_bytes=4)
    assert bytes_of(made) == 4 * 7 * (64 * 64 + 64)
    assert (
        bytes_of(replace(made, list_item_bytes=None)) is None
    )  # the profiler records no dtype for lists


def test_the_flops_of_a_recorded_step_equal_those_of_torch(tmp_path):
    embed, out = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

    def step():
        hidden_BTD = embed(torch.ones(2, 12, 16))
        heads = hidden_BTD.view(2, 12, 4, 8).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        out(mixed.transpose(1, 2).reshape(2, 12, 32)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with profiling("cpu", record_shapes=True) as profiler:
        step()
    trace = read_trace(exported(profiler, tmp_path / "trace.json"), steps=1)
    attention = 4 * 2 * 4 * 12 * 12 * 8 * 7 // 2  # torch's counter has none for a CPU
    found = sum(op.flops or 0 for op in trace.ops)
    assert found == counter.get_total_flops() + attention
