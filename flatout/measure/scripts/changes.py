"""What flatout can change in a script that it did not write, one entry per change. No torch.

Its edits are made on the user's files by patch.py, and in the script's process by apply.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flatout.hardware import probe
from flatout.measure.scripts.patch import Edit
from flatout.measure.scripts.request import Facts
from flatout.measure.steps.evidence import Evidence

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch with a fused form on every device."""
LEAST_WAIT, LEAST_GC = 0.02, 0.01
"""Shares of a step from which waiting for data and collecting garbage are worth a trial."""
MOST_WORKERS = 8
"""Most workers of a DataLoader that are tried."""
WORKERS = {"num_workers": "{workers}", "persistent_workers": "True"}
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Settings of glibc with which freed memory stays with the process, mapped: those that a speedup
makes for flatout's own runs, as variables, since they come before a script's first tensor."""
FP32, BF16 = 1e-3, 2e-2
"""How far losses may differ because sums of these types are rounded in another order."""
NO_GPU, NO_CONVOLUTIONS = "The model is not on a GPU.", "There are no convolutions."
NO_WAIT = "The steps do not wait for data."


@dataclass(frozen=True)
class Change:
    """One change of a script."""

    does: str
    """What it does, in a few words."""
    why_not: Callable[[Facts, Evidence], str | None]
    """Why it is not worth a trial; None: it is."""
    rtol: float = 0.0
    """Largest relative difference of a loss; 0: none."""
    edits: tuple[Edit, ...] = ()
    """What it changes in the user's files; see `edits_of`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the process."""


def num_workers() -> int:
    """Return the number of workers of a DataLoader that is tried."""
    return min(probe().cores, MOST_WORKERS)


def edits_of(name: str, device: str = "{device}") -> list[Edit]:
    """Return the edits of a change for this machine, and for a model on this type of device."""

    def filled(text: str) -> str:
        return text.replace("{workers}", str(num_workers())).replace("{device}", device)

    return [
        replace(
            edit,
            keywords={key: filled(value) for key, value in edit.keywords.items()},
            lines=tuple(map(filled, edit.lines)),
        )
        for edit in CHANGES[name].edits
    ]


def first(*reasons: tuple[object, str]) -> str | None:
    """Return the reason of the first condition that holds."""
    return next((reason for holds, reason in reasons if holds), None)


def started_with(environment: Mapping[str, str]) -> Edit:
    """Return the words for variables of the process, which no edit can set early enough."""
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    return Edit(by_hand=f"Start the script with these environment variables: {variables}")


def waits(evidence: Evidence) -> bool:
    """Return whether the steps wait for data."""
    return (evidence.share(evidence.phases.data_wait_s) or 0.0) >= LEAST_WAIT


def calls(kind: str) -> Callable[[Facts, Evidence], str | None]:
    """Return a `why_not` for a change of calls that a script may not make."""
    return lambda facts, _: None if kind in facts.calls else "The script does not call it."


CHANGES = {
    "data-workers": Change(
        "worker processes read the data, and stay between epochs",
        lambda facts, evidence: first(
            (facts.workers is None, "There is no DataLoader over a map-style dataset."),
            ((facts.workers or 0) >= num_workers(), "There are as many already."),
            (not waits(evidence), NO_WAIT),
        ),
        edits=(Edit(at="loader", keywords=WORKERS),),
    ),
    "prefetch": Change(
        "workers read further ahead, and stay between epochs",
        lambda facts, evidence: first(
            (not facts.workers, "There are no workers."), (not waits(evidence), NO_WAIT)
        ),
        edits=(Edit(at="loader", keywords={**WORKERS, "prefetch_factor": "8"}),),
    ),
    "pinned-memory": Change(
        "batches are in pinned memory, from which a GPU copies faster",
        lambda facts, _: first((facts.device != "cuda", NO_GPU), (facts.pinned, "They are.")),
        edits=(Edit(at="loader", keywords={"pin_memory": "True"}),),
    ),
    "no-anomaly": Change(
        "without torch.autograd.set_detect_anomaly",
        lambda facts, _: None if facts.anomaly else "It is off.",
        edits=(Edit(at="anomaly", remove=True),),
    ),
    "no-gc-collect": Change(
        "without gc.collect() in the loop",
        calls("gc-collect"),
        edits=(Edit(at="gc-collect", remove=True),),
    ),
    "no-empty-cache": Change(
        "without torch.cuda.empty_cache() in the loop",
        calls("empty-cache"),
        edits=(Edit(at="empty-cache", remove=True),),
    ),
    "gc-thresholds": Change(
        "the garbage collector runs rarely, and skips what is there at the start",
        lambda _, evidence: first(
            (
                (evidence.share(evidence.phases.gc_s) or 0.0) < LEAST_GC,
                "Collecting garbage takes no time.",
            )
        ),
        edits=(
            Edit(
                at="optimizer",
                lines=("import gc as _gc", "_gc.freeze()", "_gc.set_threshold(100_000, 50, 100)"),
            ),
        ),
    ),
    "threads": Change(
        "operations on the CPU use all cores",
        lambda facts, evidence: first(
            (facts.device != "cpu", "The model is on a GPU."),
            (facts.threads >= probe().cores, "They do already."),
            (evidence.world_size > 1, "Several processes share the cores."),
        ),
        FP32,
        edits=(
            Edit(
                at="threads",
                remove=True,
                by_hand="Unset OMP_NUM_THREADS, or call torch.set_num_threads() with the number "
                "of cores.",
            ),
        ),
    ),
    "zero-grad-none": Change(
        "zero_grad frees the gradients instead of filling them with zeros",
        calls("zero-grad"),
        edits=(Edit(at="zero-grad", keywords={"set_to_none": "True"}),),
    ),
    "tf32": Change(
        "fp32 matmuls use TF32",
        lambda facts, _: first(
            (facts.device != "cuda", NO_GPU),
            (facts.tf32, "They do already."),
            (facts.autocast or facts.dtype != "float32", "The matmuls are not in fp32."),
        ),
        FP32,
        edits=(Edit(at="start", lines=('{torch}.set_float32_matmul_precision("high")',)),),
    ),
    "bf16": Change(
        "the forward pass runs in bf16 autocast",
        lambda facts, _: first(
            (facts.autocast or facts.dtype != "float32", "It is not in fp32."),
            (
                facts.device == "cpu" and not probe().cpu_multiplies_bf16,
                "This CPU does not multiply bf16.",
            ),
        ),
        BF16,
        edits=(
            Edit(
                at="optimizer",
                lines=(
                    "import functools as _functools",
                    "@_functools.wraps(type({model}).forward)",
                    "def forward_in_bf16(self, *args, _plain=type({model}).forward, "
                    "_model={model}, **kwargs):",
                    "    if self is not _model:",
                    "        return _plain(self, *args, **kwargs)",
                    '    with {torch}.autocast("{device}", {torch}.bfloat16):',
                    "        out = _plain(self, *args, **kwargs)",
                    "    is_bf16 = {torch}.is_tensor(out) and out.dtype == {torch}.bfloat16",
                    "    return out.float() if is_bf16 else out",
                    "type({model}).forward = forward_in_bf16",
                ),
            ),
        ),
    ),
    "sdpa": Change(
        "attention through scaled_dot_product_attention",
        lambda facts, _: (
            None if facts.eager_attention else "No model with another choice is known."
        ),
        FP32,
        edits=(Edit(at="optimizer", lines=('{model}.set_attn_implementation("sdpa")',)),),
    ),
    "channels-last": Change(
        "convolutions with the channels last",
        lambda facts, _: None if facts.convolutions else NO_CONVOLUTIONS,
        FP32,
        edits=(Edit(at="optimizer", lines=("{model}.to(memory_format={torch}.channels_last)",)),),
    ),
    "cudnn-benchmark": Change(
        "cuDNN measures its algorithms for each shape",
        lambda facts, _: first(
            (facts.device != "cuda", NO_GPU), (not facts.convolutions, NO_CONVOLUTIONS)
        ),
        FP32,
        edits=(Edit(at="start", lines=("{torch}.backends.cudnn.benchmark = True",)),),
    ),
    "fused-optimizer": Change(
        "the optimizer updates all weights in one kernel",
        lambda facts, _: None if facts.unfused else "It does, or has no such kernel.",
        FP32,
        edits=(Edit(at="optimizer", keywords={"fused": "True"}, only=FUSED),),
    ),
    "compile": Change(
        "the model is compiled",
        lambda facts, _: "It is." if facts.compiled else None,
        FP32,
        edits=(Edit(at="optimizer", lines=("{model}.compile()",)),),
    ),
    "compile-each-block": Change(
        "the repeated blocks of the model are compiled, which takes less time",
        lambda facts, _: first(
            (facts.compiled, "It is compiled."), (not facts.blocks, "No block is repeated.")
        ),
        FP32,
        edits=(
            Edit(
                at="optimizer",
                lines=(
                    "for module in {model}.modules():",
                    "    if isinstance(module, {torch}.nn.ModuleList):",
                    "        for block in module:",
                    "            block.compile()",
                ),
            ),
        ),
    ),
    "deferred-item": Change(
        "tensor.item() returns the value of its previous call, without waiting for the GPU",
        lambda facts, evidence: first(
            (facts.device != "cuda", NO_GPU),
            (not evidence.counts.syncs, "The steps read no tensor."),
        ),
        edits=(
            Edit(
                by_hand="Read values only in every tenth step, or one step late: keep "
                '`loss.detach().to("cpu", non_blocking=True)` and read it after the next step.'
            ),
        ),
    ),
    "malloc": Change(
        "freed memory stays with the process instead of going back to the system",
        lambda facts, _: "The model is on a GPU." if facts.device != "cpu" else None,
        edits=(started_with(HEAP),),
        environment=HEAP,
    ),
    "expandable-segments": Change(
        "the GPU's allocator grows its segments instead of asking for more of them",
        lambda facts, _: NO_GPU if facts.device != "cuda" else None,
        edits=(started_with(SEGMENTS),),
        environment=SEGMENTS,
    ),
}
"""In the order of the first trials: what costs nothing first, what compiles last."""
