"""A recipe on this machine, with everything that it leaves open decided as `train` decides it.

On a GPU that takes a context on it, whose memory the trials would lack. So the process that starts
the trials, and stays while they run, asks another one, which ends with its answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flatout import errors
from flatout.assembly.parts import Decision
from flatout.assembly.preflight import open_dataset
from flatout.assembly.recipe import uses_gpu
from flatout.assembly.request import adding, parse_request
from flatout.assembly.resolve import resolve
from flatout.assembly.selection import assemble, speedup_named
from flatout.config.schema import RunConfig, validate
from flatout.data.store.mix import MixedDataset
from flatout.data.store.shards import Dataset
from flatout.errors import FlatoutError, RunFailed, UsageError
from flatout.hardware import Machine, pick_device, probe
from flatout.measured import gains_here
from flatout.registry import SPEEDUPS

PROGRAM = "from flatout.measure.settling import main; main()"


@dataclass(frozen=True)
class Settled:
    """A recipe with nothing left open."""

    config: RunConfig
    decisions: list[Decision]
    machine: Machine
    dataset: Dataset | MixedDataset


class Choice(BaseModel):
    """What was decided; passes between processes as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    config: dict[str, Any]
    """The resolved configuration."""
    decisions: list[Decision]
    """Every speedup, on or off, with the reason."""
    put_in: dict[str, list[str] | str]
    """For each speedup that is off where `auto` decides: what is on when it is named besides, or
    why it cannot be.
    """


def settle(asked: RunConfig, cache: Path | None = None) -> Settled:
    """Decide what a recipe leaves open, for one process on this machine.

    `cache` holds what was measured on this hardware, which `auto` goes by; None: nothing.

    Raises: UsageError when it cannot run here.
    """
    machine = probe()
    device, _ = pick_device(asked.train.device, machine)
    dataset = open_dataset(asked)
    config, decisions = resolve(
        asked.with_values({"train.device": device}),
        machine=machine,
        dataset=dataset,
        world_size=1,
        measured=gains_here(machine, device, cache),
    )
    return Settled(config, decisions, machine, dataset)


def choose(asked: RunConfig, cache: Path | None = None) -> Choice:
    """Settle a recipe, and again with each speedup named that is off.

    Raises: UsageError when it cannot run here.
    """
    settled = settle(asked, cache)
    off = (
        [decision.name for decision in settled.decisions if not decision.on]
        if parse_request(asked.speedups).auto
        else []
    )
    return Choice(
        config=settled.config.to_dict(),
        decisions=settled.decisions,
        put_in={name: put_in(name, asked, settled, cache) for name in off},
    )


def put_in(
    name: str, asked: RunConfig, settled: Settled, cache: Path | None = None
) -> list[str] | str:
    """Return what is on when `name`, with what it needs, is named on top of what was asked for; or
    why it cannot be.
    """
    stated = asked.with_values({"train.device": settled.config.train.device})
    wanted = with_needs(name)
    for part in wanted:
        why_not = speedup_named(part).reason_against(settled.machine, stated)
        if why_not:
            return (
                f"cannot run here, because: {why_not}"
                if part == name
                else f"cannot run here, because {part} cannot: {why_not}"
            )
    named = stated.with_values({"speedups": adding(asked.speedups, wanted)})
    try:
        _, decisions = resolve(
            named,
            machine=settled.machine,
            dataset=settled.dataset,
            world_size=1,
            measured=gains_here(settled.machine, named.train.device, cache),
        )
        assemble(decisions)
    except UsageError as error:
        return f"cannot be put in, because: {error.what}"
    return [decision.name for decision in decisions if decision.on]


def with_needs(name: str) -> list[str]:
    """Return a speedup, then all that it needs."""
    found = [name]
    for part in found:  # grows on the way
        if ":" in part or part in SPEEDUPS.names():
            found += [need for need in speedup_named(part).needs if need not in found]
    return found


def settle_apart(
    asked: RunConfig, cache: Path | None = None
) -> tuple[Settled, dict[str, list[str] | str]]:
    """Return a recipe settled, and `Choice.put_in`; on a GPU without touching it from this process.

    Raises: UsageError when it cannot run here; RunFailed when the other process died.
    """
    machine = probe()
    choice = (ask_another if uses_gpu(machine, asked) else choose)(asked, cache)
    config = validate(choice.config)
    return Settled(config, choice.decisions, machine, open_dataset(asked)), choice.put_in


def ask_another(
    asked: RunConfig, cache: Path | None = None, *, command: Iterable[str] = ()
) -> Choice:
    """Let a process of its own `choose`. `command` replaces the program, for tests.

    Raises: what `choose` raises there; RunFailed when the process died.
    """
    program = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {PROGRAM}"]
    done = subprocess.run(
        [*command] or program,
        input=json.dumps({"config": asked.to_dict(), "cache": cache and str(cache)}),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        return Choice.model_validate_json(answer)
    if done.returncode == UsageError.exit_code and answer.startswith("{"):
        told = json.loads(answer)
        raise getattr(errors, told["kind"])(told["what"], fix=told["fix"])
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    raise RunFailed(
        f"The process that settles the configuration died: {said}",
        fix="Try the same recipe with `flatout train`.",
    )


def main() -> None:
    """Read a configuration from standard input, print the choice; of an error, what it says."""
    try:
        asked = json.load(sys.stdin)
        cache = asked["cache"] and Path(asked["cache"])
        print(choose(validate(asked["config"]), cache).model_dump_json())
    except FlatoutError as error:
        print(json.dumps({"kind": type(error).__name__, "what": error.what, "fix": error.fix}))
        raise SystemExit(error.exit_code) from None
