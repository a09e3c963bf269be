"""Time of chat templates in a process with limits, against the same templates in this process.

    OMP_NUM_THREADS=1 python benchmarks/chat_templates.py

Thirty templates in the styles of published model families render the same conversations, as
`prepare` asks for them, in turns with and without the process. Then templates that fill the memory,
loop or break the compiler are answered. Writes benchmarks/results/chat_templates.json and .md.
"""

from __future__ import annotations

import pickle
import random
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from measurement import facts, in_turns, markdown, parser, publish, ratios, seconds_of

from flatout.conversation import jinja
from flatout.conversation.rendering import Renderer
from flatout.conversation.rendering_process import MEMORY_BYTES, MOST_CHARACTERS, render
from flatout.conversation.templates import ChatTemplate
from flatout.conversation.turns import Conversation, read_conversation
from flatout.errors import DataError
from flatout.sources import RENDERED_ROWS

LOOP = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
END = "{% endif %}"


def headed(before: str, after: str, end: str, answer: str = "assistant", start: str = "") -> str:
    """Return a template that writes each turn between a header with its role and an end."""
    turn = "{{ '" + before + "' + m.role + '" + after + "' + m.content + '" + end + "' }}"
    return f"{start}{LOOP}{turn}{PROMPT}{{{{ '{before}{answer}{after}' }}}}{END}"


def by_role(user: str, assistant: str, end: str, system: str = "{0}", start: str = "") -> str:
    """Return a template with a form for each role, where {0} is the content."""
    forms = {"system": system, "user": user, "assistant": assistant + end}
    turns = "".join(
        "{% if m.role == '" + role + "' %}" + form.replace("{0}", "{{ m.content | trim }}") + END
        for role, form in forms.items()
    )
    return f"{start}{LOOP}{turns}{PROMPT}{assistant.partition('{0}')[0]}{END}"


CHECKED = (
    "{% if not messages %}{{ raise_exception('no turns') }}{% endif %}"
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}\\n{% endfor %}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + LOOP
    + "{% set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content"
    " else m.content %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ content + '<|im_end|>\\n' }}" + PROMPT + "<|im_start|>assistant\n" + END
)
IM = ("<|im_start|>", "\\n", "<|im_end|>\\n")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>")
INST = ("[INST] {0} [/INST]", " {0}", "</s>")
FAMILIES = {
    "chatml": headed(*IM),
    "chatml, checked": CHECKED + headed(*IM),
    "qwen 1.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n"
    "{% endif %}" + headed(*IM),
    "qwen 2.5, tools": TOOLS + headed(*IM),
    "qwen 3": THINKING,
    "yi": headed(*IM, start="{% if not bos_token is defined %}{% set bos_token = '' %}{% endif %}"),
    "smollm 2": headed(*IM, start="{% set date = 'fixed' %}"),
    "hermes": CHECKED + TOOLS + headed(*IM),
    "internlm 2": headed(*IM, start="{{ bos_token }}"),
    "llama 2": FIRST_SYSTEM + by_role(*INST, start="{{ bos_token }}{{ system }}"),
    "llama 3": headed(*LLAMA_3, start="{{ bos_token }}"),
    "llama 3.1, tools": "{{ bos_token }}" + TOOLS + headed(*LLAMA_3),
    "llama 3.2, dated": "{% if strftime_now is defined %}{% set d = strftime_now('%d') %}{% else %}"
    "{% set d = '26 Jul 2024' %}{% endif %}{{ d }}" + headed(*LLAMA_3),
    "mistral 1": by_role(*INST, system="[INST] {0} [/INST]", start="{{ bos_token }}"),
    "mistral 3": CHECKED + by_role(*INST, start="{{ bos_token }}"),
    "mixtral": by_role("[INST] {0} [/INST]", "{0}", "</s>", start="{{ bos_token }}"),
    "gemma": by_role(
        "<start_of_turn>user\n{0}<end_of_turn>\n",
        "<start_of_turn>model\n{0}",
        "<end_of_turn>\n",
        start="{{ bos_token }}",
    ),
    "gemma 3": FIRST_SYSTEM
    + by_role(
        "<start_of_turn>user\n{0}<end_of_turn>\n",
        "<start_of_turn>model\n{0}",
        "<end_of_turn>\n",
        start="{{ bos_token }}{{ system }}",
    ),
    "phi 3": headed("<|", "|>\\n", "<|end|>\\n"),
    "phi 4": headed("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "zephyr": headed("<|", "|>\\n", "</s>\\n"),
    "tinyllama": CHECKED + headed("<|", "|>\\n", "</s>\\n"),
    "deepseek 2": by_role("User: {0}\n\n", "Assistant: {0}", "<|end|>", start="{{ bos_token }}"),
    "deepseek r1": by_role("<|User|>{0}", "<|Assistant|>{0}", "<|end|>", start="{{ bos_token }}"),
    "vicuna": by_role("USER: {0} ", "ASSISTANT: {0}", "</s>"),
    "alpaca": by_role("### Instruction:\n{0}\n\n", "### Response:\n{0}", "</s>\n\n"),
    "command r": headed("<|START|><|", "|>", "<|END|>", start="{{ bos_token }}"),
    "granite": headed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n"),
    "olmo 2": headed("<|", "|>\\n", "</s>\\n", start="{{ bos_token }}"),
    "marked": LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}" + PROMPT + END,
}
ATTACKS = {
    "*": "{{ 'x' * 10 ** 11 }}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "format": "{{ '{:>100000000000}'.format('x') }}",
    "%": "{{ '%100000000000s' % 'x' }}",
    "indent": "{{ ('x\\n' * 100000) | indent(10 ** 7) }}",
    "replace": "{{ 'xx'" + ".replace('x', 'x' * 1000)" * 5 + " }}",
    "join": "{{ (['x' * 1000000] * 1000000) | join(',') }}",
    "~": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "tojson": "{{ ([[1] * 1000] * 1000) | tojson(indent=10 ** 9) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested for": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "nested if": "{% if true %}" * 200 + "{% endif %}" * 200,
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


WORDS = "the model reads a question and writes its answer in some words of plain text"


def conversations(count: int) -> list[Conversation]:
    """Return conversations of one to four questions with their answers."""
    draw = random.Random(0)
    words = WORDS.split()
    made = []
    for _ in range(count):
        turns = []
        for _ in range(draw.randint(1, 4)):
            for role, length in (("user", 40), ("assistant", 100)):
                content = " ".join(draw.choices(words, k=draw.randint(5, length)))
                turns.append({"role": role, "content": content})
        made.append(read_conversation(turns))
    return made


def measure(name: str, text: str, rows: list[Conversation], rounds: int) -> dict[str, Any]:
    """Return the time of a row in this process, and in a process with limits."""
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = Renderer(ChatTemplate(name=name, text=text, variables=variables), ("</s>",))
    messages = [renderer.request(row).message for row in rows]
    calls = [messages[i : i + RENDERED_ROWS] for i in range(0, len(messages), RENDERED_ROWS)]

    def here() -> list[Any]:
        return [jinja._answer(text, *pickle.loads(one), MOST_CHARACTERS) for one in messages]

    def there() -> list[Any]:
        return [found for call in calls for found in render(name, text, call)]

    for one, other in zip(here(), there(), strict=True):
        assert [found for found, _ in one["rendered"]] == [found.text for found in other]
    # the calls above have compiled the template and started the process
    found = in_turns(
        {"here": partial(seconds_of, here), "there": partial(seconds_of, there)}, rounds
    )
    middles = {f"{way}_us": statistics.median(found[way]) / len(rows) * 1e6 for way in found}
    return {"name": name, **middles}


def attack(name: str, text: str) -> dict[str, Any]:
    """Return the answer to a template that takes too much, and the time until it came."""
    start = time.perf_counter()
    (found,) = render("mine", text, [pickle.dumps(({"messages": []}, [((None, False), [])]))])
    assert isinstance(found, DataError), name
    return {"name": name, "answer": found.what, "s": time.perf_counter() - start}


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    here, there = ([row[key] for row in found["rows"]] for key in ("here_us", "there_us"))
    slower, count = ratios(there, here), found["conversations"]
    slowest_s = max(row["s"] for row in found["attacks"])

    def both(title: str, shown: Callable[[list[float]], str]) -> tuple[str, str, str]:
        return title, shown(here), shown(there)

    return markdown(
        "| in this process | in a process with limits",
        [
            both(
                f"a conversation, median of {len(here)} templates",
                lambda us: f"{statistics.median(us):.0f} µs",
            ),
            both("fastest to slowest template", lambda us: f"{min(us):.0f} to {max(us):.0f} µs"),
            both(
                f"all templates, {count:,} conversations each",
                lambda us: f"{sum(us) * count / 1e6:.1f} s",
            ),
        ],
        f"{found['machine']}; {count:,} conversations of one to four questions,"
        f" each rendered as prepare asks for it; median of {found['rounds']} rounds, in turns;"
        f" the ratio of a template is {min(slower):.2f} to {max(slower):.2f}. All"
        f" {len(found['attacks'])} templates that fill the memory, loop or break the compiler were"
        f" answered with an error, the slowest after {slowest_s:.1f} s,"
        f" in at most {found['peak_mib']:,.0f} MiB; commit {found['commit']};"
        " `python benchmarks/chat_templates.py`.",
    )


def main() -> None:
    given = parser(__doc__, conversations=2_000, rounds=3).parse_args()
    rows = conversations(given.conversations)
    found: dict[str, Any] = {
        **facts(),
        "conversations": given.conversations,
        "rounds": given.rounds,
        "rows": [measure(*family, rows, given.rounds) for family in FAMILIES.items()],
        "attacks": [attack(*each) for each in ATTACKS.items()],
    }
    # in KiB; of the processes that have ended
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    assert found["peak_mib"] < 2 * MEMORY_BYTES / 2**20
    publish(given.out, "chat_templates", found, table(found))


if __name__ == "__main__":
    main()
