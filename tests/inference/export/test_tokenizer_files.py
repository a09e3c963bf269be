"""The tokenizer of an export is that of the run, and transformers gives the same ids."""

import base64
import json

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flatout.data.tokenizers import make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.engines import QWEN2
from flatout.data.tokenizers.make import from_tiktoken, of_bytes
from flatout.inference.export.tokenizer_files import tokenizer_config, write_tokenizer
from flatout.storage.json_io import write_json

MODEL_TYPES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
SAMPLES = (
    "Hello, world!  It's 2026, isn't it? He'll SHOUT: DON'T!",
    "def f(x):\n\n\tif x:   # spaces\r\n        return 12345 * x\n    \n  ",
    "Ça coûte 1234,56 € à Zürich — 東京は雨、 привет мир 🙂👍🏽 e\u0301",
    " \n \n\n  leading and trailing \t ",
)
PIECES = [*(bytes([value]) for value in range(256)), b" a", b"th", b" d", b"er", b"the", b" dark"]
RANKS = b"".join(base64.b64encode(one) + b" %d\n" % rank for rank, one in enumerate(PIECES))
TEXT = "It was a dark and stormy night; the rain fell in torrents. "


def of_qwen2(pattern=QWEN2):
    """Return a tokenizer in the form of Qwen 2's, with named special tokens."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([f"{TEXT} 12 345 6789 x1y22z333"] * 3, trainer)
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "<|endoftext|>"}
    return parse_tokenizer(made.to_str(), "tokenizer.json", named=named)


def with_start():
    """Return a tokenizer whose file adds a token at the start of each text."""
    made = Tokenizer.from_buffer(of_qwen2().content)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return parse_tokenizer(made.to_str(), "tokenizer.json")


TOKENIZERS = {
    **{spec: make_tokenizer(spec, lambda _: [TEXT * 10]) for spec in ("byte", "char", "train:300")},
    "Qwen 2": of_qwen2(),
    "digits in threes": of_qwen2(QWEN2.replace(r"\p{N}", r"\p{N}{1,3}")),
    "tiktoken": from_tiktoken(RANKS, "own.tiktoken", r"\s?\S+|\s+"),
    "with a start": with_start(),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_the_tokenizer_of_an_export(kind, model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = TOKENIZERS[kind]
    write_tokenizer(ours, tmp_path, 99, None)
    write_json(tmp_path / "config.json", {"model_type": model_type})
    exact = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [TEXT, "x1y22z333", *SAMPLES] if kind != "char" else [TEXT]
    wanted = [ours.encode(text) for text in texts]
    assert [exact(text)["input_ids"] for text in texts] == wanted
    is_equal = [auto(text)["input_ids"] for text in texts] == wanted
    assert is_equal == (model_type != "qwen2" or kind in ("Qwen 2", "with a start"))
    assert exact.bos_token == ours.named.get("bos_token")
    assert len(exact(["a", TEXT[:20]], padding=True)["input_ids"]) == 2
    assert exact.pad_token == ours.named.get("pad_token", ours.end_of_text)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_file_is_a_copy_without_the_step_that_adds_tokens(kind, tmp_path):
    ours = TOKENIZERS[kind]
    notes = write_tokenizer(ours, tmp_path, None, None)
    content = (tmp_path / "tokenizer.json").read_bytes()
    if kind == "with a start":
        expected = json.loads(ours.content) | {"post_processor": None}
        assert json.loads(content) == expected
        assert "adds no special tokens" in notes[0]
    else:
        assert content == ours.content
        assert bool(notes) == (kind == "char")


def test_the_settings_name_the_class_that_uses_the_file_as_it_is():
    settings = tokenizer_config(of_qwen2(), 16, None)
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    names = [settings[f"{name}_token"] for name in ("bos", "eos", "pad")]
    assert names == ["<s>", "<|endoftext|>", "<pad>"]
    assert (settings["model_max_length"], settings.get("chat_template")) == (16, None)
    settings = tokenizer_config(of_bytes(), None, "{{ x }}")
    assert (settings["pad_token"], settings["chat_template"]) == ("<|endoftext|>", "{{ x }}")
