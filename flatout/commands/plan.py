"""Say what a run will need before it starts: memory, time, energy, cost."""

from __future__ import annotations

from typing import Annotated

from flatout.assembly import preflight
from flatout.cache import default_cache
from flatout.commands import Command, Option, Overrides, RecipeName
from flatout.config.schema import load_config
from flatout.json_io import JsonObject, Result
from flatout.progress import SILENT, Progress


class PlanResult(Result):
    """What a run will need; unknown figures are null."""

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
    """Embedding, the parts of the blocks, head, and the rest; a tied head is in the embedding."""
    flops_per_token: float
    """Training FLOPs per token, causal-exact: each query with the keys that it sees."""
    flops_per_token_palm: float
    """The same with every query against all keys, the usual convention for MFU."""
    memory: JsonObject | None
    """The predicted peak of one device in GiB, by part.

    weights, gradients, optimizer, activations, logits, workspace and the correction by earlier runs
    add up to `allocated`; `reserved` is what the allocator holds for it, `context` what the process
    needs besides, `total` is their sum; `available` is what the device has. null for a model that
    cannot be traced."""
    memory_from: str | None
    """How the memory was predicted."""
    memory_error: float | None
    """Relative error to expect of the memory; null: not known."""
    peak_gib: float | None
    """The figure that `train` will report as peak_gib."""
    fits: bool | None
    """Whether it fits in the memory that is available now; null: not known."""
    rows_per_device: int
    """Sequences in a micro-batch."""
    accumulate: int
    """Micro-batches per step."""
    largest_rows_per_device: int | None
    """The largest micro-batch that fits; 0: none does."""
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
    """Relative error of the predicted time in earlier runs of this shape; null: not known."""
    kwh: float | None
    """Energy of the GPUs at their highest power."""
    kwh_from: str | None
    """The power and its source."""
    cost: float | None
    """Hours times --price-per-hour."""
    speedups: list[str]
    """Speedups that would be on."""
    changes: list[JsonObject]
    """If it does not fit: what would make it fit, with the memory saved and the cost in speed."""
    smallest_machine: str | None
    """If not even one row fits: the smallest known machine that can train it with one."""
    notes: list[str]
    """What the plan leaves out, and why."""

    def summary(self) -> str:
        """Return the plan as aligned lines."""
        from flatout.terminal.plan import plan_lines

        return plan_lines(self.model_dump())


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    machine: Annotated[
        str | None, Option("Plan for another machine, such as '8x H100'; this one by default.")
    ] = None,
    price_per_hour: Annotated[
        float | None, Option("Price of the whole machine per hour, for the cost.", min=0)
    ] = None,
    *,
    progress: Progress = SILENT,
) -> PlanResult:
    """Say what a run will need before it starts: memory, time, energy, cost.

    It needs neither the data nor a GPU. A dataset that is here gives the vocabulary size and the
    length of an epoch; otherwise model.vocab_size must be set. The memory is traced on tensors
    without values. The rate comes from earlier runs of the same shape on this hardware, then from
    bench, then from an assumed share of the peak rate. A run that does not fit gets a list of
    changes, each with what it saves and what it costs in speed.

    Raises: UsageError.
    """
    from flatout.measure.plan.plan import make_plan
    from flatout.measure.plan.result import fields_of

    made = make_plan(
        load_config(recipe, overrides or ()), machine, cache=default_cache(), progress=progress
    )
    return PlanResult(**fields_of(made, price_per_hour, progress=progress))


def check(
    recipe: str,
    overrides: list[str] | None,
    machine: str | None = None,
    progress: Progress = SILENT,
) -> None:
    """Check the command line as far as that is possible without torch.

    Raises: UsageError.
    """
    config = load_config(recipe, overrides or ())
    preflight.check_names(config)
    preflight.check_paths(config)
    if machine is not None:
        preflight.require_machine(config, machine)


COMMAND = Command(
    plan,
    example="flatout plan gpt2-124m --machine '8x H100'",
    check=check,
    needs_torch=True,
)
