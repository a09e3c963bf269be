"""The rules that are one share, one threshold, one sentence, one line and a few fixes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.hardware.machine import CUDA_TORCH
from flatout.measure.rules import (
    Finding,
    Fix,
    Harm,
    Rule,
    fix,
    is_off,
    rule,
    speedup_fixes,
    with_rows,
)
from flatout.measure.steps.evidence import Evidence

Check = Callable[[Evidence], object]
Settings = Mapping[str, Any]
POLLING = re.compile(r"while [^:]*:( pass| continue)?|pass|continue")
"""The lines of a thread that waits by asking again and again."""
ENOUGH_EVALUATION = 0.05
"""Share of the run that the fix leaves to evaluations."""


@dataclass(frozen=True)
class Way:
    """A remedy. Its text may have {e} (the evidence), {share}, {site} and {set} (its settings)."""

    text: str
    gain_from: str | None = None
    """How the gain is estimated. None means it is unknown."""
    part: float = 1.0
    """The part of the finding's share that it saves."""
    when: Check = lambda e: True
    slot: str = ""
    """The remedy is a speedup that fills this slot."""
    set: Settings | Callable[[Evidence, float], Settings] | None = None
    """Settings of a recipe that are the remedy. It does not apply where there are none."""
    cost_s: float = 0.0
    same_result: bool = True

    def fixes(self, evidence: Evidence, share: float | None, words: Settings) -> list[Fix]:
        """Return the remedy as fixes. [] where it does not apply."""
        gain = None if share is None or self.gain_from is None else self.part * share
        settings = self.set(evidence, share or 0.0) if callable(self.set) else self.set or {}
        if not self.when(evidence) or (self.set and not (settings and evidence.config)):
            return []
        shown = " ".join(f"{k}={'null' if v is None else v}" for k, v in settings.items())
        text = self.text.format(**words, set=shown)
        if self.slot:
            return speedup_fixes(evidence, self.slot, text, gain, self.gain_from)
        more: dict[str, Any] = {"cost_s": self.cost_s, "same_result": self.same_result}
        return [fix(text, gain, self.gain_from, overrides=settings, **more)]


def row(
    name: str,
    summary: str,
    says: str,
    *ways: Way,
    lost: str | Callable[[Evidence], float | None] = "",
    at_least: float = 0.0,
    saves: float = 1.0,
    when: Check = lambda e: True,
    site: str = "",
    shows: tuple[str, ...] = (),
    harm: Harm = "slows",
    on_cpu: str = "",
    unless: tuple[str, ...] = (),
) -> Rule:
    """Return a rule that finds something when a share of the step is lost.

    `says` is the verdict, with the words of `Way.text`. `lost` is the field of the seconds that are
    lost, or returns them, `at_least` the share from which they count, and `saves` the part of them
    that a fix saves. Without `lost`, `when` decides alone. `site` is the kind of the line, or some,
    of which the first one that is known counts. `on_cpu` is the verdict on a CPU, if no time is
    lost there.
    """

    def look(evidence: Evidence) -> Finding | None:
        is_warning = bool(on_cpu) and not evidence.on_gpu
        seconds = lost(evidence) if callable(lost) else getattr(evidence, lost or "step_s")
        share = evidence.share(seconds, at_least) if lost and not is_warning else None
        if not when(evidence) or (share is None and lost and not is_warning):
            return None
        place = next(filter(None, map(evidence.site, site.split())), None)
        where = "lines of other packages" if place is None else place.describe()
        words = {"e": evidence, "share": share, "site": where}
        gain = None if share is None else share * saves
        return Finding(
            verdict=(on_cpu if is_warning else says).format(**words),
            harm="warns" if is_warning else harm,
            share=gain,
            site=place,
            fixes=tuple(each for way in ways for each in way.fixes(evidence, gain, words)),
        )

    look.__name__, look.__doc__ = name, summary
    shows += (lost,) if isinstance(lost, str) and lost else ()
    return rule(shows=shows, unless=unless)(look)


def without_recipe(evidence: Evidence) -> bool:
    """Return whether the loop is not flatout's own."""
    return evidence.config is None


def work_s(evidence: Evidence) -> float:
    """Return the seconds of forward and backward."""
    return (evidence.compute_s or 0.0) + (evidence.memory_bound_s or 0.0)


def kind_s(evidence: Evidence, kind: str, name: str = "") -> float:
    """Return the seconds of a class of operations, if `name` is part of the slowest one's."""
    rows = (row for row in evidence.kernels or () if row.kind == kind and name in row.slowest)
    return sum(row.seconds for row in rows)


def idle_s(evidence: Evidence) -> float | None:
    """Return the seconds at which a GPU idles. Of a recorded run, by its utilisation if low."""
    used, step_s = evidence.utilisation, evidence.step_s or 0.0
    if evidence.host_s is None and used is not None and used < 0.6:
        return (1 - used) * step_s
    return evidence.host_s


def idle_or_tiny_s(evidence: Evidence) -> float | None:
    """Return the seconds that tiny operations cost: on a GPU, while it waits for the next one."""
    if evidence.on_gpu and evidence.tiny_op_s is not None:
        return min(evidence.tiny_op_s, evidence.host_s or 0.0)
    return evidence.tiny_op_s


def reads(evidence: Evidence) -> float:
    """Return how often a step's own code reads values of tensors."""
    return (evidence.syncs or 0.0) - (evidence.expected_syncs or 0.0)


def larger_rows(evidence: Evidence, share: float) -> Settings:
    """Return the settings of larger micro-batches in the same steps. {} where there are none."""
    if evidence.config is None:
        return {}
    batch = evidence.config.batch
    rows, parts, most = batch.rows_per_device, batch.accumulate or 1, evidence.rows_that_fit
    if not isinstance(rows, int) or parts < 2 or (most is not None and most < 2 * rows):
        return {}
    times = next(each for each in range(2, parts + 1) if parts % each == 0)
    return with_rows(evidence.config, times * rows)


def rarer_saves(evidence: Evidence, share: float) -> Settings:
    """Return the settings with which saves take about 1% of the run."""
    every = {
        f"checkpoint.{key}": evidence.setting(f"checkpoint.{key}")
        for key in ("every_steps", "every_minutes", "every_epochs")
    }
    return {key: max(round(share / 0.01), 2) * each for key, each in every.items() if each}


def rarer_evaluations(evidence: Evidence, share: float) -> Settings:
    """Return the settings with which evaluations take few percent of the run."""
    every, left = evidence.setting("train.eval_every"), ENOUGH_EVALUATION
    times = math.ceil(share * (1 - left) / (left * max(1 - share, 1e-6)))
    rarer = min((every or 0) * times, evidence.planned_steps or math.inf)
    if every and rarer > every:
        return {"train.eval_every": rarer}
    tokens = (evidence.val_tokens or 0) // times
    is_all = every and tokens and evidence.setting("train.eval_tokens") == "all"
    return {"train.eval_tokens": tokens} if is_all else {}


def fewer_checkpoints(evidence: Evidence, share: float) -> Settings:
    """Return the settings that keep one checkpoint."""
    others = evidence.setting("checkpoint.keep_every") is not None
    return {"checkpoint.keep": 1} | ({"checkpoint.keep_every": None} if others else {})


COMPILE_S = 60.0
"""What compiling costs once."""
COMPILE = (
    Way(
        "Compile the model: add the speedup compile.",
        "what compiling fuses, and the host's work",
        when=lambda e: is_off(e, "compile"),
        set={"speedups": "+compile"},
        cost_s=COMPILE_S,
    ),
    Way(
        "Compile the model (`torch.compile`), or do more work per step.",
        "what compiling fuses, and the host's work",
        when=without_recipe,
        cost_s=COMPILE_S,
    ),
)
MORE_ROWS = Way(
    "Use larger micro-batches: {set}.", "overhead that more rows share", 0.5, set=larger_rows
)
LESS_OVERHEAD = (*COMPILE, MORE_ROWS, Way("Use more rows, or a larger model, per step."))
COLLECTOR, SAVES, COPIES = "the collector's time", "the time of the saves", "the time of the copies"

ROWS = [
    row(
        "anomaly-detection",
        "torch.autograd.set_detect_anomaly is on, which records and checks every operation.",
        "Anomaly detection of autograd is on: it records and checks every operation.",
        Way("Remove it. It is for finding a NaN."),
        when=lambda e: e.anomaly_detection,
        site="anomaly",
    ),
    row(
        "broadcast-loss",
        "The loss broadcasts a column against a row, which compares all pairs of rows.",
        "Tensors of the shapes (n, 1) and (n,) are broadcast to (n, n): every prediction is "
        "compared with every target.",
        Way("Give both one shape: predictions.squeeze(1).", same_result=False),
        when=lambda e: e.site("broadcast"),
        site="broadcast",
        harm="spoils",
    ),
    row(
        "busy-threads",
        "A thread of the script polls, and the loop waits for Python's lock.",
        "A thread beside the loop polls without a pause, at {site}. Python runs one thread at a "
        "time, so the loop waits for it.",
        Way(
            "Let it wait instead: queue.Queue(maxsize=2), threading.Event().wait(). If it prepares "
            "data, do that in processes: DataLoader(num_workers=...)."
        ),
        when=lambda e: (
            (place := e.site("thread"))
            and POLLING.fullmatch(place.text)
            and e.share(place.seconds_per_step, 0.25)
        ),
        site="thread",
    ),
    row(
        "communication",
        "Processes wait for each other's gradients or weights.",
        "{share:.0%} of each step waits for communication between {e.world_size} processes.",
        Way("Exchange gradients once per step", slot="grad_sync"),
        Way(
            "Accumulate more micro-batches per step, so that gradients travel less often.",
            "half as many exchanges per token",
            0.5,
            same_result=False,
        ),
        lost="communication_s",
        at_least=0.15,
        when=lambda e: e.world_size > 1,
    ),
    row(
        "compile-failure",
        "torch.compile fails, so the run is slower.",
        "torch.compile failed, and the run continues without it: {e.compile_fallback}.",
        Way(
            "Read the error: on a CPU, torch.compile needs a C++ compiler (`apt install g++`). In "
            "your own model, it names the line that it cannot compile."
        ),
        Way(
            "Or turn it off, which saves the failed attempt at every start.",
            set={"speedups": "-compile"},
        ),
        when=lambda e: e.compile_fallback,
        site="recompile",
    ),
    row(
        "cpu-by-mistake",
        "The run is on the CPU although the machine has a GPU.",
        "The run is on the CPU although this machine has a GPU. The reason: {e.no_gpu_because}.",
        Way(
            'Move the model and every batch to the GPU: `.to("cuda")`.',
            when=lambda e: e.sees_gpu and without_recipe(e),
        ),
        Way(
            "Remove train.device=cpu.",
            when=lambda e: e.sees_gpu,
            set={"train.device": "auto"},
            same_result=False,
        ),
        Way(
            f"Install a torch for CUDA: `{CUDA_TORCH}`.",
            when=lambda e: e.torch_version and not e.torch_cuda and not e.sees_gpu,
        ),
        Way(
            "Unset CUDA_VISIBLE_DEVICES, which hides the GPU from torch.",
            when=lambda e: "CUDA_VISIBLE_DEVICES" in e.environment and not e.sees_gpu,
        ),
        Way(
            "Check that the driver works (`nvidia-smi`) and suits this torch.",
            when=lambda e: not e.sees_gpu,
        ),
        when=lambda e: e.device == "cpu" and (e.sees_gpu or (e.machine and e.machine.gpus)),
        shows=("torch_version", "torch_cuda"),
    ),
    row(
        "decomposition",
        "Matrix decompositions, such as an SVD, take a large part of each step.",
        "{share:.0%} of each step decomposes matrices (torch.linalg).",
        Way(
            "If the largest singular value is enough, use power iteration, as torch.nn.utils."
            "parametrizations.spectral_norm does. Otherwise compute it every few steps.",
            "the step without it",
        ),
        lost=lambda e: kind_s(e, "other", "linalg"),
        at_least=0.1,
    ),
    row(
        "disk-space",
        "The disk is too small for the checkpoints of the run.",
        "The checkpoints need {e.disk_needed_gib:.1f} GiB, but the disk has {e.disk_free_gib:.1f} "
        "GiB free.",
        Way("Free space, or set checkpoint.dir to a larger disk."),
        Way("Keep fewer: {set}.", set=fewer_checkpoints),
        when=lambda e: e.disk_free_gib is not None and (e.disk_needed_gib or 0) > e.disk_free_gib,
        harm="fails",
    ),
    row(
        "double-precision",
        "The model computes in float64.",
        "The model computes in float64, which takes twice the memory and time of float32.",
        Way(
            "Compute in float32: convert inputs with .float(), and remove .double().",
            "half of the work",
            same_result=False,
        ),
        lost=lambda e: work_s(e) if e.share(e.float64_s, 0.1) else None,
        saves=0.5,
        when=lambda e: e.site("float64"),
        site="float64",
        shows=("float64_s",),
    ),
    row(
        "empty-cache",
        "The loop empties the allocator's cache repeatedly.",
        "Each step calls torch.cuda.empty_cache(): it waits for the GPU, and memory must be "
        "requested again.",
        Way(
            "Remove the call. Against fragmentation, set PYTORCH_ALLOC_CONF="
            "expandable_segments:True.",
            "the time of the calls",
        ),
        lost="empty_cache_s",
        when=lambda e: (e.empty_cache or 0.0) >= 0.4,
        site="empty-cache",
        shows=("empty_cache",),
        on_cpu="Each step calls torch.cuda.empty_cache(): on a GPU that makes the host wait.",
    ),
    row(
        "evaluation-mode",
        "The model stays in evaluation mode while it is trained.",
        "In {e.evaluation_mode:.0%} of the steps the model is in evaluation mode while it is "
        "trained: dropout is off, and batch norm keeps its statistics.",
        Way("Call model.train() where the evaluation that starts there ends.", same_result=False),
        when=lambda e: (e.evaluation_mode or 0.0) >= 0.05 and e.site("evaluation-mode"),
        site="evaluation-mode",
        harm="spoils",
    ),
    row(
        "few-rows",
        "Each forward pass has a single row.",
        "Each forward pass has 1 row: the cost of starting operations, of reading the weights and "
        "of the update is not shared.",
        Way(
            "Raise the batch size, or use fewer micro-batches of more rows: each operation and "
            "each update then serves more of them.",
            same_result=False,
        ),
        lost=lambda e: max(e.tiny_op_s or 0.0, e.optimizer_s or 0.0),
        when=lambda e: e.rows == 1,
        site="rows",
        shows=("micro_batches",),
    ),
    row(
        "fragmentation",
        "The allocator reserves much more GPU memory than the tensors need.",
        "The allocator holds {e.reserved_gib:.1f} GiB for tensors of {e.peak_gib:.1f} GiB: the "
        "memory is fragmented.",
        Way("Set PYTORCH_ALLOC_CONF=expandable_segments:True."),
        when=lambda e: (
            e.on_gpu
            and (e.reserved_gib or 0) >= max(1.3 * (e.peak_gib or 1e9), 0.8 * (e.total_gib or 1e9))
            and "expandable_segments:True" not in e.environment.get("PYTORCH_ALLOC_CONF", "")
        ),
        shows=("total_gib",),
        harm="warns",
    ),
    row(
        "frequent-evaluation",
        "Evaluations take a noticeable share of the run.",
        "Evaluations take {share:.0%} of the run.",
        Way(
            "Evaluate in torch.no_grad(): its passes build graphs for nothing.",
            when=lambda e: e.evaluates_with_gradients,
        ),
        Way("Evaluate less often, or on a part of the text: {set}.", set=rarer_evaluations),
        Way("Evaluate less often, or on less data.", when=without_recipe),
        lost="evaluation_s",
        at_least=0.2,
        site="evaluation",
        shows=("val_tokens",),
    ),
    row(
        "garbage-collection",
        "Python's garbage collector takes a noticeable share of each step.",
        "Python's garbage collector takes {share:.0%} of each step.",
        Way(
            "Remove the call at {site}, or make it every few hundred steps.",
            COLLECTOR,
            when=lambda e: (place := e.site("gc")) and "collect" in place.text,
        ),
        Way("Collect at fixed steps only", COLLECTOR, slot="gc"),
        Way(
            "Call gc.freeze() and gc.disable() before the loop, and gc.collect() every few hundred "
            "steps.",
            COLLECTOR,
            when=without_recipe,
        ),
        lost="gc_s",
        at_least=0.03,
        site="gc",
        shows=("collections",),
        unless=("recompiles",),  # torch.compile collects garbage
    ),
    row(
        "gpu-shared",
        "Other processes use the same GPU.",
        "Other processes on this GPU ({e.gpu_others}) hold {e.gpu_others_gib:.1f} GiB of its "
        "memory, and may take its time.",
        Way("End them (`nvidia-smi` lists them), or use a different GPU."),
        # less memory is something that only shows, such as a desktop
        when=lambda e: e.gpu_others and (e.gpu_others_gib or 0.0) >= 0.5,
        harm="warns",
    ),
    row(
        "host-sync",
        "User code reads values of tensors in every step, which makes the host wait for the GPU.",
        "{share:.0%} of each step is lost to reads of tensors at {site}: the host waits for the "
        "GPU, and then the GPU for the host.",
        Way(
            "Keep values on the device, and read them every few steps, one step late.",
            "the time at which the GPU idles in these waits",
        ),
        lost=lambda e: min(e.host_s or 0.0, e.sync_s or 0.0),
        at_least=0.03,
        when=lambda e: reads(e) >= (1 if e.on_gpu else 2) and (e.on_gpu or e.source != "script"),
        site="sync",
        shows=("syncs", "expected_syncs", "sync_s"),
        on_cpu="Each step reads values of tensors ({e.syncs:.0f}) at {site}. On a CPU that costs "
        "little. On a GPU each makes the host wait.",
    ),
    row(
        "idle-gpu",
        "The GPU idles while the host prepares its work.",
        "The GPU idles {share:.0%} of each step, while Python prepares its work.",
        *LESS_OVERHEAD,
        lost=idle_s,
        at_least=0.15,
        when=lambda e: e.on_gpu,
        site="compute python",
        shows=("ops", "utilisation"),
        unless=(
            *("slow-data", "host-sync", "tiny-kernels", "recompiles", "garbage-collection"),
            *("environment", "empty-cache", "pageable-copies", "small-batch"),
        ),
    ),
    row(
        "memory-bound",
        "The GPU spends much of each step on elementwise work that torch.compile would fuse.",
        "{share:.0%} of each step goes into operations that move memory and hardly compute.",
        *COMPILE,
        lost="memory_bound_s",
        at_least=0.35,
        saves=0.5,
        when=lambda e: e.on_gpu and not any(s.startswith("compile") for s in e.speedups or ()),
        site="compute",
    ),
    row(
        "padding",
        "Batches are padded beyond their longest row.",
        "{share:.0%} of each step goes into columns of the batch that are padding in every row.",
        Way(
            "Pad each batch to its longest row, in collate_fn or with padding='longest'. Batches "
            "of rows of similar length, or packed rows, need less still.",
            "forward and backward in proportion to the columns",
        ),
        # attention costs more than in proportion to the columns
        lost=lambda e: (e.padding or 0.0) * work_s(e),
        at_least=0.25,  # lengths rounded up to a multiple of 8, which can pay off, stay below
        site="padding",
        shows=("padding",),
    ),
    row(
        "pageable-copies",
        "Batches are copied to the GPU from memory that is not pinned, so the host waits.",
        "{share:.0%} of each step copies batches to the GPU from memory that is not pinned.",
        Way("Copy from pinned memory in the background", COPIES, slot="loader"),
        Way(
            "Use DataLoader(pin_memory=True), and copy with .to(device, non_blocking=True).",
            COPIES,
        ),
        lost="pageable_copy_s",
        at_least=0.02,
        when=lambda e: e.on_gpu and e.pageable_copies,
        site="copy",
        shows=("pageable_copies", "pageable_copy_bytes"),
    ),
    row(
        "recompiles",
        "torch.compile keeps compiling after the warm-up.",
        "torch.compile takes {share:.0%} of each step: it compiles {e.recompiles:.2g} graphs per "
        "step after the warm-up.",
        Way(
            "Give every step the same shapes and dtypes (pad the last batch), or mark the "
            "dimension that changes with torch._dynamo.mark_dynamic.",
            "the step without compiling",
        ),
        Way("Or turn compile off: speedups=auto,-compile.", set={"speedups": "-compile"}),
        lost="compile_s",
        at_least=0.03,
        when=lambda e: e.recompiles,
        site="recompile",
        shows=("recompile_reason",),
    ),
    row(
        "repeated-rows",
        "Each worker of a DataLoader yields all rows of an iterable dataset.",
        "Each of the {e.workers} workers yields all rows of the IterableDataset: an epoch has "
        "every row {e.workers} times.",
        Way(
            "Divide the rows in __iter__: torch.utils.data.get_worker_info() has the id of the "
            "worker and their number.",
            same_result=False,
        ),
        when=lambda e: e.dataset == "iterable" and (e.workers or 0) > 1,
        site="data",
        harm="spoils",
    ),
    row(
        "slow-logging",
        "Logging and callbacks take a noticeable share of each step.",
        "Logging and callbacks take {share:.0%} of each step.",
        Way("Do less of it, or do it every few steps.", "the time of logging"),
        Way("Read values one step late", "the time of logging", slot="readback"),
        Way(
            "Write fewer records: {set}.",
            when=lambda e: (e.setting("log.every") or 10) < 10,
            set={"log.every": 10},
        ),
        lost="logging_s",
        at_least=0.05,
        site="logging",
    ),
    row(
        "slow-optimizer",
        "The optimizer updates its tensors one by one.",
        "{e.optimizer} takes {share:.0%} of each step: it updates {e.tensors} tensors one by one.",
        Way(
            "Update all tensors at once: pass fused=True to the optimizer, or foreach=True where "
            "it has no fused=True, or use torch._foreach_ functions in your own.",
            "half of its time; one pass over the memory",
        ),
        lost="optimizer_s",
        at_least=0.2,  # half of it can be saved: a tenth of the step, as for other findings
        saves=0.5,
        when=lambda e: e.optimizer_way in ("for-loop", "own"),
        site="optimizer",
    ),
    row(
        "slow-save",
        "Saves block the loop for a noticeable share of the run.",
        "Saving checkpoints takes {share:.0%} of the run.",
        Way(
            "Write checkpoints in the background",
            SAVES,
            0.8,  # the copy remains
            when=lambda e: e.on_gpu,  # on a CPU, the writing thread takes the cores that train
            slot="state_saver",
        ),
        Way("Save less often: {set}.", SAVES, 0.9, set=rarer_saves),
        Way(
            "Copy the state and write it in a background thread.",
            SAVES,
            when=lambda e: without_recipe(e) and e.on_gpu,
        ),
        Way("Save less often, or to a faster disk."),
        lost="checkpoint_s",
        at_least=0.05,
        site="save",
    ),
    row(
        "small-batch",
        "Micro-batches are small for the GPU, which has room for larger ones.",
        "Micro-batches of {e.config.batch.rows_per_device} rows reach {e.mfu:.0%} of the GPU's "
        "peak, but {e.rows_that_fit} rows fit.",
        MORE_ROWS,
        lost=lambda e: e.host_s or 0.0,
        when=lambda e: e.on_gpu and (e.mfu or 1.0) <= 0.2 and e.rows_that_fit and larger_rows(e, 0),
        unless=("slow-data", "host-sync"),
    ),
    row(
        "tiny-kernels",
        "A step consists of many tiny operations, which take longer to start than to run.",
        "{share:.0%} of each step goes into {e.tiny_ops:,.0f} tiny operations, which take longer "
        "to start than to run.",
        Way(
            "Compute {site} for all elements at once instead of one by one.",
            "the step without the tiny operations",
            when=lambda e: e.site("op") or e.site("compute") or e.site("python"),
        ),
        *LESS_OVERHEAD,
        lost=idle_or_tiny_s,
        at_least=0.25,
        when=lambda e: (e.tiny_ops or 0.0) >= 300,
        site="op compute python",
        shows=("tiny_ops", "ops", "tiny_op_s"),
        unless=("slow-code", "slow-optimizer", "few-rows"),
    ),
    row(
        "unfused-attention",
        "Attention stores the scores of all pairs of tokens in memory.",
        "Attention keeps the scores of all pairs of tokens in memory. Their softmax alone takes "
        "{share:.0%} of each step.",
        Way(
            "Use torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...).",
            "the softmax; masks and copies of the scores come on top",
        ),
        lost=lambda e: kind_s(e, "attention"),
        at_least=0.03,
        when=lambda e: e.site("softmax"),
        site="softmax",
    ),
]
"""Sorted by name."""
