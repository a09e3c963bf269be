"""Train in a process that may use only some more memory: python little_memory.py DATA RUN."""

import json
import resource
import sys
from pathlib import Path

from flatout.config.schema import load_config
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config

MORE_BYTES = 600 * 2**20


class Limit(Quiet):
    """Limits the process, during the first step, to what it has then and some more."""

    rows = 0

    def on_start(self, run):
        self.rows = self.rows or run.rows_per_device  # of the first attempt
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def on_tick(self, step, last_step):
        """Lift the limit after the step: reading the checkpoint needs more memory."""
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(data, folder):
    limit = Limit()
    config = load_config(
        None,
        [
            f"data.path={data}",
            "model.num_layers=4",
            "model.d_model=512",
            "model.num_heads=8",
            "data.seq_len=256",
            "batch.tokens_per_step=4096",
            "train.steps=1",
            "train.device=cpu",
            "train.precision=fp32",
            "speedups=auto,-compile,-prefetch,-onednn",
        ],
    )
    summary = run_training(config, folder, observers=[limit])
    rows = read_config(folder).batch.rows_per_device
    print(json.dumps({"first_rows": limit.rows, "rows": rows, "steps": summary["steps"]}))


main(sys.argv[1], Path(sys.argv[2]))
