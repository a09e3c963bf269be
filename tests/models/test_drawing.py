"""Models that are built on the meta device have the weights of those that are not."""

import pytest
import torch

from flatout.config.schema import load_config
from flatout.distributed.tensor import Split
from flatout.errors import ConfigError
from flatout.models.language_model import allocate, model_of, new_model
from flatout.models.lora import with_adapters
from flatout.models.transformer import Transformer, TransformerConfig
from flatout.ops import Ops

SHAPE = [
    "model.num_layers=2",
    "model.d_model=32",
    "model.vocab_size=50",
    "data.seq_len=16",
    "data.path=x",
]
KINDS = {
    "transformer": ["model.num_heads=4", "model.positions=rotary"],
    "eigenstate": ["model.num_eigenstates=8"],
    "published": ["model.num_eigenstates=8", "model.initialisation=published"],
}


def configured(name, *more):
    kind = "transformer" if name == "transformer" else "eigenstate"
    return load_config(None, [f"model.kind={kind}", *SHAPE, *KINDS[name], *more])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lora", [[], ["lora.rank=2"]])
def test_drawn_weights_are_those_of_the_constructor(name, lora):
    config = configured(name, *lora)
    model_class, model_config = model_of(config)
    torch.manual_seed(1)
    built = with_adapters(model_class(model_config, Ops.plain()), config.lora)
    torch.manual_seed(1)
    model = with_adapters(new_model(config, Ops.plain()), config.lora)
    assert all(parameter.is_meta for parameter in model.parameters())
    allocate(model, "cpu", draws=True)
    for found, wanted in zip(model.state_dict().items(), built.state_dict().items(), strict=True):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1]), found[0]
    tokens_BT = torch.zeros(1, 16, dtype=torch.int64)
    assert torch.equal(model.eval().logits(tokens_BT), built.eval().logits(tokens_BT))


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_a_checkpoint_replaces_are_not_drawn(name):
    before = torch.get_rng_state()
    model = new_model(configured(name), Ops.plain())
    allocate(model, "cpu", draws=False)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("source", ["meta", "cpu"])
def test_weights_may_be_elsewhere_than_buffers(source):
    """As with parallel.offload, where `meta` is a GPU."""
    model = new_model(configured("transformer"), Ops.plain())
    if source == "cpu":
        allocate(model, "cpu", draws=False)
    allocate(model, "meta", draws=False, weights_device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


CUSTOM = """
import torch
from torch import nn
from flatout.models.transformer import Transformer
class Model(Transformer):
    def __init__(self, config, ops):
        super().__init__(config, ops)
        self.register_buffer("noise", torch.rand(3), persistent=False)
    def init_weights(self):
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, mean=1.0)
"""


def test_other_models_are_built_where_they_compute_and_draw_as_they_like(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured("transformer").with_values({"model.kind": "mine:Model"})
    model_class, model_config = model_of(config)
    torch.manual_seed(1)
    built = model_class(model_config, Ops.plain())
    for draws in (True, False):
        torch.manual_seed(1)
        model = new_model(config, Ops.plain())
        allocate(model, "cpu", draws=draws)
        assert torch.equal(model.noise, built.noise)
        pairs = zip(model.parameters(), built.parameters(), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs)


def test_ranks_share_no_layers_of_a_model_that_is_not_drawn_after_it_was_cut():
    """Its parts would be left without values."""

    class Own(Transformer):
        pass

    config = TransformerConfig(vocab_size=8, num_layers=1, d_model=8, num_heads=2)
    Transformer.on_meta(config, Ops.plain()).share_layers(Split(None, 0, 2), seq_len=8)
    with pytest.raises(ConfigError, match="draws_everything, but Own lacks"):
        Own.on_meta(config, Ops.plain()).share_layers(Split(None, 0, 2), seq_len=8)
