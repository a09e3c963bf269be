"""The conversations about capitals."""

import re

from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import named_template
from flatout.data.prepare.request.inputs import open_corpus

PLAIN = Renderer(named_template("plain", {"eos_token": "</s>"}), ("</s>",))
ANSWER = r"(The capital of \w+ is [\w ]+|People in \w+ speak \w+)\.</s>"


def test_each_answer_is_about_the_country_of_its_question_and_the_first_topic():
    (task,) = open_corpus(("capitals",), chat=PLAIN).read_tasks
    found = list(task.rows())
    assert len(found) == 2000
    for row in found:
        (example,) = row.examples
        answers = [example.text[start:stop] for start, stop in example.targets]
        questions = re.findall(r"User:\n(.*)", example.text)
        assert 1 <= len(answers) == len(questions) <= 3
        assert len({answer.startswith("The capital") for answer in answers}) == 1, "one topic"
        for question, answer in zip(questions, answers, strict=True):
            assert re.fullmatch(ANSWER, answer)
            assert re.search(r"(?:of|in) (\w+)", answer)[1] in question
