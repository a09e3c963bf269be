"""Runs under torchrun that lose processes and machines at random moments, and continue.

    python benchmarks/elastic.py

Two torchrun agents on this machine, with two processes each over gloo, stand for two machines. The
first is the host of the rendezvous. When the run has logged a step that is drawn at random,

- process: one of the four processes is killed (SIGKILL);
- agent: the second agent is killed, and its processes stay;
- machine lost: the second agent and its processes are killed, and two processes remain;
- machine back: so, and the agent is started again after some seconds drawn at random;
- machine back later: so, once the run goes on with two processes, at a step drawn at random;
- host lost: the first agent and its processes are killed. Every agent that ends with an error
  starts again, as a scheduler does.

Nobody intervenes: each run must end at its last step with the losses of an undisturbed run, to the
bit where it always had four processes. Writes benchmarks/results/elastic.json and .md. Takes about
twelve minutes.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from measurement import facts, json_lines, markdown, parser, publish, spread

from flatout.cli.commands.prepare import prepare

TEXT = "synthetic:documents=500,words=200,seed=0"
RUN = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 2,
    "data.seq_len": 64,
    "batch.tokens_per_step": 1024,
    "batch.rows_per_device": 4,
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.eval_every": 0,
    "log.every": 1,
    "checkpoint.every_steps": 20,
    "optim.kind": "adamw",
    "optim.lr": "1e-3",
}
KINDS = ("process", "agent", "machine lost", "machine back", "machine back later", "host lost")
AWAY_S = (3.0, 30.0)
"""How long a machine that comes back is away; torchrun takes 15 s to give up on it."""
GIVE_UP_S = 480.0
"""torchrun waits 300 s for the processes of an agent that has ended, after those here have."""


class Machine:
    """A torchrun agent and the processes that it starts."""

    def __init__(self, number: int, folder: Path, port: int, settings: dict[str, Any]) -> None:
        self._number, self._folder, self._port, self._settings = number, folder, port, settings
        self.start()

    def start(self) -> None:
        """Start the agent, with the command of docs/clusters/torchrun.sh, for one or two."""
        folder, environment = self._folder, {"OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        words = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=elastic"),
            *("--local-addr=127.0.0.1", f"--rdzv-conf=is_host={1 - self._number}"),
            *("-m", "flatout", "train", "demo", "--run-dir", folder / "run"),
            *(f"{key}={value}" for key, value in self._settings.items()),
        ]
        with (folder / f"machine-{self._number}.log").open("a") as log:
            self.agent = subprocess.Popen(
                [*map(str, words)], env=os.environ | environment, stdout=log, stderr=log
            )

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run on this machine."""
        with suppress(psutil.Error):
            return psutil.Process(self.agent.pid).children()
        return []

    def lose(self) -> None:
        """Kill everything at once."""
        everything = self.processes()
        self.agent.kill()
        for process in everything:
            with suppress(psutil.Error):
                process.kill()
        self.agent.wait()


def play(
    folder: Path, settings: dict[str, Any], kind: str, at_step: int, draw: random.Random
) -> dict[str, Any]:
    """Run two machines with trouble once `at_step` is logged, and return what happened."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began_s = time.monotonic()
    machines = [Machine(number, folder, port, settings) for number in range(2)]
    found: dict[str, Any] = {"kind": kind, "at_step": at_step}
    there = machines[:1] if kind in ("agent", "machine lost") else machines
    left_behind: list[psutil.Process] = []
    try:
        while max(losses(folder / "run"), default=0) < at_step:
            time.sleep(0.02)
        if kind == "process":
            running = [process for machine in machines for process in machine.processes()]
            draw.choice(running).kill()
        elif kind == "agent":
            left_behind = machines[1].processes()
            machines[1].agent.kill()
        elif kind == "host lost":
            machines[0].lose()
            machines[0].start()
        elif kind != "none":
            machines[1].lose()
        if kind == "machine back":
            found["away_s"] = round(draw.uniform(*AWAY_S), 1)
            time.sleep(found["away_s"])
            machines[1].start()
        elif kind == "machine back later":
            while sizes(folder / "run")[-1] != 2:
                time.sleep(0.1)
            back_at = draw.randrange(at_step, settings["train.steps"])
            while max(losses(folder / "run"), default=0) < back_at:
                time.sleep(0.02)
            found["back_at_step"] = back_at
            machines[1].start()
        while any(machine.agent.poll() is None for machine in there):
            if time.monotonic() - began_s > GIVE_UP_S:
                break
            time.sleep(0.1)
            for machine in there if kind == "host lost" else []:
                if machine.agent.poll():
                    machine.start()
        found["codes"] = [machine.agent.poll() for machine in there]
    finally:
        for machine in machines:
            machine.lose()
        for process in left_behind:
            with suppress(psutil.Error):
                process.kill()
    found["seconds"] = round(time.monotonic() - began_s, 1)
    found["sizes"] = sizes(folder / "run")
    return found


def sizes(run: Path) -> list[int]:
    """Return the number of processes of each start of a run."""
    events = json_lines(run / "events.jsonl")
    return [each["world_size"] for each in events if each["event"] in ("start", "resume")]


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step that a run has logged; {} while a line is being written."""
    path = run / "metrics.jsonl"
    with suppress(ValueError):
        lines = json_lines(path) if path.exists() else []
        return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return {}


def measure(folder: Path, tries: int, steps: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return an undisturbed run, and the tries with their largest relative error of a loss."""
    prepare([TEXT], out=folder / "data", tokenizer="byte")
    draw, found = random.Random(0), []
    for number in range(tries + 1):
        run = folder / str(number)
        settings = {**RUN, "train.steps": steps, "data.path": folder / "data"}
        kind = kinds[(number - 1) % len(kinds)] if number else "none"
        most = steps // 2 if kind == "machine back later" else steps
        one = play(run, settings, kind, draw.randrange(1, most) if number else 0, draw)
        if number == 0:
            whole = losses(run / "run")
        each = losses(run / "run")
        one["is_complete"] = each.keys() == whole.keys() and not any(one["codes"])
        one["error"] = max(
            (abs(each[step] / loss - 1) for step, loss in whole.items() if step in each), default=1
        )
        found.append(one)
        print(one, file=sys.stderr, flush=True)
    return {"steps": steps, "undisturbed": found[0], "tries": found[1:]}


def main() -> None:
    options = parser(__doc__, tries=12, steps=400).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {**measure(Path(folder), options.tries, options.steps, KINDS), **facts()}
    publish(options.out, "elastic", found, table(found))


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for kind in KINDS:
        tries = [each for each in found["tries"] if each["kind"] == kind]
        if tries:
            sizes = sorted({" → ".join(map(str, each["sizes"])) for each in tries})
            rows.append(
                (
                    kind,
                    f"{sum(each['is_complete'] for each in tries)} of {len(tries)}",
                    "; ".join(sizes),
                    f"{max(each['error'] for each in tries):.1g}",
                    spread(each["seconds"] for each in tries),
                )
            )
    complete = sum(each["is_complete"] for each in found["tries"])
    return markdown(
        "trouble | runs that end by themselves | processes | largest error of a loss | seconds",
        rows,
        f"{complete} of {len(found['tries'])} runs of {found['steps']} steps end at their last "
        f"step; undisturbed they take {found['undisturbed']['seconds']:.0f} s; "
        f"{found['machine']}; commit {found['commit']}; `python benchmarks/elastic.py`.",
    )


if __name__ == "__main__":
    main()
