"""The conversations about capitals."""

import pytest

from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import named_template
from flatout.data.sources.capitals import CAPITALS, capitals
from flatout.errors import DataError

PLAIN = Renderer(named_template("plain", {"eos_token": "</s>"}), ("</s>",))


def rows(**parameters):
    return [row for task in capitals(**parameters) for row in task.rows()]


def test_equal_parameters_give_equal_conversations():
    assert rows(documents=20, chat=PLAIN) == rows(documents=20, chat=PLAIN)
    assert rows(documents=20, chat=PLAIN) != rows(documents=20, chat=PLAIN, seed=1)


def test_each_answer_follows_from_the_question_and_the_topic():
    for row in rows(documents=50, chat=PLAIN):
        (example,) = row.examples
        answers = [example.text[start:stop] for start, stop in example.targets]
        assert 1 <= len(answers) <= 3
        assert len({answer.startswith("The capital") for answer in answers}) == 1, "one topic"
        for answer in answers:
            assert any(
                country in answer and (capital in answer or language in answer)
                for country, (capital, language) in CAPITALS.items()
            )


def test_without_a_template_a_conversation_is_lines_of_text():
    first = rows(documents=1)[0]
    assert first.examples == ()
    assert first.text.count("\n") % 2 == 0


@pytest.mark.parametrize("parameters", [{"documents": 0}, {"seed": "x"}], ids=str)
def test_a_wrong_parameter_is_named(parameters):
    (name,) = parameters
    with pytest.raises(DataError, match=name):
        capitals(**parameters)
