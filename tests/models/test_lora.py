"""LoRA: equal to a hand-written reference and to peft, only adapters trained, merged weights.

Letters: B rows, T tokens, I width in, O width out, R rank.
"""

import copy

import pytest
import torch
from model_shapes import PLAIN, every_model, make_model, random_tokens
from torch import nn
from torch.nn import functional

from flatout.config.sections import LoraConfig
from flatout.errors import ConfigError
from flatout.models.layers import Linear
from flatout.models.lora import Delta, LoraLinear, adaptable, adapters_of, merge, with_adapters
from flatout.ops import Ops, linear

SMALL = (("num_layers", 2), ("d_model", 32), ("num_heads", 4))
LLAMA = (
    "transformer",
    (*SMALL, ("num_kv_heads", 2), ("activation", "swiglu"), ("norm", "rmsnorm")),
)
GPT = ("transformer", (*SMALL, ("bias", True)))


def adapted(shape=LLAMA, ops=PLAIN, *, random_B=True, **config):
    """Return a model with adapters, whose B are random unless they should be new."""
    model = with_adapters(make_model(shape, ops), LoraConfig(**{"rank": 3} | config))
    if random_B:
        torch.manual_seed(5)
        for adapter in adapters_of(model).values():
            nn.init.normal_(adapter.lora_B, std=0.1)
    return model


def deltas_of(model):
    """Return the deltas of a model's own adapters, by the name of the weight."""
    found = {}
    for name, one in adapters_of(model).items():
        weight = f"{name.partition('.adapters.')[0]}.weight"
        found.setdefault(weight, []).append(
            Delta(one.rows, one.lora_A.detach(), one.lora_B.detach(), one.scale)
        )
    return found


def merged_into(plain, model):
    """Return `plain` with the merged weights of `model`."""
    deltas, weights = deltas_of(model), dict(model.state_dict())
    plain.load_state_dict({name: merge(name, weights[name], deltas) for name in plain.state_dict()})
    return plain


@every_model
def test_a_new_adapter_changes_nothing(shape):
    plain, tokens_BT = make_model(shape).eval(), random_tokens()[0]
    new = adapted(shape, make_model(shape).ops, random_B=False).eval()
    assert torch.equal(plain.logits(tokens_BT), new.logits(tokens_BT))


def test_the_rank_is_at_most_that_of_every_layer():
    assert adapters_of(adapted(rank=16))  # two heads of width 8 have the keys
    with pytest.raises(ConfigError, match=r"lora\.rank=17 .* layer k .* 16 x 32") as refused:
        adapted(rank=17)
    assert "16 or less" in refused.value.fix
    assert adapters_of(adapted(rank=17, targets=("q", "down")))


@every_model
def test_only_adapters_have_gradients(shape):
    model = adapted(shape)
    model(*random_tokens())[0].backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".adapters." in name}
    assert all(model.parameter_kinds()[name] == "hidden" for name in trained)


@every_model
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)
def test_merged_weights_compute_the_same_function(shape, dtype, limit):
    model, tokens_BT = adapted(shape, alpha=6).to(dtype).eval(), random_tokens()[0]
    before = make_model(shape, PLAIN).to(dtype).eval()
    merged = merged_into(copy.deepcopy(before), model)
    with torch.no_grad():
        wanted = model.logits(tokens_BT)
        assert (wanted - before.logits(tokens_BT)).abs().max() > 1e-3
        assert (wanted - merged.logits(tokens_BT)).abs().max() < limit


def test_a_layer_is_its_definition():
    """W x + b + alpha / rank times B A x, part by part, with the gradients of A and B."""
    torch.manual_seed(0)
    base = Linear(6, 10, bias=True, ops=PLAIN, activation=functional.silu).double()
    for parameter in base.parameters():
        nn.init.normal_(parameter)
    parts = {"q": (0, 4), "v": (7, 10)}
    layer = LoraLinear(base, parts, LoraConfig(rank=2, alpha=5)).double()
    hidden = torch.randn(3, 6, dtype=torch.float64)
    update, pairs = torch.zeros(10, 6, dtype=torch.float64), []
    for name, rows in parts.items():
        mine = layer.adapters[name].lora_A, layer.adapters[name].lora_B
        nn.init.normal_(mine[1])
        lora_A, lora_B = copies = [one.detach().clone().requires_grad_() for one in mine]
        pairs += zip(mine, copies, strict=True)
        update[slice(*rows)] = 2.5 * lora_B @ lora_A
    wanted = functional.silu(functional.linear(hidden, base.weight.detach() + update, base.bias))
    found = layer(hidden)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("ops", ["reference", "onednn", "bf16"])
def test_every_product_of_a_frozen_layer_works(ops):
    models = adapted(GPT, Ops.plain(linear=getattr(linear, ops))), adapted(GPT)
    losses = []
    for model in models:
        loss, count = model(*random_tokens())
        (loss / count).backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for one, other in zip(*(adapters_of(model).values() for model in models), strict=True):
        assert (one.lora_A.grad - other.lora_A.grad).norm() < 0.1 * other.lora_A.grad.norm()


@pytest.mark.parametrize(
    ("shape", "targets", "layers"),
    [
        (LLAMA, ("q", "v"), "attention.qkv: q v"),
        (
            LLAMA,
            ("all-linear",),
            "attention.qkv: q k v, attention.output: o, mlp.gate_up: gate up, mlp.down: down",
        ),
        (GPT, ("up", "o"), "mlp.up: up, attention.output: o"),
        (
            ("eigenstate", SMALL),
            ("all-linear",),
            "recurrence.gate: gate, mlp.up: up, mlp.down: down",
        ),
    ],
)
def test_the_targets_get_adapters(shape, targets, layers):
    wanted = dict(layer.split(": ") for layer in layers.split(", "))
    assert set(adapters_of(adapted(shape, targets=targets))) == {
        f"blocks.{block}.{layer}.adapters.{part}"
        for block in range(2)
        for layer, parts in wanted.items()
        for part in parts.split()
    }


def test_parts_have_the_rows_of_their_heads():
    parts = adaptable(make_model(LLAMA))["blocks.0.attention.qkv"]
    assert parts == {"q": (0, 32), "k": (32, 48), "v": (48, 64)}


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("q_proj", "Did you mean 'q'"),
        ("gatee", "Did you mean 'gate'"),
        ("lm_head", "lora.targets=all-linear"),
        ("query_key_value", "Did you mean 'q, k, v'"),
    ],
)
def test_an_unknown_target_is_rejected(target, fix):
    with pytest.raises(ConfigError, match=r"The linear layers of this model are q, k, v") as error:
        adapted(targets=(target,))
    assert fix in error.value.fix


def test_without_a_rank_the_model_is_unchanged():
    model = make_model(GPT)
    assert with_adapters(model, LoraConfig()) is model
    assert adapters_of(model) == {}
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.blocks = nn.ModuleList()
    with pytest.raises(ConfigError, match="no linear layers that can be adapted"):
        with_adapters(model, LoraConfig(rank=2))


def test_dropout_is_for_the_adapters_and_for_training_only():
    tokens_BT = random_tokens()[0]
    model, plain = adapted(dropout=0.5), adapted()
    torch.manual_seed(1)
    assert not torch.equal(model.logits(tokens_BT), plain.logits(tokens_BT))
    assert torch.equal(model.eval().logits(tokens_BT), plain.eval().logits(tokens_BT))
    new = adapted(dropout=0.5, random_B=False)
    assert torch.equal(new.logits(tokens_BT), make_model(LLAMA, PLAIN).logits(tokens_BT))


def test_frozen_weights_need_no_gradient_products():
    whole, model = make_model(LLAMA), adapted()
    frozen = sum(
        parameter.numel()
        for name, parameter in whole.named_parameters()
        if parameter.ndim == 2 or name == "token_embedding.weight"
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    difference = model.flops_per_token(17).palm - whole.flops_per_token(17).palm
    assert difference == 6 * trained - 2 * frozen


def test_a_decoder_with_adapters_agrees_with_the_forward_pass():
    model, tokens_BT = adapted().eval(), random_tokens(rows=1)[0]
    with torch.no_grad():
        decoder = model.decoder()
        decoder.read(tokens_BT[:, :5])
        last = decoder.read(tokens_BT[:, 5:])
        torch.testing.assert_close(last, model.logits(tokens_BT)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_adapters_equal_those_of_peft():
    """Output and gradients, q, k and v being separate layers there."""
    peft = pytest.importorskip("peft")

    class Attention(nn.Module):
        """The layers of one block, as other tools define them."""

        def __init__(self, own):
            super().__init__()
            qkv = own.attention.qkv.weight.detach()
            for name, rows in {"q_proj": (0, 32), "k_proj": (32, 48), "v_proj": (48, 64)}.items():
                part = nn.Linear(32, rows[1] - rows[0], bias=False)
                part.weight = nn.Parameter(qkv[slice(*rows)].clone())
                setattr(self, name, part)

        def forward(self, hidden):
            return torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], -1)

    model = adapted(rank=4, alpha=6, targets=("q", "v"))
    block = model.blocks[0]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    theirs = peft.get_peft_model(Attention(block), config)
    pairs = {}
    for name in ("q", "v"):
        layer = getattr(theirs.base_model.model, f"{name}_proj")
        own = block.attention.qkv.adapters[name]
        for matrix in ("lora_A", "lora_B"):
            other = getattr(layer, matrix)["default"].weight
            other.data.copy_(getattr(own, matrix).data)
            pairs[f"{name}.{matrix}"] = (getattr(own, matrix), other)
    hidden = torch.randn(5, 32)
    mine, other = block.attention.qkv(hidden), theirs(hidden)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    mine.square().sum().backward()
    other.square().sum().backward()
    for name, (one, two) in pairs.items():
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5, msg=name)
