"""Finds the changes that make a script faster, proves the gain, and writes them as a patch.

Changes that can be switched between two steps are screened in one process of the script; the rest
is ranked by what that process shows. Processes run in a copy of the script's directory. In the end,
the patched files race against the original ones: that alone is what is claimed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.assembly.speedup import Tolerance
from flatout.errors import RunFailed, in_shell
from flatout.measure.attach.request import ENDED, Answer, Request, Timing
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.script import evidence_in
from flatout.measure.intervals import LEAST_GAIN
from flatout.measure.moves import Move, Setting
from flatout.measure.output import require_own
from flatout.measure.race import Race
from flatout.measure.results import ScriptTuning, facts_of, late_ones
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.patch import Patch, apply, patch_of
from flatout.measure.scripts.scratch import Scratch, project_of
from flatout.measure.search import DIFFERENT, NO_TIME, UNPROVEN, Search, unclear
from flatout.measure.trial import Result, run_in_copy, waiting_beside_others
from flatout.progress import SILENT, Progress
from flatout.storage.files import write_text, write_whole

LOOK_S, TRIAL_S = 3.0, 3.0
"""Seconds of ordinary steps before changes are screened, and of a trial."""
SCREEN_SHARE, MOST_LOOK = 0.25, 0.5
"""Share of the time for steps in which changes are screened, and for their process in all."""
MIN_STEPS, MAX_STEPS, FEW_STEPS = 12, 400, 3
"""Steps of a trial that are timed. Where they are long, they are fewer than MIN_STEPS."""
TRIAL_SHARE = 0.025
"""Share of the time that those fewer steps may take."""
WARM_STEPS = 4
"""First steps of a trial, which are not timed: a third of the others, and at most these."""
MOST_ROUNDS = 12
"""Rounds of the last race: with so many, two that a busy machine spoils leave its interval."""
TRIALS = 3
"""Trials of each of two settings after which it is usually known which is faster."""
FILE, PATCH = "tuning.json", "changes.patch"
"""The result, and the patch in it."""
STARTERS = ("python", "torchrun", "accelerate", "deepspeed")
"""Programs that pass the last words of their command to a script."""
UNCHANGED = Setting()
SPINNING = {"threads": "spinning"}
"""The value of a setting whose threads wait as they would without `passive-threads`."""


def tune_script(
    command: Sequence[str],
    *,
    out: Path | str | None = None,
    minutes: float = 10.0,
    only: Sequence[str] = (),
    patch: Path | str | None = None,
    progress: Progress = SILENT,
) -> ScriptTuning:
    """Find the changes that make a script faster, and write them as a patch.

    Raises: ConfigError when the directory is too large to be copied; RunFailed when the script
            takes no steps.
    """
    began_s, total_s = time.monotonic(), 60 * minutes
    is_asked, out = out is not None, Path(out or f"tuned-{name_of(command)}")
    require_own(out, is_own=(out / FILE).is_file())
    files = [] if patch is None else [Path(patch)]
    for file in files:
        starts = file.read_bytes()[:4] if file.is_file() else None
        require_own(file, is_own=starts in (b"", b"--- "), option="--patch")
    here = Path.cwd()
    with Scratch(project_of(here)) as scratch:
        environment = waiting_beside_others(progress)
        request = Request(
            seconds=LOOK_S, screen=tuple(only or CHANGES), screen_s=SCREEN_SHARE * total_s
        )
        with progress.task("Screening changes of the script") as task:
            look = looked_at(command, scratch, request, environment, MOST_LOOK * total_s, task.note)
        step_s = (look.evidence and look.evidence.step_s) or 0.0
        timing = timed_steps(step_s, total_s)
        trials = Trials(command, scratch, timing, environment, look)
        race = Race(trials.run, tolerance, total_s=total_s, loss_steps=1, is_strict=False,
                    longest_s=4 * (time.monotonic() - began_s) + 180, began_s=began_s,
                    name=lambda one: one.beyond(UNCHANGED) or "the unchanged script")  # fmt: skip
        if environment and "threads" not in look.kept:
            race.ratio = without_load
        search, found = search_of(race, only, look), dict[str, Any]()
        with race.running(progress, "Proving what is faster"):
            found = proved(search, trials)
        failed = race.failure(UNCHANGED)
        if failed and not race.results(UNCHANGED):
            raise RunFailed(
                f"A trial of the unchanged script failed: {failed.reason}.",
                fix="Run it alone first, twice: trials have no standard input, and start in a "
                "copy of this directory.",
            )
    taken = [one.move.name for one in search.taken]
    result = ScriptTuning(
        command=list(command),
        verdict=diagnosis_of(look.evidence).verdict if look.evidence else "",
        step_ms=1e3 * step_s,
        steps=timing.steps + (timing.warmup_steps or 0),
        changes=search.rows(),
        not_tried=search.left,
        taken=taken,
        path=str(out) if taken or is_asked or out.exists() else "",
        root="" if scratch.source == here.resolve() else os.path.relpath(scratch.source),
        **facts_of(race) | found,
    )
    each_s = 2 * TRIALS * race.expected_s(UNCHANGED)
    result = result.model_copy(update={"notes": notes(result, each_s, patch)})
    if result.path:  # what nobody asked for is not left behind where nothing was found
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / FILE, result.model_dump_json(indent=1) + "\n")
        files.append(out / PATCH)
    for file in files:
        file.unlink(missing_ok=True)  # that of an earlier tune goes
        if result.patch:
            write_whole(file, result.patch)
    if patch is not None and not result.patch:
        progress.say(f"There is no edit to make, so {patch} is not written.")
    return result


@dataclass
class Trials:
    """Runs a script with changes, or with patched files, in its copy."""

    command: Sequence[str]
    scratch: Scratch
    timing: Timing
    environment: Mapping[str, str]
    """How threads wait on a busy machine."""
    look: Answer
    """What the unchanged script shows."""

    def run(self, setting: Setting, seed: int, limit_s: float) -> Result:
        """Run a trial, and return the result."""
        self.scratch.reset()
        values, changes = dict(setting.values), sorted(setting.on, key=[*CHANGES].index)
        command = [*self.command]
        if "files" in values:
            patch = self.patch(setting)
            apply(patch, self.scratch.path)
            changes = list({one.change for one in patch.by_hand})
            command += patch.options
        timing = self.timing.model_copy(update={"seed_offset": seed})
        request = Request(changes=tuple(changes), timing=timing)
        environment = {} if values == SPINNING else self.environment
        return run_in_copy(self.scratch, command, request, limit_s=limit_s,
                           environment=environment)  # fmt: skip

    def patch(self, setting: Setting) -> Patch:
        """Return the patch that makes the changes of a setting."""
        device = str(self.look.evidence and self.look.evidence.device).partition(":")[0]
        edits = {name: edit_of(name, device) for name in sorted(setting.on, key=[*CHANGES].index)}
        starter = Path(self.command[0]).name  # what passes the rest of the command to the script
        is_passed = starter.endswith(".py") or starter.startswith(STARTERS)
        return patch_of(
            edits,
            self.look.sites,
            self.scratch.source,
            has_options=is_passed and "--" not in self.command,
        )


def tolerance(one: Setting, other: Setting) -> Tolerance:
    """Return how far the losses of two settings of a script may differ."""
    rtol = sum(CHANGES[name].rtol for name in one.on ^ other.on)
    return Tolerance.rounding(rtol=rtol) if rtol else Tolerance.exact()


def without_load(one: Result, other: Result) -> float:
    """Return how many times faster a trial was, by what does not depend on other processes."""
    return one.times_as_fast(other) * other.own_share / one.own_share


def move_of(name: str) -> Move:
    """Return the move that adds a change."""
    return Move(name, frozenset({name}), does=CHANGES[name].does)


def search_of(race: Race, only: Sequence[str], look: Answer) -> Search:
    """Return a search that starts from what the screening has kept, with the moves that are left.

    Those need new processes, and are worth a trial by the evidence.
    """
    evidence = look.evidence
    assert evidence is not None
    search = Search(race, UNCHANGED, last_trials=2 * TRIALS)
    for name in (*look.kept, *(each for each in look.screened if each not in look.kept)):
        one, move = look.screened[name], move_of(name)
        tried = search.record(move, move.apply(search.best) or search.best)
        tried.seen, tried.first_gain = {**dict(one), "status": "ok"}, one.screened.median
        tried.reason = look.failed.get(name) or unclear(one.screened)
        if name in look.kept:
            search.taken.append(tried)
            tried.taken, tried.reason = True, None
    for name in [one for one in only or CHANGES if one not in look.screened]:
        why = look.failed.get(name) or CHANGES[name].why_not(evidence)
        if why is None and (CHANGES[name].is_of_start or evidence.world_size > 1):
            search.moves = [*search.moves, move_of(name)]
        else:
            search.leave(name, why or NO_TIME)
    return search


def proved(search: Search, trials: Trials) -> dict[str, Any]:
    """Race what was kept and what needs new processes; return what the result says of them all.

    The patch of what was kept comes first, then changes of files on top of it, each with a patch of
    all, and then what is set in the environment of a process, which no patch can do.
    """
    found = together(search, trials, {})
    outside = [move for move in search.moves if CHANGES[move.name].edit.environment]
    for move in search.moves if "cached-items" not in search.best.on else ():
        after = move.apply(search.best) or search.best
        if move not in outside and search.attempt(move, after):
            found = together(search, trials, found)
    search.last_trials = 0
    for move in outside:
        after, before = move.apply(search.best) or search.best, search.best
        if move.name == "passive-threads" and trials.environment:  # all trials have it
            after, before = before, before.but(SPINNING)
        if search.attempt(move, after, before):
            by_hand = trials.patch(Setting(move.adds)).by_hand
            found["by_hand"] = [*found.get("by_hand", ()), *by_hand]
    return found


def together(search: Search, trials: Trials, found: dict[str, Any]) -> dict[str, Any]:
    """Prove the patch of all that is taken, and return what the result says of it.

    What fails or has other losses is given up, or what was added to what had been `found`.
    """
    while search.taken:
        new, why = proof_of(search, trials.patch(search.best))
        if why is None:
            return new
        worst = max(search.taken, key=lambda one: CHANGES[one.move.name].rtol)
        is_one = why == DIFFERENT or why.startswith("failed")
        for one in search.taken[-1:] if found else [worst] if is_one else [*search.taken]:
            search.give_up(one, f"in the end, {why}")
        if found:
            break
        found = {} if search.taken else new
    return found


def proof_of(search: Search, edits: Patch) -> tuple[dict[str, Any], str | None]:
    """Race the patched files, with what no patch can express, against the unchanged script.

    Returns what the result says of them, and why they are not taken after all. Where there was no
    time for an interval, that of the screening counts, if the losses agree.
    """
    race, patched = search.race, search.best.but({"files": "patched"})
    why = search.prove(patched, UNCHANGED, rounds=MOST_ROUNDS)
    gain = race.gain(patched, UNCHANGED)
    check = race.check(patched, UNCHANGED)
    is_first = gain and gain.low is None and gain.median > LEAST_GAIN and check.within_tolerance
    if why is not None and not is_first:
        return {"withheld": f"No patch is written: {why}."}, why
    found = {"patch": edits.diff, "by_hand": edits.by_hand, "options": edits.options}
    return found | {"gain": gain, "gain_losses": check}, None


def notes(found: ScriptTuning, each_s: float, patch: Path | str | None = None) -> list[str]:
    """Return what was found in all, and how to use it.

    `each_s`: seconds of a race. `patch`: where the patch was wanted.
    """
    unproven = [row for row in found.changes if UNPROVEN in (row.reason or "")]
    lines = []
    if found.gain:
        kept = found.gain_losses and found.gain_losses.words()
        lines = [f"Together: {found.gain.times()}{f'; losses {kept}' if kept else ''}."]
    elif unproven and not found.taken:
        best = max(unproven, key=lambda row: row.first_gain or 0.0)
        lines = [f"Whether {best.name} is faster is {UNPROVEN}. Add --minutes."]
    elif not found.taken:
        measured = "Nothing that was measured makes the script faster."
        lines = [measured if found.changes else "No change was measured."]
    lines += late_ones(found.not_tried, each_s)
    lines += [found.withheld] if found.withheld else []
    if found.patch:
        lines += ["", found.patch.rstrip(), ""]
        file = str(patch or f"{found.path}/{PATCH}")
        git = f"git -C {in_shell(found.root)} apply" if found.root else "git apply"
        lines.append(f"Apply it: {git} {in_shell(os.path.abspath(file) if found.root else file)}")
    command = " ".join(map(in_shell, found.command))
    if found.options:
        lines.append(f"Start it with its options: {command} {' '.join(found.options)}")
    for one in found.by_hand:
        where = f"{one.file}:{one.line}: " if one.file else ""
        lines.append(f"By hand, {one.change}: {where}{one.words}")
    if found.taken:
        lines.append(f"Without editing: flatout run --with {','.join(found.taken)} -- {command}")
    where = f"; {found.path}/" * bool(found.path)
    return [*lines, f"{found.trials}{where}"]


def looked_at(
    command: Sequence[str],
    scratch: Scratch,
    request: Request,
    environment: Mapping[str, str],
    limit_s: float,
    note: Callable[[str], object],
) -> Result:
    """Return what the unchanged script shows, in its copy, and what changes of it gain.

    Raises: RunFailed when it fails, or takes too few steps.
    """
    look = run_in_copy(
        scratch, command, request, limit_s=limit_s, environment=environment, note=note
    )
    name = " ".join(command)
    if not look.has_ended:  # there was no time for a change
        left = {name: why for name, why in look.failed.items() if why != ENDED}
        look = look.model_copy(update={"failed": left})
    if look.evidence is not None and look.screened:  # whatever came afterwards
        return look
    if look.evidence is None or look.failure is not None:
        print(look.output, file=sys.stderr)
    if "EOFError" in look.output.rpartition("\n")[2]:
        fix = "Give its answers as arguments: trials have no standard input."
        raise RunFailed(f"`{name}` reads from standard input.", fix=fix)
    evidence = evidence_in(name, look)
    if evidence.failure is not None or not evidence.step_s:
        why = evidence.failure.message if evidence.failure else "it cannot be measured"
        raise RunFailed(f"`{name}` fails: {why}.", fix="Repair that first.")
    return look


def timed_steps(step_s: float, total_s: float) -> Timing:
    """Return the steps of a trial that are timed: fewer where they are long."""
    few = max(FEW_STEPS, round(TRIAL_SHARE * total_s / step_s))
    steps = max(min(MIN_STEPS, few), min(round(TRIAL_S / step_s), MAX_STEPS))
    return Timing(steps=steps, warmup_steps=min(WARM_STEPS, steps // 3))


def name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    scripts = [word for word in command if word.endswith(".py")] or command[-1:]
    return Path(scripts[0]).stem or "script"
