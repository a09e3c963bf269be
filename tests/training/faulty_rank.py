"""Run flatout where a rank computes a wrong value: python faulty_rank.py RANK STEP FAULT WORDS...

FAULT is a statement about `run`, which the rank executes after the optimizer's step STEP.
"""

import os
import sys

import torch

from flatout.cli.main import main
from flatout.training import loop

rank, step, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
plain = loop.train_step


def faulty(run, *arguments):
    result = plain(run, *arguments)
    if run.step + 1 == step:
        with torch.no_grad():
            exec(fault, {"run": run, "torch": torch})
    return result


if int(os.environ.get("RANK", "0")) == rank:
    loop.train_step = faulty
sys.argv[1:] = sys.argv[4:]
main()
