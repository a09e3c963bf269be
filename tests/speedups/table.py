"""The generated part of docs/speedups.md."""

from flatout.assembly.choices import all_speedups


def row(speedup) -> str:
    """Return the table row of one speedup."""
    tolerance = speedup.tolerance.kind
    tolerance += f", {speedup.tolerance.rtol:g}" if tolerance == "rounding" else ""
    needs = ", ".join(f"`{name}`" for name in speedup.needs)
    return f"| `{speedup.name}` | {speedup.saves} | {tolerance} | {needs} |\n"


def tables() -> str:
    """Return the table of all speedups."""
    header = "| speedup | what it saves | tolerance | needs |\n|---|---|---|---|\n"
    return header + "".join(map(row, all_speedups()))
