"""What flatout can change in a script that it did not write, one entry per change. No torch.

Its edit is made on the user's files by patch.py, and in the script's process by apply.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flatout.hardware.machine import probe
from flatout.measure.evidence import Evidence
from flatout.measure.scripts.patch import Edit

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch with a fused form on every device."""
LEAST_WAIT = 0.02
"""Share of a step from which waiting for data is worth a trial."""
MOST_WORKERS = 8
"""Most workers of a DataLoader that are tried."""
WORKERS = {"num_workers": "{workers}", "persistent_workers": "True"}
HF = "TrainingArguments SFTConfig DPOConfig GRPOConfig"
"""Classes that hold what transformers' Trainer, and those of TRL, are told."""
HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Settings of glibc with which freed memory stays with the process, mapped: those that a speedup
makes for flatout's own runs, as variables, since they come before a script's first tensor."""
GONE = {
    "deferred-item": "Read values in every tenth step, or one step late: keep `loss.detach()"
    '.to("cpu", non_blocking=True)` and read it after the next step.',
    "compile-each-block": "Call compile() of each block in the script, or try --with compile.",
    "zero-grad-none": "Call zero_grad() without set_to_none=False in the script.",
    "gc-thresholds": "Call gc.freeze() and gc.set_threshold(100_000, 50, 100) before the loop.",
    "prefetch": "Set prefetch_factor in the script's own DataLoader.",
}
"""Changes of earlier versions, and what to do instead."""
FP32, BF16 = 1e-3, 2e-2
"""How far losses may differ because sums of these types are rounded in a different order."""
NO_CONVOLUTIONS = "There are no convolutions."


@dataclass(frozen=True)
class Change:
    """One change of a script."""

    does: str
    """What it does, in a few words."""
    edit: Edit
    """What it changes in the user's files. See `edit_of`."""
    obstacles: Callable[[Evidence], Mapping[str, object]]
    """Reasons why it is not worth a trial, and whether they hold."""
    rtol: float = 0.0
    """Largest relative difference of a loss. 0 means none."""

    def why_not(self, evidence: Evidence) -> str | None:
        """Return why it is not worth a trial. None means it is."""
        found = self.obstacles(evidence)
        return next((reason for reason, holds in found.items() if holds), None)


def num_workers() -> int:
    """Return the number of workers of a DataLoader that is tried."""
    return min(probe().cores, MOST_WORKERS)


def edit_of(name: str, device: str = "{device}") -> Edit:
    """Return the edit of a change for this machine, and for a model on this type of device."""
    edit, workers = CHANGES[name].edit, str(num_workers())

    def filled(keywords: Mapping[str, str]) -> dict[str, str]:
        return {key: text.replace("{workers}", workers) for key, text in keywords.items()}

    return replace(
        edit,
        keywords=filled(edit.keywords),
        library={known: filled(keywords) for known, keywords in edit.library.items()},
        around=edit.around.replace("{device}", device),
    )


def no_wait(evidence: Evidence) -> dict[str, object]:
    """Return the obstacle that the steps do not wait for data."""
    waits = evidence.share(evidence.data_wait_s) or 0.0
    return {"The steps do not wait for data.": waits < LEAST_WAIT}


def no_gpu(evidence: Evidence) -> dict[str, object]:
    """Return the obstacle that there is no GPU."""
    return {"The model is not on a GPU.": not evidence.on_gpu}


def calls(kind: str) -> Callable[[Evidence], Mapping[str, object]]:
    """Return the obstacles for a change of calls that a script may not make."""
    return lambda e: {"The script does not call it.": kind not in e.calls}


CHANGES = {
    "data-workers": Change(
        "worker processes read the data, and stay between epochs",
        Edit(
            at="loader",
            keywords=WORKERS,
            library={HF: {f"dataloader_{name}": text for name, text in WORKERS.items()}},
        ),
        lambda e: {
            "There is no DataLoader over a map-style dataset.": e.workers is None
            or e.dataset == "iterable",
            "There are as many workers already.": (e.workers or 0) >= num_workers(),
            "Its rows are tensors in memory, which workers would only copy.": e.dataset == "memory",
            "/dev/shm is too small: workers send batches through it.": e.lacks_shared,
            **no_wait(e),
        },
    ),
    "pinned-memory": Change(
        "batches are in pinned memory, from which a GPU copies faster",
        Edit(
            at="loader",
            keywords={"pin_memory": "True"},
            library={HF: {"dataloader_pin_memory": "True"}},
        ),
        lambda e: {**no_gpu(e), "Batches are pinned already.": e.pinned},
    ),
    "no-anomaly": Change(
        "torch.autograd.set_detect_anomaly is off",
        Edit(at="anomaly", remove=True),
        lambda e: {"Anomaly detection is off.": not e.anomaly_detection},
    ),
    "no-gc-collect": Change(
        "the loop does not call gc.collect()",
        Edit(at="gc-collect", remove=True),
        calls("gc-collect"),
    ),
    "no-empty-cache": Change(
        "the loop does not call torch.cuda.empty_cache()",
        Edit(at="empty-cache", remove=True),
        calls("empty-cache"),
    ),
    "threads": Change(
        "operations on the CPU use all cores",
        Edit(
            at="threads",
            remove=True,
            by_hand="Unset OMP_NUM_THREADS, or call torch.set_num_threads() with the number of "
            "cores.",
        ),
        lambda e: {
            "The model is on a GPU.": e.on_gpu,
            "They use all cores already.": (e.threads or 1) >= probe().cores,
            "Several processes share the cores.": e.world_size > 1,
        },
        FP32,
    ),
    "tf32": Change(
        "fp32 matmuls use TF32",
        Edit(
            lines=('{torch}.set_float32_matmul_precision("high")',),
            library={HF: {"tf32": "True"}},
        ),
        lambda e: {
            **no_gpu(e),
            "They use TF32 already.": e.tf32,
            "The matmuls are not in fp32.": e.autocast or e.dtype != "float32",
        },
        FP32,
    ),
    "bf16": Change(
        "the forward pass runs in bf16 autocast",
        Edit(
            at="loss",
            around='{torch}.autocast("{device}", dtype={torch}.bfloat16)',
            library={
                HF: {"bf16": "True"},
                "Accelerator": {"mixed_precision": '"bf16"'},
                "Fabric": {"precision": '"bf16-mixed"'},
            },
        ),
        lambda e: {
            "The forward pass is not in fp32.": e.autocast or e.dtype != "float32",
            "This CPU does not multiply bf16.": not e.on_gpu and not probe().cpu_multiplies_bf16,
        },
        BF16,
    ),
    "sdpa": Change(
        "attention uses scaled_dot_product_attention",
        Edit(lines=('{model}.set_attn_implementation("sdpa")',)),
        lambda e: {"No model with a different choice is known.": not e.eager_attention},
        FP32,
    ),
    "channels-last": Change(
        "convolutions use the channels-last layout",
        Edit(lines=("{model}.to(memory_format={torch}.channels_last)",)),
        lambda e: {NO_CONVOLUTIONS: not e.convolutions},
        FP32,
    ),
    "cudnn-benchmark": Change(
        "cuDNN measures its algorithms for each shape",
        Edit(lines=("{torch}.backends.cudnn.benchmark = True",)),
        lambda e: {**no_gpu(e), NO_CONVOLUTIONS: not e.convolutions},
        FP32,
    ),
    "fused-optimizer": Change(
        "the optimizer updates all weights in one kernel",
        Edit(
            at="optimizer",
            keywords={"fused": "True"},
            only=FUSED,
            library={HF: {"optim": '"adamw_torch_fused"'}},
        ),
        lambda e: {
            "It does already, or has no such kernel.": e.optimizer not in FUSED
            or e.optimizer_way == "fused"
        },
        FP32,
    ),
    "compile": Change(
        "the model is compiled",
        Edit(lines=("{model}.compile()",), library={HF: {"torch_compile": "True"}}),
        lambda e: {"The model is compiled already.": e.compiled},
        FP32,
    ),
    "malloc": Change(
        "freed memory stays with the process instead of going back to the system",
        Edit(environment=HEAP),
        lambda e: {"The model is on a GPU.": e.on_gpu},
    ),
    "expandable-segments": Change(
        "the GPU's allocator grows its segments instead of asking for more of them",
        Edit(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        lambda e: no_gpu(e),
    ),
}
"""In the order of the first trials: what costs nothing first, what compiles last."""
