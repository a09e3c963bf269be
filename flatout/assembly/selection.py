"""Which speedups a run uses: what the configuration wishes, what the machine allows, and a reason
for each.

`auto` is a table, `speedups/auto.yaml`: by speedup and device, on, off, on for runs of at least so
many minutes, on only with one of others, or on unless one of others is; and whether that was
measured. A speedup without a row is off under `auto` and on when it is named. What `bench` measured
on this very GPU (flatout/measured.py) is shown beside a decision and does not change it yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flatout.assembly.parts import Decision
from flatout.assembly.recipe import Recipe, Speedup, baseline
from flatout.config.schema import RunConfig
from flatout.documents import read_document
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import Machine
from flatout.registry import PACKAGE_DIR, SPEEDUPS, unknown_name

PRECISIONS = {"bf16": ("bf16-products", "bf16"), "fp16": ("fp16",)}
"""train.precision to the speedups that bring it about, the first that works is taken; fp32 needs
none.
"""


MICRO_BATCH = "micro-batch"
"""The speedup whose work is done once a run is resolved: it chooses the rows, which are written
down.
"""


@dataclass(frozen=True)
class Wish:
    """What `config.speedups` asks for."""

    auto: bool
    named: tuple[str, ...]
    dropped: tuple[str, ...]


def speedup_named(name: str) -> Speedup:
    """Return the speedup of that name; one of the user's own, `package.module:attribute`, goes by
    that reference whatever it calls itself.

    Raises: ConfigError with the nearest name when there is none.
    """
    found: Speedup = SPEEDUPS.get(name)
    return replace(found, name=name) if ":" in name else found


def all_speedups() -> list[Speedup]:
    """Return every speedup in the folder, in the order of the ladder: the table's order, then by
    name.
    """
    order = list(auto_table())
    found = [SPEEDUPS.get(name) for name in SPEEDUPS.names()]
    return sorted(
        found, key=lambda s: (order.index(s.name) if s.name in order else len(order), s.name)
    )


@cache
def auto_table() -> dict[str, dict[str, Any]]:
    """Return speedups/auto.yaml."""
    return read_document(PACKAGE_DIR / "speedups" / "auto.yaml")


def parse_wish(speedups: str | Sequence[str]) -> Wish:
    """Read auto, none, a list of names, or edits of auto such as `auto,-compile,+fused-adamw`.

    Raises: ConfigError for a name that is no speedup, with the nearest one.
    """
    words = _words(speedups)
    named: list[str] = []
    dropped: list[str] = []
    edits = any(word[0] in "+-" for word in words)
    auto = "auto" in words or edits
    for word in words:
        if word in ("auto", "none"):
            continue
        name = _meant(word)
        if ":" not in name and name not in SPEEDUPS.names():
            raise unknown_name("speedup", name, SPEEDUPS.names())
        (dropped if word.startswith("-") else named).append(name)
    if "none" in words and (auto or named):
        raise ConfigError(
            f"speedups={','.join(words)} asks for none and for some.",
            fix="Write none alone, or leave it out.",
        )
    both = next((name for name in named if name in dropped), None)
    if both:
        raise ConfigError(
            f"speedups={','.join(words)} asks for {both!r} and leaves it out.",
            fix=f"Write {both} once, with + or with -.",
        )
    return Wish(auto, tuple(named), tuple(dropped))


def _words(speedups: str | Sequence[str]) -> list[str]:
    return [
        word.strip()
        for word in (speedups.split(",") if isinstance(speedups, str) else speedups)
        if word.strip()
    ]


def _meant(word: str) -> str:
    """Return the speedup that a word of a wish names."""
    name = word.lstrip("+-")
    return name if ":" in name else name.replace("_", "-")


def naming(speedups: str | Sequence[str], names: Iterable[str]) -> str:
    """Return a wish that names these besides, and leaves none of them out."""
    added = list(names)
    sign = "+" if parse_wish(speedups).auto else ""
    kept = [
        word for word in _words(speedups) if not (word.startswith("-") and _meant(word) in added)
    ]
    return ",".join([*kept, *(sign + name for name in added)])


def select(
    config: RunConfig, machine: Machine, *, device: str = "cpu", minutes: float | None = None
) -> list[Decision]:
    """Decide every speedup for a run on `device` that will last about `minutes` (None: not known).

    Raises: ConfigError when the wish contradicts itself; HardwareError when a speedup that was
            named cannot run here.
    """
    wish = _with_precision(parse_wish(config.speedups), config, machine)
    known = all_speedups() + [speedup_named(name) for name in wish.named if ":" in name]
    decisions = [_decide(speedup, wish, config, machine, device, minutes) for speedup in known]
    by_name = {speedup.name: speedup for speedup in known}
    settled = _yielding(
        _accompanied(_with_room(decisions, by_name, wish, config), wish, device), wish, device
    )
    return _with_needs(settled, by_name, wish, config, machine)


def settled(
    config: RunConfig, machine: Machine, *, asked: RunConfig | None = None
) -> list[Decision]:
    """Return the decisions that a resolved configuration already holds: a resumed run chooses
    nothing again.

    `asked` is the configuration that the run was started with, which tells a micro-batch that was
    chosen from one that was stated.
    """
    on = parse_wish(config.speedups).named
    known = all_speedups() + [speedup_named(name) for name in on if ":" in name]
    again = "as when the run began"
    reasons = {s.name: s.reason_against(machine, config) for s in known}
    words = {
        name: f"{again}; but now: {reason}" if name in on and reason else reason or again
        for name, reason in reasons.items()
    }
    if (
        asked is not None
        and asked.batch.rows_per_device == "auto"
        and asked.batch.accumulate is None
    ):
        words[MICRO_BATCH] = (
            f"the micro-batch was chosen when the run started (batch.rows_per_device={config.batch.rows_per_device})"
        )
    return [Decision(s.name, s.name in on, words[s.name]) for s in known]


def assemble(decisions: Iterable[Decision]) -> Recipe:
    """Return the baseline with every speedup that is on.

    Raises: ConfigError when two of them fill one slot.
    """
    recipe = baseline()
    for decision in decisions:
        if decision.on:
            recipe = recipe.with_speedup(speedup_named(decision.name))
    return recipe


def _with_precision(wish: Wish, config: RunConfig, machine: Machine) -> Wish:
    """`train.precision` is a wish too: a precision that is stated names its speedup, the one that
    another needs or that works, and drops the rest.
    """
    precision = config.train.precision
    if precision == "auto":
        return wish
    ways = PRECISIONS.get(precision, ())
    every = [name for names in PRECISIONS.values() for name in names]
    contrary = [name for name in wish.named if name in every and name not in ways]
    if contrary:
        meant = next(key for key, names in PRECISIONS.items() if contrary[0] in names)
        raise ConfigError(
            f"train.precision={precision} and speedups={contrary[0]} contradict each other.",
            fix=f"Set train.precision={meant}, or leave {contrary[0]!r} out of speedups.",
        )
    needed = {need for name in wish.named for need in speedup_named(name).needs}
    able = [name for name in ways if SPEEDUPS.get(name).reason_against(machine, config) is None]
    preferred = [name for name in ways if name in needed]
    named = [name for name in ways if name in wish.named] or [*preferred, *able, *ways][:1]
    others = tuple(name for name in every if name not in named)
    return Wish(wish.auto, tuple(dict.fromkeys([*wish.named, *named])), wish.dropped + others)


def _decide(
    speedup: Speedup,
    wish: Wish,
    config: RunConfig,
    machine: Machine,
    device: str,
    minutes: float | None,
) -> Decision:
    name = speedup.name
    if name in wish.named:
        why_not = speedup.reason_against(machine, config)
        if why_not:
            raise HardwareError(
                f"The speedup {name!r} cannot be used: {why_not}",
                fix=f"Leave it out: {_without(name, config)}.",
            )
        return Decision(name, True, "asked for")
    if name in wish.dropped:
        stated = config.train.precision != "auto" and any(
            name in ways for ways in PRECISIONS.values()
        )
        return Decision(
            name,
            False,
            f"train.precision={config.train.precision}" if stated else "left out by speedups",
        )
    if not wish.auto:
        return Decision(name, False, "not among speedups")
    why_not = speedup.reason_against(machine, config)
    if why_not:
        return Decision(name, False, why_not)
    return _by_table(speedup, device, minutes)


def _less(name: str, speedups: str | Sequence[str]) -> str:
    """Return a wish that says nothing of `name`."""
    left = [word for word in _words(speedups) if _meant(word) != name]
    still_edits = parse_wish(left).auto or not parse_wish(speedups).auto
    return ",".join(left if still_edits else ["auto", *left]) or "none"


def _without(name: str, config: RunConfig) -> str:
    """Return the setting that is the user's own but for `name`, which speedups names, or else
    train.precision brings.
    """
    named = name in map(_meant, _words(config.speedups))
    return f"speedups={_less(name, config.speedups)}" if named else "train.precision=auto"


def _by_table(speedup: Speedup, device: str, minutes: float | None) -> Decision:
    entry = _table_entry(speedup.name, device)
    if not entry:
        return Decision(speedup.name, False, "off unless named: auto has no measurement for it")
    reason = str(entry.get("because", speedup.saves))
    least = entry.get("from_minutes")
    if not entry.get("on", False) and least is None:
        return Decision(speedup.name, False, reason)
    if least is not None and minutes is None:
        return Decision(
            speedup.name,
            False,
            f"pays from {least:g} minutes, and how long the run takes is not known: {reason}",
        )
    if least is not None and minutes is not None and minutes < least:
        return Decision(
            speedup.name,
            False,
            f"this run lasts about {minutes:.1f} minutes; pays from {least:g}: {reason}",
        )
    return Decision(speedup.name, True, reason)


def longest_wait() -> float:
    """Return the minutes from which every speedup pays that the table has on for long runs."""
    return max(
        float(entry.get("from_minutes", 0))
        for row in auto_table().values()
        for entry in row.values()
    )


def is_measured(speedup: Speedup, config: RunConfig, machine: Machine, device: str) -> bool | None:
    """Say whether a measurement on such a device stands behind what `auto` does with a speedup
    there.

    Returns: None where its table has no row and needs none, because the speedup cannot run there.
    """
    entry = _table_entry(speedup.name, device)
    if not entry and speedup.reason_against(machine, config):
        return None
    return bool(entry.get("measured", False))


def _table_entry(name: str, device: str) -> dict[str, Any]:
    entry: dict[str, Any] = auto_table().get(name, {}).get(device.partition(":")[0], {})
    return entry


def _yielding(decisions: list[Decision], wish: Wish, device: str) -> list[Decision]:
    """A speedup that the table has on unless another one is: off when that is on."""
    by_name = {decision.name: decision for decision in decisions}

    def rival(name: str) -> str | None:
        """Return what `name`, on so far, yields to."""
        preferred = [] if name in wish.named else _table_entry(name, device).get("unless", [])
        return next(
            (other for other in preferred if by_name[other].on and rival(other) is None), None
        )

    yielding = {
        decision.name: other
        for decision in decisions
        if decision.on and (other := rival(decision.name))
    }
    return [
        Decision(d.name, False, f"{yielding[d.name]} is on and does the same, better")
        if d.name in yielding
        else d
        for d in decisions
    ]


def _accompanied(decisions: list[Decision], wish: Wish, device: str) -> list[Decision]:
    """A speedup that the table has on only with one of others: off when all of them are."""
    on = {decision.name for decision in decisions if decision.on}
    settled = []
    for decision in decisions:
        company = (
            []
            if decision.name in wish.named
            else _table_entry(decision.name, device).get("with", [])
        )
        if decision.on and company and not on.intersection(company):
            decision = Decision(
                decision.name,
                False,
                f"it is for runs with {' or '.join(company)}, and this one is without",
            )
        settled.append(decision)
    return settled


def _with_room(
    decisions: list[Decision], speedups: dict[str, Speedup], wish: Wish, config: RunConfig
) -> list[Decision]:
    """A speedup that was named takes its slots from those that `auto` chose; two that were named
    for one slot are refused.
    """
    taken: dict[str, str] = {}
    for name in wish.named:
        for slot in speedups[name].fills:
            first = taken.setdefault(slot, name)
            if first != name:
                raise ConfigError(
                    f"The speedups {first!r} and {name!r} both fill the slot {slot!r}.",
                    fix=f"Leave out one of the two: {_without(name, config)} or {_without(first, config)}.",
                )
    settled = []
    for decision in decisions:
        rivals = [
            taken[slot]
            for slot in speedups[decision.name].fills
            if slot in taken and decision.name not in wish.named
        ]
        if decision.on and rivals:
            decision = Decision(decision.name, False, _taken_by(rivals[0]))
        settled.append(decision)
    return settled


def _taken_by(rival: str) -> str:
    return f"{rival}, which was named, takes its place"


def _with_needs(
    decisions: list[Decision],
    speedups: dict[str, Speedup],
    wish: Wish,
    config: RunConfig,
    machine: Machine,
) -> list[Decision]:
    """A speedup whose need is off is off too; one that was named is refused."""
    on = {decision.name for decision in decisions if decision.on}
    reasons = {decision.name: decision.reason for decision in decisions}
    settled = []
    for decision in decisions:
        missing = [need for need in speedups[decision.name].needs if need not in on]
        if decision.on and missing:
            if decision.name in wish.named:
                raise _lacking(
                    decision.name, speedups[missing[0]], reasons[missing[0]], wish, config, machine
                )
            decision = Decision(decision.name, False, f"needs {missing[0]}, which is off")
        settled.append(decision)
    return settled


def _lacking(
    name: str, need: Speedup, reason: str, wish: Wish, config: RunConfig, machine: Machine
) -> ConfigError:
    """Return the error that what was named lacks what it needs: with what stands in the way, and
    with what to leave out or to add.
    """
    rival = next(
        (
            other
            for other in wish.named
            if other != name and speedup_named(other).fills.keys() & need.fills.keys()
        ),
        None,
    )
    brings = next((key for key, ways in PRECISIONS.items() if need.name in ways), None)
    leave_out = f"leave {name} out: {_without(name, config)}"
    if need.reason_against(machine, config):
        fix = f"{leave_out[0].upper()}{leave_out[1:]}."
    elif brings and config.train.precision not in ("auto", brings):
        fix = f"Set train.precision={brings}, or {leave_out}."
    elif rival:
        reason = _taken_by(rival)
        fix = f"Put {need.name} in its place: speedups={naming(_less(rival, config.speedups), [need.name])}, or {leave_out}."
    else:
        fix = f"Add {need.name}: speedups={naming(config.speedups, [need.name])}, or {leave_out}."
    return ConfigError(
        f"The speedup {name!r} needs {need.name!r}, which is off: {reason.rstrip('.')}.", fix=fix
    )
