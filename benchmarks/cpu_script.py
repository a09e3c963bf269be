"""A transformer of characters as people write it, for `flatout tune` to make faster on a CPU.

    cp benchmarks/cpu_script.py DIRECTORY/train.py, and there
    flatout tune --minutes 8 --only no-anomaly,bf16,fused-optimizer -- python train.py

fp32, attention with the whole matrix, an optimizer that loops over parameters, batches that are
cut in Python, and anomaly detection that was left on. results/cpu_script.json is of one run while
other programs used the cores.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, TOKENS, ROWS, STEPS = 4, 4, 192, 128, 16, 2000


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x):
        """Return the next hidden states."""
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(~self.mask, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """The model."""

    def __init__(self, vocab_size):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size)

    def forward(self, tokens):
        """Return the logits."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight)))


def main():
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    vocabulary = sorted(set(text))
    data = torch.tensor([vocabulary.index(character) for character in text])
    model = CharTransformer(len(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        starts = torch.randint(len(data) - TOKENS, (ROWS,))
        rows = torch.stack([data[start : start + TOKENS + 1] for start in starts])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
