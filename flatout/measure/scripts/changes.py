"""What flatout can change in a script that it did not write, one entry per change. No torch.

Its edit is made on the user's files by patch.py, in the script's process by apply.py, and between
two of its steps by switches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flatout.distributed.launch import stated_variables
from flatout.hardware.machine import BUSY_CORES, probe
from flatout.measure.evidence import MOST_WORKERS, Evidence
from flatout.measure.scripts.options import Option
from flatout.measure.scripts.patch import Edit

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch with a fused form on every device."""
LEAST_WAIT, WORTH_WAIT = 0.02, 0.08
"""Share of a step from which waiting for data is worth screening, and trials of processes."""
HF = "TrainingArguments SFTConfig DPOConfig GRPOConfig"
"""Classes that hold what transformers' Trainer, and those of TRL, are told."""
HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Settings of glibc with which freed memory stays with the process, mapped: those that a speedup
makes for flatout's own runs, as variables, since they come before a script's first tensor."""
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Settings of GNU's and Intel's OpenMP with which a waiting thread sleeps: one that spins keeps its
core from those that it waits for where other processes use the cores, too."""
FP32, BF16 = 1e-3, 2e-2
"""How far losses may differ because sums of these types are rounded in a different order."""
NO_GPU = "not torch.accelerator.is_available()"
"""What keeps an argument that was measured on a CPU from a GPU, as source text."""
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
    undo: tuple[str, ...] = ()
    """Statements that undo the edit's lines."""

    @property
    def is_of_start(self) -> bool:
        """Whether only a new process can have it. Otherwise it is switched between two steps."""
        return bool(self.edit.environment) or self.edit.at == "loader"

    def why_not(self, evidence: Evidence) -> str | None:
        """Return why it is not worth a trial. None means it is."""
        found = self.obstacles(evidence)
        return next((reason for reason, holds in found.items() if holds), None)


def num_workers() -> int:
    """Return the number of workers of a DataLoader that is tried."""
    return min(probe().cores, MOST_WORKERS)


def edit_of(name: str, device: str = "{device}") -> Edit:
    """Return the edit of a change for this machine, and for a model on this type of device."""
    edit, workers, on_cpu = CHANGES[name].edit, str(num_workers()), device == "cpu"

    def filled(keywords: Mapping[str, str]) -> dict[str, str]:
        return {
            key: text.format(workers=workers, on_cpu=NO_GPU, here=NO_GPU if on_cpu else "True")
            for key, text in keywords.items()
            if on_cpu or "{on_cpu}" not in text
        }

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


def states_waits() -> bool:
    """Return whether the environment states how long OpenMP's threads spin while they wait."""
    return bool(stated_variables([*PASSIVE, "GOMP_SPINCOUNT"]))


def calls(kind: str) -> Callable[[Evidence], Mapping[str, object]]:
    """Return the obstacles for a change of calls that a script may not make."""
    return lambda e: {"The script does not call it.": kind not in e.calls}


def workers(number: str) -> Edit:
    """Return the edit with this number of workers."""
    keywords = {"num_workers": number, "persistent_workers": "True"}
    library = {HF: {f"dataloader_{name}": text for name, text in keywords.items()}}
    return Edit(at="loader", keywords=keywords, library=library)


def no_workers(evidence: Evidence, number: int) -> dict[str, object]:
    """Return the obstacles for this number of workers."""
    waits = evidence.share(evidence.data_wait_s) or 0.0
    return {
        "There is no DataLoader over a map-style dataset.": evidence.workers is None
        or evidence.dataset == "iterable",
        "The steps wait too little for data.": waits < WORTH_WAIT,
        "There are as many workers already.": (evidence.workers or 0) >= number,
        "Its rows are tensors in memory, which workers would only copy.": evidence.dataset
        == "memory",
        "/dev/shm is too small: workers send batches through it.": evidence.lacks_shared,
    }


CHANGES = {
    "data-workers": Change(
        "worker processes read the data, and stay between epochs",
        workers("{workers}"),
        lambda e: {
            **no_workers(e, num_workers()),
            "Reading waits for a disk or a network: see more-workers.": e.reads_asleep,
        },
    ),
    "more-workers": Change(
        f"{MOST_WORKERS} worker processes read the data, which waits for a disk or a network",
        workers(str(MOST_WORKERS)),
        lambda e: {
            **no_workers(e, MOST_WORKERS),
            "Reading the data keeps the processor busy.": not e.reads_asleep,
        },
    ),
    "cached-items": Change(
        "items of a dataset that are the same in each epoch are read once, before the first step",
        Edit(
            at="items",
            by_hand="Read the items into a list before the loop: rows = [*dataset], and pass that "
            "to the DataLoader.",
        ),
        lambda e: {
            "There is no DataLoader over a map-style dataset.": e.workers is None
            or e.dataset == "iterable",
            "Worker processes read them.": e.workers,
            "Its rows are tensors in memory.": e.dataset == "memory",
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
    "zero-grad-none": Change(
        "zero_grad() drops the gradients instead of writing zeros",
        Edit(at="zero-grad", keywords={"set_to_none": "True"}),
        calls("zero-grad"),
    ),
    "gc-thresholds": Change(
        "Python looks for garbage less often, and not among what exists before the loop",
        Edit(lines=("import gc as _gc", "_gc.freeze()", "_gc.set_threshold(100_000, 50, 100)")),
        lambda e: {
            "The script calls gc.collect() itself.": "gc-collect" in e.calls,
            "Collecting garbage takes little.": (e.share(e.gc_s) or 0.0) < LEAST_WAIT,
        },
        undo=("_gc.unfreeze()", "_gc.set_threshold(*thresholds)"),
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
        undo=('{torch}.set_float32_matmul_precision("highest")',),
    ),
    "bf16": Change(
        "the forward pass runs in bf16 autocast",
        Edit(
            at="loss",
            around='{torch}.autocast("{device}", dtype={torch}.bfloat16)',
            library={
                HF: {"bf16": "{here}", "use_cpu": "{on_cpu}"},  # where it asks for a GPU otherwise
                "Accelerator": {"mixed_precision": '"bf16"'},
                "Fabric lightning:Trainer": {"precision": '"bf16-mixed"'},
            },
            option=Option(
                "bf16",
                "train in bf16 autocast",
                "amp|bf16|bfloat16|fp16|float16|half(?!_life)|precision|autocast|dtype",
                {
                    "bf16": "{flag}",
                    "mixed_precision": '"bf16" if {flag} else "no"',
                    "precision": '"bf16-mixed" if {flag} else "32-true"',
                },
            ),
        ),
        lambda e: {
            "The forward pass is not in fp32.": e.autocast or e.dtype != "float32",
            "This CPU does not multiply bf16.": not e.on_gpu and not probe().cpu_multiplies_bf16,
            "A loss takes probabilities, which bf16 rounds to 0 or 1.": e.site("rounded"),
        },
        BF16,
    ),
    "sdpa": Change(
        "attention uses scaled_dot_product_attention",
        Edit(lines=('{model}.set_attn_implementation("sdpa")',)),
        lambda e: {"No model with a different choice is known.": not e.eager_attention},
        FP32,
        undo=('{model}.set_attn_implementation("eager")',),
    ),
    "channels-last": Change(
        "convolutions use the channels-last layout",
        Edit(lines=("{model}.to(memory_format={torch}.channels_last)",)),
        lambda e: {NO_CONVOLUTIONS: not e.convolutions},
        FP32,
        undo=("{model}.to(memory_format={torch}.contiguous_format)",),
    ),
    "cudnn-benchmark": Change(
        "cuDNN measures its algorithms for each shape",
        Edit(lines=("{torch}.backends.cudnn.benchmark = True",)),
        lambda e: {**no_gpu(e), NO_CONVOLUTIONS: not e.convolutions},
        FP32,
        undo=("{torch}.backends.cudnn.benchmark = False",),
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
        Edit(
            lines=("{model}.compile()",),
            library={HF: {"torch_compile": "True"}},
            option=Option("compile", "compile the model", "compile", {"torch_compile": "{flag}"}),
        ),
        lambda e: {"The model is compiled already.": e.compiled},
        FP32,
        undo=("{model}._compiled_call_impl = None",),
    ),
    "passive-threads": Change(
        "waiting threads sleep, and leave their cores to other processes",
        Edit(environment=PASSIVE),
        lambda e: {
            "The model is on a GPU.": e.on_gpu,
            "The environment states how threads wait.": states_waits(),
            "No other process uses the cores.": (e.other_busy_cores or 0.0) <= BUSY_CORES,
        },
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
