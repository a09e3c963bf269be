"""What is asked of a script that flatout measures or changes, and what it answers. No torch."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from flatout.measure.evidence import Evidence, Failure
from flatout.measure.intervals import Figure
from flatout.storage.files import Stored

ENDED = "the script ended with it"
"""Why a change has no gain that was on when the script ended."""
DEFAULT_SECONDS = 4.0
"""Seconds of ordinary steps that `diagnose` measures."""
SEEN, SO_FAR, RANK, LAST = ".seen", ".so-far", ".rank-", ".last"
"""Added to the name of the answer's file: it exists once the script has imported torch; it has the
answer while changes are screened or a run is followed; it is that of another rank than 0; it has
the step after which all ranks end."""


class Timing(Stored):
    """Which steps of a trial to time, and when it ends: after `limit_s` with fewer of them."""

    steps: int = 3
    """Fewest measured steps, after the warm-up."""
    seconds: float = 0.0
    """Fewest seconds of them."""
    first_steps: int = 0
    """Fewest steps in all, for their losses."""
    warmup_steps: int | None = None
    """Steps of the warm-up. None: as many as take `warmup_s`, until nothing is compiled."""
    warmup_s: float = 0.0
    """Seconds of the warm-up, counted from the end of the first step."""
    limit_s: float = 86_400.0
    """From its first step on: then three measured steps are enough, and after twice that, one."""
    seed_offset: int = 0
    """Added to every seed that the script sets. A script without seeds gets this one."""


class Recording(Stored):
    """Which steps to record with torch.profiler, and where to."""

    steps: int
    skip: int | None
    """Steps before them. None: until nothing is compiled any more."""
    trace: str
    """File for the trace, as torch writes it."""
    snapshot: str
    """File for the memory snapshot of one more step, on a GPU."""


class Recorded(Stored):
    """What the recorded steps took, and those before them."""

    device: str
    first_step: int
    """The first recorded step."""
    seconds: float
    """Of all recorded steps."""
    step_s: float | None
    """Of an average step before them, without the profiler."""
    notes: tuple[str, ...]


class Screened(Stored):
    """What a change gains inside a running script, by the names of a `Row`."""

    screened: Figure
    """How many times faster steps are with it."""
    compile_s: float | None = None
    """Seconds that it compiled before its first block."""
    pays_after: int | None = None
    """Steps after which these are made up for."""
    against: str | None = None
    """The changes that were on with and without it."""


class Request(Stored):
    """What to measure of a script, and what to change in its process."""

    answer: str = ""
    """File for the answer."""
    parent: int | None = None
    """The process without which this one ends. None: it may run on."""
    seconds: float = 0.0
    """Seconds of ordinary steps."""
    steps: int | None = None
    """Steps, the warm-up included, after which the measurement ends. None means by the seconds."""
    to_the_end: bool = False
    """Whether the script runs to its end, and without `steps` also its measurement."""
    changes: tuple[str, ...] = ()
    """Names of the changes to apply."""
    timing: Timing | None = None
    """The steps to time. None: see `measures`."""
    recording: Recording | None = None
    """The steps to record. None: see `measures`."""
    interrupt_after: int | None = None
    """Steps after which the process gets a SIGTERM. Nothing is measured then."""
    measures: bool = True
    """Whether to collect evidence, if no steps are timed."""
    is_trial: bool = False
    """Whether it is flatout's own run in a scratch directory, whose data may be replaced at the end
    of the measurement, and which may save what is of no use."""
    screen: tuple[str, ...] = ()
    """Names of the changes to screen at the end of the measurement, where they fit. The script is
    of no use to anybody then."""
    screen_s: float = 0.0
    """Seconds of steps for that, without compiling."""
    copy_of_user: str | None = None
    """The copy of the user's directory in which it runs. None: it runs in the directory itself."""


class Site(Stored):
    """A place in a file at which the script makes a call that a patch may edit."""

    kind: str
    """optimizer, loader, gc-collect, empty-cache, anomaly, threads or zero-grad; caller: of what
    constructs an optimizer; loss: from the call of the model to the call that goes backward."""
    name: str
    """Class or function that is called."""
    file: str
    """Absolute path."""
    line: int = 0
    """First line of the call."""
    end_line: int = 0
    """Its last line. Of a loss: the first one of the call that goes backward."""
    column: int = 0
    """Where it starts in the first line, in bytes of UTF-8."""
    end_column: int = 0
    """Where it ends in the last one, or for a loss where that call starts. 0 if not known."""
    is_direct: bool = True
    """Whether this line makes the call itself. Otherwise a library does that it calls."""
    parameters: tuple[str, ...] = ()
    """Parameters of the call, in order. () when they are not known."""
    is_in_order: bool = False
    """Whether a loader reads its rows in order, as for an evaluation."""
    names: dict[str, str] = Field(default_factory=dict)
    """Expressions of that line for the root "model", "torch" and the type of the model's "device",
    as far as there are any."""
    floats: list[str] = Field(default_factory=list)
    """Of a loss: expressions for tensors in fp32 there that are no single number."""


class Answer(Stored):
    """What was found in a script."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a loss may be either

    evidence: Evidence | None = None
    """None: nothing was measured."""
    problem: str | None = None
    """Why not."""
    failure: Failure | None = None
    """The error that ended the script."""
    recorded: Recorded | None = None
    """None: it was not asked for, or nothing was recorded."""
    once: dict[str, float] = Field({})
    """Of flatout's own training: seconds that a `save` blocks it, and `score` for each token of an
    evaluation, and `steps`: those before its data were replaced."""
    rank: int = 0
    """The rank that answers."""
    steps: int = 0
    """Steps that were seen."""
    step_s: list[float] = Field([])
    """Seconds of each step of a trial after the first."""
    warmup_steps: int = 0
    """How many of `step_s` belong to the warm-up."""
    own_share: float = 1.0
    """Share of the measured seconds that does not depend on the load, as of a `Clock`."""
    is_complete: bool = False
    """Whether all steps that were asked for were timed."""
    compiled: list[int] = Field([])
    """Indices in `step_s` of steps that compiled."""
    compile_s: float | None = None
    """Seconds that compiling took. None means nothing was compiled."""
    losses: list[float] = Field([])
    """The loss of each step: the mean of what `backward` was called on."""
    peak_gib: float | None = None
    """Peak memory of the device, or on a CPU of the process."""
    failed: dict[str, str] = Field({})
    """Changes that could not be applied, and why."""
    sites: tuple[Site, ...] = ()
    """Calls that a patch may edit."""
    screened: dict[str, Screened] = Field({})
    """What the changes gain that were screened."""
    kept: list[str] = Field([])
    """Those that are faster together, in the order in which they were added."""
    note: str = ""
    """What is screened now."""
