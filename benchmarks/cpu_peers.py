"""Training steps on a CPU beside those of other projects, in turns, also while others use it.

    python benchmarks/cpu_peers.py --peers DIRECTORY

Two shapes of GPT-2: a small model of characters, and 124M parameters. Each way trains in a process
of its own, on random tokens with AdamW: flatout eager and compiled; nanoGPT's model
eager, under bf16 autocast, compiled and both; Hugging Face's GPT-2 under bf16 autocast; and llm.c,
built with gcc -Ofast -march=native and OpenMP. A rate is the median of the steps after a warm-up,
beside it its share of the rate of a bf16 matmul, measured first.
nanoGPT, llm.c and nanodo are taken from DIRECTORY, or cloned into it. nanodo trains in fp32 and
bf16 if `--jax` names a Python whose environment has jax, flax and optax. With `--busy 1 8`, flatout
and nanoGPT train again beside that many processes that keep a core busy each. Writes
benchmarks/results/cpu_peers.json, .md and .svg after each shape.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from charts import BAR, GREY, TOP, bars, below
from gpu_worker import PEERS, data
from measurement import facts, in_turns, json_lines, markdown, parser, publish, spread, verdict

from flatout.config.schema import load_config
from flatout.hardware import roofline
from flatout.hardware.machine import usable_cores
from flatout.models.language_model import model_of

REPOSITORIES = {
    "nanoGPT": ("https://github.com/karpathy/nanoGPT", "3adf61e"),
    "llm.c": ("https://github.com/karpathy/llm.c", "f1e2ace"),
    "nanodo": ("https://github.com/google-deepmind/nanodo", "10aefde"),
}
SHAPES = {
    "characters": {"layers": 4, "heads": 4, "width": 128, "vocab": 128, "rows": 64, "length": 64},
    "gpt2-124m": {
        "layers": 12,
        "heads": 12,
        "width": 768,
        "vocab": 50304,
        "rows": 4,
        "length": 256,
    },
}
TITLES = {
    "characters": "4 layers, width 128, 64 rows of 64 tokens",
    "gpt2-124m": "GPT-2 124M, 4 rows of 256 tokens",
}
BLUE = "#3d7dd1"
STEPS = {"characters": 80, "gpt2-124m": 8}
TARGETS = {"characters": 2.5, "gpt2-124m": 1.4}
FAIR = 0.8
"""Least part that a run is to keep of its fair share of the cores, as one process among others."""
WARM_UP = 3


def main(words: Sequence[str] | None = None) -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--peers", type=Path, help="directory with nanoGPT and llm.c")
    made.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    made.add_argument("--busy", nargs="*", type=int, default=[], help="processes beside")
    made.add_argument("--jax", help="a Python with jax, flax and optax, for nanodo")
    made.add_argument("--worker", help="for its own use")
    given = made.parse_args(words)
    if given.worker:
        print(json.dumps(peer(*given.worker.split(), given.peers / "nanoGPT")))
        return
    with tempfile.TemporaryDirectory() as folder:
        peers = given.peers or Path(folder) / "peers"
        for name, (url, commit) in REPOSITORIES.items():
            if not (peers / name).exists():
                subprocess.run(["git", "clone", "-q", url, peers / name], check=True)
                subprocess.run(["git", "checkout", "-q", commit], cwd=peers / name, check=True)
        peak = roofline.measure("cpu", "bf16")[0]
        flops = {name: flops_of(name) for name in given.shapes}
        found = {**facts(), "rounds": given.rounds, "shapes": {}, "busy": {}}
        found |= {"peak_tflops": peak, "flops_per_token": flops}
        for name in given.shapes:
            ways = ways_of(name, Path(folder), peers, given.jax)
            found["shapes"][name] = in_turns(ways, given.rounds)
            chosen = {way: ways[way] for way in ("flatout", "nanoGPT, eager")}
            for count in given.busy if name == "characters" else ():
                with ExitStack() as stack:
                    for _ in range(count):
                        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                        stack.callback(other.kill)
                    found["busy"][count] = in_turns(chosen, given.rounds)
            publish(given.out, "cpu_peers", found, table(found))
            (given.out / "cpu_peers.svg").write_text(picture(found))


def picture(found: dict[str, Any]) -> str:
    """Return bars of the rates of flatout and of the fastest way of each peer."""
    charts = []
    for name, ways in found["shapes"].items():
        rates = {
            way: statistics.median(one["tokens_per_s"] for one in rounds)
            for way, rounds in ways.items()
            if all(one["tokens_per_s"] for one in rounds)
        }
        best: dict[str, float] = {}
        for way, rate in rates.items():
            own_name = way if way.startswith("flatout") else way.partition(",")[0]
            best[own_name] = max(rate, best.get(own_name, 0.0))
        rows = dict(sorted(best.items(), key=lambda one: -one[1]))
        colours = [BLUE if one.startswith("flatout") else GREY for one in rows]
        charts.append(bars(f"{TITLES[name]}, tokens/s", rows, colours))
    return below(charts, TOP + BAR * len(rows))


def ways_of(name: str, folder: Path, peers: Path, jax: str | None) -> dict[str, Any]:
    """Return the ways to train a shape."""
    shape = SHAPES[name]
    dataset = folder / f"data-{name}"
    data("random", str(dataset), str(shape["vocab"]), str(1 << 19))
    program = build_llmc(name, folder / f"llmc-{name}", peers / "llm.c")
    worker = [sys.executable, __file__, "--peers", peers, "--worker"]
    ways: dict[str, Any] = {
        "flatout": partial(own, name, dataset, folder, "auto,-compile"),
        "flatout, compiled": partial(own, name, dataset, folder, "auto,+compile"),
    }
    for how in ("eager", "bf16", "compiled", "both"):
        ways[f"nanoGPT, {how}"] = partial(measured, [*worker, f"nanogpt {name} {how}"])
    ways["transformers, bf16"] = partial(measured, [*worker, f"huggingface {name} bf16"])
    for dtype in ("float32", "bfloat16") if jax else ():
        script = Path(__file__).with_name("nanodo_peer.py")
        words = [jax, script, peers / "nanodo", dtype, STEPS[name], json.dumps(shape)]
        ways[f"nanodo, jax {dtype}"] = partial(measured, words)
    ways["llm.c"] = partial(measured, [program], cwd=program.parent)
    return ways


def flops_of(name: str) -> float:
    """Return the training FLOPs per token of a shape, causal-exact."""
    model_class, config = model_of(load_config("gpt2-124m", keys_of(name)))
    return float(model_class.count_flops(config, SHAPES[name]["length"]).causal_exact)


def keys_of(name: str) -> list[str]:
    """Return the keys of a shape for flatout: a GPT-2 without biases."""
    shape = SHAPES[name]
    return [
        *(f"model.num_layers={shape['layers']}", f"model.num_heads={shape['heads']}"),
        *(f"model.d_model={shape['width']}", f"model.vocab_size={shape['vocab']}"),
        *("model.positions=learned", "model.bias=false", "train.device=cpu"),
        *(f"data.seq_len={shape['length']}", f"batch.rows_per_device={shape['rows']}"),
        *("batch.accumulate=1", "batch.tokens_per_step=null"),
    ]


def own(name: str, dataset: Path, folder: Path, speedups: str) -> dict[str, Any]:
    """Train with flatout; return the rate, the last loss and the peak of the memory."""
    steps, every = STEPS[name] + WARM_UP, max(STEPS[name] // 8, 1)
    with tempfile.TemporaryDirectory(dir=folder) as run:
        words = [
            *("train", "gpt2-124m", *keys_of(name), f"data.path={dataset}", f"train.steps={steps}"),
            *("train.tokens=null", "train.eval_every=0", "log.to=[]", f"log.every={every}"),
            *("checkpoint.best=false", "schedule.warmup=0", f"speedups={speedups}"),
            *("--run-dir", f"{run}/run", "--json"),
        ]
        code, printed, peak_gib = process([sys.executable, "-m", "flatout", *words])
        if code:
            return {"tokens_per_s": None, "problem": f"It exited with {code}."}
        records = json_lines(Path(run) / "run" / "metrics.jsonl")
    rates = [row["perf/tokens_per_s"] for row in records if "train/loss" in row]
    rate = statistics.median(rates[-(-WARM_UP // every) :])
    loss = json.loads(printed.splitlines()[-1])["train_loss"]
    return {"tokens_per_s": rate, "loss": loss, "peak_gib": peak_gib}


def measured(words: Sequence[object], cwd: Path | None = None) -> dict[str, Any]:
    """Run a peer; return the rate that it prints, and the peak of its memory."""
    code, printed, peak_gib = process(words, cwd)
    if code:
        return {"tokens_per_s": None, "problem": f"It exited with {code}."}
    if cwd is None:
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    else:
        steps_ms = [float(each) for each in re.findall(r"took ([\d.]+) ms", printed)]
        tokens = int(cwd.joinpath("tokens").read_text())
        found = {"tokens_per_s": 1e3 * tokens / statistics.median(steps_ms[WARM_UP:])}
    return {**found, "peak_gib": peak_gib}


def process(words: Sequence[object], cwd: Path | None = None) -> tuple[int, str, float]:
    """Run a process; return its exit code, what it printed, and the most memory it held, in GiB."""
    threads = {"OMP_NUM_THREADS": str(usable_cores())} if cwd else {}
    with subprocess.Popen(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, printed, usage.ru_maxrss / 2**20


def peer(kind: str, name: str, how: str, folder: Path) -> dict[str, Any]:
    """Train a peer's model in this process; return the rate and the last loss."""
    import torch

    shape, device = SHAPES[name], torch.device("cpu")
    config = load_config("gpt2-124m", keys_of(name))
    torch.manual_seed(0)
    model, loss_of, optimizer = PEERS[kind](model_of(config)[1], config, device, folder)
    called: Any = torch.compile(model) if how in ("compiled", "both") else model
    size = (shape["rows"], shape["length"] + 1)
    marks = []
    for _ in range(WARM_UP + STEPS[name] + 1):
        marks.append(time.perf_counter())
        row = torch.randint(shape["vocab"] // 2, size)
        narrow = how in ("bf16", "both")
        with torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext():
            loss = loss_of(called, row[:, :-1].contiguous(), row[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = float(loss.detach())
    seconds = statistics.median(np.diff(marks)[WARM_UP:])
    return {"tokens_per_s": shape["rows"] * shape["length"] / seconds, "loss": last}


def build_llmc(name: str, folder: Path, source: Path) -> Path:
    """Build llm.c for a shape, without its evaluations and samples; return the program."""
    shape, rng = SHAPES[name], np.random.default_rng(0)
    code = (source / "train_gpt2.c").read_text()
    for old, new in (
        ("int B = 4;", f"int B = {shape['rows']};"),
        ("int T = 64;", f"int T = {shape['length']};"),
        ("step <= 40", f"step < {STEPS[name] // 2 + WARM_UP}"),
        ("if (step % 10 == 0) {", "if (0) {"),
        ("if (step > 0 && step % 20 == 0) {", "if (0) {"),
    ):
        assert old in code, old
        code = code.replace(old, new)
    tokens = folder / "dev" / "data" / "tinyshakespeare"
    tokens.mkdir(parents=True)
    (folder / "train_gpt2.c").write_text(code)
    (folder / "tokens").write_text(str(shape["rows"] * shape["length"]))
    flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-Wno-unused-result", "-I", source]
    words = ["gcc", *flags, folder / "train_gpt2.c", "-lm", "-lgomp", "-o", folder / "program"]
    subprocess.run([*map(str, words)], check=True, capture_output=True)
    for split in ("train", "val"):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, 1 << 19
        drawn = rng.integers(0, shape["vocab"] // 2, 1 << 19, dtype=np.uint16)
        path = tokens / f"tiny_shakespeare_{split}.bin"
        path.write_bytes(header.tobytes() + drawn.tobytes())
    layers, width, length = shape["layers"], shape["width"], shape["length"]
    header = np.zeros(256, np.int32)
    vocabs = shape["vocab"], shape["vocab"]
    header[:8] = 20240326, 3, length, vocabs[0], layers, shape["heads"], width, vocabs[1]
    block = 12 * width * width + 13 * width
    count = (shape["vocab"] + length) * width + layers * block + 2 * width
    weights = rng.normal(0, 0.02, count).astype(np.float32)
    (folder / "gpt2_124M.bin").write_bytes(header.tobytes() + weights.tobytes())
    return folder / "program"


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    parts = []
    for name, ways in found["shapes"].items():
        rates = {
            way: [run["tokens_per_s"] for run in runs]
            for way, runs in ways.items()
            if all(run["tokens_per_s"] for run in runs)
        }
        medians = {way: statistics.median(each) for way, each in rates.items()}
        own = max(rate for way, rate in medians.items() if way.startswith("flatout"))
        best = max(rate for way, rate in medians.items() if not way.startswith("flatout"))
        lines = [
            (
                *(way, spread(rates[way]), f"{rate / best:.2f}"),
                f"{rate * found['flops_per_token'][name] / found['peak_tflops'] / 1e12:.0%}",
                memory(ways[way]),
            )
            for way, rate in medians.items()
        ]
        target = TARGETS[name]
        note = f"Target {target} times the best other: {own / best:.2f}, "
        note += f"{verdict(own / best >= target)}."
        shape = SHAPES[name]
        title = f"{name}, {shape['rows']} x {shape['length']}"
        columns = f"{title} | tokens/s | of the best other | of the matmul rate | GiB"
        parts.append(markdown(columns, lines, note))
    lines = []
    for count, ways in found["busy"].items():
        for way, runs in ways.items():
            alone = statistics.median(
                run["tokens_per_s"] for run in found["shapes"]["characters"][way]
            )
            cores, busy = usable_cores(), int(count)
            rates = [run["tokens_per_s"] for run in runs]
            cells = []
            for fair in (max(1 / (1 + busy), 1 - busy / cores), cores / (cores + busy)):
                kept = [rate / (alone * fair) for rate in rates]
                cells += [f"{fair:.2f}", spread(kept, 2)]
            lines.append((count, way, spread(rates), *cells))
    if lines:
        columns = "busy processes | characters | tokens/s | share of a process | kept of it | "
        note = f"Target: {FAIR} of what one process among these gets, if each gets as much."
        parts.append(markdown(f"{columns}share of its threads | kept of it", lines, note))
    peak = f"A bf16 matmul runs at {found['peak_tflops']:.2f} TFLOP/s here. "
    about = (
        f"{peak}{found['machine']}; {found['rounds']} rounds in turns, median (lowest to highest); "
    )
    parts.append(f"{about}commit {found['commit']}; `python benchmarks/cpu_peers.py`.\n")
    return "\n".join(parts)


def memory(runs: Sequence[dict[str, Any]]) -> str:
    """Return the median of the peaks."""
    return f"{statistics.median(run['peak_gib'] for run in runs):.2f}"


if __name__ == "__main__":
    main()
