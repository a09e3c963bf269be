"""Backward recomputes what is cheap, and none of the operations that are kept."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.assembly.choices import assemble
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, linear, scan_passes  # noqa: F401
from flatout.speedups.selective_checkpointing import KEPT


class Count(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.calls[operation.name()] = self.calls.get(operation.name(), 0) + 1
        return operation(*args, **(kwargs or {}))


def calls(*speedups, ops):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "num_layers": 2, "d_model": 16, "num_heads": 2}
    model = Transformer(Transformer.check(shape, seq_len=8), ops)
    for name in speedups:
        assemble([name]).activations(model)
    tokens_BT = torch.zeros(2, 8, dtype=torch.int64)
    with Count() as counted:
        model(tokens_BT, tokens_BT.clone())[0].backward()
    return counted.calls


@pytest.mark.parametrize("name", sorted(KEPT - {"flex_attention"}))
def test_the_kept_operations_exist(name):
    namespace, operation = name.split("::")
    assert hasattr(getattr(torch.ops, namespace), operation)


@pytest.mark.parametrize(
    ("ops", "kept"),
    [
        (Ops.plain(attention=attention.fused), "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (Ops.plain(linear=linear.onednn), "mkldnn::_linear_pointwise"),
    ],
)
def test_kept_operations_run_once(ops, kept):
    plain = calls(ops=ops)
    assert calls("selective-checkpointing", ops=ops)[kept] == plain[kept] > 0
    assert calls("checkpointing", ops=ops)[kept] > plain[kept]
