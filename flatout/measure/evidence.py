"""What is known about where the time and the memory of training steps go. No torch.

`Evidence` is the input of every rule in `measure/rules/`. `diagnose` fills it from a short run of
a recipe, from a script or from the files of a run, and `flatout.watch` from somebody else's loop.

What was not measured is None, never 0, and a rule whose facts are missing is silent. Times are
seconds of an average step, so a save of 2 s every 100 steps is 0.02 in `checkpoint_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from flatout.config.schema import RunConfig
from flatout.display import Show
from flatout.hardware.machine import BUSY_CORES, Machine
from flatout.storage.files import Stored
from flatout.storage.streams import shortened

Number = float | None
Count = int | None
Text = str | None
"""None where it was not measured, or is not known."""
PHASES = (
    "data_wait",
    "copy",
    "host",
    "compute",
    "memory_bound",
    "communication",
    "optimizer",
    "logging",
    "evaluation",
    "checkpoint",
    "gc",
    "compile",
    "other",
)
"""The phases of a step. `Evidence` has the seconds of each."""
FailureKind = Literal[
    "out-of-memory", "missing-package", "no-data", "diverged", "hang", "killed", "error"
]
FAILURES: dict[str, FailureKind] = {
    "MissingPackage": "missing-package",
    "ModuleNotFoundError": "missing-package",
    "OutOfMemory": "out-of-memory",
    "MemoryError": "out-of-memory",
    "OutOfMemoryError": "out-of-memory",
    "DataError": "no-data",
    "Diverged": "diverged",
}
"""Kinds of failure by the name of the error's class."""
MIN_SAVES = 3
"""Fewest saves, or full collections of garbage, by which their time is judged.

The first one allocates its buffers and opens its directory, and the last one comes at the end of
every run however long it is: two tell nothing about what saves take of a longer run.
"""
MOST_WORKERS = 8
"""Most workers of a DataLoader that are advised, or tried, for each process."""
HALF = 0.5
MIN_SHARED_GIB = 0.1
"""Least shared memory with which workers are advised. Containers have 64 MiB if none is stated."""


LINES = {
    "data_wait": "data",
    "forward": "compute",
    "compute": "compute",
    "other": "own",
    "checkpoint": "save",
    "backward": "backward",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
}
"""Phases of a rank's own work, and the kinds of lines at which they spend their time."""


def typical(values: Sequence[float]) -> float | None:
    """Return the median of a metric's records without the first, which includes the warm-up."""
    return float(median(values[1:] if len(values) > 1 else values)) if len(values) else None


def lasting_s(seconds: float, saves: int) -> float | None:
    """Return the seconds of such rare work. None when there was too little to judge by."""
    return None if 0 < saves < MIN_SAVES else seconds


class CallSite(Stored):
    """A line of the user's own code, and what it costs."""

    file: str
    """The file, as Python names it."""
    line: int
    """Line number, from 1."""
    text: str
    """The line itself, without indentation. "" when the file cannot be read."""
    seconds_per_step: float | None = None
    """Seconds of an average step that are spent there."""
    caller: CallSite | None = None
    """The line that calls its function in each step. None where it was not looked for."""

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        """Return `file:line: text`, and the line that calls it if that is known."""
        called = f" (called at {self.caller.describe()})" if self.caller else ""
        return self.place + (f": {self.text}" if self.text else "") + called


class Growth(Stored):
    """What grows steadily from step to step."""

    first: float
    """The median of the first third of the steps."""
    last: float
    """That of the last third."""
    per_1000: float
    """The growth in 1,000 steps."""


class KernelRow(Stored):
    """The operations of one class in an average step."""

    kind: Annotated[str, Show("class")]
    """The class: matmul, attention, normalisation, elementwise, reduction, copy, optimizer,
    communication, scan, decomposition, loss or other."""
    seconds: Annotated[float, Show("ms", lambda seconds: f"{1e3 * seconds:.3g}")]
    """Their own time."""
    share: Annotated[float, Show("share", ".0%")]
    """Share of the time of all classes."""
    calls: Annotated[float, Show("calls", ",.0f")]
    """How many there are. On a CPU without those that one of the same class calls."""


class Failure(Stored):
    """How the run ended, or why it cannot start."""

    kind: FailureKind
    """What it is. `killed`: SIGKILL, which the operating system sends when memory runs out."""
    message: str
    """The error in one line."""
    fix: str | None = None
    """What the error itself advises."""
    step: int | None = None
    """The step at which it happened. 0 before the first."""
    site: CallSite | None = None
    """The line at which it happened, or at which a run hangs."""


class Evidence(Stored):
    """Everything that rules may look at. What is not known is None."""

    # NaN and infinity pass between processes. A loss may be either
    model_config = ConfigDict(ser_json_inf_nan="constants")

    source: Literal["preflight", "measured run", "recorded run", "watched loop", "script"]
    """Who filled it."""
    config: RunConfig | None = None
    """The configuration, with the choices of `auto` filled in if they are known. None for loops
    that are not flatout's. Fixes state overrides of a recipe only when there is one."""
    speedups: tuple[str, ...] | None = None
    """Speedups that are on."""
    machine: Machine | None = None
    """This machine."""
    device: Text = None
    """cpu, cuda or cuda:N."""
    world_size: int = 1
    """Processes of the run."""
    tokens_per_step: Count = None
    """Tokens of one optimizer step."""
    planned_steps: Count = None
    """Length of the run."""
    epochs: Number = None
    """Passes over the training tokens in the whole run."""
    remaining_s: Number = None
    """Seconds that the run has left. Gains are weighed against them."""
    failure: Failure | None = None
    """Why there are no numbers, or why the run ended."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why, and damaged files. Shown to the user."""
    machine_lines: tuple[tuple[str, str], ...] = ()
    """What was found on the machine when no run was asked for, and the time of each rank, as a name
    and a text."""

    steps: Count = None
    """Steps that the numbers are averages of."""
    step_s: Number = None
    """Seconds from the start of a step to the start of the next, on average, all included.

    Each moment of a step counts for one phase. On a GPU, a moment at which the device works counts
    for the work, and one at which it idles for what the host does then.
    """
    data_wait_s: Number = None
    """Waiting for the next batch."""
    copy_s: Number = None
    """Copies between host and device that nothing else covers."""
    host_s: Number = None
    """Python and the queueing of operations. On a GPU, while the device idles."""
    compute_s: Number = None
    """Forward and backward, without memory-bound operations if those were measured."""
    memory_bound_s: Number = None
    """Operations limited by memory bandwidth: elementwise, norms, reductions, copies."""
    communication_s: Number = None
    """Collectives that nothing else covers."""
    optimizer_s: Number = None
    """The optimizer's steps, with gradient clipping where it can be told apart."""
    logging_s: Number = None
    """Reading values back, writing them, callbacks."""
    evaluation_s: Number = None
    """Evaluation and samples, divided by the steps between them."""
    checkpoint_s: Number = None
    """Time that saves block the loop, divided by the steps between them."""
    gc_s: Number = None
    """Python's garbage collector."""
    compile_s: Number = None
    """Compiling again, after the warm-up."""
    other_s: Number = None
    """What none of the other phases covers."""
    counterfactual_s: Mapping[str, float] = {}
    """Seconds of an average step with one thing replaced: `synthetic-data`, by batches that are in
    memory already. Of a recipe on a CPU also settings, such as `speedups=auto`."""
    sites: Mapping[str, tuple[CallSite, ...]] = {}
    """Lines of the user's code, the costliest first, under: data, sync, copy, empty-cache, gc,
    python, save, logging, optimizer, recompile, compute, evaluation, evaluation-mode, op (the lines
    that call the most operations), own (lines outside of torch's training work), softmax (an
    attention without SDPA), float64, anomaly, threads, padding,
    step (which calls the optimizer), clipped (where gradients are), seeded (a seed that is the one
    before), training-mode (an evaluation in it), unshifted (targets that are the inputs), line
    (work without weights, its backward pass included),
    repeated, unread and zero (work that is repeated or has no effect), again, discarded and lost
    (passes through the same graph, those whose gradients nothing uses, those of which some are
    used), created (weights that are new in each step),
    normalised (a loss that takes logits and is given probabilities), rounded (one that is given
    probabilities, which bf16 rounds), growing (more work in each
    step), looped (the same weights in many calls that do not need each other), rows (a batch
    size of 1), broadcast (a column and a row that make a square), not-finite (the first result
    that is not), written (in-place changes of weights that an optimizer has)."""
    kernels: tuple[KernelRow, ...] | None = None
    """Time of the operations by class, from a profiler."""

    ops: Number = None
    """Operations (CPU) or kernels (GPU) of a step."""
    tiny_ops: Number = None
    """Those that take less than `trace.TINY_S`."""
    tiny_op_s: Number = None
    """Their seconds, with the time to start them."""
    syncs: Number = None
    """Reads of a tensor's value by the host in a step: `.item()`, `float(tensor)`..."""
    sync_s: Number = None
    """Seconds that the host waits in them. About 0 on a CPU, where nothing is in flight."""
    expected_syncs: Number = None
    """Those that the training code itself makes, such as logging the loss."""
    pageable_copies: Number = None
    """Copies in a step between a GPU and memory that is not pinned."""
    pageable_copy_s: Number = None
    empty_cache: Number = None
    """Calls of `torch.cuda.empty_cache()` in a step. On a CPU they do nothing but count."""
    empty_cache_s: Number = None
    gradient_syncs: Number = None
    """Backward passes of a step after which the ranks reduce their gradients."""
    waiting_s: Number = None
    """Seconds of a step for which a rank waits for the slowest one, on average of all ranks."""
    transfer_s: Number = None
    """Seconds of a step for which the slowest rank waits: those of the transfer."""
    slowest: Count = None
    """The rank that is the slowest most often."""
    slowest_phase: str = ""
    """The phase, as in `course.PHASES`, that takes the slowest rank longer than the others."""
    slowest_size: float = 1.0
    """How many times as many elements the inputs of the slowest rank have."""
    course: Sequence[Sequence[float]] = []
    """What equally many successive steps took, by `course.COLUMNS`."""
    grows: Mapping[str, Growth] = {}
    """The columns of the course that grow steadily."""

    collections: Number = None
    """Runs of Python's garbage collector in a step, of any generation."""
    recompiles: Number = None
    """Graphs compiled again in a step."""
    recompile_reason: Text = None
    """Why, in the compiler's words."""
    compile_fallback: Text = None
    """Why a run that should compile runs uncompiled."""

    total_gib: Number = None
    """Memory of the training device. On a CPU, of the machine or what a container allows."""
    free_gib: Number = None
    """What was free before the run."""
    peak_gib: Number = None
    """Measured peak of the run."""
    reserved_gib: Number = None
    """Peak that the allocator held."""
    estimated_gib: Number = None
    """Estimate for the run, from flatout/assembly/memory.py."""
    rows_that_fit: Count = None
    """Most rows per micro-batch that fit by the estimate. 0 when not even one does."""
    growth_bytes: Number = None
    """Memory that each step adds, where it grows steadily by much. 0 means it does not."""
    kept_graphs: Number = None
    """Share of the last steps' graphs that are still in memory."""
    kept_by: str = "a variable"
    """The variable that keeps graphs."""
    grown: str = ""
    """A list, or a similar variable, that grows with the steps."""
    grown_by: str = ""
    """What it gets: `tensors`, or `hooks` of a module or tensor. "" for other objects."""
    uneven: bool = False
    """Whether memory grows for a while only: the inputs of the steps have many sizes, or a replay
    buffer is not full yet."""

    cores: Count = None
    """Cores that the process may use."""
    threads: Count = None
    """Threads that torch uses for one operation."""
    other_busy_cores: Number = None
    """Cores that other processes keep busy, of those that the process may use."""
    own_cores: Number = None
    """Cores that the run keeps busy, its children included."""
    worker_cores: Number = None
    """Those that its running children do, such as the processes of a DataLoader."""
    shared_gib: Number = None
    """Free shared memory, through which processes send batches."""
    environment: Mapping[str, str] = {}
    """Environment variables that matter for training and are set."""
    torch_version: Text = None
    torch_cuda: Text = None
    """The CUDA version that torch was built for. None with `torch_version` set: a CPU build."""
    backends_off: tuple[str, ...] = ()
    """Libraries of torch that the script has turned off, by their names in torch.backends."""
    sees_gpu: bool | None = None
    """Whether torch can use a GPU."""
    no_gpu_because: Text = "the model and its batches are on the CPU"
    """Why a run is not on a GPU."""
    disk_free_gib: Number = None
    """Free space where checkpoints are written."""
    disk_needed_gib: Number = None
    """What the run's checkpoints need there."""
    gpu_others: Count = None
    """Other processes that hold memory on the training GPU, as its driver reports them."""
    gpu_others_gib: Number = None
    """Memory that they hold."""
    slowed_by: tuple[str, ...] | None = None
    """Reasons for which the GPU runs below its clock rate: power cap, heat and others."""
    clock_share: Number = None
    """Clock rate as a share of the highest."""
    power_limit_share: Number = None
    """Enforced power limit as a share of its default limit."""
    supports_bf16: bool | None = None
    """Whether the GPU multiplies bfloat16."""

    train_tokens: Count = None
    """Tokens of the dataset for training."""
    val_tokens: Count = None
    """Tokens for validation."""
    read_bytes_per_step: Number = None
    """Bytes that came from a disk, not from memory, in an average step."""
    disk_stalled_s: Number = None
    """Seconds of an average step at which the process waited for a disk."""

    rows: Count = None
    """First dimension of what the model is called with. This and the following are what calls in
    torch show of a loop that is not flatout's."""
    workers: Count = None
    """Processes of the DataLoader."""
    dataset: Text = None
    """What it reads: `memory` means rows of tensors, `iterable` one that has no indices."""
    pinned: bool = True
    """Whether its batches are pinned."""
    reads_ran: Number = None
    """Share of the waits for data for which the loop's thread ran."""
    calls: tuple[str, ...] = ()
    """Kinds of calls of the script that a patch may edit, as those of a `Site`."""
    dtype: str = "float32"
    """Type of the largest weight."""
    autocast: bool = False
    """Whether the forward pass runs in autocast."""
    tf32: bool = False
    """Whether fp32 matmuls may use TF32."""
    compiled: bool = False
    """Whether the model is compiled."""
    convolutions: bool = False
    """Whether it has two-dimensional convolutions, with contiguous weights."""
    eager_attention: bool = False
    """Whether it is one of transformers that computes attention without SDPA."""
    padding: Number = None
    """Share of the columns of the model's inputs in which every row has the same padding."""
    evaluation_mode: Number = None
    """Share of the steps whose pass was in evaluation mode, after others in training mode. 0 where
    the mode makes no difference."""
    evaluates_with_gradients: bool = False
    """Whether passes of evaluations build graphs."""
    anomaly_detection: bool | None = None
    """Whether `torch.autograd.set_detect_anomaly(True)` is in effect."""
    optimizer: Text = None
    """Class of the optimizer."""
    optimizer_way: Literal["for-loop", "foreach", "fused", "own"] | None = None
    """How it updates its tensors. `own` means it is not one of torch.optim."""
    tensors: Count = None
    """Tensors that it updates."""
    float64_s: Number = None
    """Seconds of an average forward pass in operations of float64."""
    wasted_gradients: Number = None
    """Share of all gradients, by numbers, that belong to weights which nothing updates."""
    never_updated: tuple[str, ...] = ()
    """The names of those that belong to the model."""
    unregistered: tuple[str, ...] = ()
    """Lists and similar attributes of the model's modules that have some of them."""

    without_gradients: Number = None
    """Share of the early steps in which the optimizer had no gradients, or zeros, after a backward
    pass. This and the following are of the optimizer with the worst of them."""
    uncleared: Number = None
    """Share of the early steps whose gradients include those of the step before."""
    unmoved: Number = None
    """Share of the values with gradients that no early step changed."""
    unreached: Number = None
    """Share of its weights, by numbers, that had no gradient in any of those steps."""
    unreached_names: tuple[str, ...] = ()
    """The names of those that belong to the model."""
    full_rows: Number = None
    """Share of the rows of its largest tensor, if that is an embedding's, that have gradients."""
    largest_share: Number = None
    """Share of the weights, by numbers, of its largest tensor."""
    new_optimizers: Number = None
    """Optimizers per step that follow another one of the same weights."""
    weights_dtype: Text = None
    """Type of the weights that it updates."""
    highest_lr: Number = None
    """Its highest learning rate in those steps."""
    watched_optimizer: str = "the optimizer"
    """Its class."""
    losses: tuple[tuple[int, float], ...] | None = None
    """(step, training loss), including NaN and infinity."""
    looks_ahead: bool | None = None
    """Whether outputs for tokens depend on later ones, which the model learns to predict."""
    mixes_rows: bool = False
    """Whether outputs for a row of the batch depend on other rows."""
    updates: Number = None
    """Largest share by which an early step changed the weights. None: the learning rate rises, as
    in a warm-up."""
    tracer: str = ""
    """What follows all calls of the script in most steps: a profiler or a debugger."""
    constant_inputs: bool = False
    """Whether all inputs of the model had one value in the first steps."""
    large_inputs: bool = False
    """Whether an input of floats had numbers far from 1 in them."""
    only_classes: Count = None
    """Number of classes of the targets in successive steps, if each step has one or two of them."""
    bare_steps: Number = None
    """Share of an optimizer's steps that use the gradients of the step before again."""
    clipped_to: float = 1.0
    """Largest share of the gradients' norm that clipping left in the early steps."""
    halved_after: Number = None
    """Steps in which the learning rate halves, if it falls by equal factors."""
    undone: float = 0.0
    """Share of the optimizer's updates that something takes back before the next one."""
    rescaled: float = 1.0
    """How many times as large as in the first steps the model's inputs are in late ones."""
    started_anew: Number = None
    """Share of the waits for data that are for workers which are started anew."""
    tiny_rates: float = 0.0
    """Share of the steps with a learning rate of next to nothing, compared with the highest one."""
    ragged: Number = None
    """Share of the tokens of a batch that are padding in rows of different lengths."""
    padded_targets: tuple[int, float] | None = None
    """The id of padding that the loss counts, and its share of the targets."""
    equal_units: str = ""
    """A layer whose units all have the same weights, by its name."""
    same_rows: Count = None
    """Rows of the loader's first batches, if these all have the same values."""
    dataset_rows: Count = None
    """Rows of the DataLoader's dataset."""
    bad_data: bool = False
    """Whether the first value that is not finite was in the data."""
    skipped_steps: Count = None
    """Updates that float16 skipped."""

    peak_tflops: Number = None
    """Rate of matmuls that counts as 100%."""
    peak_source: Text = None
    """Where that comes from: a data sheet or a measurement here."""
    mfu: Number = None
    """Their ratio. None when the peak is unknown or was measured on a busy machine."""
    tokens_per_s: Number = None
    """Throughput of the steps, without saves and evaluations."""

    @property
    def on_gpu(self) -> bool:
        """Whether the steps ran on a GPU."""
        return self.device is not None and self.device.startswith("cuda")

    @property
    def work_s(self) -> float:
        """Seconds of forward and backward."""
        return (self.compute_s or 0.0) + (self.memory_bound_s or 0.0)

    @property
    def used_share(self) -> float:
        """Share of the device's memory that the tensors take. 0 where it is not known."""
        return (self.reserved_gib or self.peak_gib or 0.0) / (self.total_gib or math.inf)

    @property
    def needed_share(self) -> float:
        """Share of the free memory that the run needs by the estimate. 0 where it is not known."""
        return (self.estimated_gib or 0.0) / (self.free_gib or math.inf)

    @property
    def growth_mib(self) -> float:
        """Memory that each step adds."""
        return (self.growth_bytes or 0.0) / 2**20

    @property
    def unlearned(self) -> str:
        """Names of weights that an optimizer was taken to update by mistake. "" without any.

        A model of which less than half is trained is usually adapted to something new.
        """
        names = self.never_updated if (self.wasted_gradients or 0.0) < 0.5 else ()
        return shortened(names, 3)

    @property
    def unreached_words(self) -> str:
        """The names of weights without a gradient, in brackets."""
        return f" ({shortened(self.unreached_names, 3)})" if self.unreached_names else ""

    @property
    def evaluation_words(self) -> str:
        """Which line takes most of the evaluations, if one does."""
        line = self.site("evaluation")
        takes_most = line and (line.seconds_per_step or 0.0) > HALF * (
            self.evaluation_s or math.inf
        )
        return f", most of it at {line.describe()}" if line and takes_most else ""

    @property
    def wait_words(self) -> str:
        """What most of the waiting for data is for, if it is for new workers."""
        line = self.site("rows")
        made = f" at {line.describe()}" if line else ""
        anew = f", most of it for workers that are started anew{made}"
        return anew if (self.started_anew or 0.0) > HALF else ""

    @property
    def grown_words(self) -> str:
        """What grows in each step, if it is known."""
        return f", and {self.grown} grows" if self.grown else ""

    @property
    def rate_words(self) -> str:
        """How soon the learning rate falls."""
        soon = self.halved_after
        return f": it halves every {soon:.0f} steps" if soon else ""

    @property
    def reads_asleep(self) -> bool:
        """Whether what reads the data mostly sleeps, as it does for a slow disk or a network."""
        ran = self.worker_cores if self.workers else self.reads_ran
        most = max(BUSY_CORES, (self.cores or 0) / 4) if self.workers else math.inf
        is_quiet = (self.other_busy_cores or 0.0) <= most  # else workers may wait for a core
        return ran is not None and is_quiet and ran < HALF * (self.workers or 1)

    @property
    def lacks_shared(self) -> bool:
        """Whether worker processes would have too little shared memory for batches."""
        return self.shared_gib is not None and self.shared_gib < MIN_SHARED_GIB

    def setting(self, key: str) -> Any:
        """Return the value at a dotted key of the configuration. None without one."""
        return None if self.config is None else self.config.value(key)

    def site(self, kinds: str) -> CallSite | None:
        """Return the costliest line of a kind, of several the first that is known. None: none."""
        at_failure = self.failure and self.failure.site
        known = {**self.sites, "failure": (at_failure,) if at_failure else ()}
        return next((line for kind in kinds.split() for line in known.get(kind, ())), None)

    def at(self, kind: str) -> str | None:
        """Return the place of the costliest line of a kind."""
        return line.place if (line := self.site(kind)) else None

    def failed(self, *kinds: str) -> Failure | None:
        """Return how the run failed, if it is one of these kinds."""
        return self.failure if self.failure is not None and self.failure.kind in kinds else None

    def seconds_at(self, kind: str) -> float:
        """Return the seconds of a step at all lines of a kind that are known."""
        return sum(line.seconds_per_step or 0.0 for line in self.sites.get(kind, ()))

    def share(self, of: CallSite | float | None, at_least: float = 0.0) -> float | None:
        """Return seconds, or those at a line, as a share of the step. None when it is unknown or
        below `at_least`.
        """
        seconds = of.seconds_per_step if isinstance(of, CallSite) else of
        if seconds is None or not self.step_s:
            return None
        share = min(max(seconds / self.step_s, 0.0), 1.0)
        return None if share < at_least else share

    def phase_shares(self) -> dict[str, float]:
        """Return the measured phases as shares of the step, by name. {} without a step time."""
        shares = {name: self.share(getattr(self, f"{name}_s")) for name in PHASES}
        return {name: share for name, share in shares.items() if share is not None}
