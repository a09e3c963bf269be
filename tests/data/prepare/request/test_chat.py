"""Which chat template a dataset uses."""

import json

import pytest
from conversations import CHATML, write_tokenizer
from prepared import Listener

from flatout.data.conversation.templates import named_template
from flatout.data.prepare.request.options import Options
from flatout.data.prepare.request.request import chat_renderer
from flatout.data.tokenizers.make import of_bytes
from flatout.errors import DataError


def chosen(tokenizer, chat="auto", progress=None):
    return chat_renderer(Options(tokenizer=str(tokenizer), chat=chat), progress or Listener())


def test_text_needs_no_template():
    assert chat_renderer(Options(tokenizer="byte")) is None


@pytest.mark.parametrize("tokenizer", ["byte", "char", "train:300"])
def test_a_tokenizer_without_chat_tokens_gets_the_plain_template(tokenizer):
    listener = Listener()
    found = chosen(tokenizer, progress=listener)
    assert (found.template.name, found.special) == ("plain", ("<|endoftext|>",))
    assert listener.said == ["The tokenizer has no chat template. Using plain."]


def test_a_tokenizer_with_chat_tokens_gets_its_own_template_or_chatml(tmp_path):
    folder = write_tokenizer(tmp_path / "hf")
    found = chosen(folder)
    assert found.template.text == CHATML
    assert set(found.special) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert chosen(folder).template.name == "chat_template.jinja"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert chosen(folder).template.name == "chatml"


def test_a_named_template_keeps_the_tokenizers_variables(tmp_path):
    found = chosen(write_tokenizer(tmp_path / "hf"), "plain")
    assert found.template.variables == {"bos_token": "", "eos_token": "<|im_end|>"}
    assert found.end_token == "<|im_end|>"


def test_the_tokenizer_of_a_run_or_a_dataset_brings_its_template(tmp_path):
    template = named_template("chatml", {"eos_token": "x"})
    of_bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.json").write_text(template.model_dump_json())
    assert chosen(tmp_path / "tokenizer.json").template == template


def test_an_unusable_template_is_rejected_before_anything_is_read(tmp_path):
    folder = write_tokenizer(tmp_path / "hf", "{% if %}")
    with pytest.raises(DataError, match=r"tokenizer_config\.json, line 1, fails"):
        chosen(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[-1].content }}"})
    )
    with pytest.raises(DataError, match="could not learn to end"):
        chosen(folder)
    with pytest.raises(DataError, match="There is no chat template 'chatlm'"):
        chosen(folder, "chatlm")
