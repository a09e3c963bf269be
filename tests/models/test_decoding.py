"""The logits of a decoder equal those of a full pass, however the tokens are split.

Letters: B rows, T tokens, V vocabulary, G key and value heads, S slots for keys, C head size.
"""

import pytest
import torch

from flatout.config.registry import MODELS
from flatout.errors import ShapeError
from flatout.models.language_model import LanguageModel, RecomputingDecoder
from flatout.models.transformer import CachingDecoder, KeyValueCache
from flatout.ops import Ops, attention, cross_entropy
from flatout.ops.linear import bf16

PLAIN = Ops.plain()
FAST = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused)
SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "tied_head": False}
TRANSFORMERS = {
    "default": {},
    "learned positions, biases": {"positions": "learned", "bias": True},
    "one key head": {"num_kv_heads": 1, "head_dim": 6},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window over all": {"window": 1000},
    "llama": {**LLAMA, "window": 7, "qk_norm": True},
    "gpt2": {"positions": "learned", "bias": True, "window": 3, "num_kv_heads": 2, "dropout": 0.5},
    "gpt_neox": {"parallel_residual": True, "rotary_dims": 2, "bias": True},
    "scaled": {
        "activation": "geglu",
        "qkv_bias": True,
        "logit_scale": 0.5,
        "rotary_scaling": "linear",
        "rotary_factor": 4.0,
    },
    "windows in some layers": {"window": 5, "full_attention_every": 2},
}
EIGENSTATES = {"default": {}, "learned positions": {"positions": "learned"}}
OWN = {"transformer": TRANSFORMERS, "eigenstate": EIGENSTATES}
VOCAB, SEQ_LEN = 61, 24


def shapes():
    """Yield every registered model, with each kind of cache and of positions."""
    for kind in MODELS.names():
        known = MODELS.get(kind).Config.model_fields
        small = {key: value for key, value in SMALL.items() if key in known}
        for name, own in OWN.get(kind, {"default": {}}).items():
            yield pytest.param((kind, tuple((small | own).items())), id=f"{kind}: {name}")


every_model = pytest.mark.parametrize("shape", list(shapes()))


def make_model(shape, ops=FAST, seq_len=SEQ_LEN) -> LanguageModel:
    """Return a model whose weights are large enough for attention to be far from uniform."""
    kind, own = shape
    model_class = MODELS.get(kind)
    torch.manual_seed(0)
    model = model_class(model_class.check(dict(own) | {"vocab_size": VOCAB}, seq_len=seq_len), ops)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn_like(parameter)
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(noise)
    return model.eval()


def random_tokens(rows=3, seq_len=SEQ_LEN):
    return torch.randint(VOCAB, (rows, seq_len), generator=torch.Generator().manual_seed(1))


def assert_close_to(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


CUTS = [[1] * SEQ_LEN, [SEQ_LEN], [9] + [1] * 15, [2, 11, 1, 1, 5, 4], [1, 1, 1, 20, 1]]


@pytest.fixture
def poisoned_memory():
    """New tensors contain NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("ops", [PLAIN, FAST], ids=["reference", "fused"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_logits_after_each_piece_match_a_full_pass(shape, ops, cut, poisoned_memory):
    model, tokens = make_model(shape, ops), random_tokens()
    expected, decoder = model.logits(tokens).detach(), model.decoder()
    assert expected.std() > 0.1
    for piece in tokens.split(cut, dim=1):
        actual = decoder.read(piece)
        assert_close_to(actual, expected[:, decoder.num_tokens - 1])
        assert not actual.requires_grad
    assert decoder.num_tokens == SEQ_LEN


@every_model
@pytest.mark.parametrize("cut", CUTS[2:4], ids=str)
def test_bf16_matmuls_are_close_whether_a_piece_has_few_rows_or_many(shape, cut):
    narrow = Ops.plain(attention=attention.bf16, cross_entropy=cross_entropy.bf16, linear=bf16)
    model, tokens = make_model(shape, narrow), random_tokens(rows=1)
    expected, decoder = model.logits(tokens).detach(), model.decoder()
    plain = make_model(shape).logits(tokens).detach()
    torch.testing.assert_close(expected, plain, rtol=0.1, atol=0.1)
    for piece in tokens.split(cut, dim=1):
        actual = decoder.read(piece)
        assert actual.dtype == torch.float32
        at = decoder.num_tokens - 1
        torch.testing.assert_close(actual, expected[:, at], rtol=0.1, atol=0.1)


@every_model
def test_rows_are_independent(shape):
    model, tokens = make_model(shape), random_tokens()
    together, alone = model.decoder(), model.decoder()
    for piece in tokens.split([5, 1, 1, 17], dim=1):
        assert_close_to(together.read(piece)[1:2], alone.read(piece[1:2]))


@every_model
def test_half_precision_is_close(shape):
    model, tokens = make_model(shape).to(torch.bfloat16), random_tokens()
    decoder, whole = model.decoder(), LanguageModel.decoder(model)
    for piece in tokens[:, :15].split([5, *[1] * 10], dim=1):
        torch.testing.assert_close(decoder.read(piece), whole.read(piece), rtol=0.1, atol=0.1)


@every_model
def test_a_full_decoder_rejects_more_tokens(shape):
    model = make_model(shape)
    for asked in (10**9, None):
        assert model.decoder(asked).max_tokens in {model.max_seq_len, None}
    decoder = model.decoder(max_tokens=6)
    if decoder.max_tokens is None:
        pytest.skip("this model reads any number of tokens")
    decoder.read(random_tokens(seq_len=5))
    assert decoder.has_room(1)
    assert not decoder.has_room(2)
    with pytest.raises(ShapeError, match="5 of at most 6"):
        decoder.read(random_tokens(seq_len=2))
    decoder.read(random_tokens(seq_len=1))
    with pytest.raises(ShapeError, match="at least one"):
        decoder.read(random_tokens(seq_len=0))


@every_model
def test_a_model_without_its_own_decoder_recomputes_everything(shape):
    """Such a model inherits the decoder of LanguageModel."""
    model, tokens = make_model(shape), random_tokens()
    decoder, expected = LanguageModel.decoder(model, 20), model.logits(tokens).detach()
    assert isinstance(decoder, RecomputingDecoder)
    assert decoder.max_tokens == 20
    for piece in tokens[:, :20].split([6, 1, 13], dim=1):
        assert_close_to(decoder.read(piece), expected[:, decoder.num_tokens - 1])


@pytest.mark.parametrize(("window", "slots"), [(None, SEQ_LEN), (5, 5), (1000, SEQ_LEN)])
def test_a_transformer_caches_the_keys_of_its_window(window, slots):
    """No layer gets earlier tokens again."""
    shape = SMALL | {"num_kv_heads": 2, "window": window}
    model, seen = make_model(("transformer", tuple(shape.items()))), []
    model.blocks[1].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    decoder = model.decoder()
    assert isinstance(decoder, CachingDecoder)
    for piece in random_tokens().split([10, *[1] * 14], dim=1):
        decoder.read(piece)
        for cache in decoder._caches:
            assert tuple(cache._kept_2BGSC.shape) == (2, 3, 2, slots, 8)
    assert seen == [10, *[1] * 14]


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "pieces", [[1] * 12, [12], [3, 4, 5], [1, 6, 1, 1, 3], [7, 1, 1, 1, 1, 1]], ids=str
)
def test_a_cache_returns_the_last_keys(size, pieces, poisoned_memory):
    """The keys are in order for several new tokens, and in any order for one."""
    keys = torch.arange(12.0).view(1, 1, 12, 1).expand(2, 3, 12, 4)
    cache, start = KeyValueCache(size), 0
    for piece in keys.split(pieces, dim=2):
        k, v = cache.extend(piece, -piece, start)
        num_new, end = piece.shape[2], start + piece.shape[2]
        assert k.shape[:2] + k.shape[3:] == (2, 3, 4)
        assert torch.equal(k, -v)
        actual = k[1, 2, :, 3].tolist()
        expected = list(range(end))[-(size if num_new == 1 else size + num_new) :]
        assert (sorted(actual) if num_new == 1 else actual) == expected[-len(actual) :]
        assert len(actual) >= min(end, size - 1 + num_new), "a query gets all keys of its window"
        start = end
