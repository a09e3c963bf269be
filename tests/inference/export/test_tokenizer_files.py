"""The tokenizer of an export is checked before it is written."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flatout.data.tokenizers import make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.bpe import RankTokenizer
from flatout.data.tokenizers.byte import ByteTokenizer
from flatout.data.tokenizers.byte_level import QWEN2
from flatout.errors import DataError
from flatout.inference.export.tokenizer_files import (
    SAMPLES,
    end_of_text,
    first_difference,
    tokenizer_config,
    tokenizer_json,
)
from flatout.storage.json_io import write_json

MODEL_TYPES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
TEXT = "It was a dark and stormy night; the rain fell in torrents. "


class Caseless(ByteTokenizer):
    """A tokenizer of the user's own, whose inherited document has other ids."""

    def encode_piece(self, text, offset):
        return super().encode_piece(text.lower(), offset)


@pytest.mark.parametrize("spec", ["byte", "char", "train:300"])
def test_tokenizers_of_flatout_pass_the_check(spec):
    tokenizer = make_tokenizer(spec, lambda _: [TEXT * 10])
    document = tokenizer_json(tokenizer)
    assert first_difference(tokenizer, document) is None
    assert end_of_text(document, tokenizer.eot_id) == "<|endoftext|>"


def test_a_tokenizer_with_other_ids_is_rejected_with_the_text():
    with pytest.raises(DataError, match=r"other ids than the tokenizer itself for .Hello"):
        tokenizer_json(Caseless())


def test_a_tokenizer_without_a_counterpart_is_rejected():
    tokenizer = RankTokenizer("mine", [bytes([value]) for value in range(256)], r"\w+|\W+", 256)
    with pytest.raises(DataError, match="'mine' has no counterpart"):
        tokenizer_json(tokenizer)


def test_the_end_of_text_may_be_a_plain_piece_of_the_vocabulary():
    document = ByteTokenizer().tokenizer_json()
    assert end_of_text(document | {"added_tokens": []}, 256) == "<|endoftext|>"


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


TOKENIZERS = {
    **{spec: make_tokenizer(spec, lambda _: [TEXT * 10]) for spec in ("byte", "char", "train:300")},
    "Qwen 2": of_qwen2(),
    "digits in threes": of_qwen2(QWEN2.replace(r"\p{N}", r"\p{N}{1,3}")),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_the_tokenizer_of_an_export(kind, model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = TOKENIZERS[kind]
    document = tokenizer_json(ours)
    named = {name: token for name, (token, _) in ours.named_tokens().items()}
    token = end_of_text(document, ours.eot_id)
    write_json(tmp_path / "tokenizer.json", document)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_config(token, named, 99, None))
    write_json(tmp_path / "config.json", {"model_type": model_type})
    exact = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [TEXT, "x1y22z333", *SAMPLES] if kind != "char" else [TEXT]
    wanted = [ours.encode(text) for text in texts]
    assert [exact(text)["input_ids"] for text in texts] == wanted
    is_equal = [auto(text)["input_ids"] for text in texts] == wanted
    assert is_equal == (model_type != "qwen2" or kind == "Qwen 2")
    assert exact.bos_token == named.get("bos_token")
    assert len(exact(["a", TEXT[:20]], padding=True)["input_ids"]) == 2
    assert exact.pad_token == named.get("pad_token", token)


def test_the_settings_name_the_class_that_uses_the_file_as_it_is():
    settings = tokenizer_config("</s>", {"bos_token": "<s>"}, 16, None)
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert [settings[f"{name}_token"] for name in ("bos", "eos", "pad")] == ["<s>", "</s>", "</s>"]


def test_the_settings_have_the_chat_template_if_there_is_one():
    assert "chat_template" not in tokenizer_config("</s>", {}, 16, None)
    assert tokenizer_config("</s>", {}, 16, "{{ x }}")["chat_template"] == "{{ x }}"
