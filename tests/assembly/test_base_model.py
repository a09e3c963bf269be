"""The model's shape comes from the base model, and stated keys must agree with it."""

import pytest
from foreign_models import DOCUMENTS, LLAMA, write_model

from flatout.assembly.shape import with_base_shape
from flatout.config.schema import load_config
from flatout.data.store.mix import open_data
from flatout.errors import ConfigError

MODEL = LLAMA | {"vocab_size": 257}


@pytest.fixture
def theirs(tmp_path):
    return str(write_model(tmp_path / "theirs", MODEL))


@pytest.fixture
def resolved(tiny_set):
    def make(init_from, *overrides):
        words = [f"train.init_from={init_from}", f"data.path={tiny_set}", "data.seq_len=16"]
        config = load_config(None, [*words, *overrides])
        return with_base_shape(config, open_data(config.data))

    return make


def test_the_shape_comes_from_the_base_model(theirs, resolved):
    config = resolved(theirs)
    own = config.model.own()
    assert (config.model.kind, config.model.vocab_size) == ("transformer", 257)
    assert (own["num_layers"], own["d_model"], own["num_kv_heads"]) == (2, 32, 2)
    assert (own["activation"], own["max_seq_len"], own["tied_head"]) == ("swiglu", 96, False)
    agreeing = ["model.num_layers=2", "model.activation=swiglu", "model.vocab_size=257"]
    assert resolved(theirs, *agreeing) == config
    own = resolved(theirs, "model.dropout=0.1", "model.z_loss=1e-4", "model.window=8").model.own()
    assert (own["dropout"], own["z_loss"], own["window"]) == (0.1, 1e-4, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=3", r"model\.num_layers is 3 here and 2 there.*model\.num_layers=2\."),
        ("model.tied_head=true", r"is True here and False there.*model\.tied_head=false\."),
        ("model.qk_norm=true", r"model\.qk_norm is True here and False there"),
        ("model.logit_softcap=30", r"model\.logit_softcap is 30 here and None there.*=null\."),
        ("model.vocab_size=300", r"model\.vocab_size is 300 here and 257 there"),
        ("model.kind=eigenstate", r"model\.kind is eigenstate here and transformer there"),
        ("model.num_layer=2", r"model\.num_layers"),
        ("data.seq_len=128", r"data\.seq_len=128 exceeds the model's 96 positions"),
    ],
)
def test_a_stated_key_that_differs_is_rejected_with_both_values(
    theirs, resolved, override, message
):
    with pytest.raises(ConfigError, match=message):
        resolved(theirs, override)


def test_another_vocabulary_is_rejected_and_a_larger_one_accepted_if_stated(tmp_path, resolved):
    padded = str(write_model(tmp_path / "padded", MODEL | {"vocab_size": 320}))
    with pytest.raises(ConfigError, match=r"63 rows.*set model\.vocab_size=320\."):
        resolved(padded)
    assert resolved(padded, "model.vocab_size=320").model.vocab_size == 320
    small = str(write_model(tmp_path / "small", LLAMA))
    for stated in ([], ["model.vocab_size=257"]):
        with pytest.raises(ConfigError, match=r"vocabulary of 61.*has 257.*own tokenizer"):
            resolved(small, *stated)


def test_runs_of_flatout_change_nothing(resolved, fox_run):
    root, _ = fox_run
    config = resolved(root / "runs" / "fox")
    assert config.model.own() == {}


def test_planning_without_data_takes_the_vocabulary_of_the_base_model(tmp_path):
    folder = write_model(tmp_path / "gpt2", DOCUMENTS["gpt2"])
    config = load_config(None, [f"train.init_from={folder}", "data.seq_len=16"])
    assert with_base_shape(config, None).model.vocab_size == 61
