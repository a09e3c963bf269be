"""What is known about where the time and the memory of training steps go. No torch.

`Evidence` is the input of every rule in `measure/rules/`. Three tools fill it: `diagnose
RECIPE` from a short measured run, `diagnose RUN` from the files of a recorded run, and
`flatout.watch` from somebody else's loop. Nothing here depends on how the steps are taken.

To fill it from another tool: set what was measured and omit the rest, which is then None. A
finding whose numbers are missing is not reported. Never write 0 for something that was not
measured. Times are seconds of an average step, so a save of 2 s every 100 steps is 0.02 in
`checkpoint_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict

from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine
from flatout.storage.files import Stored


class CallSite(Stored):
    """A line of the user's own code, and what it costs."""

    file: str
    """The file, as Python names it."""
    line: int
    """Line number, from 1."""
    text: str
    """The line itself, without indentation. "" when the file cannot be read."""
    count_per_step: float | None = None
    """How often it runs in an average step."""
    seconds_per_step: float | None = None
    """Seconds of an average step that are spent there."""
    caller: CallSite | None = None
    """The line that calls its function in each step. None where it was not looked for."""

    def describe(self) -> str:
        """Return `file:line: text`."""
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


class Phases(Stored):
    """Seconds of an average step by phase. None where it was not measured.

    Each moment of a step counts once, so the phases add up to at most `Evidence.step_s`. On a GPU,
    a moment at which the device works counts for the work, and one at which it idles counts for
    what the host does then.
    """

    data_wait_s: float | None = None
    """Waiting for the next batch."""
    copy_s: float | None = None
    """Copies between host and device that nothing else covers."""
    host_s: float | None = None
    """Python and the queueing of operations. On a GPU, while the device idles."""
    compute_s: float | None = None
    """Forward and backward, without memory-bound operations if those were measured."""
    memory_bound_s: float | None = None
    """Operations limited by memory bandwidth: elementwise, norms, reductions, copies."""
    communication_s: float | None = None
    """Collectives that nothing else covers."""
    optimizer_s: float | None = None
    """The optimizer's steps, with gradient clipping where it can be told apart."""
    logging_s: float | None = None
    """Reading values back, writing them, callbacks."""
    evaluation_s: float | None = None
    """Evaluation and samples, divided by the steps between them."""
    checkpoint_s: float | None = None
    """Time that saves block the loop, divided by the steps between them."""
    gc_s: float | None = None
    """Python's garbage collector."""
    compile_s: float | None = None
    """Compiling again, after the warm-up."""
    other_s: float | None = None
    """What none of the other phases covers."""

    def known(self) -> dict[str, float]:
        """Return the measured phases, by name without the unit."""
        return {
            name.removesuffix("_s"): value
            for name, value in self.model_dump().items()
            if value is not None
        }


class Counts(Stored):
    """How often things happen in an average step, and what they take. None if not measured."""

    ops: float | None = None
    """Operations (CPU) or kernels (GPU)."""
    tiny_ops: float | None = None
    """Those that take less than `trace.TINY_S`."""
    tiny_op_s: float | None = None
    """Their seconds, with the time to start them."""
    syncs: float | None = None
    """Reads of a tensor's value by the host: `.item()`, `float(tensor)`, `tensor.tolist()`..."""
    sync_s: float | None = None
    """Seconds that the host waits in them. About 0 on a CPU, where nothing is in flight."""
    expected_syncs: float | None = None
    """Those that the training code itself makes, such as logging the loss."""
    pageable_copies: float | None = None
    """Copies between a GPU and memory that is not pinned."""
    pageable_copy_s: float | None = None
    """Their seconds."""
    pageable_copy_bytes: float | None = None
    """Their size."""
    empty_cache: float | None = None
    """Calls of `torch.cuda.empty_cache()`. On a CPU they do nothing but count."""
    empty_cache_s: float | None = None
    """Their seconds."""
    allocations: float | None = None
    """Requests to the device's driver for memory, after the warm-up."""
    collections: float | None = None
    """Runs of Python's garbage collector, of any generation."""
    full_collections: float | None = None
    """Those of the oldest generation, or started by `gc.collect()`."""
    recompiles: float | None = None
    """Graphs compiled again."""
    graph_breaks: float | None = None
    """Breaks found while compiling. Not divided by steps."""


class KernelRow(Stored):
    """The operations of one class in an average step."""

    kind: str
    """The class: matmul, attention, normalisation, elementwise, reduction, copy, optimizer,
    communication, scan, loss or other."""
    seconds: float
    """Their own time."""
    share: float
    """Share of the time of all classes."""
    calls: float
    """How many there are. On a CPU without those that one of the same class calls."""
    slowest: str
    """The name that takes the most time."""


class MemoryFacts(Stored):
    """Memory of the training device, in GiB. On a CPU, that of the machine."""

    total_gib: float | None = None
    """What the device has, or what a container allows."""
    free_gib: float | None = None
    """What was free before the run."""
    peak_gib: float | None = None
    """Measured peak of the run."""
    reserved_gib: float | None = None
    """Peak that the allocator held."""
    estimated_gib: float | None = None
    """Estimate for the run, from flatout/assembly/memory.py."""
    estimated_parts_gib: Mapping[str, float] | None = None
    """The estimate by part: weights, gradients, optimizer, activations, logits, workspace."""
    rows_that_fit: int | None = None
    """Most rows per micro-batch that fit by the estimate. 0 when not even one does."""


class HostFacts(Stored):
    """The machine and the environment of the process."""

    cores: int | None = None
    """Cores that the process may use."""
    machine_cores: int | None = None
    """Cores that the machine, or the container, has."""
    threads: int | None = None
    """Threads that torch uses for one operation."""
    shared_gib: float | None = None
    """Free shared memory, through which processes send batches."""
    other_busy_cores: float | None = None
    """Cores that other processes keep busy, of those that the process may use."""
    busy_share: float | None = None
    """Share of a recorded run in which that left too few for its threads. None means all of it."""
    environment: Mapping[str, str] | None = None
    """Environment variables that matter for training and are set."""
    torch_version: str | None = None
    """Version of torch."""
    torch_cuda: str | None = None
    """The CUDA version that torch was built for. None with `torch_version` set: a CPU build."""
    sees_gpu: bool | None = None
    """Whether torch can use a GPU."""
    no_gpu_because: str | None = None
    """Why torch cannot use one."""
    disk_free_gib: float | None = None
    """Free space where checkpoints are written."""
    disk_needed_gib: float | None = None
    """What the run's checkpoints need there."""


class GpuFacts(Stored):
    """What the driver reports of the training GPU, during the steps where possible."""

    name: str | None = None
    """Its name."""
    other_processes: int | None = None
    """Processes of others that hold memory on it."""
    other_memory_gib: float | None = None
    """Memory that they hold."""
    slowed_by: tuple[str, ...] | None = None
    """Reasons for which it runs below its clock rate: power cap, heat and others. () means none."""
    clock_share: float | None = None
    """Clock rate as a share of the highest."""
    power_limit_share: float | None = None
    """Enforced power limit as a share of its default limit."""
    temperature_c: float | None = None
    """Temperature."""
    utilisation: float | None = None
    """Share of the time at which some kernel ran, as the driver measures it."""
    supports_bf16: bool | None = None
    """Whether it multiplies bfloat16."""


class DataFacts(Stored):
    """The data of the run, and how reading it uses the machine."""

    train_tokens: int | None = None
    """Tokens for training."""
    val_tokens: int | None = None
    """Tokens for validation."""
    vocab_size: int | None = None
    """Size of the vocabulary."""
    documents: int | None = None
    """Documents for training."""
    read_bytes_per_step: float | None = None
    """Bytes that came from a disk, not from memory, in an average step."""
    disk_stalled_s: float | None = None
    """Seconds of an average step at which the process waited for a disk."""
    reader_cpu_s: float | None = None
    """Processor seconds that preparing a batch takes in an average step."""
    missing: str | None = None
    """Why there is no usable dataset. None means there is one, or none is needed."""
    missing_fix: str | None = None
    """What to do about it."""


class LoopFacts(Stored):
    """What a loop that is not flatout's does, as its calls in torch show. None if not seen."""

    micro_batches: float | None = None
    """Backward passes of an average step."""
    rows: int | None = None
    """First dimension of what the model is called with."""
    workers: int | None = None
    """Processes of the DataLoader."""
    dataset: str | None = None
    """What it reads: `memory` means rows of tensors, `iterable` one that each worker reads as a
    whole, and `divided` one whose rows are divided among workers."""
    evaluation_mode: float | None = None
    """Share of the steps whose pass was in evaluation mode, after others in training mode. 0 where
    the mode makes no difference."""
    evaluates_with_gradients: bool = False
    """Whether passes of evaluations build graphs."""
    anomaly_detection: bool | None = None
    """Whether `torch.autograd.set_detect_anomaly(True)` is in effect."""
    optimizer: str | None = None
    """Class of the optimizer."""
    optimizer_way: Literal["for-loop", "foreach", "fused", "own"] | None = None
    """How it updates its tensors. `own` means it is not one of torch.optim."""
    renewals: float | None = None
    """Optimizers of the same tensors that are made in an average step."""
    tensors: int | None = None
    """Tensors that it updates."""
    float64_s: float | None = None
    """Seconds of an average forward pass in operations of float64."""
    classes: int | None = None
    """Classes of the cross entropy that is the loss."""
    kept_graphs: float | None = None
    """Share of the last steps' graphs that are still in memory."""
    kept_by: str | None = None
    """The variable that keeps them."""
    padding: float | None = None
    """Share of the columns of the model's inputs in which every row has the same padding."""
    wasted_gradients: float | None = None
    """Share of all gradients, by numbers, that belong to weights which nothing updates."""
    never_updated: tuple[str, ...] = ()
    """The names of those that belong to the model."""
    growth_bytes: float | None = None
    """Memory that each step adds, where it grows steadily. 0 means it does not."""


class Roofline(Stored):
    """The distance to what this device can do at most."""

    peak_tflops: float | None = None
    """Rate of matmuls that counts as 100%."""
    peak_source: str | None = None
    """Where that comes from: a data sheet or a measurement here."""
    achieved_tflops: float | None = None
    """Model FLOPs per second that the steps achieve."""
    mfu: float | None = None
    """Their ratio. None when the peak is unknown or was measured on a busy machine."""
    tokens_per_s: float | None = None
    """Throughput of the steps, without saves and evaluations."""
    expected_tokens_per_s: float | None = None
    """Throughput that this device should reach."""
    expected_from: str | None = None
    """How that was estimated."""


class Failure(Stored):
    """How the run ended when it could not be measured."""

    kind: Literal[
        "out-of-memory",
        "compile",
        "missing-package",
        "no-data",
        "diverged",
        "hang",
        "killed",
        "error",
    ]
    """What it is. `killed`: SIGKILL, which the operating system sends when memory runs out."""
    message: str
    """The error in one line."""
    fix: str | None = None
    """What the error itself advises."""
    step: int | None = None
    """The step at which it happened. 0 before the first."""
    site: CallSite | None = None
    """The line at which it happened, or at which a run hangs."""


MIN_SAVES = 3
"""Fewest saves, or full collections of garbage, by which their time is judged.

The first one allocates its buffers and opens its directory, and the last one comes at the end of
every run however long it is: two tell nothing about what saves take of a longer run.
"""


MIN_SHARED_GIB = 0.1
"""Least shared memory with which workers are advised. Containers have 64 MiB if none is stated."""


def lacks_shared(evidence: Evidence) -> bool:
    """Return whether worker processes would have too little shared memory for batches."""
    shared_gib = evidence.host.shared_gib
    return shared_gib is not None and shared_gib < MIN_SHARED_GIB


def lasting_s(seconds: float, saves: int) -> float | None:
    """Return the seconds of such rare work. None when there was too little to judge by."""
    return None if 0 < saves < MIN_SAVES else seconds


FAILURES = {
    "MissingPackage": "missing-package",
    "ModuleNotFoundError": "missing-package",
    "OutOfMemory": "out-of-memory",
    "MemoryError": "out-of-memory",
    "DataError": "no-data",
    "Diverged": "diverged",
}
"""Kinds of failure by the name of the error's class."""


class Evidence(Stored):
    """Everything that findings may look at. What is not known is None."""

    # NaN and infinity pass between processes. A loss may be either
    model_config = ConfigDict(ser_json_inf_nan="constants")

    source: Literal["preflight", "measured run", "recorded run", "watched loop", "script"]
    """Who filled it."""
    config: RunConfig | None = None
    """The configuration, with the choices of `auto` filled in if they are known. None for loops
    that are not flatout's. Fixes state overrides of a recipe only when there is one."""
    speedups: tuple[str, ...] | None = None
    """Speedups that are on. None if unknown."""
    compile_fallback: str | None = None
    """Why a run that should compile runs uncompiled."""
    recompile_reasons: tuple[str, ...] = ()
    """Why code was compiled again, in the compiler's words."""
    machine: Machine | None = None
    """This machine."""
    device: str | None = None
    """cpu, cuda or cuda:N."""
    world_size: int = 1
    """Processes of the run."""
    steps: int | None = None
    """Steps that the numbers are averages of."""
    step_s: float | None = None
    """Seconds from the start of a step to the start of the next, on average, all included."""
    phases: Phases = Phases()
    counts: Counts = Counts()
    kernels: tuple[KernelRow, ...] | None = None
    """Time of the operations by class, from a profiler."""
    counterfactual_s: Mapping[str, float] = {}
    """Seconds of an average step with one thing replaced. `synthetic-data`: batches that are in
    memory already. `all-threads`, `no-anomaly`: see their names. `short-turns`:
    threads give Python's lock to each other at once. Of a recipe on a CPU also settings, such as
    `speedups=auto`."""
    sites: Mapping[str, tuple[CallSite, ...]] = {}
    """Lines of the user's code, the costliest first, under: data, sync, copy, empty-cache, gc,
    python, save, logging, optimizer, recompile, compute, op (the lines that call the most
    operations), own (lines outside of torch's training work), softmax (an attention without SDPA),
    float64, decomposition (of a matrix), anomaly, threads, kept (the line that keeps graphs),
    thread (where the user's other threads do not wait), padding, rows (a batch size of 1),
    broadcast (a column and a row that make a square)."""
    rates_by_rows: Mapping[int, float] = {}
    """Tokens per second of earlier runs of this shape here, by the rows of their micro-batches."""
    memory: MemoryFacts = MemoryFacts()
    host: HostFacts = HostFacts()
    gpu: GpuFacts | None = None
    """None without a GPU, or if its driver reports nothing."""
    data: DataFacts = DataFacts()
    parameters: int | None = None
    """Weights of the model."""
    tokens_per_step: int | None = None
    """Tokens of one optimizer step."""
    planned_steps: int | None = None
    """Length of the run."""
    epochs: float | None = None
    """Passes over the training tokens in the whole run."""
    roofline: Roofline = Roofline()
    loop: LoopFacts = LoopFacts()
    losses: tuple[tuple[int, float], ...] | None = None
    """(step, training loss), including NaN and infinity."""
    grad_norms: tuple[tuple[int, float], ...] | None = None
    """(step, norm of the gradient)."""
    skipped_steps: int | None = None
    """Updates that float16 skipped."""
    failure: Failure | None = None
    """Why there are no numbers, or why the run ended."""
    remaining_s: float | None = None
    """Seconds that the run has left. Gains are weighed against them."""
    machine_lines: tuple[tuple[str, str], ...] = ()
    """What was found on the machine when no run was asked for, as a name and a text."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why, and damaged files. Shown to the user."""

    def share(self, seconds: float | None) -> float | None:
        """Return seconds of a step as a share of the step. None when either is unknown."""
        if seconds is None or not self.step_s:
            return None
        return min(max(seconds / self.step_s, 0.0), 1.0)

    def lost(self, seconds: float | None, at_least: float) -> float | None:
        """Return seconds of a step as a share of the step. None when it is below `at_least`."""
        share = self.share(seconds)
        return None if share is None or share < at_least else share

    def saved(self, name: str, at_least: float) -> float | None:
        """Return the share of the step that a counterfactual saves. None below `at_least`."""
        seconds = self.counterfactual_s.get(name)
        return None if seconds is None else self.lost((self.step_s or 0.0) - seconds, at_least)

    def lacks(self, speedup: str) -> bool:
        """Return whether the recipe, if there is one, could turn a speedup on."""
        return self.config is not None and speedup not in (self.speedups or ())

    def failed(self, *kinds: str) -> Failure | None:
        """Return how the run failed, if it is one of these kinds."""
        return self.failure if self.failure is not None and self.failure.kind in kinds else None

    def phase_shares(self) -> dict[str, float]:
        """Return the measured phases as shares of the step, by name. {} without a step time."""
        shares = {name: self.share(value) for name, value in self.phases.known().items()}
        return {name: share for name, share in shares.items() if share is not None}

    def site(self, kind: str) -> CallSite | None:
        """Return the costliest line of a kind, or None."""
        found = self.sites.get(kind, ())
        return found[0] if found else None

    @property
    def on_gpu(self) -> bool:
        """Whether the steps ran on a GPU."""
        return self.device is not None and self.device.startswith("cuda")

    def setting(self, key: str) -> Any:
        """Return the value at a dotted key of the configuration. None without one."""
        return None if self.config is None else self.config.value(key)
