"""A plain PyTorch training loop with a planted fault, in a separate process.

    python benchmarks/diagnose_loop.py FAULT STRENGTH [--way watch|traceml] [--steps 70]

Prints one JSON line: what `flatout.watch` finds, and the time of a step. `traceml run` also runs
this file, with `--way traceml`. Strength 1, 2 and 3 are about 15%, 30% and 60% of a step, where the
fault takes time; see FAULTS.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS, TOKENS, VOCABULARY = 256, 8, 64, 512
SHARES = (0.15, 0.3, 0.6)
"""Share of a step that a fault takes at each strength."""
SAVE_EVERY = 10
MOST_TINY = 60_000
"""Operations in a step. The profiler keeps each of them."""


class Model(nn.Module):
    """A small transformer with room for a planted fault in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.fault: Callable[[], None] = lambda: None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores of the next token.

        Shapes: tokens_BT (B, T); scores (B, T, V).
        """
        hidden_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        self.fault()
        return self.head(hidden_BTD)


class Loop:
    """The parts of a loop that faults change; `step_s` is the time of a healthy step."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.model = Model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.before_batch: Callable[[], None] = lambda: None
        self.after_step: Callable[[int], None] = lambda number: None
        self.pinned = device == "cuda"
        self.step_s = 0.0
        self.kept: list[Any] = []

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Yield random tokens."""
        for _ in range(steps):
            self.before_batch()
            batch = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
            yield batch.pin_memory() if self.pinned else batch

    def step(self, tokens_BT: Tensor) -> Tensor:
        """Take one step and return the loss."""
        tokens_BT = tokens_BT.to(self.device, non_blocking=True)
        scores_BTV = self.model(tokens_BT[:, :-1])
        loss = nn.functional.cross_entropy(scores_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def lost_s(loop: Loop, strength: int) -> float:
    """Return the seconds that make the share of a strength."""
    share = SHARES[strength - 1]
    return loop.step_s * share / (1 - share)


def plant_data_sleep(loop: Loop, strength: int) -> None:
    seconds = lost_s(loop, strength)
    loop.before_batch = lambda: time.sleep(seconds)


def plant_slow_disk(loop: Loop, strength: int) -> None:
    """Read a block per step, past the page cache, at a rate that makes each step wait.

    Raises: OSError when Linux does not let this process limit the rate of its reads.
    """
    length = 1 << 20
    path = loop.folder / "data.bin"
    with path.open("wb") as file:
        file.write(os.urandom(length))
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, length)  # aligned, as direct reads need it
    limit_reads(path, int(length / (1.1 * loop.step_s + lost_s(loop, strength))))
    loop.before_batch = lambda: os.preadv(descriptor, [memory], 0)


def limit_reads(path: Path, bytes_per_s: int) -> None:
    """Limit the rate at which this process reads from the disk that holds `path`: root only."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    disk = (block / "../dev" if (block / "partition").exists() else block / "dev").resolve()
    number = disk.read_text().strip()
    first = Path("/sys/fs/cgroup/blkio")
    if first.is_dir():
        group, name, limit = first / "flatout-slow-disk", "blkio.throttle.read_bps_device", ""
    else:
        group, name, limit = Path("/sys/fs/cgroup/flatout-slow-disk"), "io.max", "rbps="
    group.mkdir(exist_ok=True)
    (group / name).write_text(f"{number} {limit}{bytes_per_s}")
    (group / "cgroup.procs").write_text(str(os.getpid()))


def plant_item(loop: Loop, strength: int) -> None:
    """Read values of tensors. On a GPU each read waits for it."""
    value = torch.ones((), device=loop.device)
    number = (4, 16, 64)[strength - 1]

    def fault() -> None:
        for _ in range(number):
            value.item()

    loop.model.fault = fault


def plant_tiny(loop: Loop, strength: int) -> None:
    value = torch.ones(4, device=loop.device)

    def work(number: int) -> None:
        total = value
        for _ in range(number):
            total = total + 1

    each_s = seconds_of(lambda: work(1000)) / 1000
    share = (0.4, 0.6, 0.75)[strength - 1]
    number = min(int(loop.step_s * share / (1 - share) / each_s), MOST_TINY)
    loop.model.fault = lambda: work(number)


def plant_pageable(loop: Loop, strength: int) -> None:
    """Copy from memory that is not pinned, together with a large tensor that the model ignores."""
    loop.pinned = False
    extra = torch.zeros((8, 32, 128)[strength - 1] << 20, dtype=torch.uint8)
    loop.model.fault = lambda: extra.to(loop.device) and None


def plant_save(loop: Loop, strength: int) -> None:
    target_s = SAVE_EVERY * lost_s(loop, strength)
    path = loop.folder / "checkpoint.pt"
    probe = torch.zeros(1 << 22)
    rate = probe.nbytes / seconds_of(lambda: torch.save(probe, path))
    state = torch.zeros(int(rate * target_s) // 4)

    def save(number: int) -> None:
        if number % SAVE_EVERY == 0:
            torch.save({"model": loop.model.state_dict(), "state": state}, path)

    loop.after_step = save


def plant_gc(loop: Loop, strength: int) -> None:
    gc.freeze()
    loop.kept = [[] for _ in range(100_000)]
    each_s = seconds_of(gc.collect) / len(loop.kept)
    loop.kept = [[] for _ in range(int(lost_s(loop, strength) / each_s))]
    loop.model.fault = lambda: gc.collect() and None


def plant_recompile(loop: Loop, strength: int) -> None:
    """Compile a function for a length that no step before had."""
    torch._dynamo.config.recompile_limit = 10**6
    torch._dynamo.config.accumulated_recompile_limit = 10**6
    depth, length = (1, 4, 16)[strength - 1], [8]

    @torch.compile(dynamic=False, backend="aot_eager")
    def layer(values: Tensor) -> Tensor:
        for _ in range(depth):
            values = torch.tanh(values * 2 + 1)
        return values

    def fault() -> None:
        length[0] += 1
        layer(torch.ones(length[0], device=loop.device))

    loop.model.fault = fault


def plant_threads(loop: Loop, strength: int) -> None:
    """Use one thread. A stronger fault is a larger step, which loses more."""
    torch.set_num_threads(1)
    original = loop.batches
    loop.batches = lambda steps: (  # type: ignore[method-assign]
        batch.repeat(strength, 1) for batch in original(steps)
    )


def plant_empty_cache(loop: Loop, strength: int) -> None:
    number = (1, 2, 4)[strength - 1]
    loop.model.fault = lambda: [torch.cuda.empty_cache() for _ in range(number)] and None


FAULTS: dict[str, tuple[str, Callable[[Loop, int], None]]] = {
    "sleep in the data source": ("slow-data", plant_data_sleep),
    "slow disk": ("slow-data", plant_slow_disk),
    "synchronising .item()": ("host-sync", plant_item),
    "tiny kernels": ("tiny-kernels", plant_tiny),
    "unpinned copies": ("pageable-copies", plant_pageable),
    "slow save": ("slow-save", plant_save),
    "collector storms": ("garbage-collection", plant_gc),
    "recompiles each step": ("recompiles", plant_recompile),
    "CPU thread cap": ("cpu-threads", plant_threads),
    "needless empty_cache": ("empty-cache", plant_empty_cache),
}
"""Finding that should name each fault, and the function that plants it."""
GPU_ONLY = ("unpinned copies",)
CPU_ONLY = ("CPU thread cap",)
HEALTHY = "healthy"


def instruments(way: str, loop: Loop) -> tuple[Any, Any, Any]:
    """Return (wrap the loader, context of a step, the watch or None)."""
    if way == "watch":
        import flatout

        watch = flatout.watch(model=loop.model, tokens_per_step=ROWS * TOKENS)
        return watch, watch.step, watch
    import traceml_ai

    traceml_ai.init(mode="auto")
    return traceml_ai.wrap_dataloader_fetch, lambda: traceml_ai.trace_step(loop.model), None


def run(fault: str, strength: int, way: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train with a planted fault; return the findings and the time of a step."""
    loop = Loop("cuda" if torch.cuda.is_available() else "cpu", folder)
    healthy = [seconds_of(lambda b=batch: loop.step(b), 1) for batch in loop.batches(15)]
    loop.step_s = statistics.median(healthy[5:])
    if fault != HEALTHY:
        FAULTS[fault][1](loop, strength)
    wrap, step, watch = instruments(way, loop)
    started_s = time.perf_counter()
    for number, batch in enumerate(wrap(loop.batches(steps)), 1):
        with step():
            loop.step(batch)
        loop.after_step(number)
    seconds = time.perf_counter() - started_s
    found: dict[str, Any] = {"healthy_step_ms": 1e3 * loop.step_s, "step_ms": 1e3 * seconds / steps}
    if watch is not None:
        diagnosis = watch.diagnosis()
        found["findings"] = [finding.name for finding in diagnosis.findings]
        found["verdict"], found["shares"] = diagnosis.verdict, dict(diagnosis.shares)
        found["threads"] = torch.get_num_threads()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=[HEALTHY, *FAULTS])
    parser.add_argument("strength", type=int, choices=(1, 2, 3))
    parser.add_argument("--way", choices=("watch", "traceml"), default="watch")
    parser.add_argument("--steps", type=int, default=70)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = run(given.fault, given.strength, given.way, given.steps, Path(folder))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
