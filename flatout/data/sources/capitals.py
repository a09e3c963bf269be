"""Conversations about the capitals of countries, to try chat training: `capitals:documents=2000`.

A second question such as "And of Italy?" can only be answered by a model that reads the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from flatout.data.conversation.rendering import Renderer
from flatout.data.sources import Document, ReadTask, Row, require_counts
from flatout.data.sources.fields import Fields, document
from flatout.storage.json_io import JsonObject

CAPITALS = {
    "Argentina": ("Buenos Aires", "Spanish"),
    "Austria": ("Vienna", "German"),
    "Brazil": ("Brasilia", "Portuguese"),
    "Chile": ("Santiago", "Spanish"),
    "Cuba": ("Havana", "Spanish"),
    "Denmark": ("Copenhagen", "Danish"),
    "Egypt": ("Cairo", "Arabic"),
    "Finland": ("Helsinki", "Finnish"),
    "France": ("Paris", "French"),
    "Germany": ("Berlin", "German"),
    "Greece": ("Athens", "Greek"),
    "Hungary": ("Budapest", "Hungarian"),
    "Iceland": ("Reykjavik", "Icelandic"),
    "Italy": ("Rome", "Italian"),
    "Japan": ("Tokyo", "Japanese"),
    "Mexico": ("Mexico City", "Spanish"),
    "Norway": ("Oslo", "Norwegian"),
    "Poland": ("Warsaw", "Polish"),
    "Portugal": ("Lisbon", "Portuguese"),
    "Romania": ("Bucharest", "Romanian"),
    "Spain": ("Madrid", "Spanish"),
    "Sweden": ("Stockholm", "Swedish"),
    "Thailand": ("Bangkok", "Thai"),
    "Turkey": ("Ankara", "Turkish"),
}
"""The capital and the most spoken language of each country."""
_QUESTIONS = {
    "capital": (
        "What is the capital of {country}?",
        "Which city is the capital of {country}?",
        "Name the capital of {country}.",
    ),
    "language": (
        "Which language is spoken in {country}?",
        "What do people speak in {country}?",
        "Name the language of {country}.",
    ),
}
_ANSWERS = {
    "capital": "The capital of {country} is {answer}.",
    "language": "People in {country} speak {answer}.",
}
_AGAIN = ("And {country}?", "What about {country}?")
MAX_QUESTIONS = 3
"""Questions of a conversation: one to this many."""


def capitals(documents: int = 2000, seed: int = 0, chat: Renderer | None = None) -> list[ReadTask]:
    """Return the task of `documents` conversations, determined by the parameters.

    Without `chat`, a document is the text of its turns, one per line.

    Raises: DataError when a parameter is not an integer or is out of range.
    """
    require_counts("capitals", documents=(documents, 1), seed=(seed, 0))
    mark = f"capitals {documents} {seed}"
    return [ReadTask(write_conversations, (documents, seed, chat), mark, documents * 200)]


SOURCE = capitals


def write_conversations(documents: int, seed: int, chat: Renderer | None) -> Iterator[Row]:
    """Yield the conversations, rendered by `chat` or as lines."""
    fields = Fields(chat=chat)
    for number in range(documents):
        turns = conversation(random.Random(f"{seed} {number}"))
        name = f"conversation {number}"
        if chat is None:
            yield Document("".join(turn["content"] + "\n" for turn in turns), name)
        else:
            yield document({"messages": turns}, fields, name)


def conversation(draw: random.Random) -> list[JsonObject]:
    """Return the turns of one conversation: each question is about the topic of the first."""
    topic = draw.choice(sorted(_QUESTIONS))
    turns: list[JsonObject] = []
    for number in range(draw.randint(1, MAX_QUESTIONS)):
        country = draw.choice(sorted(CAPITALS))
        question = draw.choice(_QUESTIONS[topic] if number == 0 else _AGAIN)
        answer = CAPITALS[country][0 if topic == "capital" else 1]
        turns += [
            {"role": "user", "content": question.format(country=country)},
            {
                "role": "assistant",
                "content": _ANSWERS[topic].format(country=country, answer=answer),
            },
        ]
    return turns
