"""The plan of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flatout.figures import amount, duration
from flatout.json_io import JsonObject
from flatout.progress import counted
from flatout.terminal.screen import columns, wrapped

NAMES = 13
"""Columns of the names."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "correction")
OPTIONAL = ("logits", "workspace", "correction")
"""Parts that are shown only if they take something at the peak."""
MOST_CHANGES = 6
"""Changes that are shown; --json has all."""


def plan_lines(plan: JsonObject, *, width: int | None = None) -> str:
    """Return the fields of `flatout plan` as aligned lines, wrapped to `width` columns."""
    lines = [
        *_facts(plan),
        *_memory(plan),
        *_time(plan),
        *_changes(plan),
        *(("Note", note) for note in plan["notes"]),
    ]
    return wrapped(
        "\n".join(f"{name:<{NAMES}}{text}".rstrip() for name, text in lines),
        width or columns(),
        hanging=NAMES,
    )


def _facts(plan: JsonObject) -> Iterator[tuple[str, str]]:
    yield "Run", f"{plan['recipe']} on {plan['machine']}"
    yield "Parameters", f"{plan['params']:,}: {', '.join(_parts(plan['params_by_part']))}"
    yield (
        "FLOPs",
        f"{amount(plan['flops_per_token'])} per token, causal-exact; "
        f"{amount(plan['flops_per_token_palm'])} as PaLM counts them",
    )
    batch = f"{counted(plan['rows_per_device'], 'row')} per device, accumulated "
    batch += counted(plan["accumulate"], "time")
    length = "length unknown"
    if plan["steps"]:
        length = f"{counted(plan['steps'], 'step')}, {amount(plan['tokens'], 'tokens')}"
    yield "Batch", f"{batch}; {length}"


def _parts(params: Mapping[str, int]) -> Iterator[str]:
    """Yield the parts of the model; those of the blocks are in brackets after their sum."""
    inside = {name: n for name, n in params.items() if name.startswith("blocks.")}
    for name, number in params.items():
        if name not in inside:
            yield f"{name} {amount(number)}"
        elif name == next(iter(inside)):
            details = ", ".join(
                f"{part.removeprefix('blocks.').replace('_', ' ')} {amount(n)}"
                for part, n in inside.items()
            )
            yield f"blocks {amount(sum(inside.values()))} ({details})"


def _memory(plan: JsonObject) -> Iterator[tuple[str, str]]:
    memory = plan["memory"]
    if memory is None:
        yield "Memory", "unknown"
        return
    error = plan["memory_error"]
    known = f"error about {error:.0%}" if error is not None else "error unknown"
    unit, per_gib, digits = ("MiB", 1024, 1) if memory["total"] < 1 else ("GiB", 1, 2)
    yield "Memory", f"{unit} per device at the peak, in {memory['peak_in']} ({known})"

    def line(name: str, text: str) -> tuple[str, str]:
        return "", f"{memory[name] * per_gib:9.{digits}f}  {text}"

    for name in PARTS:
        if name not in OPTIONAL or round(memory[name] * per_gib, digits):
            yield line(name, f"{name}{_later(name, memory)}")
    yield line("allocated", "allocated")
    yield line("reserved", "reserved by the allocator")
    yield line("context", "context, the process besides")
    yield line("total", f"in all{_verdict(plan)}")
    yield "", f"Source: {plan['memory_from']}."


def _later(name: str, memory: JsonObject) -> str:
    if name == "gradients" and memory["gradients_in_all"] > memory["gradients"] + 0.005:
        return f" ({memory['gradients_in_all']:.2f} GiB later in the step)"
    return ""


def _verdict(plan: JsonObject) -> str:
    available = plan["memory"]["available"]
    if available is None:
        return ""
    largest = plan["largest_rows_per_device"]
    answer = "fits" if plan["fits"] else "does not fit"
    most = "1 row fits" if largest == 1 else f"{largest or 0:,} rows fit"
    rows = f"at most {most}" if largest else "not even one row fits"
    return f" of {available:.2f} GiB: {answer}; {rows}"


def _time(plan: JsonObject) -> Iterator[tuple[str, str]]:
    rate = plan["tokens_per_s"]
    if rate is None and plan["fits"] is False:
        yield "Time", plan["tokens_per_s_from"]
        return
    yield "Speed", (f"{amount(rate)} tokens/s: " if rate else "") + plan["tokens_per_s_from"]
    if plan["mfu"]:
        yield "MFU", f"{plan['mfu']:.1%} of {plan['mfu_of']}"
    if plan["wall_s"] is None:
        yield "Time", "unknown"
    else:
        error = plan["wall_s_error"]
        known = "" if error is None else f"; the rates of these runs differ by up to {error:.0%}"
        yield "Time", f"{duration(plan['wall_s'])}{known}"
    if plan["kwh"] is not None:
        yield "Energy", f"{plan['kwh']:,.3g} kWh at {plan['kwh_from']}"
    elif plan["wall_s"] is not None:
        yield "Energy", "unknown, as the power of this device is"
    if plan["cost"] is not None:
        yield "Cost", f"{plan['cost']:,.2f}"


def _changes(plan: JsonObject) -> Iterator[tuple[str, str]]:
    if plan["changes"]:
        yield "To make it fit", ""
    for change in plan["changes"][:MOST_CHANGES]:
        fits = "fits" if change["fits"] else "not enough"
        facts = [f"{change['saves_gib']:.2f} GiB less, {fits}", f"speed {change['speed']}"]
        facts += [change["promise"]] if change["promise"] else []
        yield "", f"{' '.join(change['overrides'])}: {'; '.join(facts)}"
    if plan["smallest_machine"]:
        yield "Smallest", f"{plan['smallest_machine']} would do, with one row per device"
