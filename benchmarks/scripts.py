"""`flatout diagnose --` and `flatout tune --` on training scripts that others wrote.

    python benchmarks/scripts.py --python PYTHON [--parts diagnose blind loops tune] [--mirrors DIR]

PYTHON needs torch, torchvision, transformers, peft, evaluate, accelerate and lightning; flatout is
found through PYTHONPATH. Ten scripts are fetched from GitHub at fixed commits, or from git
directories in DIR (DIR/OWNER+NAME/repo), and run on synthetic data (benchmarks/scripts.yaml): as
they are, and with three planted faults each. `blind` are those of script_blind.yaml, written by
someone who had not seen flatout, which need scipy. `loops` are the two sets of twenty loops with
a fault and five healthy ones in script_faults.yaml, on which rules were improved afterwards, and
script_faults2.yaml, on which they were not. `tune` takes a slow fault of each script, and the
script as it is. The patch that it writes is measured again here, in turns with the script.

A fault is named when a finding names one of the expected lines or is itself an expected one. A
warning that a line may cost something elsewhere is not enough.
`busy-machine` is not counted: it speaks of other processes. Writes benchmarks/results/scripts.json
and .md. Every trial is written to scripts-trials.jsonl as soon as it ends. After an interruption,
the same command continues from there. Takes about two hours on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from measurement import facts, in_turns, markdown, parser, publish, spread, verdict
from training_runs import remembered

HERE = Path(__file__).parent
PARTS = ("diagnose", "blind", "loops", "tune")
LIMIT_S = 1200.0
"""Seconds after which a command is ended."""
NOT_COUNTED = "busy-machine"
BY_NAME_ONLY = ("tiny-kernels", "memory-bound")
"""Findings whose line is not a cause by itself."""
LOOP_KEYS = ("fault", "healthy", "set")
TARGETS, LOOPS_TARGET, GAIN_TARGET = {"planted in scripts": 0.9, "blind set": 0.75}, 0.85, 1.8
Row = dict[str, Any]


def main() -> None:
    made = parser(__doc__, seconds=5.0, minutes=4.0, steps=40, rounds=3)
    made.add_argument("--python", default=sys.executable)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--only", default="", help="part of the names of scripts and faults")
    made.add_argument("--mirrors", type=Path, help="directory of git directories")
    options = made.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trials = options.out / "scripts-trials.jsonl"
    found: dict[str, list[Row]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory(dir=options.out) as name:
        for part, key, measure in tasks(options, Path(name)):
            if part in options.parts and options.only in " ".join(key.values()):
                result = remembered({"part": part, **key}, trials, measure)
                found[part].append({**key, **result})
    figures = {**facts(), "seconds": options.seconds, "minutes": options.minutes, **found}
    publish(options.out, "scripts", figures, table(figures))


def tasks(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, Row, Callable[[], Row]]]:
    """Yield the part, the names and the measurement of each trial."""
    every = [
        (part, script)
        for part, name in (("diagnose", "scripts.yaml"), ("blind", "script_blind.yaml"))
        for script in yaml.safe_load((HERE / name).read_text())
    ]
    for part, script in every:
        for fault in (None, *script["faults"]):
            key = {"script": script["script"], "fault": fault["fault"] if fault else "as it is"}

            def diagnosed(script: Row = script, fault: Row | None = fault) -> Row:
                return diagnose(options, *prepared(script, fault, options, folder), fault)

            def tuned(script: Row = script, fault: Row | None = fault) -> Row:
                return tune(options, *prepared(script, fault, options, folder))

            yield part, key, diagnosed
            if part == "diagnose" and (fault is None or fault.get("tune")):
                yield "tune", key, tuned
    for loop in [
        {**each, "set": number}
        for number, name in (("first", "script_faults.yaml"), ("second", "script_faults2.yaml"))
        for each in yaml.safe_load((HERE / name).read_text())
    ]:

        def looped(loop: Row = loop) -> Row:
            cwd = Path(tempfile.mkdtemp(dir=folder))
            (cwd / "train.py").write_text(loop["source"])
            fault = loop if "fault" in loop else None
            return diagnose(options, ["train.py"], cwd, environment(cwd), fault)

        yield "loops", {kind: loop[kind] for kind in LOOP_KEYS if kind in loop}, looped


def prepared(
    script: Row, fault: Row | None, options: argparse.Namespace, folder: Path
) -> tuple[list[str], Path, dict[str, str]]:
    """Fetch a script, make its data, plant a fault; return its words, directory, environment."""
    root = folder / script["repository"].replace("/", "+")
    if root.exists():
        shutil.rmtree(root)
    fetch(script, root, options.mirrors)
    cwd = root / script.get("in", ".")
    variables = environment(root)
    for name, content in script.get("files", {}).items():
        path = cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        MAKERS[content](path) if content in MAKERS else path.write_text(content)
    for words in script.get("before", ()):
        subprocess.run(
            [options.python, *words], cwd=cwd, env=variables, check=True, capture_output=True
        )
    fault = fault or {"edits": {}}
    once = {"edits": {fault["file"]: {fault["old"]: fault["new"]}}} if "file" in fault else fault
    for name, edits in [*script.get("edits", {}).items(), *once["edits"].items()]:
        text = (root / name).read_text()
        for old, new in edits.items():
            if text.count(old) != 1:
                raise SystemExit(f"{name} has {old!r} {text.count(old)} times, not once.")
            text = text.replace(old, new)
        (root / name).write_text(text)
    code = ["-c", script["call"]] if "call" in script else []
    return [*code, *shlex.split(fault.get("run", script["run"]))], cwd, variables


def fetch(script: Row, root: Path, mirrors: Path | None) -> None:
    """Check a script's files out into a new directory."""
    name, commit = script["repository"], script["commit"]
    root.mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)

    git("init", "--quiet")
    if mirrors is None:
        source = f"https://github.com/{name}.git"
        git("fetch", "--quiet", "--depth=1", "--filter=blob:none", source, commit)
    else:
        objects = (mirrors / name.replace("/", "+") / "repo/objects").resolve()
        (root / ".git/objects/info/alternates").write_text(f"{objects}\n")
    git("checkout", "--quiet", commit, "--", *script.get("paths", ["."]))


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a script: no network, and its own and our packages."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(HERE.parent)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(root / "huggingface"),
        "PYTHONUNBUFFERED": "1",
    }


def sentences(number: int) -> list[str]:
    """Return sentences of 4 to 30 of 2,000 words, of which some are much more frequent."""
    chance, letters = random.Random(number), "abcdefghijklmnoprstuvw"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(2000)]
    weights = [1 / (place + 3) for place in range(len(words))]
    lengths = [chance.randint(4, 30) for _ in range(number)]
    return [" ".join(chance.choices(words, weights, k=length)) + " ." for length in lengths]


def pairs(number: int) -> list[tuple[str, str]]:
    every = sentences(2 * number)
    return [*zip(every[::2], every[1::2], strict=True)]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_mnist(folder: Path) -> None:
    """Write random digits in the files of MNIST."""
    folder.mkdir(parents=True)
    chance = random.Random(0)
    for name, number in {"train": 20_000, "t10k": 1000}.items():
        head = struct.pack(">HBBIII", 0, 8, 3, number, 28, 28)
        images = head + chance.randbytes(number * 28 * 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        labels = bytes(chance.randrange(10) for _ in range(number))
        head = struct.pack(">HBBI", 0, 8, 1, number)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels)


def write_cora(path: Path) -> None:
    """Write papers with random words and subjects for the citations in the same directory."""
    chance = random.Random(0)
    papers = dict.fromkeys(path.with_name("cora.cites").read_text().split())
    with path.open("w") as file:
        for paper in papers:
            words = set(chance.choices(range(1433), k=18))
            row = ("1" if number in words else "0" for number in range(1433))
            print(paper, *row, f"Subject_{chance.randrange(7)}", sep="\t", file=file)


MAKERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("\n".join([*sentences(12_000), "O God, O God!\n"])),
    "pairs": lambda path: path.write_text("\n".join("\t".join(pair) for pair in pairs(3000))),
    "instructions": lambda path: write_rows(
        path, ({"instruction": one, "output": two} for one, two in pairs(1000))
    ),
    "sentences": lambda path: write_rows(
        path,
        (
            {"sentence1": one, "sentence2": two, "label": number % 2, "idx": number}
            for number, (one, two) in enumerate(pairs(2000))
        ),
    ),
    "mnist": write_mnist,
    "cora": write_cora,
}


def run(words: list[str], cwd: Path, variables: Mapping[str, str]) -> tuple[str, str, int | None]:
    """Run a command and all that it starts for at most LIMIT_S; return its output and exit code."""
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    given = {"cwd": cwd, "env": variables, "start_new_session": True, "text": True}
    process = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, **given)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "", f"ended after {LIMIT_S:.0f} s", None
    return output, errors, process.returncode


def flatout_json(words: list[str], cwd: Path, variables: Mapping[str, str]) -> tuple[Row, str]:
    """Run a command of flatout; return its JSON, {} if it failed, and the end of its errors."""
    output, errors, code = run([sys.executable, "-m", "flatout", *words], cwd, variables)
    try:
        return json.loads(output.splitlines()[-1]), "" if code == 0 else errors[-1500:]
    except (ValueError, IndexError):
        return {}, f"exit code {code}: {errors[-1500:]}"


def diagnose(
    options: argparse.Namespace,
    script: list[str],
    cwd: Path,
    variables: dict[str, str],
    fault: Row | None,
) -> Row:
    """Diagnose a script; return the findings, and the place of the one that names the fault."""
    asked = ["diagnose", "--json", "--seconds", str(options.seconds), "--", options.python]
    found, problem = flatout_json([*asked, *script], cwd, variables)
    findings = [
        {
            "name": one["name"],
            "harm": one["harm"],
            "verdict": one["verdict"],
            "line": one["site"] and one["site"]["text"],
            "share": one["share"],
        }
        for one in found.get("findings", ())
        if one["name"] != NOT_COUNTED
    ]
    named = [number for number, one in enumerate(findings, 1) if fault and names(one, fault)]
    return {
        "place": named[0] if named else None,
        "findings": findings,
        "problem": problem or None,
        **{name: found.get(name) for name in ("verdict", "step_s", "shares", "notes")},
    }


def names(finding: Row, fault: Row) -> bool:
    """Return whether a finding names a fault. One that only warns of later harm does not."""
    text = f"{finding['line']} {finding['verdict']}"
    can_be = finding["harm"] != "warns" and finding["name"] not in BY_NAME_ONLY
    is_there = can_be and any(part in text for part in fault["at"])
    return is_there or finding["name"] in fault.get("names", ())


def tune(
    options: argparse.Namespace, script: list[str], cwd: Path, variables: dict[str, str]
) -> Row:
    """Tune a script, and measure its patch in turns with it."""
    patch = cwd / "flatout.patch"
    minutes = ["--minutes", str(options.minutes), "--patch", str(patch)]
    asked = ["tune", "--json", *minutes, "--", options.python, *script]
    found, problem = flatout_json(asked, cwd, variables)
    shown = ("gain", "changes", "by_hand")
    result: Row = {"problem": problem or None, **{name: found.get(name) for name in shown}}
    if not patch.exists() or not patch.read_text().strip():
        return result
    root = next(one for one in (cwd, *cwd.parents) if (one / ".git").is_dir())
    copy = root.with_name(f"{root.name}-patched")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    inside = copy / cwd.relative_to(root)
    done = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=inside / found.get("root", ""),
        capture_output=True,
        text=True,
        check=False,
    )
    result["patch"] = patch.read_text()
    if done.returncode:
        return {**result, "problem": f"git apply: {done.stderr.strip()}"}
    other = {**variables, "PYTHONPATH": variables["PYTHONPATH"].replace(str(root), str(copy))}
    ways = {
        "plain": lambda: steps_of(options, script, cwd, variables),
        "patched": lambda: steps_of(options, script, inside, other),
    }
    runs = in_turns(ways, options.rounds)
    shutil.rmtree(copy)
    medians = {
        name: [statistics.median(one["seconds"][5:]) for one in rows] for name, rows in runs.items()
    }
    first, second = (one["losses"] for one in runs["plain"][:2])
    return {
        **result,
        "seconds": medians,
        "gains": [a / b for a, b in zip(medians["plain"], medians["patched"], strict=True)],
        "noise": apart(first, second),
        "losses_apart": apart(first, runs["patched"][0]["losses"]),
    }


def steps_of(
    options: argparse.Namespace, script: list[str], cwd: Path, variables: Mapping[str, str]
) -> Row:
    """Run some steps of a script, without flatout; return their seconds and losses."""
    out = cwd / "steps.json"
    words = [options.python, str(HERE / "script_steps.py"), str(options.steps), str(out), *script]
    _, errors, _ = run(words, cwd, variables)
    if not out.exists():
        raise SystemExit(f"{shlex.join(words)} in {cwd}: {errors[-2000:]}")
    found = json.loads(out.read_text())
    out.unlink()
    return found


def apart(losses: list[float], others: list[float]) -> float:
    """Return the largest relative distance of two series of losses."""
    pairs = zip(losses, others, strict=False)
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def table(found: Row) -> str:
    """Return the results as Markdown."""
    every = found["diagnose"] + found["blind"]
    plain = [row for row in every if row["fault"] == "as it is"]
    planted, blind = (
        [row for row in found[part] if row["fault"] != "as it is"] for part in ("diagnose", "blind")
    )
    loops = {
        f"loops with a fault, {number} set": [
            row for row in found["loops"] if "fault" in row and row["set"] == number
        ]
        for number in ("first", "second")
    }
    healthy = [row for row in found["loops"] if "healthy" in row]
    text = [f"{found['machine']}; commit {found['commit']}; `python benchmarks/scripts.py`.\n"]
    for title, rows in {"script as it is": plain, "healthy loop": healthy}.items():
        cells = [(row.get("script") or row["healthy"], ms(row), first_of(row)) for row in rows]
        text.append(markdown(f"{title} | step | first finding", cells))
    for title, rows in {"planted in scripts": planted, "blind set": blind, **loops}.items():
        cells = [
            (f"{row.get('script', '')} {row['fault']}".strip(), place(row), first_of(row))
            for row in rows
        ]
        target = TARGETS.get(title, LOOPS_TARGET)
        text.append(markdown(f"{title} | named | first finding", cells, counted(rows, target)))
    cells = [
        (
            *(row["script"], row["fault"]),
            f"{row['gain']['median']:.2f}" if row["gain"] else "",
            spread(row["gains"], 2) if "gains" in row else short(row["problem"] or "no patch"),
            *(f"{row[name]:.1e}" if name in row else "" for name in ("losses_apart", "noise")),
        )
        for row in found["tune"]
    ]
    slow = [row.get("gains", [1.0]) for row in found["tune"] if row["fault"] != "as it is"]
    middle = statistics.median(map(statistics.median, slow)) if slow else None
    kept = "not measured" if middle is None else verdict(middle >= GAIN_TARGET)
    note = f"Target: a median gain of {GAIN_TARGET} on slow scripts: {kept}."
    columns = "script | fault | gain, by tune | gain of the patch | losses apart | noise"
    return "\n".join([*text, markdown(columns, cells, note)])


def counted(rows: list[Row], target: float) -> str:
    first = sum(row["place"] == 1 for row in rows)
    later = sum(row["place"] is not None and row["place"] > 1 for row in rows)
    kept = verdict(first >= target * len(rows)) if rows else "not measured"
    return f"Named first: {first} of {len(rows)}, later: {later}. Target {target:.0%}: {kept}."


def place(row: Row) -> str:
    return {None: "**missed**", 1: "first"}.get(row["place"], f"as number {row['place']}")


def first_of(row: Row) -> str:
    if not row["findings"]:
        return short(row["problem"] or "none")
    one = row["findings"][0]
    line = f" `{one['line'][:60]}`" if one["line"] else ""
    return short(f"{one['name']}{line}")


def short(text: str) -> str:
    return " ".join(text.split())[:160].replace("|", "/")


def ms(row: Row) -> str:
    return "" if row["step_s"] is None else f"{1e3 * row['step_s']:.0f} ms"


if __name__ == "__main__":
    main()
