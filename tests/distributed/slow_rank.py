"""One of two processes, of which the second answers too late: python slow_rank.py."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from flatout.distributed import rendezvous
from flatout.errors import RunFailed
from flatout.training.out_of_memory import peers_named

rendezvous.STEP_TIMEOUT = timedelta(seconds=1)
ranks = rendezvous.connect("cpu")
dist.all_reduce(torch.ones(1))
rendezvous.expect_steps()
if ranks.rank == 1:
    time.sleep(5)
else:
    try:
        with peers_named():
            dist.all_reduce(torch.ones(1))
    except RunFailed as error:
        print(error, flush=True)
os._exit(0)
