"""Energy and cost of a planned run."""

from __future__ import annotations

from flatout.hardware import Figure, Machine


def power_of(machine: Machine) -> Figure | None:
    """Return the data sheet's power of one GPU; None if it is unknown, as for CPUs."""
    row = machine.row
    return row.power_w if row else None


def kwh(watts: float | None, devices: int, seconds: float | None) -> float | None:
    """Return the energy of devices at full power; None if their power or the time is unknown."""
    if watts is None or seconds is None:
        return None
    return watts * devices * seconds / 3.6e6


def cost(price_per_hour: float | None, seconds: float | None) -> float | None:
    """Return the price of the machine for so long; None without a price or a time."""
    if price_per_hour is None or seconds is None:
        return None
    return price_per_hour * seconds / 3600
