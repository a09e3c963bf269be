import pytest
import torch
from op_variants import variants

from flatout.errors import ConfigError, ShapeError
from flatout.models import layers
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy
from flatout.ops.heads import reference

FAST = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused)


SMALL = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 4}


def make_config(seq_len=16, **changes):
    return Transformer.check(SMALL | changes, seq_len=seq_len)


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        # GPT-2: V D + T D embeddings, a block of 12 D^2 + 13 D, a final norm of 2 D.
        (
            {"positions": "learned", "bias": True},
            50 * 32 + 16 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32,
        ),
        # Llama: V D twice, a block of (2 H + 2 G) C D + 3 D F + 2 D, a final norm of D.
        (
            {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "tied_head": False},
            2 * 50 * 32 + 2 * ((2 * 4 + 2 * 2) * 8 * 32 + 3 * 32 * 128 + 2 * 32) + 32,
        ),
        (
            {"qk_norm": True, "d_ff": 10, "head_dim": 6},
            50 * 32 + 2 * (4 * 4 * 6 * 32 + 2 * 32 * 10 + 2 * 32 + 2 * 6) + 32,
        ),
    ],
    ids=["gpt2", "llama", "own sizes"],
)
def test_the_number_of_parameters_follows_the_formula(changes, formula):
    assert Transformer.num_parameters(make_config(**changes)) == formula


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seq_len", "sizes", "own", "published"),
    [
        (1024, (50257, 12, 768, 12), {"positions": "learned", "bias": True}, 124_439_808),
        (
            2048,
            (32000, 32, 4096, 32),
            {"d_ff": 11008, "norm": "rmsnorm", "activation": "swiglu", "tied_head": False},
            6_738_415_616,
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_published_models_have_their_published_sizes(seq_len, sizes, own, published):
    config = make_config(seq_len, **dict(zip(SMALL, sizes, strict=True)), **own)
    assert Transformer.num_parameters(config) == published


def test_parameter_names_are_stable():
    """Checkpoints contain these names."""
    options = {"bias": True, "qk_norm": True, "tied_head": False, "positions": "learned"}
    model = Transformer(make_config(num_layers=1, **options), FAST)

    def both(*parts):
        return [f"blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]

    assert [name for name, _ in model.named_parameters()] == [
        "token_embedding.weight",
        "position_embedding.weight",
        *both("attention_norm", "attention.qkv", "attention.output"),
        "blocks.0.attention.query_norm.weight",
        "blocks.0.attention.key_norm.weight",
        *both("mlp_norm", "mlp.up", "mlp.down"),
        "final_norm.weight",
        "final_norm.bias",
        "unembedding.weight",
    ]
    gated = Transformer(make_config(num_layers=1, activation="swiglu", norm="rmsnorm"), FAST)
    names = [name for name, _ in gated.named_parameters() if "mlp." in name]
    assert names == ["blocks.0.mlp.gate_up.weight", "blocks.0.mlp.down.weight"]


@pytest.mark.parametrize(
    "norms", [{"norm": "rmsnorm"}, {"qk_norm": True}, {"norm": "rmsnorm", "qk_norm": True}], ids=str
)
def test_every_rms_norm_uses_the_configured_eps(norms):
    """With hidden states of magnitude 1, each norm divides by sqrt(1 + eps)."""
    given = []

    def noted(*tensors, **named):
        given.append(named["eps"])
        return reference(*tensors, **named)

    model = Transformer(make_config(**norms, rms_norm_eps=0.5), Ops.plain(heads=noted))
    model.logits(torch.zeros(1, 4, dtype=torch.int64))
    assert given == [0.5, 0.5]
    norms_of_rows = [module for module in model.modules() if isinstance(module, layers.RMSNorm)]
    assert len(norms_of_rows) == 5 * ("norm" in norms) + 4 * ("qk_norm" in norms)
    for module in norms_of_rows:
        ones = torch.ones(2, len(module.weight))
        torch.testing.assert_close(module(ones), ones / 1.5**0.5)


def test_every_layer_norm_uses_the_configured_eps():
    model = Transformer(make_config(layer_norm_eps=0.5), FAST)
    norms = [module for module in model.modules() if isinstance(module, layers.LayerNorm)]
    assert len(norms) == 5
    hidden = torch.tensor([1.0, -1.0]).repeat(16)
    for module in norms:
        torch.testing.assert_close(module(hidden), hidden / 1.5**0.5)


def same_weights(**changes):
    """Return two models with equal weights, without and with changes."""
    torch.manual_seed(0)
    plain, changed = (Transformer(make_config(**keys), FAST) for keys in ({}, changes))
    changed.load_state_dict(plain.state_dict())
    return plain, changed


TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(3))


def test_the_logit_scale_multiplies_logits_and_precedes_the_softcap():
    plain, scaled = same_weights(logit_scale=0.25)
    logits = plain.logits(TOKENS)
    torch.testing.assert_close(scaled.logits(TOKENS), logits * 0.25)
    classes = logits.flatten(0, 1) * 0.25
    loss = torch.nn.functional.cross_entropy(classes, TOKENS.flatten(), reduction="sum")
    torch.testing.assert_close(scaled(TOKENS, TOKENS)[0], loss)
    _, capped = same_weights(logit_scale=8.0, logit_softcap=2.0)
    expected = (logits * 8 / 2).tanh() * 2
    torch.testing.assert_close(capped.logits(TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_a_parallel_mlp_reads_the_input_of_attention():
    _, parallel = same_weights(parallel_residual=True)
    block, hidden = parallel.blocks[0], torch.randn(2, 16, 32)
    expected = hidden + block.mlp(block.mlp_norm(hidden))
    expected += block.attention(block.attention_norm(hidden), None)
    torch.testing.assert_close(block(hidden), expected)


@pytest.mark.parametrize(
    ("keys", "with_bias"),
    [
        ({"bias": True}, ["attention.qkv", "attention.output", "mlp.up", "mlp.down"]),
        ({"qkv_bias": True}, ["attention.qkv"]),
        ({"bias": True, "qkv_bias": False}, ["attention.output", "mlp.up", "mlp.down"]),
        ({}, []),
    ],
    ids=str,
)
def test_biases_of_queries_keys_and_values_may_differ_from_the_others(keys, with_bias):
    block = Transformer(make_config(**keys), FAST).blocks[0]
    linear = ["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
    assert [name for name in linear if block.get_submodule(name).bias is not None] == with_bias


def test_initial_weights_have_the_documented_deviation():
    model = Transformer(make_config(num_layers=8, d_model=128, bias=True, tied_head=False), FAST)
    into_residual = ("attention.output.weight", "mlp.down.weight")
    for name, parameter in model.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            expected = 0.02 / 4 if name.endswith(into_residual) else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.05)
            assert float(parameter.mean()) == pytest.approx(0, abs=expected / 20)


def test_rotary_scores_depend_on_distance_only():
    cos, sin = Transformer(make_config(seq_len=64), FAST).blocks[0].attention.rotary([(0, 64)])
    query, key = torch.randn(2, 8, dtype=torch.float64)
    product = torch.cat((query, key, key)).expand(1, 64, -1)
    turned_q, turned_k, _ = (x[0, 0] for x in reference(product, None, cos, sin, counts=(1, 1)))
    scores, close = turned_q @ turned_k.T, {"rtol": 1e-5, "atol": 1e-5}
    for distance in range(64):
        expected = scores[0, distance].expand(64 - distance)
        torch.testing.assert_close(scores.diagonal(distance), expected, **close)
    assert not torch.allclose(scores[0, 1], scores[0, 2])
    torch.testing.assert_close(turned_q.norm(dim=-1), query.norm().expand(64), rtol=1e-6, atol=1e-6)


def test_rotary_tables_stay_fp32_and_move_between_devices():
    model = Transformer(make_config(), FAST)
    expected = model.blocks[0].attention.rotary.cos.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.blocks[1].attention.rotary.cos, expected)


def test_a_window_limits_the_visible_tokens():
    torch.manual_seed(0)
    model = Transformer(make_config(num_layers=1, window=3), FAST)
    tokens = torch.arange(16)[None]
    other = tokens.clone()
    other[0, 4] = 49
    moved = (model.logits(tokens) != model.logits(other)).any(dim=-1)[0]
    assert moved.nonzero().flatten().tolist() == [4, 5, 6]
    config = make_config(num_layers=5, window=3, full_attention_every=2)
    blocks = Transformer(config, FAST).blocks
    assert [block.attention.window for block in blocks] == [3, None, 3, None, 3]


def test_more_tokens_than_positions_are_rejected_with_a_fix():
    assert make_config(seq_len=48).max_seq_len == 48
    assert make_config(seq_len=48, max_seq_len=64).max_seq_len == 64
    for positions in ("learned", "rotary"):
        model = Transformer(make_config(seq_len=8, positions=positions), FAST)
        assert model.max_seq_len == 8
        with pytest.raises(ShapeError, match=r"Fix: .*model\.max_seq_len=9"):
            model.logits(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"num_heads": 5}, r"model\.num_heads=4"),
        ({"num_kv_heads": 3}, r"model\.num_kv_heads=4"),
        ({"head_dim": 5}, r"model\.head_dim=6"),
        ({"max_seq_len": 8}, r"model\.max_seq_len=16"),
        ({"d_model": 4, "num_heads": 7}, r"model\.num_heads=4"),
        ({"activation": "gelo"}, r".*gelu"),
        ({"num_layer": 2}, r"model\.num_layers"),
        ({"rotary_dims": 3}, r"model\.rotary_dims=4"),
        ({"rotary_dims": 10}, r"model\.rotary_dims=4"),
        ({"rotary_low_factor": 4.0}, r"1 and 4"),
        ({"full_attention_every": 2}, r"model\.window"),
        ({"rotary_scaling": "linear"}, r"model\.rotary_factor=4"),
    ],
)
def test_inconsistent_shapes_name_the_key_to_set(changes, fix):
    with pytest.raises(ConfigError, match=rf"Fix: .*{fix}"):
        make_config(**changes)


FREEST = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "activation": "relu2"}
FREEST |= {"qk_norm": True, "norm": "rmsnorm", "tied_head": False, "vocab_size": 61}
LIMITS = {
    "all before it": (None, False),
    "window": (40, False),
    "documents": (None, True),
    "window and documents": (40, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", variants(attention))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# torch itself uses deprecated features when it compiles.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_attention_gives_the_loss_and_gradients_of_the_reference(name, limits, device):
    """The model has grouped heads of 128, query and key norms, squared ReLU and a window."""
    window, has_documents = LIMITS[limits]
    config = make_config(300, **FREEST, window=window)
    inputs = [*torch.randint(61, (2, 2, 300), generator=torch.Generator().manual_seed(2))]
    if has_documents:
        ids = [[0] * 90 + [1] * 210, [0] * 140 + [1] * 10 + [2] * 150]
        inputs.append(torch.tensor(ids, dtype=torch.int32))
    results = []
    for function, where in ((variants(attention)[name], device), (attention.reference, "cpu")):
        torch.manual_seed(0)
        model = Transformer(config, Ops.plain(attention=function)).to(where)
        loss_sum, _ = model(*(each.to(where) for each in inputs))
        loss_sum.backward()
        gradients = (parameter.grad.cpu() for parameter in model.parameters())
        results.append([loss_sum.detach().cpu(), *gradients])
    limit = {"bf16": 3e-2}.get(name, 1e-4 if device == "cpu" else 1e-3)
    for actual, expected in zip(*results, strict=True):
        atol = limit * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=limit, atol=atol)
