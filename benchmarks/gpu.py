"""Test and measure flatout on one GPU: an ordered list of commands, the most valuable first.

    # everything; the same command continues after an interruption
    python benchmarks/gpu.py --out results --nanogpt path/to/nanoGPT
    # where a command may take ten minutes at most, and starts with an empty folder
    python benchmarks/gpu.py --out "$OUT" --minutes 9.5 --earlier results/results.jsonl
    # check on a CPU, at toy shapes, that every step runs
    python benchmarks/gpu.py --out FOLDER --tiny

Each step answers one question (`--list` prints them) in a process of its own. OUT/results.jsonl
gets a line per step as it ends, OUT/output.txt all that the steps printed, full tracebacks too, and
OUT/table.md a table of the figures beside what was predicted: the ranges in the list below, which
are for an H200 and are scaled by the rate of a bf16 matmul on other GPUs, and what `train` predicts
for itself. A step with a line is not run again, unless `--again` names it or the time was up.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from main_job import commit

from flatout.hardware import probe
from flatout.measure.child import end_group

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
SCRATCH = Path(tempfile.gettempdir()) / "flatout-gpu"
"""Datasets, runs and caches, which the next command finds if the machine is still there."""
H200_TFLOPS = 790.0
"""Rate of a bf16 matmul on an H200, measured at 781 to 803 TFLOP/s."""
NEEDED, MOST = 1.1, 2.5
"""A step starts if NEEDED times its expected seconds are left, and is stopped after MOST times."""
LEAST_LIMIT_S, LONGEST_S = 120.0, 300.0
"""The ladder takes what time there is, if it is this much."""
LEAST_FALL = 0.01
"""The loss must end this share below that of a uniform guess to show that the model trains."""
VOCABULARY, TINY_VOCABULARY = 50_257, 512
STEPS, TINY_STEPS = 48, 12
OWN = ("tokens_per_s", "peak_gib")
"""Figures that `train` predicts for itself."""
LONG_VALUE = 40_000
"""Characters of JSON from which a field of a result is left to the log."""
TINY = (
    *("model.num_layers=2", "model.d_model=32", "train.device=cpu", "optim.lr=1e-2"),
    *(f"model.vocab_size={TINY_VOCABULARY}", "batch.rows_per_device=8", "batch.accumulate=1"),
)
SAME = (
    *("schedule.kind=constant", "schedule.warmup=0", "schedule.min_lr=0", "optim.lr=3e-4"),
    *("train.tokens=null", "train.eval_every=0", "log.to=[]"),
)
"""Without a warm-up: in so few steps the loss falls only if the rate starts high enough."""
SET = "auto,+compile,+collector"
FLATOUT = ("-m", "flatout")


@dataclass(frozen=True)
class Step:
    """One question, and the command that answers it."""

    name: str
    question: str
    words: tuple[str, ...]
    """Arguments of Python, in the root of the repository; `{words}` are filled in."""
    seconds: float
    """Expected on one H200."""
    expected: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Predicted ranges on one H200, of figures in the result, by name."""
    target: Mapping[str, float] = field(default_factory=dict)
    """What a figure is to reach on one H200; of `peak_gib` at most."""
    against: str | None = None
    """The step whose tokens/s are compared as `times`."""


def trained(
    name: str,
    question: str,
    recipe: str,
    rows: int | None,
    *overrides: str,
    speedups: str = SET,
    bias: bool = False,
    seconds: float = 90.0,
    data: str = "random",
    **more: Any,
) -> Step:
    """Return a step that trains a recipe for a few steps; without `rows`, with its own batch."""
    batch = (f"batch.rows_per_device={rows}", "batch.accumulate=1", "batch.tokens_per_step=null")
    words = (
        *(*FLATOUT, "train", recipe, *SAME, f"data.path={{{data}}}", f"speedups={speedups}"),
        *(() if bias or recipe.startswith("eigenstate") else ("model.bias=false",)),
        *(batch if rows else ()),
        *(*overrides, "train.steps={steps}", "log.every={every}", "{tiny}"),
        *("--run-dir", "{run}", "--json"),
    )
    return Step(name, question, words, seconds, **more)


def peer(name: str, question: str, kind: str, recipe: str, rows: int, *words: str, **more) -> Step:
    """Return a step that trains another project's model of the same shape."""
    command = ("benchmarks/gpu_worker.py", kind, recipe, str(rows), "{peer}", "{tiny}", *words)
    return Step(name, question, command, **{"seconds": 75.0, **more})


def profiled(name: str, question: str, recipe: str, rows: int, *overrides: str) -> Step:
    """Return a step that profiles a few steps of training."""
    words = (
        *(*FLATOUT, "profile", recipe, *SAME, "data.path={random}", f"speedups={SET}"),
        *(f"batch.rows_per_device={rows}", "batch.accumulate=1", "batch.tokens_per_step=null"),
        *(*overrides, "train.steps=200", "{tiny}", "--out", "{run}", "--json"),
    )
    return Step(f"{name}/profile", question, words, 100)


ONE_TEXT = "data.document_mask=false"
STEPS_IN_ORDER = (
    Step(
        "environment",
        "Which GPU and versions are here, and how fast are a matmul and a copy?",
        ("benchmarks/gpu_worker.py", "environment"),
        30,
        expected={"roof_tflops": (781, 803), "copy_tb_per_s": (3.8, 4.6)},
    ),
    Step(
        "tests",
        "Do kernels, attention, graphs and copies equal their references?",
        ("benchmarks/gpu_worker.py", "tests", "{tests}"),
        130,
    ),
    trained(
        "gpt2-124m/recipe",
        "Does a recipe train as it is, with its own batch?",
        "gpt2-124m",
        None,
        speedups="auto",
        bias=True,
        seconds=120,
    ),
    trained(
        "gpt2-124m/set",
        "How fast is GPT-2 124M with all that helps?",
        "gpt2-124m",
        64,
        expected={"tokens_per_s": (530e3, 545e3)},
        target={"tokens_per_s": 590e3, "times": 1.15},
        against="gpt2-124m/nanogpt",
    ),
    peer(
        "gpt2-124m/nanogpt",
        "How fast is nanoGPT, compiled, at the same shape and batch?",
        "nanogpt",
        "gpt2-124m",
        64,
        "model.bias=false",
        expected={"tokens_per_s": (510e3, 520e3), "peak_gib": (40.0, 41.6)},
    ),
    trained(
        "eigenstate/set",
        "How fast is the eigenstate network at 32,768 tokens?",
        "eigenstate-small-32k",
        4,
        ONE_TEXT,
        expected={"tokens_per_s": (565e3, 585e3)},
        target={"tokens_per_s": 600e3, "times": 2.5},
        against="eigenstate/fft",
    ),
    Step(
        "resume",
        "Does a stopped run on a GPU continue with the same bits?",
        (
            *(*FLATOUT, "verify", "gpt2-124m", "--resume", "--steps", "4,4", "--json", *SAME),
            *("data.path={random}", "model.num_layers=4", "batch.tokens_per_step=null"),
            *("batch.rows_per_device=8", "batch.accumulate=1", "train.steps=8", "{tiny}"),
        ),
        100,
    ),
    profiled("gpt2-124m", "Where does the time of a step of GPT-2 go?", "gpt2-124m", 64),
    trained(
        "gpt2-124m-32k/set",
        "How fast is GPT-2 at 32,768 tokens, and within 48 GiB?",
        "gpt2-124m-32k",
        4,
        expected={"times": (1.02, 1.04)},
        target={"times": 1.05, "peak_gib": 48.0},
        against="gpt2-124m-32k/nanogpt",
    ),
    peer(
        "gpt2-124m-32k/nanogpt",
        "How fast is nanoGPT there?",
        "nanogpt",
        "gpt2-124m-32k",
        4,
        "model.bias=false",
        seconds=90,
        expected={"tokens_per_s": (150e3, 156e3), "peak_gib": (78.0, 82.0)},
    ),
    trained(
        "eigenstate/fft",
        "How fast is the recurrence by FFT, as public code computes it?",
        "eigenstate-small-32k",
        1,
        ONE_TEXT,
        speedups="auto,+compile,+gpu_worker:FFT_SCAN",
        expected={"tokens_per_s": (225e3, 240e3)},
    ),
    trained(
        "eigenstate/one-row",
        "Does one sequence of 32,768 tokens fit into 13 GiB?",
        "eigenstate-small-32k",
        1,
        ONE_TEXT,
        target={"peak_gib": 13.0},
    ),
    profiled(
        "eigenstate",
        "And of the eigenstate network?",
        "eigenstate-small-32k",
        4,
        ONE_TEXT,
    ),
    trained(
        "gpt2-124m-fast/set",
        "How fast is this size with a free choice of shape and Muon?",
        "gpt2-124m-fast",
        64,
        "batch.accumulate=8",
        seconds=130,
        expected={"tokens_per_s": (560e3, 580e3)},
        target={"tokens_per_s": 620e3},
    ),
    trained(
        "gpt2-700m/set",
        "How fast is the 700M class, in fp8?",
        "gpt2-700m",
        16,
        speedups=f"{SET},+fp8",
        seconds=130,
        expected={"tokens_per_s": (100e3, 110e3)},
        target={"tokens_per_s": 115e3},
        against="gpt2-700m/nanogpt",
    ),
    peer(
        "gpt2-700m/nanogpt",
        "How fast is nanoGPT there?",
        "nanogpt",
        "gpt2-700m",
        16,
        "model.bias=false",
        seconds=100,
        expected={"tokens_per_s": (101e3, 104e3)},
    ),
    trained("gpt2-700m/bf16", "What does fp8 gain?", "gpt2-700m", 16, seconds=125),
    trained(
        "gpt2-124m-32k-wide-heads/set",
        "What do heads of 128 gain at 32,768 tokens?",
        "gpt2-124m-32k-wide-heads",
        4,
        expected={"tokens_per_s": (180e3, 195e3)},
        target={"tokens_per_s": 190e3},
    ),
    peer(
        "gpt2-124m/people",
        "How fast is a hand-written loop: fp32, eager, .item() in every step?",
        "people",
        "gpt2-124m",
        8,
        "model.bias=false",
        seconds=40,
        expected={"tokens_per_s": (41e3, 43e3), "peak_gib": (16.0, 17.4)},
    ),
    trained(
        "gpt2-124m/none",
        "How fast is speedups=none, which tokenises text in the step?",
        "gpt2-124m",
        8,
        speedups="none",
        data="text",
        expected={"tokens_per_s": (7e3, 9.5e3)},
    ),
    peer(
        "gpt2-124m/huggingface",
        "How fast is Hugging Face's GPT-2, eager, as people run it?",
        "huggingface",
        "gpt2-124m",
        16,
        "--eager",
        seconds=45,
        expected={"tokens_per_s": (150e3, 162e3), "peak_gib": (22.0, 23.6)},
    ),
    peer(
        "gpt2-124m/huggingface-compiled",
        "And compiled?",
        "huggingface",
        "gpt2-124m",
        32,
        expected={"tokens_per_s": (405e3, 425e3), "peak_gib": (20.6, 22.2)},
    ),
    trained(
        "gpt2-124m/set-bias",
        "And with biases?",
        "gpt2-124m",
        64,
        bias=True,
        target={"times": 1.15},
        against="gpt2-124m/nanogpt-bias",
    ),
    peer("gpt2-124m/nanogpt-bias", "And nanoGPT?", "nanogpt", "gpt2-124m", 64, "model.bias=true"),
    Step(
        "diagnose",
        "Does diagnose name what limits a run on a GPU?",
        (
            *(*FLATOUT, "diagnose", "gpt2-124m", *SAME, "data.path={random}", "train.steps=400"),
            *("{tiny}", "--json"),
        ),
        150,
    ),
    *(
        trained(
            f"{shape}/{title}",
            f"What does {title} change?",
            recipe,
            rows,
            *overrides,
            speedups=speedups,
            against=f"{shape}/set",
        )
        for shape, title, recipe, rows, speedups, overrides in (
            ("gpt2-124m", "cuda-graphs", "gpt2-124m", 64, f"{SET},+cuda-graphs", ()),
            ("gpt2-124m", "liger-ce", "gpt2-124m", 64, f"{SET},+liger-ce", ()),
            (
                *("gpt2-124m", "compile-blocks", "gpt2-124m", 64),
                *("auto,-compile,+compile-blocks,+collector", ()),
            ),
            ("gpt2-124m", "rows-32", "gpt2-124m", 32, SET, ()),
            ("gpt2-124m", "rows-128", "gpt2-124m", 128, SET, ()),
            (
                *("eigenstate", "fast-scan", "eigenstate-small-32k", 4, f"{SET},+fast-scan"),
                (ONE_TEXT, "model.chunk_size=128"),
            ),
        )
    ),
    trained("gpt2-124m/set-again", "How far apart are two measurements?", "gpt2-124m", 64),
    Step(
        "ladder",
        "What does each speedup add, one at a time?",
        (
            *(*FLATOUT, "bench", "gpt2-124m", *SAME, "data.path={text}", "{tiny}"),
            *("batch.tokens_per_step=32768", "batch.rows_per_device=auto", "batch.accumulate=null"),
            *("--minutes", "{minutes}", "--out", "{run}", "--json"),
        ),
        480,
        target={"total_speedup": 70.0},
    ),
)


def main(words: Sequence[str] | None = None) -> None:
    """Run the steps that are due, until the time is up, and write the table."""
    began_s = time.monotonic()
    arguments = parser().parse_args(words)
    steps = [step for step in STEPS_IN_ORDER if matches(step, arguments.only)]
    if arguments.list:
        for step in steps:
            print(f"{step.seconds:5.0f} s  {step.name}: {step.question}")
        return
    if arguments.out is None or not steps:
        raise SystemExit("Give --out DIR, and names of --list with --only.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    results, rows = arguments.out / "results.jsonl", {}
    for path in filter(None, (arguments.earlier, results)):
        rows |= {row["step"]: row for row in rows_of(path)}
    write_rows(results, rows.values())  # so that this folder alone is enough to continue
    arguments.commit, has_gpu = arguments.commit or commit(), bool(probe().gpus)
    end_s = began_s + 60 * (arguments.minutes or math.inf)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no step is left running
    for step in steps:
        known = rows.get(step.name)
        if known and known["status"] != "stopped" and not matches(step, arguments.again):
            continue
        row = outcome(step, arguments, end_s - time.monotonic(), has_gpu=has_gpu)
        if row is None:
            print(f"{step.name}: no time left.", file=sys.stderr)
            continue
        row = {"step": step.name, "question": step.question, **row}
        row |= {"torch": version("torch"), "commit": arguments.commit}
        rows[step.name] = row
        if row["status"] == "ok" and not arguments.tiny:
            row |= compared(step, rows)
        write_rows(results, [row], mode="a")
        print(json.dumps(row), flush=True)
    table = "\n".join(table_lines(rows, tiny=arguments.tiny))
    (arguments.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table, file=sys.stderr)


def outcome(
    step: Step, arguments: argparse.Namespace, left_s: float, *, has_gpu: bool
) -> dict[str, Any] | None:
    """Run a step if it can run here, and return its row; None when there is no time for it."""
    if not arguments.tiny and not has_gpu:
        return {"status": "skipped", "reason": "There is no NVIDIA GPU; --tiny uses the CPU."}
    if step.words[1:2] == ("nanogpt",) and arguments.nanogpt is None:
        return {"status": "skipped", "reason": "Give nanoGPT's folder with --nanogpt."}
    if left_s < (0 if arguments.tiny else NEEDED * min(step.seconds, LONGEST_S)):
        return None
    print(f"{step.name}: about {step.seconds:.0f} s.", file=sys.stderr, flush=True)
    return run(step, arguments, left_s)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="folder of the results: three files")
    made.add_argument("--minutes", type=float, help="start no step that would end later")
    made.add_argument("--only", default="*", help="names of steps, with * and ?, and commas")
    made.add_argument("--again", default="", help="names of steps to run again")
    made.add_argument("--earlier", type=Path, help="results.jsonl of an earlier command")
    made.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    made.add_argument("--commit", help="commit to record if there is no repository")
    made.add_argument("--tiny", action="store_true", help="toy shapes on the CPU")
    made.add_argument("--list", action="store_true", help="print the steps")
    return made


def matches(step: Step, patterns: str) -> bool:
    """Return whether comma-separated patterns match the name of a step."""
    return any(fnmatch.fnmatchcase(step.name, word.strip()) for word in patterns.split(","))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a results file; a last line that a killed command left torn is dropped."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                print(f"{path}: a damaged line is ignored.", file=sys.stderr)


def write_rows(path: Path, rows: Any, mode: str = "w") -> None:
    """Write rows, one line each, and flush them to disk."""
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def run(step: Step, arguments: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a step in a process of its own, and return its row; its output goes to the log."""
    limit_s = max(MOST * step.seconds, LEAST_LIMIT_S)
    log = arguments.out / "output.txt"
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flatout-step-") as folder, log.open("ab") as written:
        for kind in ("random", "text"):
            if any(f"{{{kind}}}" in word for word in step.words):
                make_data(kind, data_path(kind, arguments), arguments, written)
        words = filled(step, arguments, Path(folder), left_s)
        written.write(f"\n===== {step.name}: python {' '.join(words)}\n".encode())
        written.flush()
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=out,
                stderr=written,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment(),
                start_new_session=True,
            )
            try:
                code = process.wait(min(limit_s, left_s) if left_s < math.inf else limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
            out.seek(0)
            printed = out.read()
        written.write(printed)
    row: dict[str, Any] = {"seconds": round(time.monotonic() - began_s, 1)}
    lines = printed.decode(errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if code is None and left_s < limit_s:
        return row | {"status": "stopped", "reason": "The time of the command was up."}
    if code is None:
        return row | {"status": "timed-out", "reason": f"It took more than {limit_s:.0f} s."}
    if not isinstance(found, dict):
        reason = f"It exited with code {code} and without figures: {last_error(log)}"
        return row | {"status": "failed", "reason": reason}
    figures = {k: v for k, v in found.items() if len(json.dumps(v)) < LONG_VALUE}
    return row | judged(figures, code, tiny=arguments.tiny)


def data_path(kind: str, arguments: argparse.Namespace) -> Path:
    """Return the path of a dataset, which the next command finds again."""
    return SCRATCH / f"{kind}{'-tiny' if arguments.tiny else ''}"


def make_data(kind: str, path: Path, arguments: argparse.Namespace, log: Any) -> None:
    """Make a dataset unless it is there; if that fails, the step says that there is none."""
    sizes = (TINY_VOCABULARY, 1 << 15) if arguments.tiny else (VOCABULARY, 1 << 23)
    words = ["benchmarks/gpu_worker.py", "data", kind, str(path), *map(str, sizes)]
    given = {"stdout": log, "stderr": log, "cwd": ROOT, "env": environment()}
    if not (path / "manifest.json").exists():
        subprocess.run([sys.executable, *words], check=False, **given)


def filled(step: Step, arguments: argparse.Namespace, folder: Path, left_s: float) -> list[str]:
    """Return the words of a step's command for this machine."""
    tiny = arguments.tiny
    long = "32k" in " ".join(step.words)
    values = {
        **{kind: str(data_path(kind, arguments)) for kind in ("random", "text")},
        "run": str(folder / "run"),
        "steps": str(TINY_STEPS if tiny else STEPS),
        "every": str((TINY_STEPS if tiny else STEPS) // 6),
        "minutes": f"{max(min(left_s - 40, 1200) / 60, 1):.2f}" if not tiny else "0.5",
        "tests": "--tiny" if tiny else "--essential",
        "peer": str(arguments.nanogpt.resolve() if arguments.nanogpt else "-"),
    }
    words: list[str] = []
    for word in step.words:
        if word == "{tiny}":
            heads = ["model.num_eigenstates=16"] if "eigenstate" in step.name else []
            heads = heads or ["model.num_heads=2"]
            words += [*TINY, f"data.seq_len={64 if long else 32}", *heads] if tiny else []
        elif tiny and word.startswith("speedups=auto"):
            words.append("speedups=auto" + ",+gpu_worker:FFT_SCAN" * ("FFT_SCAN" in word))
        elif not (tiny and word.startswith(("batch.tokens_per_step", "model.chunk_size"))):
            for name, value in values.items():
                word = word.replace(f"{{{name}}}", value)
            words.append(word)
    return words


def environment() -> dict[str, str]:
    """Return the environment of a step: caches in the scratch folder, and this folder's modules."""
    SCRATCH.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "FLATOUT_CACHE": str(SCRATCH / "cache")}


def last_error(log: Path) -> str:
    """Return the last line of the log that is not empty."""
    lines = log.read_bytes()[-4_000:].decode(errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing")


def judged(figures: dict[str, Any], code: int, *, tiny: bool) -> dict[str, Any]:
    """Return the status of a step with figures."""
    loss, guess = figures.get("train_loss"), math.log(TINY_VOCABULARY if tiny else VOCABULARY)
    reason = None
    if code or figures.get("error"):
        reason = str(figures.get("error") or f"Exit code {code}.")
    elif loss is not None and not loss <= (1 - LEAST_FALL) * guess:
        reason = f"It does not train: its loss is {loss:.3f}."
    return {"status": "failed" if reason else "ok", "reason": reason, "figures": figures}


def compared(step: Step, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a step beside its predictions and targets, on this machine.

    `off_by` is relative to the middle of the predicted range.
    """
    found = dict(figures_of(rows, step.name))
    theirs = figures_of(rows, step.against or "").get("tokens_per_s")
    if theirs and found.get("tokens_per_s"):
        found["times"] = found["tokens_per_s"] / theirs
    roof = figures_of(rows, "environment").get("roof_tflops") or H200_TFLOPS
    scale = {"tokens_per_s": roof / H200_TFLOPS}
    own = found.get("predicted") or {}
    spans = {f"{name}, by train": (own[name],) * 2 for name in OWN if own.get(name)}
    for name, span in step.expected.items():
        spans[name] = tuple(figure * scale.get(name, 1.0) for figure in span)
    measured = {name: found.get(name.partition(",")[0]) for name in spans}
    return {
        "times": found.get("times"),
        "predicted": spans,
        "off_by": {
            name: round(figure / (sum(spans[name]) / 2) - 1, 4)
            for name, figure in measured.items()
            if figure is not None and sum(spans[name])
        },
        "kept": {
            name: found[name] <= wanted
            if name == "peak_gib"
            else found[name] >= wanted * scale.get(name, 1.0)
            for name, wanted in step.target.items()
            if found.get(name) is not None
        },
    }


def figures_of(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the figures of a step, or none."""
    return (rows.get(name) or {}).get("figures") or {}


def table_lines(rows: Mapping[str, dict[str, Any]], *, tiny: bool) -> Iterator[str]:
    """Yield the table of all steps with a row; toy shapes are not compared with predictions."""
    machine = figures_of(rows, "environment").get("machine", "An unknown machine")
    yield f"{machine}; torch {version('torch')}{'; toy shapes' if tiny else ''}."
    yield ""
    yield "| step | tokens/s | GiB | times | off by | targets | |"
    yield "|---|---|---|---|---|---|---|"
    for step in STEPS_IN_ORDER:
        if (row := rows.get(step.name)) is None:
            continue
        found, beside = figures_of(rows, step.name), {} if tiny else compared(step, rows)
        kept = beside.get("kept", {}).items()
        cells = (
            step.name,
            shown(found.get("tokens_per_s"), ",.0f"),
            shown(found.get("peak_gib"), ".1f"),
            shown(beside.get("times"), ".3f"),
            "; ".join(f"{name} {off:+.1%}" for name, off in beside.get("off_by", {}).items()),
            "; ".join(f"{name} {'kept' if is_kept else 'missed'}" for name, is_kept in kept),
            "" if row["status"] == "ok" else f"{row['status']}: {row['reason'][:90]}",
        )
        yield f"| {' | '.join(cells)} |"


def shown(value: float | None, form: str) -> str:
    """Return a number, or nothing."""
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
