"""A source of generated text: `generated:words:documents=3,seed=1`."""

import random


def words(documents: int = 3, seed: int = 0):
    draw = random.Random(seed)
    for _ in range(documents):
        yield " ".join(draw.choice(("cat", "dog", "sits", "runs", "here")) for _ in range(50))
