"""A trial: runs one training command in its own process until it answers a request. No torch.

A recipe is a command as well: `flatout train RECIPE --run-dir SCRATCH`. Whatever happens to the
process, there is a result.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from pydantic import Field, ValidationError

from flatout import errors
from flatout.assembly.choices import parse_request
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig
from flatout.distributed.launch import own_environment
from flatout.errors import ConfigError, FlatoutError, RunFailed, in_shell
from flatout.hardware.machine import BUSY_CORES, CpuTimes, usable_cores
from flatout.measure.attach.lines import failure_of
from flatout.measure.attach.request import SEEN, SO_FAR, Answer, Request, Timing
from flatout.measure.course import compared
from flatout.measure.evidence import Failure
from flatout.measure.scripts.changes import CHANGES, PASSIVE, states_waits
from flatout.progress import Progress
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog

if TYPE_CHECKING:
    from flatout.measure.scripts.scratch import Scratch

POLL_S = 0.05
GRACE_S = 20.0
"""How long a script may take to end after it was measured."""
REQUEST = "FLATOUT_ATTACH"
"""The environment variable by which a process finds what is asked of it."""
NOT_IMPORTED = "torch was not imported"
HOOK = Path(__file__).parent / "attach" / "sitecustomize.py"
LOOK_S = 0.2
"""Seconds for which the use of the cores is looked at."""
NO_MEMORY = "out of memory|can't allocate memory"
QUIET: dict[str, Any] = {
    "train.eval_every": 0,
    "train.patience": 0,
    "train.sample_every": 0,
    "checkpoint.every_minutes": 1e9,
    "checkpoint.every_steps": None,
    "checkpoint.every_epochs": None,
    "checkpoint.upload": None,
}
"""Switches off everything but training."""
MIN_RUN_STEPS = 2_000
"""Shorter recipes are extended to this many steps, so that they can warm up and be measured."""
Status = Literal["ok", "out-of-memory", "failed", "timed-out"]


class Result(Answer):
    """How a command ended, and what was found in it."""

    code: int | None = None
    """Exit code, negative for a signal that ended it. None means it was ended from here."""
    output: str = ""
    """What it printed, if that was captured."""
    has_ended: bool = True
    """Whether it was not ended for taking too long."""
    process_s: float = 0.0
    """Seconds of the whole process, including its start and imports."""
    rows_per_device: int | None = None
    """Of a recipe: sequences in a micro-batch."""
    accumulate: int | None = None
    """Of a recipe: micro-batches per step."""
    tokens: list[int] = Field([])
    """Of a recipe: the tokens of each of `step_s`, without padding."""
    environment: dict[str, Any] = Field({})
    """Of a recipe: device, processor, threads, torch."""

    @property
    def reason(self) -> str | None:
        """Why no steps of a trial were timed. None: they were."""
        failure, has_steps = self.failure, len(self.step_s) > self.warmup_steps
        if self.failed:
            return next(iter(self.failed.values()))
        if failure and not (has_steps if failure.kind == "hang" else self.is_complete):
            return failure.message
        if has_steps:
            return None
        if self.steps or self.problem:
            return self.problem or f"it took too few steps: {self.steps}"
        return "no optimizer of torch took two steps in it"

    @property
    def status(self) -> Status:
        """How a trial ended."""
        reason, kind = self.reason, self.failure and self.failure.kind
        if reason is None:
            return "ok"
        if kind == "hang":
            return "timed-out"
        is_full = kind == "out-of-memory" or re.search(NO_MEMORY, reason, re.IGNORECASE)
        return "out-of-memory" if is_full else "failed"

    @property
    def is_ok(self) -> bool:
        """Whether steps of a trial were timed."""
        return self.reason is None

    @property
    def measured(self) -> list[int]:
        """The indices of the measured steps. Those that compiled are left out."""
        every = range(self.warmup_steps, len(self.step_s))
        return [at for at in every if at not in self.compiled] or [*every]

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a measured step."""
        return 1e3 * statistics.fmean(self.step_s[at] for at in self.measured)

    def rate(self, steps: Sequence[int]) -> float:
        """Return the tokens per second of some steps, or of a script the steps per second."""
        done = sum(self.tokens[at] for at in steps) if self.tokens else len(steps)
        return done / sum(self.step_s[at] for at in steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of a recipe."""
        return self.rate(self.measured) if self.tokens else None

    def times_as_fast(self, other: Result) -> float:
        """Return how many times faster this trial was, over the same steps where there are some."""
        ours, theirs = self.measured, other.measured
        if len(same := sorted({*ours} & {*theirs})) >= min(len(ours), len(theirs)) / 2:
            ours = theirs = same
        return self.rate(ours) / other.rate(theirs)


def program_in(command: Sequence[str]) -> list[str]:
    """Return the words of a command that starts a program, Python for a script alone.

    Raises: ConfigError when there is no such program.
    """
    words = [*command]
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    if shutil.which(words[0]) is None:
        fix = "Write the command as in a terminal: flatout diagnose -- python train.py."
        if {*"|&;><$*"} & {*(line := " ".join(command))}:
            fix = f"A pipeline needs a shell: -- sh -c {in_shell(line)}."
        raise ConfigError(f"There is no command {words[0]!r}.", fix=fix)
    return words


def waiting_beside_others(progress: Progress) -> dict[str, str]:
    """Return the variables with which waiting threads sleep if other processes use the cores.

    One line tells the user. Empty on an idle machine, and where the environment states how
    threads wait.
    """
    before = CpuTimes.read()
    time.sleep(LOOK_S)
    others = before.others_until(CpuTimes.read())
    if others <= BUSY_CORES:
        return {}
    cores = f"{others:.1f} of {usable_cores()} cores"
    if states_waits():
        progress.say(f"Other processes use {cores}; timings will vary.")
        return {}
    progress.say(f"Other processes use {cores}, so threads sleep while they wait.")
    return {**PASSIVE}


def run_command(
    command: Sequence[str],
    request: Request,
    *,
    folder: Path | None = None,
    is_captured: bool = False,
    environment: Mapping[str, str] | None = None,
    as_json: bool = False,
    limit_s: float = math.inf,
    grace_s: float = GRACE_S,
    note: Callable[[str], object] = lambda text: None,
) -> Result:
    """Run a command until it answers a request, and return the answer.

    The user's code and directory are not changed, and of its environment only what its changes set.
    `note` receives what it says while it screens changes, whose results count even if it fails.
    Standard input and output are its own. With `as_json` its output goes to standard error. If it
    `is_captured` there is no input. After `limit_s`, or `grace_s` after its answer, it is ended.
    Nothing that it started runs on, however the call ends.

    Raises: ConfigError when the command does not exist.
    """
    start_s, words = time.monotonic(), program_in(command)
    with tempfile.TemporaryDirectory(prefix="flatout-") as name, tempfile.TemporaryFile() as kept:
        own = Path(name)
        shutil.copyfile(HOOK, own / "sitecustomize.py")
        answer, place = own / "answer.json", own / "request.json"
        parent = os.getpid() if is_captured else None
        request = request.model_copy(update={"answer": str(answer), "parent": parent})
        place.write_text(request.model_dump_json(), encoding="utf-8")
        variables = own_environment() | dict(environment or {})
        if request.timing is not None:
            variables["PYTHONHASHSEED"] = "0"
        if request.recording is not None:  # compiled kernels of a CPU then have names in the trace
            variables["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
        for change in request.changes:
            variables |= CHANGES[change].edit.environment
        search = [name, *filter(None, [variables.get("PYTHONPATH")])]
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**variables, "PYTHONPATH": os.pathsep.join(search), REQUEST: str(place)},
            stdin=subprocess.DEVNULL if is_captured else None,
            stdout=kept if is_captured else sys.stderr if as_json else None,
            stderr=subprocess.STDOUT if is_captured else None,
            start_new_session=is_captured,  # otherwise it may read from the terminal
        )
        try:
            has_ended = _wait(process, request, grace_s, limit_s, note)
            code = process.poll()
        except KeyboardInterrupt:  # the script got it as well, and answers
            if is_captured or not request.measures:
                raise
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S / 2)
            has_ended, code = True, None
            if joined(own, answer.name) is None:
                raise
        finally:
            end_all(process)
        found = joined(own, answer.name)
        if found is None:
            seen = Path(request.answer + SEEN).exists()
            found = Answer(problem=None if seen else NOT_IMPORTED)
        kept.seek(0)
        ended = {
            "code": code,
            "output": kept.read().decode(errors="replace").strip(),
            "has_ended": has_ended,
            "process_s": time.monotonic() - start_s,
        }
        return explained(Result(**dict(found) | ended))


def explained(result: Result) -> Result:
    """Return a result with how its process failed: by an error, a time limit or its exit code."""
    code, output, kind = result.code, result.output, "error"
    message = output.rpartition("\n")[2][:300] or f"The process ended with exit code {code}"
    if result.failure is not None:
        return result
    if error := error_in(output):
        return result.model_copy(update={"failure": failure_of(error, result.steps)})
    if not result.has_ended:
        kind, message = "hang", f"The process took longer than {result.process_s:.0f} s"
    elif not code:
        return result
    elif code < 0:
        message = f"The process was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            kind, message = "killed", f"{message}: the usual cause is too little memory"
    failure = Failure.model_validate({"kind": kind, "message": message})
    return result.model_copy(update={"failure": failure})


def answer_in(path: Path) -> Answer | None:
    """Return the answer in a file. None when it is not there, or damaged."""
    with suppress(OSError, ValidationError):
        return Answer.model_validate_json(path.read_bytes())
    return None


def joined(folder: Path, name: str) -> Answer | None:
    """Return the answer of rank 0, or of the first one that took steps, with what compares all.

    Of several failures the first one counts: others fail because of it. None: there is no answer.
    """
    places = sorted(folder.glob(f"{name}*"), key=lambda path: path.stat().st_mtime_ns)
    every = [one for place in places if (one := answer_in(place)) is not None]
    every.sort(key=lambda one: not one.steps)  # what has started the ranks takes none
    if not every:
        return None
    known = {one.rank: one for one in every if one.steps} or {0: every[0]}
    measured = {rank: e for rank in sorted(known) if (e := known[rank].evidence) is not None}
    first, failure = known[min(known)], next((one.failure for one in every if one.failure), None)
    evidence = first.evidence and compared(measured)
    return first.model_copy(update={"failure": failure, "evidence": evidence})


def _wait(
    process: subprocess.Popen[bytes],
    request: Request,
    grace_s: float,
    limit_s: float,
    note: Callable[[str], object],
) -> bool:
    """Wait until a command has ended, or for a while after its answer. False: it took too long."""
    path, end_s = Path(request.answer), time.monotonic() + limit_s
    is_answered, so_far = request.to_the_end, Path(request.answer + SO_FAR)
    while process.poll() is None and time.monotonic() < end_s:
        time.sleep(POLL_S)
        if request.screen and (news := answer_in(so_far)):
            note(news.note)
        if not is_answered and (answer := answer_in(path)):
            # what fails before any step, or cannot attach beside others, may be a helper
            is_helper = answer.failure is not None or Path(request.answer + SEEN).exists()
            is_answered = answer.steps > 0 or not is_helper
            # one that ends by itself has its exit code
            wait_s = grace_s if answer.is_complete else max(grace_s, GRACE_S)
            if is_answered:  # without steps it cannot attach
                end_s = time.monotonic() + (wait_s if answer.steps else 0.0)
    return is_answered or process.poll() is not None


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process, everything that it started, and its session if it has one of its own."""
    started: dict[psutil.Process, None] = {}
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(psutil.Error):
            started |= dict.fromkeys(psutil.Process(process.pid).children(recursive=True))
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is None:
            process.send_signal(how)
        for one in started:
            with suppress(psutil.Error):
                one.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        _, alive = psutil.wait_procs([*started], timeout=5)
        if not alive and process.poll() is not None:
            return


def run_in_copy(
    copy: Scratch,
    command: Sequence[str],
    request: Request,
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Result:
    """Run a command in a copy of the user's directory until it answers a request.

    The words of the command and of the result are those of the original.
    """
    found = run_command(
        [copy.inside(word) for word in command],
        request.model_copy(update={"copy_of_user": str(copy.path)}),
        folder=copy.of(Path.cwd()),
        is_captured=True,
        environment={**copy.environment(), **(environment or {})},
        limit_s=limit_s,
        grace_s=0.0,
        note=note,
    )
    return Result.model_validate_json(copy.original(found.model_dump_json()))


def run_recipe(config: RunConfig, run_dir: Path, request: Request, limit_s: float) -> Result:
    """Train a recipe in a fresh process until it answers a request.

    The configuration is written beside the run directory. Modules are imported from where this
    process imports them.
    """
    path = run_dir.with_suffix(".yaml")
    path.write_text(dump_yaml(config.to_dict()), encoding="utf-8")
    train = [sys.executable, "-m", "flatout", "train", str(path), "--run-dir", str(run_dir)]
    return run_command(
        [*train, "--json"],
        request,
        is_captured=True,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        limit_s=limit_s,
        grace_s=0.0,
    )


def try_recipe(config: RunConfig, timing: Timing, limit_s: float) -> Result:
    """Time some steps of a recipe, whose rows and speedups are stated, and return the result.

    Its schedule is that of the full run, which ends early. A speedup that had to be switched off
    makes the trial fail.
    """
    keys = QUIET | {"log.every": 1, "log.to": []}
    if config.train.steps:
        keys["train.steps"] = max(config.train.steps, MIN_RUN_STEPS)
    quiet = config.with_values(keys)
    with tempfile.TemporaryDirectory(prefix="flatout-trial-") as folder:
        run_dir = Path(folder) / "run"
        found = run_recipe(quiet, run_dir, Request(timing=timing), limit_s)
        chosen = layout.read_config(run_dir) if found.is_ok else None
        if chosen is None:
            return found
        log, batch = RunLog(run_dir), chosen.batch
        records = [each for each in log.records() if "train/loss" in each]
        events = log.events
    tokens = [int(b["tokens"] - a["tokens"]) for a, b in pairwise(records)]
    usual = round(statistics.fmean(tokens or [batch.tokens_per_step or 1]))
    facts: dict[str, Any] = {
        "rows_per_device": batch.rows_per_device,
        "accumulate": batch.accumulate,
        # the last steps may have no records any more
        "tokens": tokens + [usual] * (len(found.step_s) - len(tokens)),
        "losses": [each["train/loss"] for each in records],
        "environment": next((e["environment"] for e in events if e["event"] == "start"), {}),
    }
    for each in events:
        if each.get("on") is False and each["name"] in parse_request(config.speedups).named:
            facts["failed"] = {each["name"]: f"{each['name']}: {each['reason']}."}
    return found.model_copy(update=facts)


def error_in(output: str) -> FlatoutError | None:
    """Return the error that a command of flatout reported as JSON. None when it did not.

    Wrong usage stays wrong usage. Everything else means a failed run.
    """
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and {"error", "fix", "kind"} <= found.keys():
                kind = getattr(errors, found["kind"], RunFailed)
                is_kept = issubclass(kind, errors.UsageError | errors.OutOfMemory)
                return (kind if is_kept else RunFailed)(found["error"], fix=found["fix"])
    return None


def require_one_process(command: str) -> None:
    """Check that this process is not one of several.

    Raises: ConfigError.
    """
    from flatout.distributed.rendezvous import stated_ranks

    if stated_ranks().world_size > 1:
        raise ConfigError(
            f"{command} measures a single process, but this is one of several.",
            fix="Start it without torchrun.",
        )
