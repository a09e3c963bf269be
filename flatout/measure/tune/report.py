"""The result of `flatout tune`: what each choice gained, and tuned.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from flatout.assembly.selection import Gain, assemble
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.files import write_text
from flatout.json_io import Stored
from flatout.measure.trials.remember import WHERE
from flatout.measure.trials.resolving import Resolved
from flatout.measure.trials.results import Trial
from flatout.measure.trials.statistics import Figure
from flatout.measure.tune.race import Race
from flatout.measure.tune.search import NO_TIME, Search, Tried
from flatout.measure.tune.space import Left, Setting
from flatout.progress import counted

FORMAT_VERSION = 1
MARK = "# Written by `flatout tune`"
"""The start of a recipe that tune wrote, which tune may therefore replace."""
LINE_COLUMNS = 96
NAME_COLUMNS = 40


class Choice(Stored):
    """A change that was measured."""

    name: str
    """For example batch.rows_per_device=8, + compile or - prefetch."""
    part: str
    """batch, checkpointing, speedups or prefetch."""
    speedup: str | None
    """The one speedup whose gain it measures, if that is all that it changes."""
    leaves_out: bool
    """Whether it leaves the speedup out."""
    against: str
    """The setting that it changes: auto, or how that setting differs from auto."""
    status: str
    """ok, out-of-memory, failed or timed-out."""
    taken: bool
    """Whether tuned.yaml has it."""
    verdict: str
    """The gain in words, or why there is none."""
    gain: Figure | None
    """How many times more tokens per second with it than without it; null without figures."""
    repeats: int
    """Measurements of the changed setting."""
    tokens_per_s: Figure | None
    """Rate of the changed setting."""
    peak_gib: float | None
    """Peak memory of its last trial, with an evaluation if that trial rehearsed one."""
    promise: str | None
    """exact, rounding or statistical; null if the losses were not compared."""
    promise_kept: bool | None
    """null if it was not decided."""
    promise_reason: str | None
    """How it was decided, or why not."""


class Best(Stored):
    """The setting that tuned.yaml states."""

    name: str
    """auto, or how it differs from auto."""
    rows_per_device: int
    """Sequences per micro-batch."""
    accumulate: int
    """Micro-batches per optimizer step, on this one device."""
    prefetch: int
    """Optimizer steps that the feed reads ahead."""
    precision: str
    """Precision of the matrix products."""
    speedups: list[str]
    """All speedups that are on."""
    tokens_per_s: Figure | None
    """Its rate."""
    gain: Figure | None
    """How many times more tokens per second than the first setting; null when it is that one."""
    peak_gib: float | None
    """Peak memory of any of its trials."""
    rehearsed: list[str]
    """What its trials did besides training: evaluation, save."""


class Tuning(Stored):
    """Everything that was measured."""

    format_version: int = FORMAT_VERSION
    """Version of this format."""
    recipe: str
    """Name of the recipe."""
    began: str
    """Date and time of the start."""
    machine: str
    """Processor, memory, GPUs."""
    environment: dict[str, str | int]
    """Device, threads, versions."""
    commit: str | None
    """Commit of flatout in a checkout, with + if files were changed."""
    tokens_per_step: int
    """Tokens per optimizer step, the same in every trial."""
    start: str
    """The setting that everything started from: auto, unless that failed."""
    start_tokens_per_s: Figure | None
    """Its rate."""
    best: Best
    """The setting that was found."""
    choices: list[Choice]
    """Every change that was measured, in order."""
    not_tried: list[Left] = Field([])
    """Changes that were not measured, with the reasons."""
    trials: list[Trial]
    """Every trial."""


def tuning_of(search: Search, requested: RunConfig, resolved: Resolved, facts: Any) -> Tuning:
    """Return the result of a search that found a setting that runs.

    `facts` has the fields that are not about the search.
    """
    race, best, start = search.race, search.best or search.space.start, search.start
    config = tuned_config(requested, resolved, best)
    result = race.results[best]
    trials = list(race.measured.ok(race.name(best)).values())
    late = (Left(move.name, NO_TIME) for move in search.late)
    left = {each.name: each for each in (*search.space.left, *search.left, *late)}
    return Tuning(
        **facts,
        recipe=requested.name,
        machine=resolved.machine.describe(),
        environment=result.environment,
        tokens_per_step=race.tokens_per_step,
        start=race.name(start or best),
        start_tokens_per_s=race.rate(start or best),
        best=Best(
            name=race.name(best),
            rows_per_device=best.rows,
            accumulate=race.tokens_per_step // (best.rows * config.data.seq_len),
            prefetch=best.prefetch,
            precision=config.train.precision,
            speedups=best.in_order(),
            tokens_per_s=race.rate(best),
            gain=race.gain(best, start) if start and start != best else None,
            peak_gib=max((t.peak_gib for t in trials if t.peak_gib is not None), default=None),
            rehearsed=sorted({what for trial in trials for what in trial.rehearsed}),
        ),
        choices=[choice_of(tried, race) for tried in search.tried if tried.after in race.results],
        not_tried=[*left.values()],
        trials=race.trials,
    )


def choice_of(tried: Tried, race: Race) -> Choice:
    """Return what was measured about a move."""
    result, parity = race.results[tried.after], tried.parity
    gain = race.gain(tried.after, tried.before) if result.is_ok else None
    if gain is None:
        verdict = f"{result.status}: {result.reason}" if result.reason else result.status
    elif parity is not None and parity.kept is False:
        verdict = f"{gain.verdict()}; the losses break the promise ({parity.reason})"
    else:
        verdict = gain.verdict()
    return Choice(
        name=tried.move.name,
        part=tried.move.part,
        speedup=tried.move.speedup,
        leaves_out=tried.move.is_leaving_out,
        against=race.name(tried.before),
        status=result.status,
        taken=tried.taken,
        verdict=verdict,
        gain=gain,
        repeats=race.repeats(tried.after),
        tokens_per_s=race.rate(tried.after),
        peak_gib=result.peak_gib,
        promise=parity.promise.kind if parity else None,
        promise_kept=parity.kept if parity else None,
        promise_reason=parity.reason if parity else None,
    )


def tuned_config(requested: RunConfig, resolved: Resolved, best: Setting) -> RunConfig:
    """Return the resolved configuration with a setting, for any number of processes.

    batch.accumulate stays open: it follows from the tokens per step and the number of processes.
    """
    tokens_per_step = resolved.config.batch.tokens_per_step or 0
    recipe = assemble(best.in_order())
    return resolved.config.with_values(
        best.values(tokens_per_step)
        | {
            "train.precision": recipe.precision.name,
            "parallel.replicate": requested.parallel.replicate,
        }
    )


def require_writable(out: Path) -> None:
    """Check, before anything is measured, that tuned.yaml can be written.

    Raises: ConfigError when the path has another file, or cannot be written.
    """
    other = "Choose another file with --out FILE."
    if out.is_dir():
        raise ConfigError(f"{out} is a directory.", fix=other)
    try:
        if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(f"{out} exists, and `flatout tune` did not write it.", fix=other)
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.parent / f".{out.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.", fix=other) from error


def write_recipe(tuning: Tuning, config: RunConfig, out: Path) -> None:
    """Write the recipe, with what each choice gained as comments."""
    body = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    header = "\n".join(f"# {line}".rstrip() for line in header_lines(tuning))
    write_text(out, f"{MARK} on {tuning.began[:10]}.\n{header}\n\n{body}")


def header_lines(tuning: Tuning) -> list[str]:
    """Return the comments of tuned.yaml."""
    torch = tuning.environment.get("torch", "unknown")
    commit = f"; commit {tuning.commit}" if tuning.commit else ""
    taken = [choice for choice in tuning.choices if choice.taken]
    rest = last_of_each([choice for choice in tuning.choices if not choice.taken], apart_from=taken)
    lines = [f"Recipe {tuning.recipe}; {tuning.machine}; torch {torch}{commit}.", total(tuning)]
    done = " and ".join(tuning.best.rehearsed)
    lines.append(f"Rehearsed with it: {done or 'nothing'}.")
    if "save" not in tuning.best.rehearsed:
        lines.append("No save was rehearsed: the time was up, or the disk has too little space.")
    if taken:
        lines += ["", "Taken, in this order; each gain is over the setting before:"]
        lines += choice_lines(taken)
    if rest:
        lines += ["", "Measured and not taken:", *choice_lines(rest)]
    late = [each.name for each in tuning.not_tried if each.reason == NO_TIME]
    if late:
        others = counted(len(late), "other")
        lines += ["", f"There was not enough time for {others}; add --minutes."]
    return lines


def last_of_each(choices: Sequence[Choice], *, apart_from: Sequence[Choice]) -> list[Choice]:
    """Return the last choice of each name that `apart_from` lacks."""
    known = {choice.name for choice in apart_from}
    return [*{choice.name: choice for choice in choices if choice.name not in known}.values()]


def total(tuning: Tuning) -> str:
    """Return the rate of the best setting, and its gain, as a sentence."""
    best = tuning.best
    rate = f"{best.tokens_per_s.median:,.0f} tokens/s" if best.tokens_per_s else "no rate"
    gain = f", {with_interval(best.gain)} of {tuning.start}" if best.gain else ""
    peak = "" if best.peak_gib is None else f"; peak {best.peak_gib:.2f} GiB"
    if best.name == tuning.start:
        gain = f": nothing that was measured is faster than {tuning.start}"
        if not tuning.choices:
            gain = f" as {tuning.start} chooses: nothing else was measured"
    return f"{rate}{gain}{peak}."


def with_interval(figure: Figure) -> str:
    """Return a gain with its interval."""
    if figure.low is None or figure.high is None:
        return f"x{figure.median:.2f} (too few repeats)"
    return f"x{figure.median:.2f} ({figure.low:.2f} to {figure.high:.2f})"


def choice_lines(choices: Sequence[Choice]) -> list[str]:
    """Return one aligned line per choice: its name, gain and verdict."""
    width = min(max(len(choice.name) for choice in choices), NAME_COLUMNS)
    lines = []
    for choice in choices:
        told = choice.verdict
        if choice.gain is not None:
            told = with_interval(choice.gain)
            words = choice.verdict.split(f"x{choice.gain.median:.2f}")[0].strip(", ")
            broken = choice.verdict.partition("; ")[2]
            told = "; ".join(part for part in (told, words, broken) if part)
        line = f"  {choice.name:<{width}}  {told}"
        lines.append(line if len(line) <= LINE_COLUMNS else f"{line[: LINE_COLUMNS - 3]}...")
    return lines


def gains(tuning: Tuning) -> dict[str, Gain]:
    """Return the gain of each speedup that was added or left out, for the table of this machine.

    Only those with an interval count, and none whose losses broke their promise.
    """
    found = {}
    for choice in tuning.choices:
        name, gain = choice.speedup, choice.gain
        if name is None or gain is None or choice.promise_kept is False:
            continue
        if gain.low is None or gain.high is None:
            continue
        if choice.leaves_out:
            gain = Figure(median=1 / gain.median, low=1 / gain.high, high=1 / gain.low)
        found[name] = Gain(
            gain=gain.median,
            low=gain.low,
            high=gain.high,
            where=WHERE["left-out" if choice.leaves_out else "put-in"],
            recipe=tuning.recipe,
            date=tuning.began,
            commit=tuning.commit,
            torch=str(tuning.environment.get("torch", "unknown")),
        )
    return found
