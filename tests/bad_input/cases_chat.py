"""Conversations: rows, chat templates, `flatout chat`."""

import json

from case import Case, World, table

from flatout.data.tokenizers.make import of_bytes

NEW = "--out data/new --tokenizer byte"


def row(*turns: tuple[str, object]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"messages": messages}) + "\n"


def weighted(weight: object, field: str = "weight") -> str:
    turn = {"role": "assistant", "content": "Hello", field: weight}
    return json.dumps({"messages": [turn]}) + "\n"


GOOD = row(("user", "Hi"), ("assistant", "Hello"))


def chat_rows(*others: str):
    """Return a function that writes a file with a good row and others."""
    return lambda world: world.write("chat.jsonl", GOOD + "".join(others))


def template(text: str):
    """Return a function that writes a chat template and rows."""

    def spoil(world: World) -> None:
        world.write("mine.jinja", text)
        world.write("chat.jsonl", GOOD * 3)

    return spoil


def special_row(world: World) -> None:
    world.write("tokenizer.json", of_bytes().content.decode())
    world.write("chat.jsonl", GOOD + row(("user", "a<|endoftext|>"), ("assistant", "Hello")))


CASES = [
    *table("""
an option without its value before another option
    prepare chat.jsonl --chat --out data/new
    option '--chat' requires an argument -> Remove --chat
"""),
    Case(
        "conversations that are read as text",
        f"prepare chat.jsonl {NEW}",
        ("chat.jsonl, line 1", "'messages'"),
        ("--chat auto",),
        chat_rows(),
    ),
    Case(
        "a conversation without an assistant turn",
        f"prepare chat.jsonl {NEW} --chat auto",
        ("chat.jsonl, line 2", "no assistant turn"),
        ("--on-bad-row skip",),
        chat_rows(row(("user", "Hi"))),
        progress="Using plain",
    ),
    Case(
        "a conversation whose assistant turns do not count",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl, line 2", "only assistant turns that are excluded"),
        ("--on-bad-row skip",),
        chat_rows(weighted(0)),
    ),
    Case(
        "an assistant turn that counts in part",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl, line 2", "the weight 0.5 in turn 1"),
        ("1 or 0", "--on-bad-row skip"),
        chat_rows(weighted(0.5)),
    ),
    Case(
        "an assistant turn of which parts are selected",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl, line 2", "'train_detail' in turn 1"),
        ('"weight": 0',),
        chat_rows(weighted([], "train_detail")),
    ),
    Case(
        "a turn with the name of a special token",
        "prepare chat.jsonl --out data/new --tokenizer tokenizer.json --chat plain",
        ("chat.jsonl, line 2", "'<|endoftext|>'", "special token"),
        ("Remove it", "--on-bad-row skip"),
        special_row,
    ),
    Case(
        "a turn of an unknown role",
        f"prepare chat.jsonl {NEW} --chat auto",
        ("chat.jsonl, line 2", "'bot'", "turn 2"),
        ("system, user, assistant or tool",),
        chat_rows(row(("user", "Hi"), ("bot", "Hello"))),
        progress="Using plain",
    ),
    Case(
        "a turn whose content is not text",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl, line 2", "turn 1"),
        ("--on-bad-row skip",),
        chat_rows(row(("user", 7), ("assistant", "Hello"))),
    ),
    Case(
        "a row without turns",
        f"prepare rows.jsonl {NEW} --chat chatml",
        ("rows.jsonl, line 1", "'messages'"),
        ("--text-field",),
    ),
    Case(
        "a chat template that does not exist",
        f"prepare chat.jsonl {NEW} --chat chatlm",
        ("'chatlm'",),
        ("Did you mean 'chatml'?",),
        chat_rows(),
    ),
    Case(
        "a chat template that is not Jinja",
        f"prepare chat.jsonl {NEW} --chat mine.jinja",
        ("mine.jinja, line 1",),
        ("--chat chatml",),
        template("{% for %}"),
    ),
    Case(
        "a chat template that fails for a row",
        f"prepare chat.jsonl {NEW} --chat mine.jinja",
        ("chat.jsonl, line 1", "mine.jinja"),
        ("Correct it",),
        template(
            "{% for m in messages %}{{ m.content }}{{ eos_token }}"
            "{% if m.content == 'Hi' %}{{ m.name.first }}{% endif %}{% endfor %}"
        ),
    ),
    Case(
        "a chat template that fills the memory",
        f"prepare chat.jsonl {NEW} --chat mine.jinja",
        ("mine.jinja", "too much memory"),
        ("--chat chatml",),
        template("{{ 'x' | center(10000000000) }}"),
    ),
    Case(
        "a chat template that asks for a turn otherwise than it writes it",
        f"prepare chat.jsonl {NEW} --chat mine.jinja",
        ("chat.jsonl, line 1", "turn 2", "mine.jinja"),
        ("{% generation %}", "--chat chatml"),
        template(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}[model]{% endif %}"
        ),
    ),
    Case(
        "a row with two system prompts",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl, line 2", "'system'", "different"),
        ("--on-bad-row skip",),
        chat_rows(
            json.dumps(
                {
                    "system": "Be brief.",
                    "conversations": [
                        {"from": "system", "value": "Be kind."},
                        {"from": "gpt", "value": "Hello"},
                    ],
                }
            )
        ),
    ),
    Case(
        "a chat template that does not end turns",
        f"prepare chat.jsonl {NEW} --chat mine.jinja",
        ("mine.jinja", "could not learn to end"),
        ("eos_token",),
        template("{% for m in messages %}{{ m.content }}{% endfor %}"),
    ),
    Case(
        "--chat for text without rows",
        f"prepare book.txt {NEW} --chat chatml",
        ("book.txt has no rows", "--chat"),
        ("Remove them",),
    ),
    Case(
        "--chat and --mask-field",
        f"prepare chat.jsonl {NEW} --chat chatml --mask-field prompt",
        ("--mask-field", "--chat"),
        ("Remove one of the two",),
        chat_rows(),
    ),
    Case(
        "--chat and --max-bytes",
        f"prepare chat.jsonl {NEW} --chat chatml --max-bytes 10",
        ("--max-bytes", "--chat"),
        ("--max-documents",),
        chat_rows(),
    ),
    Case(
        "a single conversation",
        f"prepare chat.jsonl {NEW} --chat chatml",
        ("chat.jsonl", "cannot be split"),
        ("--val",),
        chat_rows(),
    ),
    Case(
        "a chat with a run that was not trained on chat data",
        "chat runs/first",
        ("runs/first", "not trained on chat data"),
        ("--chat-template chatml",),
    ),
    Case("a chat with a run that does not exist", "chat frist", ("frist",), ("runs/first",)),
]
