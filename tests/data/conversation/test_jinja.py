"""What a template may do, and what it is stopped from."""

import resource
import signal
from threading import Thread

import pytest

from flatout.data.conversation import jinja
from flatout.data.conversation.jinja import Refused, render
from flatout.data.conversation.templates import ChatTemplate
from flatout.data.conversation.turns import START, STOP
from flatout.errors import DataError


def written(text, **values):
    """Return what a template writes, or its error."""
    template = ChatTemplate(name="mine", text=text)
    try:
        (found,) = render(template, {"messages": [], **values}, [((None, False), [])])
    except (Refused, DataError) as error:
        return error
    return found.text


def test_json_is_not_escaped_for_html():
    assert written("{{ x | tojson }}", x={"a": "<é>"}) == '{"a": "<é>"}'
    assert written("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_lines_of_blocks_leave_no_white_space():
    assert written("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loop_controls_work():
    text = "{% for i in x %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert written(text, x=[1, 2, 3]) == "1"


def test_a_generation_block_is_marked():
    assert written("a{% generation %}b{% endgeneration %}c") == f"a{START}b{STOP}c"


def test_half_of_a_surrogate_pair_passes():
    assert written("{{ x }}", x="\ud800") == "\ud800"


def test_a_template_may_reject():
    found = written("{{ raise_exception('roles must alternate') }}")
    assert isinstance(found, Refused)
    assert "roles must alternate" in str(found)


def test_todays_date_is_not_defined():
    text = "{% if strftime_now is defined %}today{% else %}fixed{% endif %}"
    assert written(text) == "fixed"


def test_other_texts_are_compared_with_the_first():
    text = "{{ messages | join }}{% if add_generation_prompt %}?{% endif %}"
    asked = [((None, False), [(2, False), (2, True)]), ((1, True), [])]
    found = render(ChatTemplate(name="mine", text=text), {"messages": ["a", "b", "c"]}, asked)
    assert found == [("abc", [(2, 2), (3, 2)]), ("a?", [])]


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
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_an_error(text):
    found = written(text, messages=[{"content": "x"}])
    assert isinstance(found, DataError)
    assert "The chat template mine" in found.what


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000s' | format('x') }}",
        "{{ '%10000000000s' % 'x' }}",
        "{{ '{:>10000000000}'.format('x') }}",
        "{{ ('x\n' * 100000) | indent(1000000) }}",
        "{{ 'xx'" + ".replace('x', 'x' * 1000)" * 5 + " }}",
        "{{ (['x' * 1000000] * 100000) | join(',') }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "{{ ([[1] * 9] * 9) | tojson(indent=100000000) }}",
        "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_a_template_cannot_fill_the_memory(text, monkeypatch):
    monkeypatch.setattr(jinja, "MEMORY_BYTES", 1 << 25)
    found = written(text)
    assert isinstance(found, DataError)
    assert any(why in found.what for why in ("takes too much memory", "writes too much text"))


@pytest.mark.parametrize(
    "text", ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"]
)
def test_a_template_cannot_run_for_ever(text, monkeypatch):
    monkeypatch.setattr(jinja, "CPU_S", 0.1)
    found = written(text)
    assert isinstance(found, DataError)
    assert "takes too much CPU time" in found.what


def test_a_conversation_that_exceeds_a_limit_does_not_affect_the_next():
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)
    assert "too much text" in written("{{ 'x' * n }}", n=10**8).what
    assert written("{{ 'x' * n }}", n=2) == "xx"
    after = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)
    assert after == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_thread_renders_too():
    found = []
    thread = Thread(target=lambda: found.append(written("{{ 1 }}")))
    thread.start()
    thread.join()
    assert found == ["1"]
