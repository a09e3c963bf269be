"""What a run will need: the record of `flatout plan`, from the calculation to the screen. No torch.

What is unknown is None, and null in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.display import amount, duration
from flatout.progress import counted
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject, Result

NAMES = 13
"""Columns of the names."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "correction")
OPTIONAL = ("logits", "workspace", "correction", "host")
"""Parts that are shown only if they take something at the peak."""
NEXT_MESHES = 3
"""Meshes that are shown besides the chosen one. --json shows all."""
MOST_CHANGES = 6
"""Changes that are shown. --json shows all."""


class Change(Stored):
    """One change to a run that needs less memory."""

    overrides: list[str]
    """What to add to the command line."""
    saves_gib: float
    need_gib: float
    """What all tensors need with it."""
    fits: bool
    speed: str
    """Its cost or gain in speed, and where that comes from."""
    tolerance: str | None
    """The loss tolerance of its speedups, if it is weaker than rounding."""


class MicroBatch(Stored):
    """A micro-batch of the run, in a comparison."""

    rows_per_device: int
    """Its rows."""
    need_gib: float
    """Memory that the run needs with it."""
    fits: bool | None
    """Whether that is free. Null if unknown."""
    tokens_per_s: float | None
    """Predicted rate. Null if unknown, as when it does not fit."""

    def line(self) -> str:
        """Return a line of the table."""
        spills = "does not fit: it fails, or on Windows and WSL spills to the host, much slower"
        answer = {True: "fits", False: spills, None: ""}[self.fits]
        rate = f"{amount(self.tokens_per_s)} tokens/s, " if self.tokens_per_s else ""
        name = f"{counted(self.rows_per_device, 'row'):>11}"
        return f"{name}  {self.need_gib:7.2f} GiB  {rate}{answer}"


class MeshChoice(Stored):
    """One arrangement of the processes, with what it needs and reaches."""

    overrides: list[str]
    """Its keys."""
    rows_per_device: int
    """Rows of a micro-batch."""
    need_gib: float | None
    """Memory of a device."""
    fits: bool | None
    """Whether it fits. Null if unknown."""
    tokens_per_s: float | None
    """Predicted rate of all devices, also where it does not fit."""
    source: str
    """What the rate was predicted from."""

    def line(self) -> str:
        """Return a line of the table."""
        rate = f"{amount(self.tokens_per_s)} tokens/s" if self.tokens_per_s else "rate unknown"
        need = f", {self.need_gib:.1f} GiB" if self.need_gib is not None else ""
        answer = ", does not fit" if self.fits is False else ""
        rows = counted(self.rows_per_device, "row")
        return f"{' '.join(self.overrides)}: {rate}, {rows}{need}{answer}"


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
    params: int
    """Parameters of the model."""
    params_by_part: dict[str, int]
    """Embedding, the parts of the blocks, head, and the rest. A tied head is in the embedding."""
    flops_per_token: float
    """Training FLOPs per token, causal-exact: each query with the keys that it sees."""
    flops_per_token_palm: float
    """The same with every query against all keys, the usual convention for MFU."""
    memory: JsonObject | None
    """The predicted peak of one device in GiB, by part.

    weights, gradients, optimizer, activations, logits, workspace and the correction by earlier runs
    add up to `allocated`. `reserved` is what the allocator holds for it, `context` what the process
    needs besides, `total` is their sum. `available` is what the device has, `host` what is in the
    memory of the machine instead. null for a model that cannot be traced."""
    memory_from: str | None
    """How the memory was predicted."""
    memory_error: float | None
    """Relative error to expect of the memory. Null if not known."""
    peak_gib: float | None
    """The number that `train` will report as peak_gib."""
    fits: bool | None
    """Whether it fits in the memory that is available now. Null if not known."""
    rows_per_device: int
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    largest_rows_per_device: int | None
    """The largest micro-batch that fits. 0 means none does."""
    steps: int | None
    """Optimizer steps."""
    tokens: int | None
    """Training tokens."""
    tokens_per_s: float | None
    """Steady rate of all devices."""
    tokens_per_s_from: str
    """The assumed efficiency and its source."""
    mfu: float | None
    """Share of the peak rate that this is."""
    mfu_of: str | None
    """The peak rate and its source."""
    wall_s: float | None
    """Seconds of the run."""
    wall_s_error: float | None
    """Relative error of the predicted time in earlier runs of this shape. Null if not known."""
    kwh: float | None
    """Energy of the GPUs at their highest power."""
    kwh_from: str | None
    """The power and its source."""
    cost: float | None
    """Hours times --price-per-hour."""
    speedups: list[str]
    """Speedups that would be on."""
    changes: list[Change]
    """If it does not fit: what would make it fit, with the memory saved and the cost in speed."""
    smallest_machine: str | None
    """If not even one row fits: the smallest known machine that can train it with one."""
    batches: list[MicroBatch]
    """The micro-batches of --rows."""
    meshes: list[MeshChoice]
    """For several GPUs of --machine, without keys under `parallel`: the mesh that was chosen, and
    those that were not, the fastest that fit first."""
    notes: list[str]
    """What the plan omits, and why."""

    def summary(self) -> str:
        """Return the plan as aligned lines."""
        lines = [*self._facts(), *self._memory(), *self._time(), *self._changes()]
        names = ["Mesh", "Next", *[""] * len(self.meshes)]
        shown = [mesh.line() for mesh in self.meshes[: 1 + NEXT_MESHES]]
        lines += list(zip(names, shown, strict=False))
        names = ["Batches", *[""] * len(self.batches)]
        lines += [(name, batch.line()) for name, batch in zip(names, self.batches, strict=False)]
        lines += [("Note", note) for note in self.notes]
        return "\n".join(f"{name:<{NAMES}}{text}".rstrip() for name, text in lines)

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "Run", f"{self.recipe} on {self.machine}"
        parts = [f"{name} {amount(n)}" for name, n in self.params_by_part.items()]
        inside = [part for part in parts if part.startswith("blocks.")]
        if inside:  # in brackets after their sum
            blocks = {name: n for name, n in self.params_by_part.items() if "blocks." in name}
            shown = ", ".join(inside).replace("blocks.", "").replace("_", " ")
            parts[parts.index(inside[0])] = f"blocks {amount(sum(blocks.values()))} ({shown})"
            parts = [part for part in parts if part not in inside]
        yield "Parameters", f"{self.params:,}: {', '.join(parts)}"
        yield (
            "FLOPs",
            f"{amount(self.flops_per_token)} per token, causal-exact; "
            f"{amount(self.flops_per_token_palm)} as PaLM counts them",
        )
        batch = f"{counted(self.rows_per_device, 'row')} per device, "
        batch += f"{counted(self.accumulate, 'micro-batch', 'micro-batches')} per step"
        length = "length unknown"
        if self.steps:
            length = f"{counted(self.steps, 'step')}, {amount(self.tokens or 0, 'tokens')}"
        yield "Batch", f"{batch}; {length}"

    def _memory(self) -> Iterator[tuple[str, str]]:
        memory = self.memory
        if memory is None:
            yield "Memory", "unknown"
            return
        error = self.memory_error
        known = f"error about {error:.0%}" if error is not None else "error unknown"
        unit, per_gib, digits = ("MiB", 1024, 1) if memory["total"] < 1 else ("GiB", 1, 2)
        yield "Memory", f"{unit} per device at the peak, in {memory['peak_in']} ({known})"
        texts = {name: name for name in PARTS}
        if memory["gradients_in_all"] > memory["gradients"] + 0.005:
            texts["gradients"] += f" ({memory['gradients_in_all']:.2f} GiB later in the step)"
        texts |= {"allocated": "allocated", "reserved": "reserved by the allocator"}
        texts |= {"context": "context, the process besides", "total": "in all"}
        if memory["available"] is not None:
            largest = self.largest_rows_per_device
            most = "1 row fits" if largest == 1 else f"{largest or 0:,} rows fit"
            rows = f"at most {most}" if largest else "not even one row fits"
            answer = "fits" if self.fits else "does not fit"
            texts["total"] += f" of {memory['available']:.2f} GiB: {answer}; {rows}"
        texts["host"] = "in the machine's memory: weights, gradients and optimizer state"
        for name, text in texts.items():
            if name not in OPTIONAL or round(memory[name] * per_gib, digits):
                yield "", f"{memory[name] * per_gib:9.{digits}f}  {text}"
        yield "", f"Source: {self.memory_from}."

    def _time(self) -> Iterator[tuple[str, str]]:
        rate = self.tokens_per_s
        if rate is None and self.fits is False:
            yield "Time", self.tokens_per_s_from
            return
        yield "Speed", (f"{amount(rate)} tokens/s: " if rate else "") + self.tokens_per_s_from
        if self.mfu:
            yield "MFU", f"{self.mfu:.1%} of {self.mfu_of}"
        if self.wall_s is None:
            yield "Time", "unknown"
        else:
            error = self.wall_s_error
            known = (
                "" if error is None else f"; the rates of these runs differ by up to {error:.0%}"
            )
            yield "Time", f"{duration(self.wall_s)}{known}"
        if self.kwh is not None:
            yield "Energy", f"{self.kwh:,.3g} kWh at {self.kwh_from}"
        elif self.wall_s is not None:
            yield "Energy", "unknown, as the power of this device is"
        if self.cost is not None:
            yield "Cost", f"{self.cost:,.2f}"

    def _changes(self) -> Iterator[tuple[str, str]]:
        if self.changes:
            yield "To make it fit", ""
        for change in self.changes[:MOST_CHANGES]:
            fits = "fits" if change.fits else "not enough"
            facts = f"{change.saves_gib:.2f} GiB less, {fits}", f"speed {change.speed}"
            told = "; ".join(filter(None, (*facts, change.tolerance)))
            yield "", f"{' '.join(change.overrides)}: {told}"
        if self.smallest_machine:
            yield "Smallest", f"{self.smallest_machine}: one row per device fits"
