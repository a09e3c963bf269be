"""Run flatout where one rank runs out of memory: python limited_rank.py RANK ROWS CALLS WORDS...

The rank's training runs out of memory with more than ROWS rows, from the first call after CALLS on.
"""

import os
import sys

import torch

from flatout.cli.main import main
from flatout.models.transformer import Transformer

limited_rank, most_rows, since = map(int, sys.argv[1:4])
through, calls = Transformer.through, 0


def limited(self, blocks, hidden_BTD, tokens_BT, *more):
    global calls
    if torch.is_grad_enabled():
        calls += 1
        if calls > since and len(tokens_BT) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
    return through(self, blocks, hidden_BTD, tokens_BT, *more)


if int(os.environ["RANK"]) == limited_rank:
    Transformer.through = limited
sys.argv[1:] = sys.argv[4:]
main()
