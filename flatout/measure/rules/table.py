"""The rules that are one share, one threshold, one sentence, one line and one fix."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from flatout.hardware.machine import CUDA_TORCH
from flatout.measure.evidence import Evidence
from flatout.measure.rules import Loss, Remedy, Way, is_off, row, rows_of, speedup, with_rows

POLLING = re.compile(r"while [^:]*:( pass| continue)?|pass|continue")
"""The lines of a thread that waits by asking again and again."""
COMPILE_S = 60.0
"""What compiling costs once. It must save more in the rest of the run."""
CLOSE = 0.92
"""Share of the memory from which it counts as full, and an estimate as too high: neither is exact.
"""
ROOM = 0.8
"""Part of the rows that fit up to which they are advised: an estimate is not exact."""


def compiling(evidence: Evidence, share: float) -> Remedy:
    """Return the remedy to compile the model, unless it is compiled, or the run ends too soon."""
    if share * (evidence.remaining_s or math.inf) < COMPILE_S:
        return None
    if evidence.config is None:
        return "Compile the model (`torch.compile`), or do more work per step."
    return is_off(evidence, "compile") and ("Compile the model: {set}.", {"speedups": "+compile"})


def larger_rows(evidence: Evidence, _: float) -> Remedy:
    """Return the remedy of larger micro-batches in the same steps, if twice as many rows fit."""
    rows, fit = rows_of(evidence.config), evidence.rows_that_fit
    return rows and with_rows(evidence, 2**20 if fit is None else int(ROOM * fit), 2 * rows)


def fewer_rows(evidence: Evidence, _: float) -> Remedy:
    """Return the remedy of fewer rows. After a failure, at most half: the estimate was too low."""
    rows, fit = rows_of(evidence.config), evidence.rows_that_fit
    most = rows // 2 if evidence.failure else rows - 1
    return with_rows(evidence, most if fit is None else min(fit, most))


def recomputing(evidence: Evidence, _: float) -> Remedy:
    """Return the remedy of activation checkpointing."""
    text = "Recompute activations, for about a third more computation: {set}."
    return is_off(evidence, "checkpointing") and (text, {"speedups": "+checkpointing"})


def shorter(evidence: Evidence, _: float) -> Remedy:
    """Return the remedy for a container that grows."""
    return evidence.grown and (
        "Look at {e.grown}, which gets items in each step: keep the last ones, or a running value."
    )


COSTLY = 0.3
"""Share of the step from which work without weights is a finding."""
COSTLY_ADVICE = (
    (r"one_hot", "Use the indices: F.cross_entropy and F.embedding take them."),
    (r"softmax\(|nll_loss|\.log\(", "F.cross_entropy takes the logits themselves: one function, "
     "without results between them."),
    (r"\[[^]]*None|unsqueeze|cdist", "It compares all pairs: expand the square, |a|² - 2ab + "
     "|b|², whose product is one matmul."),
    (r"\bfor\b", "Make one call for the whole batch instead of one for each element."),
    (r"\bcat\(|\bstack\(|append", "Write into one tensor that exists already, or keep a list and "
     "concatenate it once."),
    ("", "See whether one function of torch.nn.functional does it, or let torch.compile fuse it."),
)  # fmt: skip
"""What to do about a line that computes without weights, by a pattern of its text."""


LESS_MEMORY = (
    fewer_rows,
    recomputing,
    "Use a smaller batch, shorter sequences or a smaller model.",
)


def rarer(text: str, left: float, *keys: str) -> Way:
    """Return the remedy of longer intervals, with which rare work takes the share `left`."""

    def remedy(evidence: Evidence, share: float) -> Remedy:
        times = math.ceil(share * (1 - left) / (left * max(1 - share, left)))
        settings: dict[str, float] = {}
        for key in keys:
            in_steps = not key.endswith(("minutes", "epochs"))
            most = (in_steps and evidence.planned_steps) or math.inf
            if (now := evidence.setting(key)) and now < most:
                settings[key] = min(times * now, most)
        return settings and (text, settings)

    return remedy


ADVICE = (
    (r"deepcopy\(", "Copy only the weights that must be kept, and only when they are the best."),
    (r"\bsleep\(", "Remove the sleep."),
    (r"\benvs?\.step\(", "Step several environments at once, each in its own process, and give the "
     "model all of their states in one call."),
    (r"next\(iter\(", "Make the iterator once, before the loop."),
    (r"\bprint\(|logg(er|ing)\.|\.write\(|json\.dump", "Write less, or every few hundred steps."),
    (r"\bre\.|json\.loads|Image\.|imread|tokeniz", "Prepare the data once, before training, or in "
     "the workers of a DataLoader."),
    (r"\.cpu\(\)|\.numpy\(\)|\.tolist\(\)|\.item\(\)", "Compute it with operations on whole "
     "tensors, every few steps."),
    (r"torch\.(as_)?tensor\(|FloatTensor\(", "A list of NumPy arrays is converted number by "
     "number: stack it first, torch.from_numpy(np.stack(arrays))."),
    (r"DataLoader\(", "Make the DataLoader once, before the loop."),
    (r"\bgc\.collect", "Remove the call, or make it every few hundred steps."),
    (r"(mul_|lerp_?|add_)\(.*(alpha|decay|beta|ema|0\.9)", "Update all tensors at once: "
     "torch._foreach_lerp_(averages, weights, 1 - decay)."),
    (r"norm\(", "Use torch.nn.utils.get_total_norm, or the norm that clip_grad_norm_ returns."),
    ("", "Take it out of the step, do it every few steps, or compute it for whole tensors at "
     "once."),
)  # fmt: skip
"""What to do about a line that does not train, by a pattern of its text."""


def by_text(kind: str, advice: Sequence[tuple[str, str]]) -> Way:
    """Return the remedy for the costliest line of a kind, by the first pattern in its text."""

    def remedy(evidence: Evidence, _: float) -> Remedy:
        line = evidence.sites[kind][0].text
        return next(text for pattern, text in advice if re.search(pattern, line))

    return remedy


def tiny_share(evidence: Evidence) -> Loss:
    """Return the share of the step that many tiny operations take.

    A GPU loses their time only while it waits for the next one.
    """
    most_s = (evidence.host_s or 0.0) if evidence.on_gpu else math.inf
    seconds = min(evidence.tiny_op_s or 0.0, most_s)
    return (evidence.tiny_ops or 0.0) >= 300 and evidence.share(seconds, 0.25)


IN_BACKGROUND = speedup("state_saver", "Write checkpoints in the background: {set}.")
LESS_OVERHEAD = (compiling, larger_rows, "Use more rows, or a larger model, per step.")

ROWS = [
    row(
        "anomaly-detection",
        "torch.autograd.set_detect_anomaly is on, which records and checks every operation.",
        lambda e: e.anomaly_detection and "slows",
        "Anomaly detection of autograd is on: it records and checks every operation.",
        "Remove it. It is for finding a NaN.",
        site="anomaly",
    ),
    row(
        "busy-machine",
        "Other processes use the cores on which the run computes.",
        lambda e: (
            e.device == "cpu"
            and (e.other_busy_cores or 0.0) > max(0.5, (e.cores or 1e9) - (e.threads or 1))
            and (e.other_busy_cores or 0.0) / (e.cores or 1)
        ),
        "Other processes kept {e.other_busy_cores:.1f} of {e.cores} cores busy, which left too few "
        "for torch (threads: {e.threads}). Rates from that time are too low.",
        lambda e, _: (
            (e.threads or 2) > 1
            and "Measure again without them, or with OMP_NUM_THREADS=1: threads that wait for "
            "others are slower."
        ),
        "Measure again without them.",
    ),
    row(
        "busy-threads",
        "A thread of the script polls, and the loop waits for Python's lock.",
        lambda e: (
            (place := e.site("thread")) and POLLING.fullmatch(place.text) and e.share(place, 0.25)
        ),
        "A thread beside the loop polls without a pause, at {site}. Python runs one thread at a "
        "time, so the loop waits for it.",
        "Let it wait instead: queue.Queue(maxsize=2), threading.Event().wait(). If it prepares "
        "data, do that in processes: DataLoader(num_workers=...).",
        site="thread",
    ),
    row(
        "communication",
        "Processes wait for each other's gradients or weights.",
        lambda e: (
            e.world_size > 1
            and e.share(e.communication_s if e.transfer_s is None else e.transfer_s, 0.15)
        ),
        "{share:.0%} of each step waits for communication between {e.world_size} processes.",
        "Accumulate more micro-batches per step, so that gradients travel less often.",
        site="communication",
        shows="waiting_s transfer_s",
        unless="accumulation-sync",
    ),
    row(
        "compile-failure",
        "torch.compile fails, so the run is slower.",
        lambda e: e.compile_fallback and "slows",
        "torch.compile failed, and the run continues without it: {e.compile_fallback}.",
        (
            "Read the error: on a CPU, torch.compile needs a C++ compiler (`apt install g++`), and "
            "it names the line of your model that it cannot compile. Or turn it off.",
            {"speedups": "-compile"},
        ),
        site="recompile",
    ),
    row(
        "costly-line",
        "A line that uses no weights takes a large part of each step.",
        COSTLY,
        "{share:.0%} of each step is the work of {site}, which uses no weights, its part of the "
        "backward pass included.",
        by_text("line", COSTLY_ADVICE),
        site="line",
        unless="slow-code repeated-work tiny-kernels",
    ),
    row(
        "cpu-by-mistake",
        "The run is on the CPU although the machine has a GPU.",
        lambda e: e.device == "cpu" and (e.sees_gpu or (e.machine and e.machine.gpus)) and "slows",
        "The run is on the CPU although this machine has a GPU. The reason: {e.no_gpu_because}.",
        lambda e, _: e.sees_gpu and e.config and ("Set {set}.", {"train.device": "auto"}),
        lambda e, _: e.sees_gpu and 'Move the model and every batch to the GPU: `.to("cuda")`.',
        lambda e, _: (
            e.torch_version and not e.torch_cuda and f"Install a torch for CUDA: `{CUDA_TORCH}`."
        ),
        "Make the GPU usable: `nvidia-smi` must show it, CUDA_VISIBLE_DEVICES must not hide it, "
        "and the driver must suit this torch.",
        shows="torch_version torch_cuda",
    ),
    row(
        "decomposition",
        "Matrix decompositions, such as an SVD, take a large part of each step.",
        lambda e: e.share(
            sum(row.seconds for row in e.kernels or () if row.kind == "decomposition"), 0.1
        ),
        "{share:.0%} of each step decomposes matrices (torch.linalg), as spectral norms do.",
        "If the largest singular value is enough, use power iteration, as torch.nn.utils."
        "parametrizations.spectral_norm does. Otherwise compute it every few steps.",
        site="decomposition",
    ),
    row(
        "disk-space",
        "The disk is too small for the checkpoints of the run.",
        lambda e: (e.disk_needed_gib or 0.0) > (e.disk_free_gib or math.inf) and "fails",
        "The checkpoints need {e.disk_needed_gib:.1f} GiB, but the disk has {e.disk_free_gib:.1f} "
        "GiB free.",
        (
            "Free space, write to a larger disk, or keep fewer: {set}.",
            {"checkpoint.keep": 1, "checkpoint.keep_every": None},
        ),
    ),
    row(
        "double-precision",
        "The model computes in float64.",
        lambda e: e.site("float64") and e.share(e.float64_s, 0.1) and e.share(e.work_s / 2),
        "The model computes in float64, which takes twice the memory and time of float32.",
        "Compute in float32: convert inputs with .float(), and remove .double().",
        site="float64",
        shows="float64_s",
    ),
    row(
        "empty-cache",
        "The loop empties the allocator's cache repeatedly.",
        lambda e: (
            (e.empty_cache or 0.0) >= 0.4 and (e.share(e.empty_cache_s) if e.on_gpu else "warns")
        ),
        "Each step calls torch.cuda.empty_cache(): a GPU makes the host wait for that, and memory "
        "must be requested again.",
        "Remove the call. Against fragmentation, set PYTORCH_ALLOC_CONF=expandable_segments:True.",
        site="empty-cache",
        shows="empty_cache empty_cache_s",
    ),
    row(
        "few-rows",
        "Each forward pass has a single row.",
        lambda e: (
            e.rows == 1
            and not e.site("looped")
            and e.share(max(e.tiny_op_s or 0.0, e.optimizer_s or 0.0))
        ),
        "Each forward pass has 1 row: the cost of starting operations, of reading the weights and "
        "of the update is not shared.",
        "Raise the batch size, or use fewer micro-batches of more rows.",
        site="rows",
    ),
    row(
        "dense-gradients",
        "Gradients of a few rows of an embedding update all of its rows.",
        lambda e: (
            (1.0 if e.full_rows is None else e.full_rows) < 0.1
            and e.share((e.optimizer_s or 0.0) * (e.largest_share or 0.0), 0.15)
        ),
        "{share:.0%} of each step updates the largest weights, of which only {e.full_rows:.0%} of "
        "the rows have a gradient.",
        "Use nn.Embedding(..., sparse=True) with torch.optim.SparseAdam for its weights, and the "
        "optimizer of now for all others.",
        site="optimizer",
        shows="optimizer_s",
    ),
    row(
        "fragmentation",
        "The allocator reserves much more GPU memory than the tensors need.",
        lambda e: (
            (e.reserved_gib or 0.0) > max(1.3 * (e.peak_gib or 1e9), 0.8 * (e.total_gib or 1e9))
            and "expandable_segments:True" not in e.environment.get("PYTORCH_ALLOC_CONF", "")
            and "warns"
        ),
        "The allocator holds {e.reserved_gib:.1f} GiB for tensors of {e.peak_gib:.1f} GiB: the "
        "memory is fragmented.",
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True.",
        shows="total_gib",
    ),
    row(
        "frequent-evaluation",
        "Evaluations take a noticeable share of the run.",
        ("evaluation_s", 0.2),
        "Evaluations take {share:.0%} of the run{e.evaluation_words}.",
        lambda e, _: (
            e.evaluates_with_gradients
            and "Evaluate in torch.inference_mode(): its passes build graphs for nothing."
        ),
        rarer("Evaluate less often: {set}.", 0.05, "train.eval_every"),
        "Evaluate less often, or on less data. If these passes make what is trained on, make more "
        "of it in one pass.",
        site="evaluating",
    ),
    row(
        "full-memory",
        "The memory of the GPU is nearly full.",
        lambda e: e.on_gpu and e.used_share >= CLOSE and ("slows" if e.used_share > 1 else "warns"),
        "The tensors take {e.used_share:.0%} of the GPU's memory: the run may run out of it, or a "
        "driver that moves memory to the host (Windows, WSL) makes it many times slower.",
        *LESS_MEMORY,
        shows="reserved_gib peak_gib total_gib",
        unless="out-of-memory too-little-memory fragmentation",
    ),
    row(
        "garbage-collection",
        "Python's garbage collector takes a noticeable share of each step.",
        ("gc_s", 0.03),
        "Python's garbage collector takes {share:.0%} of each step.",
        speedup("gc", "Collect at fixed steps only: {set}."),
        "Call gc.freeze() and gc.disable() before the loop, and gc.collect() only every few "
        "hundred steps.",
        site="gc",
        shows="gc_s collections",
        unless="recompiles",  # torch.compile collects garbage
    ),
    row(
        "gpu-shared",
        "Other processes use the same GPU.",
        # less memory is something that only shows, such as a desktop
        lambda e: (e.gpu_others_gib or 0.0) >= 0.5 and "warns",
        "Other processes on this GPU ({e.gpu_others}) hold {e.gpu_others_gib:.1f} GiB of its "
        "memory, and may take its time.",
        "End them (`nvidia-smi` lists them), or use a different GPU.",
    ),
    row(
        "growing-hooks",
        "Each step registers a hook that none removes.",
        lambda e: e.grown_by == "hooks" and "slows",
        "Each step adds to {e.grown} a hook that is never removed: the work of a pass grows.",
        "Register it once, before the loop. Or keep what registering returns, and call its "
        "remove() after the pass.",
    ),
    row(
        "growing-memory",
        "The graph of each step is kept, so that memory and time grow with the steps.",
        lambda e: (
            # or graphs of evaluations, or of parts of the model
            ((e.kept_graphs or 0.0) > 0.5 or (e.growth_bytes and e.grown and e.grown == e.kept_by))
            and "spoils"
        ),
        "The graph of each step is kept by {e.kept_by}, so memory and time grow with the steps.",
        "Keep numbers, not tensors with gradients: a list or a sum of losses or outputs takes "
        "loss.item() or output.detach().",
        shows="growth_mib",
    ),
    row(
        "growing-work",
        "A line makes more calls in each step, or gives them more tensors, than in the one before.",
        lambda e: (
            (place := e.site("growing"))
            and (e.grown or "size" not in e.grows)  # a curriculum gives it more on purpose
            and (e.share(place, 0.05) or "warns")
        ),
        "The work of {site} grows with every step.",
        "Look for what is added in each step and never removed, such as hooks or the values of "
        "all steps so far. Keep a running sum, or the last values.",
        site="growing",
        unless="growing-memory growing-hooks",
    ),
    row(
        "host-sync",
        "User code reads values of tensors in every step, which makes the host wait for the GPU.",
        lambda e: (
            (e.syncs or 0.0) - (e.expected_syncs or 0.0) >= 2 - e.on_gpu
            and (
                e.share(min(e.host_s or 0.0, e.sync_s or 0.0), 0.03)
                if e.on_gpu
                else e.source != "script" and "warns"
            )
        ),
        "Each step reads values of tensors ({e.syncs:.0f}) at {site}. On a GPU, the host waits for "
        "each, and then the GPU for the host.",
        "Keep values on the device, and read them every few steps, one step late.",
        site="sync",
        shows="syncs expected_syncs sync_s",
    ),
    row(
        "idle-gpu",
        "The GPU idles while the host prepares its work.",
        lambda e: e.on_gpu and e.share(e.host_s, 0.15),
        "The GPU idles {share:.0%} of each step, while Python prepares its work.",
        *LESS_OVERHEAD,
        site="compute python",
        shows="ops",
        unless="slow-data host-sync tiny-kernels recompiles garbage-collection environment "
        "empty-cache pageable-copies small-batch",
    ),
    row(
        "length",
        "The run is so long that the model memorises its data.",
        lambda e: (
            ((e.epochs or 0.0) > 100 or (e.tokens_per_step or 0) > (e.train_tokens or math.inf))
            and "spoils"
        ),
        "The run reads its text {e.epochs:,.0f} times: it will memorise it.",
        "Prepare more text, or shorten the run. Or stop when the validation loss no longer falls: "
        "train.patience=5 with train.eval_every.",
        shows="planned_steps tokens_per_step train_tokens",
    ),
    row(
        "many-workers",
        "The DataLoader has many more processes than there are cores.",
        lambda e: (e.workers or 0) > 2 * (e.cores or math.inf) and not e.reads_asleep and "warns",
        "The DataLoader has {e.workers} processes on {e.cores} cores: they take turns with the "
        "training.",
        lambda e, _: (
            f"Use num_workers={max((e.cores or 2) - 1, 1)}, or measure which number helps."
        ),
        site="rows",
    ),
    row(
        "looped-calls",
        "A line uses the same weights in many calls of one pass, which could be one call.",
        COSTLY,
        "{share:.0%} of each step is the work of {site}, which uses the same weights in call after "
        "call of one pass.",
        "Give it all steps of the sequence, or all rows of the batch, in one call: nn.LSTM takes a "
        "whole sequence.",
        site="looped",
        unless="repeated-work",
    ),
    row(
        "memory-bound",
        "The GPU spends much of each step on elementwise work that torch.compile would fuse.",
        lambda e: (
            e.on_gpu
            and "compile" not in str(e.speedups)
            and e.share((e.memory_bound_s or 0.0) / 2, 0.175)
        ),
        "Compiling would save about {share:.0%} of each step: operations that move memory and "
        "hardly compute take twice that.",
        compiling,
        site="compute",
        shows="memory_bound_s",
    ),
    row(
        "memory-leak",
        "Each step takes memory that it does not return.",
        # the history of LBFGS grows to its length
        lambda e: (
            (e.growth_bytes or 0.0) > 0
            and (e.grown_by or not e.uneven)
            and e.optimizer != "LBFGS"
            and ("spoils" if e.grown_by == "tensors" else "warns")
        ),
        "Each step takes {e.growth_mib:.2g} MiB of memory that it does not return{e.grown_words}.",
        shorter,
        "Look for a list, a cache or an attribute that grows in the loop.",
        unless="growing-memory",
    ),
    row(
        "out-of-memory",
        "The run ran out of memory.",
        lambda e: e.failed("out-of-memory", "killed") and "fails",
        "{e.failure.message}",
        *LESS_MEMORY,
        site="failure",
        shows="estimated_gib free_gib rows_that_fit",
    ),
    row(
        "padding",
        "Batches are padded beyond their longest row.",
        # lengths rounded up to a multiple of 8, which can pay off, stay below
        lambda e: e.share((e.padding or 0.0) * e.work_s, 0.25),
        "{share:.0%} of each step goes into columns of the batch that are padding in every row.",
        "Pad each batch to its longest row, in collate_fn or with padding='longest'. Batches of "
        "rows of similar length, or packed rows, need less still.",
        site="padding",
        shows="padding",
    ),
    row(
        "pageable-copies",
        "Batches are copied to the GPU from memory that is not pinned, so the host waits.",
        ("pageable_copy_s", 0.02),
        "{share:.0%} of each step copies batches to the GPU from memory that is not pinned.",
        speedup("loader", "Copy from pinned memory in the background: {set}."),
        "Use DataLoader(pin_memory=True), and copy with .to(device, non_blocking=True).",
        site="copy",
        shows="pageable_copies",
    ),
    row(
        "precision",
        "Matrices are multiplied in float32, which uses a small part of this GPU.",
        lambda e: (
            e.supports_bf16
            and e.setting("train.precision") == "fp32"
            and e.speedups is not None
            and "tf32" not in e.speedups
            and "slows"
        ),
        "Matrices are multiplied in float32, which uses a small part of this GPU.",
        (
            "Use bf16: {set}. Or multiply in TF32: add the speedup tf32.",
            {"train.precision": "bf16"},
        ),
    ),
    row(
        "recompiles",
        "torch.compile keeps compiling after the warm-up.",
        lambda e: e.recompiles and e.share(e.compile_s, 0.03),
        "torch.compile takes {share:.0%} of each step: it compiles {e.recompiles:.2g} graphs per "
        "step after the warm-up.",
        "Give every step the same shapes and dtypes (pad the last batch), or mark the dimension "
        "that changes with torch._dynamo.mark_dynamic.",
        site="recompile",
        shows="recompile_reason",
    ),
    row(
        "repeated-work",
        "A line computes the same from the same values in every step.",
        lambda e: e.share(e.seconds_at("repeated"), 0.1),
        "{share:.0%} of each step computes at {site} what it computed in the step before, from "
        "the same values.",
        "Compute it once, before the loop, and keep the result. Of a frozen part of the model, "
        "keep the outputs for each row of the data.",
        site="repeated",
    ),
    row(
        "slow-code",
        "Lines of the loop take time without training.",
        lambda e: (
            not (tiny_share(e) and e.at("op") == e.at("own"))
            and e.share(
                min(
                    e.seconds_at("own"),
                    # on a GPU, they only cost time where it idles meanwhile
                    (e.host_s or 0.0) if e.on_gpu else math.inf,
                ),
                0.1,
            )
        ),
        "{share:.0%} of each step goes into lines that are no work of forward, backward or "
        "optimizer, most of it into {site}.",
        by_text("own", ADVICE),
        site="own",
        unless="anomaly-detection growing-work",
    ),
    row(
        "slow-logging",
        "Logging and callbacks take a noticeable share of each step.",
        ("logging_s", 0.05),
        "Logging and callbacks take {share:.0%} of each step.",
        lambda e, _: (
            (e.setting("log.every") or 10) < 10
            and ("Write fewer records: {set}.", {"log.every": 10})
        ),
        speedup("readback", "Read values one step late: {set}."),
        lambda e, _: e.config and "Log to fewer places (log.to), or less often (log.every).",
        "Do less of it, or do it every few steps.",
        site="logging",
        shows="logging_s",
    ),
    row(
        "slow-optimizer",
        "The optimizer updates its tensors one by one.",
        lambda e: (
            e.optimizer_way in ("for-loop", "own") and e.share((e.optimizer_s or 0.0) / 2, 0.1)
        ),
        "{e.optimizer} updates {e.tensors} tensors one by one: updating all at once would save "
        "about {share:.0%} of each step, half of its time.",
        "Pass fused=True to the optimizer, or foreach=True where it has no fused=True, or use "
        "torch._foreach_ functions in your own.",
        site="optimizer",
        shows="optimizer_s",
    ),
    row(
        "slow-save",
        "Saves block the loop for a noticeable share of the run.",
        ("checkpoint_s", 0.05),
        "Saving checkpoints takes {share:.0%} of the run.",
        # on a CPU, the writing thread takes the cores that train
        lambda e, _: e.on_gpu and IN_BACKGROUND(e, 0.0),
        rarer(
            "Save less often: {set}.",
            0.01,
            "checkpoint.every_steps",
            "checkpoint.every_minutes",
            "checkpoint.every_epochs",
        ),
        "Save less often, or to a faster disk, or on a GPU in a background thread.",
        site="save",
    ),
    row(
        "small-batch",
        "Micro-batches are small for the GPU, which has room for larger ones.",
        lambda e: (
            e.on_gpu
            and (e.mfu or 1.0) <= 0.2
            and e.rows_that_fit
            and (e.share(e.host_s) or "slows")
        ),
        "Micro-batches of {e.config.batch.rows_per_device} rows reach {e.mfu:.0%} of the GPU's "
        "peak, but {e.rows_that_fit} rows fit.",
        larger_rows,
        unless="slow-data host-sync",
    ),
    row(
        "tiny-kernels",
        "A step consists of many tiny operations, which take longer to start than to run.",
        tiny_share,
        "{share:.0%} of each step goes into {e.tiny_ops:,.0f} tiny operations, which take longer "
        "to start than to run.",
        lambda e, _: (
            e.site("op compute python")
            and "Compute {line} for all elements at once instead of one by one."
        ),
        *LESS_OVERHEAD,
        site="op compute python",
        shows="ops tiny_op_s",
        unless="slow-data slow-code slow-optimizer few-rows repeated-backward",
    ),
    row(
        "too-little-memory",
        "The run needs more memory than is free, or nearly as much.",
        lambda e: e.needed_share >= CLOSE and ("fails" if e.needed_share > 1 else "warns"),
        "The run needs about {e.estimated_gib:.1f} GiB, and {e.free_gib:.1f} GiB are available.",
        *LESS_MEMORY,
        shows="rows_that_fit",
        unless="out-of-memory",
    ),
    row(
        "tracing",
        "A profiler or a debugger follows all calls of the run.",
        lambda e: e.tracer and "slows",
        "{e.tracer} follows all calls in most steps.",
        "Use it for some steps only, as with torch.profiler.schedule, or run without it.",
    ),
    row(
        "unfused-attention",
        "Attention stores the scores of all pairs of tokens in memory.",
        lambda e: (
            e.site("softmax")
            and e.share(sum(k.seconds for k in e.kernels or () if k.kind == "attention"), 0.03)
        ),
        "Attention keeps the scores of all pairs of tokens in memory. Their softmax alone takes "
        "{share:.0%} of each step.",
        "Use torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), or call "
        "nn.MultiheadAttention with need_weights=False.",
        site="softmax",
    ),
    row(
        "unused-results",
        "Much of a matmul's result has no effect on the loss.",
        0.1,
        "{share:.0%} of each step computes results at {site} that the loss does not use: their "
        "gradients are zero.",
        "Take what the loss uses before the product: rows by hidden[mask], the diagonal of a @ b.T "
        "by (a * b).sum(-1).",
        site="unused",
        unless="padding",
    ),
    row(
        "work-without-effect",
        "Results that nobody reads, or whose gradients are zero, are computed.",
        0.1,
        "{share:.0%} of each step is the work of {site}, which changed no weight in any of them: "
        "nothing reads its result, or its gradients are zero.",
        "Remove it, or compute it only in the steps that use it.",
        site="unread zero",
    ),
]
"""Sorted by name."""
