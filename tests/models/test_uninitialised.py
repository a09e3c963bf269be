import pytest
import torch
from torch import nn

from flatout.models.language_model import uninitialised
from flatout.models.transformer import Transformer
from flatout.ops import Ops


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(3, 3))
        self.gain = nn.Parameter(torch.zeros(3))
        nn.init.normal_(self.matrix)
        nn.init.ones_(self.gain)


def test_random_weights_are_left_out_and_constant_ones_are_not():
    before = torch.get_rng_state()
    with uninitialised("transformer"):
        model = Filled()
    assert not model.matrix.any()
    assert model.gain.all()
    assert torch.equal(torch.get_rng_state(), before)
    assert Filled().matrix.all(), "afterwards weights are drawn again"


def test_models_without_random_weights_have_the_same_shapes():
    config = Transformer.check(
        {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 4}, seq_len=16
    )
    with uninitialised("transformer"):
        model = Transformer(config, Ops.plain())
    drawn = Transformer(config, Ops.plain())
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in drawn.state_dict().items()}


@pytest.mark.parametrize("kind", ["mine:Model", "package.models:Net"])
def test_custom_models_draw_theirs(kind):
    with uninitialised(kind):
        assert Filled().matrix.all()
