"""GPT-2 124M as people write it, for `flatout tune` to make faster; any argument: a toy shape.

    flatout tune --minutes 5 -- python benchmarks/gpu_script.py

Plain attention with the whole matrix, fp32, an optimizer that loops over parameters, a DataLoader
without workers, `.item()` and `empty_cache()` in every step.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

TINY = len(sys.argv) > 1
V, D, LAYERS, HEADS, T, ROWS = (512, 64, 2, 2, 64, 4) if TINY else (50257, 768, 12, 12, 1024, 8)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RandomTokens(Dataset):
    """Rows of random tokens, each made when it is asked for."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, V // 2, (T + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        """Return the next hidden states."""
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, D))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """The model."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        """Return the logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    """Train."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, foreach=False)
    loader = DataLoader(RandomTokens(), batch_size=ROWS, shuffle=True)
    for step, (tokens, targets) in enumerate(loader):
        tokens, targets = tokens.to(DEVICE), targets.to(DEVICE)
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.empty_cache()
        value = loss.item()
        if step % 10 == 0:
            print(f"step {step}: loss {value:.3f}", flush=True)
        if step == 2_000:
            break


if __name__ == "__main__":
    main()
