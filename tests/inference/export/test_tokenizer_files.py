"""The tokenizer of an export is checked before it is written."""

import pytest

from flatout.data.tokenizers import make_tokenizer
from flatout.data.tokenizers.bpe import RankTokenizer
from flatout.data.tokenizers.byte import ByteTokenizer
from flatout.errors import DataError
from flatout.inference.export.tokenizer_files import (
    end_of_text,
    first_difference,
    tokenizer_config,
    tokenizer_json,
)

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


def test_a_tokenizer_with_other_ids_is_refused_with_the_text():
    with pytest.raises(DataError, match=r"other ids than the tokenizer itself for .Hello"):
        tokenizer_json(Caseless())


def test_a_tokenizer_without_a_counterpart_is_refused():
    tokenizer = RankTokenizer("mine", [bytes([value]) for value in range(256)], r"\w+|\W+", 256)
    with pytest.raises(DataError, match="'mine' has no counterpart"):
        tokenizer_json(tokenizer)


def test_the_end_of_text_may_be_a_plain_piece_of_the_vocabulary():
    document = ByteTokenizer().tokenizer_json()
    assert end_of_text(document | {"added_tokens": []}, 256) == "<|endoftext|>"


def test_the_settings_have_the_chat_template_if_there_is_one():
    assert "chat_template" not in tokenizer_config("</s>", 16, None)
    assert tokenizer_config("</s>", 16, "{{ x }}")["chat_template"] == "{{ x }}"
