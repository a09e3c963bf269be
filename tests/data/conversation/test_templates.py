"""Chat templates: built-in ones, and those in files."""

import json

import pytest

from flatout.data.conversation.templates import (
    ChatTemplate,
    load_template,
    named_template,
    stored_template,
    template_beside,
)
from flatout.errors import DataError


def test_a_name_or_a_jinja_file_is_a_template(tmp_path):
    assert named_template("chatml", {}).name == "chatml"
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    found = named_template(str(tmp_path / "mine.jinja"), {"eos_token": "</s>"})
    assert (found.name, found.text) == ("mine.jinja", "{{ messages }}")
    assert found.variables == {"eos_token": "</s>"}


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(DataError, match="Did you mean 'chatml'"):
        named_template("chatm", {})
    with pytest.raises(DataError, match="auto, chatml, plain, or a file"):
        named_template("zzz", {})


@pytest.mark.parametrize(
    "stated",
    ["T", [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "T"}]],
    ids=["one", "several"],
)
def test_a_tokenizer_config_states_the_template_and_its_tokens(tmp_path, stated):
    path = tmp_path / "tokenizer_config.json"
    config = {
        "chat_template": stated,
        "eos_token": {"content": "<|im_end|>", "special": True},
        "bos_token": None,
        "unk_token": "<unk>",
        "model_max_length": 5,
    }
    path.write_text(json.dumps(config))
    expected = {"bos_token": "", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    defaults = {"bos_token": "", "eos_token": "</s>"}
    for found in (named_template(str(path), defaults), template_beside(path, None, defaults)):
        assert (found.text, found.variables) == ("T", expected)
    (tmp_path / "chat_template.jinja").write_text("J")
    beside = template_beside(path, tmp_path / "chat_template.jinja", defaults)
    assert (beside.text, beside.variables) == ("J", expected), "the newer file comes first"


def test_a_tokenizer_without_a_template_has_none(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{}")
    assert template_beside(path, tmp_path / "no.jinja", {}) is None
    assert template_beside(None, None, {}) is None


def test_a_stored_template_is_read_back(tmp_path):
    template = named_template("plain", {"eos_token": "</s>"})
    (tmp_path / "chat_template.json").write_text(template.model_dump_json())
    assert load_template(tmp_path / "chat_template.json") == template
    assert named_template(str(tmp_path / "chat_template.json"), {}) == template
    assert load_template(tmp_path / "absent.json") is None
    assert stored_template({"chat_template": template.model_dump(mode="json")}) == template
    assert stored_template({}) is None


def test_templates_are_compared_by_what_they_write():
    one = ChatTemplate(name="a", text="x", variables={"eos_token": "</s>"})
    assert one.writes_as(one.model_copy(update={"name": "b"}))
    assert not one.writes_as(one.model_copy(update={"variables": {}}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"name": "x"}', "contains no chat template"),
        ('{"chat_template": 7}', "not a template"),
    ],
)
def test_a_damaged_file_is_explained(tmp_path, content, said):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=said):
        named_template(str(tmp_path / "a.json"), {})


def test_a_template_that_is_not_text_is_explained(tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="it is not UTF-8"):
        named_template(str(tmp_path / "a.jinja"), {})
