"""Time of chat templates in a process with limits, against the same templates in this process.

    OMP_NUM_THREADS=1 python benchmarks/chat_templates.py

Templates in the styles of published model families render the same conversations, as `prepare` asks
for them, in turns with and without the process. Writes benchmarks/results/chat_templates.json and
.md. tests/data/conversation/test_jinja.py holds that templates which take too much are answered.
"""

from __future__ import annotations

import pickle
import random
import statistics
from functools import partial
from typing import Any

from measurement import facts, in_turns, markdown, parser, publish, ratios, seconds_of

from flatout.data.conversation import jinja
from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.rendering_process import MOST_CHARACTERS, render
from flatout.data.conversation.templates import ChatTemplate
from flatout.data.conversation.turns import Conversation, read_conversation
from flatout.data.sources import RENDERED_ROWS

LOOP = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
END = "{% endif %}"
IM = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ANSWER = "<|im_start|>assistant\n"
FAMILIES = {
    "chatml": LOOP + IM + PROMPT + ANSWER + END,
    "qwen 2.5, tools": "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}"
    "{% endfor %}{% endif %}" + LOOP + IM + PROMPT + ANSWER + END,
    "qwen 3": "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + LOOP
    + "{% set content = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content"
    " else m.content %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ content + '<|im_end|>\n' }}" + PROMPT + ANSWER + END,
    "llama 2": "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    "{{ bos_token }}" + LOOP + "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}" + PROMPT + END,
    "llama 3": "{{ bos_token }}" + LOOP + "{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}" + PROMPT + END,
    "marked": LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}" + PROMPT + END,
}
WORDS = "the model reads a question and writes its answer in some words of plain text"


def conversations(count: int) -> list[Conversation]:
    """Return conversations of one to four questions with their answers."""
    draw, words = random.Random(0), WORDS.split()

    def turn(role: str, length: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(5, length)))}

    pairs = (draw.randint(1, 4) for _ in range(count))
    return [read_conversation([turn("user", 40), turn("assistant", 100)] * n) for n in pairs]


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


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    here, there = ([row[key] for row in found["rows"]] for key in ("here_us", "there_us"))
    slower, ways = ratios(there, here), (here, there)
    medians = (f"{statistics.median(us):.0f} µs" for us in ways)
    return markdown(
        "| in this process | in a process with limits",
        [
            (f"a conversation, median of {len(here)} templates", *medians),
            ("fastest to slowest template", *(f"{min(us):.0f} to {max(us):.0f} µs" for us in ways)),
        ],
        f"{found['machine']}; {found['conversations']:,} conversations of one to four questions,"
        f" each rendered as prepare asks for it; median of {found['rounds']} rounds, in turns;"
        f" the ratio of a template is {min(slower):.2f} to {max(slower):.2f};"
        f" commit {found['commit']}; `python benchmarks/chat_templates.py`.",
    )


def main() -> None:
    given = parser(__doc__, conversations=2_000, rounds=5).parse_args()
    rows = conversations(given.conversations)
    found: dict[str, Any] = {
        **facts(),
        "conversations": given.conversations,
        "rounds": given.rounds,
        "rows": [measure(*family, rows, given.rounds) for family in FAMILIES.items()],
    }
    publish(given.out, "chat_templates", found, table(found))


if __name__ == "__main__":
    main()
