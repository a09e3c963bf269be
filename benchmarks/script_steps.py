"""Runs a training script for some optimizer steps; prints its losses and seconds, without flatout.

    python benchmarks/script_steps.py STEPS FILE train.py ARGS
    python benchmarks/script_steps.py STEPS FILE -c CODE ARGS

FILE gets a line of JSON: the seconds of each step, and each loss that `backward` was called on.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    steps, out, first, *words = sys.argv[1:]
    ends_s: list[float] = []
    losses: list[float] = []
    main_optimizer: list[Any] = []
    plain = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if loss.numel() == 1:
            losses.append(float(loss.detach()))
        return plain(loss, *args, **kwargs)

    def count(optimizer: Any, *_: Any) -> None:
        main_optimizer[:] = main_optimizer or [type(optimizer), len(optimizer.param_groups[0])]
        if type(optimizer) is not main_optimizer[0]:
            return
        ends_s.append(time.perf_counter())
        if len(ends_s) > int(steps):
            seconds = [end - start for start, end in itertools.pairwise(ends_s)]
            Path(out).write_text(json.dumps({"seconds": seconds, "losses": losses}))
            sys.stdout.flush()
            os._exit(0)  # workers and servers of the script must not keep it

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    register_optimizer_step_post_hook(count)
    sys.path.insert(0, os.getcwd())
    if first == "-c":
        code, *words = words
        sys.argv = ["-c", *words]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *words]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")
    raise SystemExit(f"The script ended after {len(ends_s)} of {steps} steps.")


if __name__ == "__main__":
    main()
