"""Reading turns in the forms of OpenAI and ShareGPT."""

import pickle

import pytest

from flatout.data.conversation.turns import BadConversation, read_conversation


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_both_forms_give_the_same_turns():
    openai = turns(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"))
    sharegpt = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    assert read_conversation(openai) == read_conversation(sharegpt)
    assert read_conversation(openai).messages == tuple(openai)
    assert read_conversation(openai).targets == (False, False, True)


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    found = read_conversation([{"role": "assistant", "content": parts}])
    assert found.messages[0]["content"] == "one two"


def test_fields_that_are_null_are_omitted_and_others_reach_the_template():
    found = read_conversation(
        [{"role": "assistant", "content": "x", "name": None, "reasoning_content": "because"}]
    )
    assert found.messages == (
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
    )


def weighted(weight):
    return {"role": "assistant", "content": "Hello", "weight": weight}


@pytest.mark.parametrize("weight", [None, 1, 1.0, True])
def test_an_assistant_turn_of_weight_1_counts(weight):
    assert read_conversation([weighted(weight)]).targets == (True,)


def test_an_assistant_turn_of_weight_0_does_not_count():
    found = read_conversation(
        [
            {"role": "assistant", "content": "wrong", "weight": 0},
            {"role": "assistant", "content": "right", "weight": 1},
        ]
    )
    assert found.targets == (False, True)
    assert "weight" not in found.messages[0]


def test_arguments_of_tool_calls_are_parsed():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    found = read_conversation(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        {"tools": '[{"name": "add"}]'},
    )
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.messages[0]["content"] == ""
    assert found.tools == [{"name": "add"}]


@pytest.mark.parametrize(
    ("value", "reason", "said"),
    [
        (None, "no turns", "no list of turns"),
        ([], "no turns", "no list of turns"),
        ("Hi", "no turns", "no list of turns"),
        (["Hi"], "a turn is not an object", "turn 1"),
        (turns(("user", "Hi")), "no assistant turn", "no assistant turn"),
        (
            [{"role": "user", "content": "Hi"}, weighted(0), weighted(0)],
            "only assistant turns that are excluded",
            "has only assistant turns that are excluded, so nothing",
        ),
        ([weighted(1), weighted(0.5)], "a weight that is not 0 or 1", "the weight 0.5 in turn 2"),
        ([weighted(2)], "a weight that is not 0 or 1", "the weight 2 in turn 1"),
        ([weighted("0")], "a weight that is not 0 or 1", "the weight '0' in turn 1"),
        ([weighted([1])], "a weight that is not 0 or 1", "the weight [1] in turn 1"),
        ([weighted(float("nan"))], "a weight that is not 0 or 1", "the weight nan in turn 1"),
        (turns(("user", "Hi"), ("bot", "Hello")), "unknown role", "the role 'bot' in turn 2"),
        ([{"content": "Hi"}], "unknown role", "no role in turn 1"),
        ([{"role": ["user"], "content": "Hi"}], "unknown role", "turn 1"),
        (turns(("user", 7), ("assistant", "x")), "content that is not text", "turn 1"),
        (turns(("user", None), ("assistant", "x")), "content that is not text", "turn 1"),
        (
            turns(("user", [{"type": "image_url"}]), ("assistant", "x")),
            "content that is not text",
            "turn 1",
        ),
    ],
    ids=str,
)
def test_an_unusable_conversation_is_explained(value, reason, said):
    with pytest.raises(BadConversation) as found:
        read_conversation(value)
    assert found.value.reason == reason
    assert said in found.value.what
    again = pickle.loads(pickle.dumps(found.value))
    assert (again.what, again.fix, again.reason) == (
        found.value.what,
        found.value.fix,
        found.value.reason,
    )


def test_tools_that_are_not_a_list_are_rejected():
    with pytest.raises(BadConversation, match="not JSON"):
        read_conversation(turns(("assistant", "x")), {"tools": "["})
    with pytest.raises(BadConversation, match="not a list"):
        read_conversation(turns(("assistant", "x")), {"tools": {"name": "add"}})
