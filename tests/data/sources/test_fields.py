import pytest

from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import named_template
from flatout.data.sources import BadRow, ReadTask
from flatout.data.sources.fields import Fields, document
from flatout.data.sources.files import files

CHAT = Renderer(named_template("plain", {"eos_token": "</s>"}), ("</s>",))
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def read(row, text="text", prompt=None):
    return document(row, Fields(text, prompt), "a.jsonl, line 1")


def test_a_field_may_be_nested():
    row = {"data": {"body": {"text": "deep"}}, "data.title": "flat", "text": "top"}
    assert read(row, "data.body.text").text == "deep"
    assert read(row, "data.title").text == "flat", "a field of that very name comes first"
    assert read(row).text == "top"


@pytest.mark.parametrize(
    ("row", "field", "reason", "said"),
    [
        ({"a": None}, "a.b", "'a.b' is not text", "but it is null, not text"),
        ({"a": {"b": None}}, "a.b", "'a.b' is not text", "but it is null"),
        ({"a": {"b": ["x"]}}, "a.b", "'a.b' is not text", "but it is a list"),
        ({"a": {"b": {}}}, "a.b", "'a.b' is not text", "but it is an object"),
        ({"a": "x"}, "a.b", "no field 'a.b'", "--text-field a"),
        (
            {"a": {"text": "long text"}, "id": "7"},
            "a.txt",
            "no field 'a.txt'",
            "Did you mean --text-field a.text?",
        ),
        (
            {"deep": {"content": "the longest"}, "id": "7"},
            "qqq",
            "no field 'qqq'",
            "Did you mean --text-field deep.content?",
        ),
        ({}, "text", "no field 'text'", "--text-field"),
        ([1], "text", "not an object", "is not a JSON object"),
    ],
)
def test_a_row_without_the_text_is_a_bad_row(row, field, reason, said):
    bad = read(row, field)
    assert isinstance(bad, BadRow)
    assert bad.reason == reason
    assert said in str(bad.error)
    assert bad.location == "a.jsonl, line 1"


def rendered(row, fields):
    (found,) = ReadTask(lambda: [document(row, fields, "a.jsonl")], (), "").rows()
    return found


def test_a_prompt_is_read_from_its_field():
    assert read({"q": {"ask": "why?"}, "text": "so"}, prompt="q.ask").prompt == "why?"
    assert read({"q": None, "text": "so"}, prompt="q").prompt == ""
    assert read({"q": "x", "text": "so"}).prompt == ""
    assert read({"text": "so"}, prompt="q").reason == "no field 'q'", (
        "a field that is nowhere is a mistake, not an empty prompt"
    )
    assert "--mask-field" in str(read({"q": 7, "text": "so"}, prompt="q").error)


def test_a_suggested_field_is_quoted_for_the_shell():
    bad = document({"hello world": "some text"}, Fields("helo world"), "rows.jsonl")
    assert bad.fix == "Did you mean --text-field 'hello world'?"


def test_a_conversation_is_read_from_its_usual_fields_or_a_named_one():
    for field, text in (("messages", "text"), ("conversations", "text"), ("mine", "mine")):
        found = rendered({"text": "other", field: TURNS}, Fields(text, chat=CHAT))
        assert found.text == "User:\nHi\n\nAssistant:\nHello</s>"
        assert found.examples[0].answers == "Hello"


def test_the_system_prompt_of_a_row_is_its_first_turn():
    expected = "System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\nHello</s>"
    row = {"system": "Be brief.", "conversations": TURNS}
    assert rendered(row, Fields(chat=CHAT)).text == expected
    turn = {"role": "system", "content": "Be brief."}
    assert rendered(row | {"conversations": [turn, *TURNS]}, Fields(chat=CHAT)).text == expected
    assert rendered(row | {"system": ""}, Fields(chat=CHAT)).text.startswith("User:")
    row["conversations"] = [turn | {"content": "Be kind."}, *TURNS]
    assert rendered(row, Fields(chat=CHAT)).reason == "two system prompts"
    assert rendered(row | {"system": 7}, Fields(chat=CHAT)).reason == "bad system prompt"


def test_a_system_prompt_has_two_names():
    row = {"system_prompt": "TOP", "conversations": TURNS}
    fields = Fields(chat=CHAT)
    assert rendered(row, fields).text.startswith("System:\nTOP\n\nUser:\nHi")
    assert rendered(row | {"system": "TOP"}, fields).text.count("TOP") == 1
    bad = rendered(row | {"system": "else"}, fields)
    assert bad.reason == "two system prompts"
    assert "'system_prompt'" in str(bad.error)


def test_a_prompt_and_its_completion_are_a_conversation_of_which_the_completion_counts():
    first = [*TURNS, {"role": "user", "content": "Why?"}]
    row = {"prompt": first, "completion": [{"role": "assistant", "content": "So."}]}
    fields = Fields(chat=CHAT)
    found = rendered(row | {"system_prompt": "TOP"}, fields)
    assert found.text == (
        "System:\nTOP\n\nUser:\nHi\n\nAssistant:\nHello</s>\n\nUser:\nWhy?\n\nAssistant:\nSo.</s>"
    )
    assert found.examples[0].answers == "So."
    assert rendered(row | {"messages": TURNS}, fields).text.startswith("User:\nHi\n\nAss")
    bad = rendered(row | {"prompt": "Why?"}, fields)
    assert "--mask-field prompt --text-field completion" in bad.fix
    assert "--chat auto" in read(row).fix


def test_an_instruction_with_its_output_is_a_conversation():
    row = {"instruction": "Add.", "input": "2 + 2", "output": "4", "text": "all of it"}
    fields = Fields(chat=CHAT)
    assert rendered(row, fields).text == "User:\nAdd.\n\n2 + 2\n\nAssistant:\n4</s>"
    for other in (row | {"input": ""}, {"instruction": "Add.", "output": "4"}):
        assert rendered(other, fields).text == "User:\nAdd.\n\nAssistant:\n4</s>"
    row |= {"system": "Be brief.", "history": [["Hi", "Hello"]]}
    assert rendered(row, fields).text == (
        "System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\nHello</s>\n\n"
        "User:\nAdd.\n\n2 + 2\n\nAssistant:\n4</s>"
    )
    assert rendered(row | {"history": ["Hi"]}, fields).reason == "bad history"
    assert rendered(row | {"output": None}, fields).reason == "content that is not text"
    assert rendered(row | {"messages": TURNS}, fields).text.startswith(
        "System:\nBe brief.\n\nUser:\nHi"
    )


def test_parquet_reads_all_fields_of_a_conversation(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    alpaca = {
        "system": "Be brief.",
        "instruction": "Add.",
        "input": "2 + 2",
        "output": "4",
        "id": 7,
    }
    trl = {"system_prompt": "Be brief.", "prompt": TURNS[:1], "completion": TURNS[1:], "id": 7}
    for row in (alpaca, trl):
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        (task,) = files(str(path), Fields(chat=CHAT))
        (found,) = task.rows()
        assert found.text == rendered(row, Fields(chat=CHAT)).text


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"text": "x"}, "no field 'messages'", "has no field 'messages'"),
        ({"messages": "x"}, "no turns", "has no list of turns"),
        ({"messages": TURNS[:1]}, "no assistant turn", "has no assistant turn"),
    ],
)
def test_a_row_without_a_usable_conversation_is_a_bad_row(row, reason, said):
    bad = document(row, Fields(chat=CHAT), "a.jsonl, line 1")
    assert isinstance(bad, BadRow)
    assert bad.reason == reason
    assert said in str(bad.error)


def test_conversations_that_are_read_as_text_are_recognised():
    bad = read({"messages": TURNS})
    assert bad.reason == "no field 'text'"
    assert "--chat auto" in bad.fix
    assert "--chat" not in read({"messages": "a text"}).fix


def test_conversations_are_in_the_default_field_if_the_user_names_it():
    row = {"text": TURNS, "messages": TURNS[:1]}
    found = rendered(row, Fields("text", chat=CHAT, is_stated=True))
    assert found.text == "User:\nHi\n\nAssistant:\nHello</s>"
