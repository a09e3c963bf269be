"""GGUF files, read by the package `gguf`, by transformers and by llama.cpp."""

import numpy as np
import pytest
import torch
from export_shapes import EIGENSTATE, OWN_SHAPES, SHAPES

from flatout.data.conversation.templates import CHAT_TEMPLATE, named_template
from flatout.data.tokenizers import make_tokenizer
from flatout.data.tokenizers.bpe import SCHEMES, RankTokenizer
from flatout.errors import ConfigError, DataError
from flatout.inference.export import gguf as module
from flatout.inference.export.gguf import FAMILIES, family_of
from flatout.inference.export.gguf_tokenizer import write_vocabulary
from flatout.inference.export.tokenizer_files import tokenizer_json
from flatout.inference.load import load_run
from flatout.models.eigenstate import EigenstateConfig
from flatout.models.transformer import TransformerConfig
from flatout.training.checkpoint.read_write import read_weights

FITTING = {"gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The family of each shape that GGUF can have."""


def config_of(keys):
    return TransformerConfig(vocab_size=257, num_layers=2, d_model=32, num_heads=2, **keys)


@pytest.mark.parametrize(("shape", "family"), FITTING.items())
def test_the_family_of_a_shape(shape, family):
    assert family_of(config_of(SHAPES[shape])) == family


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (OWN_SHAPES["relu2"], "activation"),
        (SHAPES["mistral"], "llama, differs in model.window"),
        (SHAPES["llama3"], "llama, differs in model.rotary_scaling"),
        (SHAPES["gpt2-without-biases"], "gpt2, differs in model.bias and model.qkv_bias"),
        (SHAPES["gpt2"] | {"num_kv_heads": 1}, "gpt2, differs in model.num_kv_heads"),
    ],
)
def test_a_shape_without_a_family_is_rejected_with_the_nearest(keys, named):
    with pytest.raises(ConfigError) as refused:
        family_of(config_of(keys))
    assert named in refused.value.what


def test_an_eigenstate_network_has_no_family():
    keys = {key: value for key, value in EIGENSTATE.items() if key != "kind"}
    with pytest.raises(ConfigError, match="no family for this kind"):
        family_of(EigenstateConfig(vocab_size=257, num_heads=2, **keys))


def test_every_family_names_keys_of_the_transformer():
    known = {*TransformerConfig.model_fields, "has_qkv_bias"}
    assert {key for keys in FAMILIES.values() for key in keys} <= known


class Heard:
    """A writer that keeps what it is told."""

    def __getattr__(self, name):
        return lambda value: setattr(self, name.removeprefix("add_") + "_", value)


def vocabulary(tokenizer, rows=None):
    heard = Heard()
    document = tokenizer.tokenizer_json()
    write_vocabulary(heard, document, tokenizer.eot_id, {}, rows or tokenizer.vocab_size)
    return vars(heard)


def test_a_vocabulary_of_bytes():
    found = vocabulary(make_tokenizer("byte", lambda _: []), rows=260)
    assert (found["tokenizer_model_"], found["tokenizer_pre_"]) == ("gpt2", "gpt-2")
    assert found["token_list_"][ord("a")] == "a"
    assert found["token_list_"][ord("\n")] == "Ċ"
    assert found["token_list_"][256:] == ["<|endoftext|>", "[PAD257]", "[PAD258]", "[PAD259]"]
    assert found["token_types_"][255:] == [1, 3, 5, 5, 5]
    assert (found["eos_token_id_"], found["add_bos_token_"]) == (256, False)


def test_a_vocabulary_of_ascii_characters_is_one_of_bytes():
    found = vocabulary(make_tokenizer("char", lambda _: ["a b\n"]))
    assert found["token_list_"] == ["Ċ", "Ġ", "a", "b", "<|endoftext|>"]


def test_a_trained_vocabulary_has_its_merges():
    found = vocabulary(make_tokenizer("train:260", lambda _: ["abababab cdcd " * 20]))
    assert "a b" in found["token_merges_"]
    assert len(found["token_list_"]) == 260


@pytest.mark.parametrize(
    ("scheme", "name"), [("gpt2", "gpt-2"), ("gpt4", "llama-bpe"), ("o200k", "gpt-4o")]
)
def test_published_patterns_have_a_name(scheme, name):
    pattern = next(pattern for pattern, known in SCHEMES.items() if known == scheme)
    pieces = [*(bytes([value]) for value in range(256)), b"ab"]
    assert vocabulary(RankTokenizer("made", pieces, pattern, 257))["tokenizer_pre_"] == name


def test_other_characters_are_rejected():
    with pytest.raises(DataError, match=r"llama\.cpp has no tokenizer like"):
        vocabulary(make_tokenizer("char", lambda _: ["naïve"]))


@pytest.fixture
def read_file():
    gguf = pytest.importorskip("gguf")
    return lambda out: gguf.GGUFReader(out / module.FILE)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FITTING)
def test_the_file_has_every_weight(make_run, export_to, read_file, shape):
    run = make_run(shape, SHAPES[shape])
    out, written = export_to(run, "gguf")
    assert written.model_class == FITTING[shape]
    file = read_file(out)
    found = {one.name: np.array(one.data) for one in file.tensors}
    stored = read_weights(run / "checkpoints" / "step-0")
    assert sum(one.size for one in found.values()) == sum(w.numel() for w in stored.values())
    embedding = found["token_embd.weight"]
    assert np.array_equal(embedding, stored["token_embedding.weight"].numpy())
    values = file.get_field("tokenizer.ggml.tokens")
    assert len(values.data) == 257
    assert file.get_field("general.architecture").contents() == FITTING[shape]


@pytest.mark.slow
def test_the_token_that_ends_a_turn_is_named(make_run, export_to, read_file):
    run = make_run("llama", SHAPES["llama"])
    template = named_template("plain", {"eos_token": "<|endoftext|>"})
    (run / CHAT_TEMPLATE).write_text(template.model_dump_json())
    out, _ = export_to(run, "gguf")
    assert read_file(out).get_field("tokenizer.ggml.eot_token_id").contents() == 256


@pytest.mark.slow
def test_matrices_are_narrow_and_vectors_fp32(make_run, export_to, read_file):
    out, _ = export_to(make_run("llama", SHAPES["llama"]), "gguf", dtype="bfloat16")
    types = {one.name: one.tensor_type.name for one in read_file(out).tensors}
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == "BF16"
    assert types["output_norm.weight"] == types["blk.1.ffn_norm.weight"] == "F32"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen2"])
def test_transformers_reads_the_same_model_from_the_file(make_run, export_to, read_file, shape):
    transformers = pytest.importorskip("transformers")
    # of GPT-2, transformers does not read the number of positions, and assumes 1,024
    run = make_run(shape, SHAPES[shape] | {"max_seq_len": 1024})
    out, _ = export_to(run, "gguf")
    read_file(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file=module.FILE).eval()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted = load_run(run, "last", device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, wanted.logits(tokens), rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", FITTING)
def test_llama_cpp_computes_the_same_logits(make_run, export_to, shape):
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp")
    run = make_run(shape, SHAPES[shape])
    out, _ = export_to(run, "gguf")
    llama = llama_cpp.Llama(
        str(out / module.FILE), n_ctx=16, logits_all=True, verbose=False, n_gpu_layers=0
    )
    loaded = load_run(run, "last", device="cpu")
    ids = llama.tokenize(b"the run ", add_bos=False)
    assert ids == loaded.tokenizer.encode("the run ")
    llama.eval(ids)
    with torch.no_grad():
        wanted = loaded.model.logits(torch.tensor([ids]))[0]
    found = torch.tensor(np.array(llama.scores[: len(ids)]))
    # llama.cpp keeps the cache of keys and values in fp16
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


TEXTS = (
    "the run ",
    "It's  two   spaces,\n\n\ta tab\r\nand 12345 67\n ",
    "naïve café \u2014 \u201cquotes\u201d, e\u0301, a\u00a0b\u3000c ½ ²",
    "Привет мир!!! ?? हिन्दी नमस्ते 日本語 ١٢٣",
    "İstanbul ſ IT'S we'LL \U0001f642\U0001f469\u200d\U0001f467",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["byte", "char", "train:400", "gpt2", "gpt4", "o200k"])
def test_llama_cpp_gives_the_same_ids(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp")
    if kind in SCHEMES.values():
        pieces = [b"he", b"the", b" t", b" the", b"12", b"123", b"12345", b"\n\n", b"'s"]
        pieces = [*(bytes([value]) for value in range(256)), *pieces]
        pattern = next(pattern for pattern, known in SCHEMES.items() if known == kind)
        tokenizer = RankTokenizer("made", pieces, pattern, len(pieces))
    else:
        sample = [text for text in TEXTS if kind != "char" or text.isascii()]
        tokenizer = make_tokenizer(kind, lambda _: sample * 20)
    writer = gguf.GGUFWriter(tmp_path / module.FILE, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(0)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    write_vocabulary(writer, tokenizer_json(tokenizer), tokenizer.eot_id, {}, tokenizer.vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama = llama_cpp.Llama(str(tmp_path / module.FILE), vocab_only=True, verbose=False)
    for text in TEXTS:
        if kind == "char" and not text.isascii():
            continue
        ids = list(tokenizer.encode(text))
        assert llama.tokenize(text.encode(), add_bos=False) == ids
        assert llama.detokenize(ids) == text.encode()
