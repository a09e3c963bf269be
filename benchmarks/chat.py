"""Fine-tuning on conversations with and without the loss on the user's turns.

    OMP_NUM_THREADS=1 python benchmarks/chat.py

The planted task: a user's turn is random letters and a name, and the right answer is the name's
number, from a table that only the conversations state. A model is first trained on users' turns
alone, so that it continues a turn with another one. It is then fine-tuned on the same tokens in the
same order twice: with the loss on the assistant's turns alone, and on all tokens. New conversations
about the same names are answered greedily. Writes benchmarks/results/chat.json and .md. Accuracies
and losses are measured, not times, so the machine may be busy.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measurement import facts, markdown, parser, publish, spread

import flatout
from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import named_template
from flatout.data.conversation.turns import read_conversation
from flatout.data.tokenizers.base import END_OF_TEXT
from flatout.inference.chat import ChatSession, Sampling
from flatout.inference.load import load_run

NAMES = 24
NOISE = 40
"""Random letters of a user's turn."""
TURNS = 2
"""Questions of a conversation."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHAPE = [
    *("model.num_layers=2", "model.d_model=64", "model.num_heads=2", "model.norm=rmsnorm"),
    *("model.activation=relu2", "data.seq_len=224", "data.document_mask=true"),
    *("batch.tokens_per_step=3584", "optim.kind=muon", "optim.lr=5e-3", "schedule.kind=constant"),
    *("schedule.warmup=10", "train.device=cpu", "train.eval_tokens=4096", "checkpoint.keep=20"),
    "speedups=auto,-compile",
]
TEMPLATE = named_template("chatml", {})
WAYS = {"masked": "the assistant's turns", "all": "all tokens"}


def table_of(seed: int) -> dict[str, str]:
    """Return the number of each name."""
    draw = random.Random(f"table {seed}")
    names: dict[str, str] = {}
    while len(names) < NAMES:
        names["".join(draw.choices(LETTERS, k=3))] = f"{draw.randrange(100):02d}"
    return names


def question(draw: random.Random, name: str) -> str:
    """Return a user's turn about a name."""
    return "".join(draw.choices(LETTERS, k=NOISE)) + f" {name}?"


def conversation(draw: random.Random, numbers: dict[str, str]) -> list[dict[str, str]]:
    """Return the turns of one conversation."""
    turns = []
    for name in draw.choices(sorted(numbers), k=TURNS):
        turns += [
            {"role": "user", "content": question(draw, name)},
            {"role": "assistant", "content": numbers[name]},
        ]
    return turns


def write_data(folder: Path, seed: int, count: int) -> None:
    """Prepare the users' turns alone, and the conversations in both ways: equal tokens."""
    draw, numbers = random.Random(f"rows {seed}"), table_of(seed)
    renderer = Renderer(TEMPLATE, (END_OF_TEXT,))
    rows = [conversation(draw, numbers) for _ in range(count)]
    requests = [renderer.request(read_conversation(turns)) for turns in rows]
    texts = [found.text for (found,) in renderer.examples(requests)]
    asked = [
        "".join(f"<|im_start|>user\n{turn['content']}<|im_end|>\n" for turn in turns[::2])
        for turns in rows
    ]
    for name, lines in (
        ("masked", [{"messages": turns} for turns in rows]),
        ("all", [{"text": text} for text in texts]),
        ("base", [{"text": text} for text in asked]),
    ):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        chat = "chatml" if name == "masked" else None
        options = {"tokenizer": "byte", "split": "hash 0.05", "chat": chat, "workers": 1}
        flatout.prepare([path], folder / name, **options)
    first, second = (flatout.Dataset.open(folder / name).split("train") for name in WAYS)
    assert np.array_equal(
        first.read_tokens(0, first.num_tokens), second.read_tokens(0, second.num_tokens)
    ), "both ways train on the same tokens"


def accuracy_of(run: Path, step: int, seed: int, count: int) -> float:
    """Return the share of new questions that a checkpoint answers right."""
    draw, numbers = random.Random(f"new {seed}"), table_of(seed)
    loaded = load_run(run, str(step))
    seq_len, sampling = loaded.config.data.seq_len, Sampling(temperature=0, max_tokens=14)
    session = ChatSession(loaded.model, loaded.tokenizer, seq_len, TEMPLATE, sampling=sampling)
    right = 0
    for name in draw.choices(sorted(numbers), k=count):
        session.reset()
        right += "".join(session.reply(question(draw, name))) == numbers[name]
    return right / count


def measure(folder: Path, seed: int, steps: list[int], base_steps: int, asked: int) -> list[dict]:
    """Return the accuracy and the loss of both ways after each number of steps."""
    write_data(folder, seed, count=3_000)
    base = folder / "runs" / "base"
    flatout.train(
        "demo-char",
        [*SHAPE, f"data.path={folder / 'base'}", f"train.steps={base_steps}", f"train.seed={seed}"],
        run=base,
    )
    rows = []
    for way in WAYS:
        run = folder / "runs" / way
        keys = [f"data.path={folder / way}", f"train.init_from={base}", f"train.seed={seed}"]
        keys += [f"train.steps={steps[-1]}", f"checkpoint.every_steps={steps[0]}"]
        flatout.train("demo-char", [*SHAPE, *keys], run=run)
        for step in steps:
            score = flatout.evaluate(run, str(step), data=[folder / "masked"])
            row = {"seed": seed, "way": way, "steps": step, "loss": score.val_loss}
            rows.append(row | {"accuracy": accuracy_of(run, step, seed, asked)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = []
    for step in found["steps"]:
        for way, name in WAYS.items():
            rows = [row for row in found["rows"] if (row["steps"], row["way"]) == (step, way)]
            right = spread(100 * row["accuracy"] for row in rows)
            lines.append((step, name, right, spread((row["loss"] for row in rows), 3)))
    return markdown(
        "steps | loss counts | right answers, % | loss on answers, nats per token",
        lines,
        f"{found['machine']}; {NAMES} names with numbers of two digits, {NOISE} random letters"
        f" before each question, {found['asked']} new questions, answered greedily;"
        f" a byte transformer of 2 layers, d 64, first trained for {found['base_steps']} steps on"
        " questions alone; 3,584 tokens per step; median (smallest to largest) over seeds, here"
        f" {found['seeds']}; commit {found['commit']}; `python benchmarks/chat.py --seeds"
        f" {found['seeds']}`.",
    )


def main() -> None:
    defaults = {"seeds": 3, "steps": [50, 100, 150], "base_steps": 60, "questions": 100}
    given = parser(__doc__, **defaults).parse_args()
    rows = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path(folder), seed, given.steps, given.base_steps, given.questions)
    counts = {"seeds": given.seeds, "steps": given.steps, "base_steps": given.base_steps}
    found = {**facts(), **counts, "asked": given.questions, "rows": rows}
    publish(given.out, "chat", found, table(found))


if __name__ == "__main__":
    main()
