"""Test and measure flatout on one GPU: an ordered list of commands, the most valuable first.

    # everything; the same command continues after an interruption
    python benchmarks/gpu.py --out results --nanogpt path/to/nanoGPT
    # where a command may take ten minutes at most, and starts with an empty directory
    python benchmarks/gpu.py --out "$OUT" --minutes 9.5 --earlier results/results.jsonl
    # check on a CPU, at toy shapes, that every step runs
    python benchmarks/gpu.py --out FOLDER --tiny

Each step answers one question (`--list` prints them) in a separate process. OUT/results.jsonl
gets a line per step as it ends, OUT/output.txt all that the steps printed, full tracebacks too, and
OUT/table.md a table of the results beside what was predicted: the ranges in gpu_steps.yaml, which
are for an H200 and are scaled by the rate of a bf16 matmul on other GPUs. A step with a line is not
run again, unless `--again` names it or the time was up.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measurement import facts, markdown

from flatout.config.documents import read_document
from flatout.hardware.machine import probe
from flatout.measure.trial import end_all
from flatout.storage.json_io import LineReader, object_or_none

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
SCRATCH = Path(tempfile.gettempdir()) / "flatout-gpu"
"""Datasets, runs and caches, which the next command finds if the machine is still there."""
H200_TFLOPS = 790.0
"""Rate of a bf16 matmul on an H200, measured at 781 to 803 TFLOP/s."""
NEEDED, MOST = 1.1, 2.5
"""A step starts if NEEDED times its expected seconds are left, and is stopped after MOST times."""
LEAST_LIMIT_S, LONGEST_S = 120.0, 300.0
"""The ablation takes what time there is, if it is this much."""
LEAST_FALL = 0.01
"""The loss must end this share below that of a uniform guess to show that the model trains."""
VOCABULARY, TINY_VOCABULARY = 50_257, 512
STEPS, TINY_STEPS = 48, 12
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
FLATOUT, WORKER = ("-m", "flatout"), "benchmarks/gpu_worker.py"


@dataclass(frozen=True)
class Step:
    """One question, and the command that answers it."""

    question: str
    words: tuple[str, ...]
    """Arguments of Python, in the root of the repository; `{words}` are filled in."""
    seconds: float
    expected: Mapping[str, Sequence[float]] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)
    against: str | None = None


def step_of(given: Mapping[str, Any]) -> Step:
    """Return a step from its entry in gpu_steps.yaml, which explains the keys."""
    overrides = given.get("overrides", "").split()
    data = (*SAME, f"data.path={{{given.get('data', 'random')}}}")
    speedups = f"speedups={given.get('speedups', SET)}"
    rows = given.get("train") or given.get("profile")
    batch = (f"batch.rows_per_device={rows}", "batch.accumulate=1", "batch.tokens_per_step=null")
    if "train" in given:
        words = ["{recipe}", *data, speedups, "{no bias}", *(batch if rows else ()), *overrides]
        words += ["train.steps={steps}", "log.every={every}", "{tiny}", "--run-dir", "{run}"]
        words, seconds = [*FLATOUT, "train", *words, "--json"], 90.0
    elif "profile" in given:
        words = ["{recipe}", *data, speedups, *batch, *overrides, "train.steps=200", "{tiny}"]
        words, seconds = [*FLATOUT, "profile", *words, "--out", "{run}", "--json"], 100.0
    elif "peer" in given:
        kind, rows = given["peer"].split()
        words, seconds = [WORKER, kind, "{recipe}", rows, "{peer}", "{tiny}", *overrides], 75.0
    else:
        words, seconds = given["run"].split(), 0.0
    return Step(
        given["question"],
        tuple(words),
        given.get("seconds", seconds),
        given.get("expected", {}),
        given.get("target", {}),
        given.get("against"),
    )


STEPS_IN_ORDER = {
    name: step_of(given) for name, given in read_document(HERE / "gpu_steps.yaml").items()
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the steps that are due, until the time is up, and write the table."""
    began_s = time.monotonic()
    given = parser().parse_args(words)
    steps = {name: step for name, step in STEPS_IN_ORDER.items() if matches(name, given.only)}
    if given.list:
        for name, step in steps.items():
            print(f"{step.seconds:5.0f} s  {name}: {step.question}")
        return
    if given.out is None or not steps:
        raise SystemExit("Give --out DIR, and names of --list with --only.")
    given.out.mkdir(parents=True, exist_ok=True)
    results, rows = given.out / "results.jsonl", {}
    for path in filter(None, (given.earlier, results)):
        if path.exists():  # a last line that a killed command left torn is dropped
            rows |= {row["step"]: row for row in LineReader(path).read()}
    write_rows(results, rows.values())  # so that this directory alone is enough to continue
    versions = {"torch": version("torch"), "commit": given.commit or facts()["commit"]}
    end_s, has_gpu = began_s + 60 * (given.minutes or math.inf), bool(probe().gpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no step is left running
    for name, step in steps.items():
        is_known = name in rows and rows[name]["status"] != "stopped"
        if is_known and not matches(name, given.again):
            continue
        left_s = end_s - time.monotonic()
        row: dict[str, Any] = {"step": name, "question": step.question}
        if not given.tiny and not has_gpu:
            row |= skipped("There is no NVIDIA GPU; --tiny uses the CPU.")
        elif step.words[1:2] == ("nanogpt",) and given.nanogpt is None:
            row |= skipped("Give nanoGPT's directory with --nanogpt.")
        elif left_s < (0 if given.tiny else NEEDED * min(step.seconds, LONGEST_S)):
            print(f"{name}: no time left.", file=sys.stderr)
            continue
        else:
            print(f"{name}: about {step.seconds:.0f} s.", file=sys.stderr, flush=True)
            row |= run(name, step, given, left_s)
        rows[name] = row | versions
        if row["status"] == "ok" and not given.tiny:
            rows[name] |= compared(name, rows)
        write_rows(results, [rows[name]], mode="a")
        print(json.dumps(rows[name]), flush=True)
    text = table(rows, tiny=given.tiny)
    (given.out / "table.md").write_text(text, encoding="utf-8")
    print(text, file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="directory of the results: three files")
    made.add_argument("--minutes", type=float, help="start no step that would end later")
    made.add_argument("--only", default="*", help="names of steps, with * and ?, and commas")
    made.add_argument("--again", default="", help="names of steps to run again")
    made.add_argument("--earlier", type=Path, help="results.jsonl of an earlier command")
    made.add_argument("--nanogpt", type=Path, help="a directory with nanoGPT's model.py")
    made.add_argument("--commit", help="commit to record if there is no repository")
    made.add_argument("--tiny", action="store_true", help="toy shapes on the CPU")
    made.add_argument("--list", action="store_true", help="print the steps")
    return made


def matches(name: str, patterns: str) -> bool:
    """Return whether comma-separated patterns match the name of a step."""
    return any(fnmatch.fnmatchcase(name, word.strip()) for word in patterns.split(","))


def skipped(reason: str) -> dict[str, str]:
    """Return the outcome of a step that cannot run here."""
    return {"status": "skipped", "reason": reason}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    """Write rows, one line each, and flush them to disk."""
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def run(name: str, step: Step, given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a step in a separate process, and return its outcome. Its output goes to the log."""
    limit_s = max(MOST * step.seconds, LEAST_LIMIT_S)
    log = given.out / "output.txt"
    began_s = time.monotonic()
    SCRATCH.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
    cache = {"PYTHONPATH": path, "FLATOUT_CACHE": str(SCRATCH / "cache")}
    with tempfile.TemporaryDirectory(prefix="flatout-step-") as folder, log.open("ab") as written:
        there: dict[str, Any] = {"stderr": written, "cwd": ROOT, "env": {**os.environ, **cache}}
        for kind in ("random", "text"):
            is_there = (data_path(kind, given) / "manifest.json").exists()
            if not is_there and any(f"{{{kind}}}" in word for word in step.words):
                sizes = (TINY_VOCABULARY, 1 << 15) if given.tiny else (VOCABULARY, 1 << 23)
                made = [WORKER, "data", kind, data_path(kind, given), *sizes]
                # if it fails, the step says that there is no dataset
                subprocess.run([sys.executable, *map(str, made)], stdout=written, **there)
        words = filled(name, step, given, Path(folder), left_s)
        written.write(f"\n===== {name}: python {' '.join(words)}\n".encode())
        written.flush()
        begin = written.tell()
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **there,
            )
            try:
                code = process.wait(min(limit_s, left_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_all(process)
            out.seek(0)
            printed = out.read()
        complaints = log.read_bytes()[begin:]
        written.write(printed)
    row: dict[str, Any] = {"seconds": round(time.monotonic() - began_s, 1)}
    if code is None and left_s < limit_s:
        return row | {"status": "stopped", "reason": "The time of the command was up."}
    if code is None:
        return row | {"status": "timed-out", "reason": f"It took more than {limit_s:.0f} s."}
    found = object_or_none((printed.strip().splitlines() or [b""])[-1])
    if found is None:
        # an exception is the last line of what was written to standard error
        lines = (complaints.strip() or printed).decode(errors="replace").splitlines()
        last = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing")
        reason = f"It exited with code {code} and without results: {last}"
        return row | {"status": "failed", "reason": reason}
    figures = {k: v for k, v in found.items() if len(json.dumps(v)) < LONG_VALUE}
    loss, guess = figures.get("train_loss"), math.log(TINY_VOCABULARY if given.tiny else VOCABULARY)
    reason = None
    if code or figures.get("error"):
        reason = str(figures.get("error") or f"Exit code {code}.")
    elif loss is not None and not loss <= (1 - LEAST_FALL) * guess:
        reason = f"It does not train: its loss is {loss:.3f}."
    return row | {"status": "failed" if reason else "ok", "reason": reason, "figures": figures}


def data_path(kind: str, given: argparse.Namespace) -> Path:
    """Return the path of a dataset, which the next command finds again."""
    return SCRATCH / f"{kind}{'-tiny' if given.tiny else ''}"


def filled(
    name: str, step: Step, given: argparse.Namespace, folder: Path, left_s: float
) -> list[str]:
    """Return the words of a step's command for this machine."""
    tiny, recipe = given.tiny, name.partition("/")[0]
    is_eigenstate = recipe.startswith("eigenstate")
    steps = TINY_STEPS if tiny else STEPS
    values = {
        **{kind: str(data_path(kind, given)) for kind in ("random", "text")},
        "recipe": recipe,
        "run": str(folder / "run"),
        "steps": str(steps),
        "every": str(steps // 6),
        "minutes": f"{max(min(left_s - 40, 1200) / 60, 1):.2f}" if not tiny else "0.5",
        "tests": "--tiny" if tiny else "--essential",
        "peer": str(given.nanogpt.resolve() if given.nanogpt else "-"),
    }
    heads = "model.num_eigenstates=16" if is_eigenstate else "model.num_heads=2"
    shape = (*TINY, f"data.seq_len={64 if '32k' in recipe else 32}", heads)
    several = {
        "{tiny}": shape if tiny else (),
        "{no bias}": () if is_eigenstate else ("model.bias=false",),
        "{same}": SAME,
        "{toy}": ("toy",) if tiny else (),
    }
    words: list[str] = []
    for word in step.words:
        if word in several:
            words += several[word]
        elif tiny and word.startswith("speedups=auto"):
            words.append("speedups=auto" + ",+gpu_worker:FFT_SCAN" * ("FFT_SCAN" in word))
        elif not (tiny and word.startswith(("batch.tokens_per_step", "model.chunk_size"))):
            for key, value in values.items():
                word = word.replace(f"{{{key}}}", value)
            words.append(word)
    return words


def compared(name: str, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a step beside its predictions and targets, on this machine.

    `off_by` is relative to the middle of the predicted range.
    """
    step, found = STEPS_IN_ORDER[name], dict(figures_of(rows, name))
    theirs = figures_of(rows, step.against or "").get("tokens_per_s")
    if theirs and found.get("tokens_per_s"):
        found["times"] = found["tokens_per_s"] / theirs
    roofline = figures_of(rows, "environment").get("matmul_tflops") or H200_TFLOPS
    scale = {"tokens_per_s": roofline / H200_TFLOPS}
    spans = {}
    for key, span in step.expected.items():
        spans[key] = tuple(figure * scale.get(key, 1.0) for figure in span)
    off_by = {}
    for key, span in spans.items():
        figure = found.get(key.partition(",")[0])
        if figure is not None and sum(span):
            off_by[key] = round(figure / (sum(span) / 2) - 1, 4)
    kept = {}
    for key, wanted in step.target.items():
        if (figure := found.get(key)) is not None:
            is_most = key == "peak_gib"
            kept[key] = figure <= wanted if is_most else figure >= wanted * scale.get(key, 1.0)
    return {"times": found.get("times"), "predicted": spans, "off_by": off_by, "kept": kept}


def figures_of(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the results of a step, or none."""
    return (rows.get(name) or {}).get("figures") or {}


def table(rows: Mapping[str, dict[str, Any]], *, tiny: bool) -> str:
    """Return the table of all steps with a row; toy shapes are not compared with predictions."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = []
    for name in filter(rows.__contains__, STEPS_IN_ORDER):
        row, found = rows[name], figures_of(rows, name)
        beside = {} if tiny else compared(name, rows)
        kept = beside.get("kept", {}).items()
        lines.append(
            (
                name,
                shown(found.get("tokens_per_s"), ",.0f"),
                shown(found.get("peak_gib"), ".1f"),
                shown(beside.get("times"), ".3f"),
                "; ".join(f"{key} {off:+.1%}" for key, off in beside.get("off_by", {}).items()),
                "; ".join(f"{key} {'kept' if is_kept else 'missed'}" for key, is_kept in kept),
                "" if row["status"] == "ok" else f"{row['status']}: {row['reason'][:90]}",
            )
        )
    machine = figures_of(rows, "environment").get("machine", "An unknown machine")
    commits = ", ".join(sorted({str(row.get("commit")) for row in rows.values()}))
    torch = ", ".join(sorted({str(row.get("torch")) for row in rows.values()}))
    about = f"{machine}; torch {torch}; commit {commits}{'; toy shapes' if tiny else ''}"
    return f"{about}.\n\n" + markdown(
        "step | tokens/s | GiB | times | off by | targets | status", lines
    )


if __name__ == "__main__":
    main()
