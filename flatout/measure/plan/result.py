"""What a run will need: the record of `flatout plan`. No torch.

What is unknown is None, and null in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from flatout.display import (
    Column,
    Display,
    Show,
    Table,
    amount,
    displayed,
    duration,
    gib,
    rate,
    table_of,
)
from flatout.progress import counted
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject, Result

SHOWN = "weights", "gradients", "optimizer", "activations", "logits", "workspace", "allocated"
PARTS = {
    **dict(zip(SHOWN, SHOWN, strict=True)),
    "reserved": "reserved by the allocator",
    "context": "context, the process besides",
    "total": "in all",
    "host": "in the machine's memory: weights, gradients and optimizer state",
}
OPTIONAL = ("logits", "workspace", "host")
"""Parts that are shown only if they take something at the peak."""
LEAST_GIB = 0.05 / 1024
MOST_MESHES, MOST_CHANGES = 4, 6
"""Meshes and changes that are shown. --json shows all."""


class Alternative(Stored):
    """A variant of the run: a mesh, a micro-batch, or a change that needs less memory."""

    overrides: Annotated[list[str], Show("", " ".join)]
    """What to add to the command line."""
    rows_per_device: Annotated[int, Show("rows")]
    """Rows of a micro-batch."""
    need_gib: Annotated[float | None, Show("GiB", ",.2f")]
    """What a device needs with it."""
    fits: Annotated[bool | None, Show("fits")]
    """Whether that is free. Null if unknown."""
    tokens_per_s: Annotated[float | None, Show("tokens/s", amount)]
    """Predicted rate of all devices. Null if unknown, as when it does not fit."""
    source: str
    """What the rate was predicted from."""


class Change(Alternative):
    """One change to a run that needs less memory."""

    saves_gib: Annotated[float, Show("saves GiB", ",.2f")]
    tolerance: Annotated[str | None, Show("losses", unknown="")]
    """The loss tolerance of its speedup, if it is weaker than rounding."""


def _params(plan: Plan) -> str:
    groups: dict[str, dict[str, int]] = {}
    for name, number in plan.params_by_part.items():
        group, _, part = name.partition(".")
        groups.setdefault(group, {})[part.replace("_", " ")] = number
    texts = []
    for group, parts in groups.items():
        inside = ", ".join(f"{part} {amount(number)}" for part, number in parts.items() if part)
        texts.append(f"{group} {amount(sum(parts.values()))}" + (f" ({inside})" if inside else ""))
    return f"{plan.params:,}: {', '.join(texts)}"


def _flops(plan: Plan) -> str:
    exact, palm = amount(plan.flops_per_token), amount(plan.flops_per_token_palm)
    return f"{exact} per token, causal-exact; {palm} as PaLM counts them"


def _batch(plan: Plan) -> str:
    length = "length unknown"
    if plan.steps:
        length = f"{counted(plan.steps, 'step')}, {amount(plan.tokens or 0, 'tokens')}"
    rows = counted(plan.rows_per_device, "row")
    each = counted(plan.accumulate, "micro-batch", "micro-batches")
    return f"{rows} per device, {each} per step; {length}"


def _memory(plan: Plan) -> str:
    memory, largest = plan.memory, plan.largest_rows_per_device
    if memory is None:
        return "unknown"
    text = f"{gib(memory['total'])} per device at the peak, in {memory['peak_in']}"
    if memory["available"] is not None:
        most = "1 row fits" if largest == 1 else f"{largest or 0:,} rows fit"
        rows = f"at most {most}" if largest else "not even one row fits"
        answer = "fits" if plan.fits else "does not fit"
        text = f"{text}, of {gib(memory['available'])}: {answer}; {rows}"
    error = plan.memory_error
    known = f"error about {error:.0%}" if error is not None else "error unknown"
    return f"{text} ({known}; {plan.memory_from})"


def _speed(plan: Plan) -> str:
    known = f"{rate(plan.tokens_per_s)}: " if plan.tokens_per_s else ""
    return known + plan.tokens_per_s_from


def _time(plan: Plan) -> str:
    if plan.wall_s is None:
        return "" if plan.fits is False else "unknown"
    error = plan.wall_s_error
    spread = "" if error is None else f"; the rates of these runs differ by up to {error:.0%}"
    return duration(plan.wall_s) + spread


def _energy(plan: Plan) -> str:
    if plan.kwh is not None:
        return f"{plan.kwh:,.3g} kWh at {plan.kwh_from}"
    return "" if plan.wall_s is None else "unknown, as the power of this device is"


class Plan(Result):
    """What a run will need. Unknown numbers are null."""

    recipe: str
    """Name of the recipe."""
    machine: str
    """The machine that it is planned for."""
    device: str
    """cpu or cuda."""
    world_size: int
    """Processes, one per GPU."""
    params: Annotated[int, Show("Parameters", record=_params)]
    """Parameters of the model."""
    params_by_part: dict[str, int]
    """Embedding, the parts of the blocks, head, and the rest. A tied head is in the embedding."""
    flops_per_token: Annotated[float, Show("FLOPs", record=_flops)]
    """Training FLOPs per token, causal-exact: each query with the keys that it sees."""
    flops_per_token_palm: float
    """The same with every query against all keys, the usual convention for MFU."""
    rows_per_device: Annotated[int, Show("Batch", record=_batch)]
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    steps: int | None
    """Optimizer steps."""
    tokens: int | None
    """Training tokens."""
    memory: Annotated[JsonObject | None, Show("Memory", record=_memory)] = None
    """The predicted peak of one device in GiB, by part.

    weights, gradients, optimizer, activations, logits and workspace add up to `allocated`.
    `reserved` is what the allocator holds for it, `context` what the process needs besides, `total`
    is their sum. `available` is what the device has, `host` what is in the memory of the
    machine instead. null for a model that cannot be traced."""
    memory_from: str | None = None
    """How the memory was predicted."""
    memory_error: float | None = None
    """Relative error to expect of the memory. Null if not known."""
    peak_gib: float | None = None
    """The number that `train` will report as peak_gib."""
    fits: bool | None
    """Whether it fits in the memory that is available now. Null if not known."""
    largest_rows_per_device: int | None
    """The largest micro-batch that fits. 0 means none does."""
    tokens_per_s: Annotated[float | None, Show("Speed", record=_speed)]
    """Steady rate of all devices."""
    tokens_per_s_from: str
    """The assumed efficiency and its source."""
    mfu: Annotated[
        float | None,
        Show("MFU", record=lambda plan: f"{plan.mfu:.1%} of {plan.mfu_of}" if plan.mfu else ""),
    ]
    """Share of the peak rate that this is."""
    mfu_of: str | None
    """The peak rate and its source."""
    wall_s: Annotated[float | None, Show("Time", record=_time)]
    """Seconds of the run."""
    wall_s_error: float | None
    """Relative error of the predicted time in earlier runs of this shape. Null if not known."""
    kwh: Annotated[float | None, Show("Energy", record=_energy)]
    """Energy of the GPUs at their highest power."""
    kwh_from: str | None
    """The power and its source."""
    cost: Annotated[float | None, Show("Cost", ",.2f", unknown="")]
    """Hours times --price-per-hour."""
    speedups: Annotated[list[str], Show("Speedups")]
    """Speedups that would be on."""
    changes: list[Change]
    """If it does not fit: what would make it fit, with the memory saved and the cost in speed."""
    batches: list[Alternative]
    """The micro-batches of --rows."""
    meshes: list[Alternative]
    """For several GPUs of --machine, without keys under `parallel`: the mesh that was chosen, and
    those that were not, the fastest that fit first."""
    notes: list[str]
    """What the plan omits, and why."""

    @property
    def headline(self) -> str:
        """The run and the machine."""
        return f"{self.recipe} on {self.machine}"

    def display(self) -> Display:
        """Return its lines, and its tables: memory by part, changes, meshes, micro-batches."""
        lists: dict[str, Sequence[Alternative]] = {
            "Mesh: the first is chosen": self.meshes[:MOST_MESHES],
            "Micro-batches": self.batches,
            "To make it fit": self.changes[:MOST_CHANGES],
        }
        tables = [table_of(rows, title) for title, rows in lists.items() if rows]
        if self.memory:
            columns = Column("", "right"), Column("")
            tables.insert(0, Table(columns, [*self._parts(self.memory)], "Memory by part"))
        return replace(displayed(self), tables=tables)

    def _parts(self, memory: JsonObject) -> Iterator[tuple[str, str]]:
        """Yield the sizes and names of the parts of the memory."""
        for name, text in PARTS.items():
            if name in OPTIONAL and memory[name] < LEAST_GIB:
                continue
            if name == "gradients" and memory["gradients_in_all"] > memory[name] + LEAST_GIB:
                text += f" ({gib(memory['gradients_in_all'])} later in the step)"
            yield gib(memory[name]), text
