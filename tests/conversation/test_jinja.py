"""Templates run in a sandbox, with the names that Hugging Face's templates use."""

import pytest

from flatout.conversation.jinja import START, STOP, Refused, render
from flatout.errors import DataError


def test_json_is_not_escaped_for_html():
    assert render("t", "{{ x | tojson }}", {"x": {"a": "<é>"}}) == '{"a": "<é>"}'
    assert render("t", "{{ x | tojson(indent=1) }}", {"x": [1]}) == "[\n 1\n]"


def test_lines_of_blocks_leave_no_white_space():
    assert render("t", "  {% if true %}\nx\n  {% endif %}\ny", {}) == "x\ny"


def test_loop_controls_work():
    assert (
        render(
            "t",
            "{% for i in x %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            {"x": [1, 2, 3]},
        )
        == "1"
    )


def test_a_generation_block_is_marked():
    text = "a{% generation %}b{% endgeneration %}c"
    assert render("t", text, {}) == f"a{START}b{STOP}c"


def test_a_template_may_refuse():
    with pytest.raises(Refused, match="roles must alternate"):
        render("t", "{{ raise_exception('roles must alternate') }}", {})


def test_todays_date_is_not_defined():
    text = "{% if strftime_now is defined %}today{% else %}fixed{% endif %}"
    assert render("t", text, {}) == "fixed"


@pytest.mark.parametrize(
    "text",
    [
        "{% if %}",
        "\n{{ messages[0].content + 1 }}",
        "{{ missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include 'file' %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_an_error(text):
    with pytest.raises(DataError, match="The chat template mine"):
        render("mine", text, {"messages": [{"content": "x"}]})
