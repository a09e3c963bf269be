"""How `speedups=auto` decides one speedup: by its default, or by measurements here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.parts import Decision
from flatout.assembly.recipe import Off, On, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine
from flatout.registry import SPEEDUPS

if TYPE_CHECKING:
    from flatout.assembly.prediction import Gain


def all_speedups() -> list[Speedup]:
    """Return all built-in speedups in ladder order: by rank, then by name."""
    found = [SPEEDUPS.get(name) for name in SPEEDUPS.names()]
    return sorted(found, key=lambda speedup: (speedup.rank, speedup.name))


def default_of(speedup: Speedup, device: str) -> On | Off | None:
    """Return the default that a speedup's file states for `cpu` or `cuda`, or None.

    On MPS, for which no file states one, a speedup is on if it is on for CPUs and for GPUs.
    """
    if device == "mps":
        known = [speedup.auto.get("cpu"), speedup.auto.get("cuda")]
        return On() if all(isinstance(default, On) for default in known) else None
    return speedup.auto.get("cuda" if device.startswith("cuda") else "cpu")


def overrides(speedup: Speedup, gain: Gain | None) -> bool | None:
    """Return whether a gain measured here turns a speedup on or off; None leaves the default.

    The gain's interval must lie entirely above or below 1. A speedup with a statistical promise is
    never turned on: a measured rate says nothing about the loss.
    """
    if gain is None or not (gain.is_faster or gain.is_slower):
        return None
    if gain.is_faster and speedup.promise.kind == "statistical":
        return None
    return gain.is_faster


def decide(
    speedup: Speedup, device: str, minutes: float | None, gain: Gain | None = None
) -> Decision:
    """Decide a speedup that can run, for a run of `minutes` (None: unknown).

    `gain` is the one measured on this hardware, if any.
    """
    default, override = default_of(speedup, device), overrides(speedup, gain)
    if default is None and override is None:
        return Decision(speedup.name, False, "off unless named, because it has not been measured")
    reason = (default.because if default else None) or speedup.saves
    if override is not None and gain is not None:
        reason = f"measured here: {gain.describe()}"
    on = isinstance(default, On) if override is None else override
    least = default.from_minutes if default else 0
    if on and least and minutes is None:
        on = False
        reason = f"pays off from {least:g} minutes, and the run's duration is unknown: {reason}"
    elif on and minutes is not None and minutes < least:
        on = False
        reason = f"this run lasts about {minutes:.1f} minutes; pays off from {least:g}: {reason}"
    return Decision(speedup.name, on, reason)


def is_measured(speedup: Speedup, config: RunConfig, machine: Machine, device: str) -> bool | None:
    """Return whether a speedup's default is based on a measurement on this kind of device.

    Returns: None if it has no default because it cannot run there.
    """
    default = default_of(speedup, device)
    if default is None and speedup.reason_against(machine, config):
        return None
    return default is not None and default.measured


def longest_wait() -> float:
    """Return the longest `from_minutes` of the speedups that are on by default."""
    return max(
        (
            default.from_minutes
            for speedup in all_speedups()
            for default in speedup.auto.values()
            if isinstance(default, On)
        ),
        default=0,
    )
