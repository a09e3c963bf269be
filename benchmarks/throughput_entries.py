"""The workloads of throughput.py, the entries measured on each, and their targets.

A workload (`Work`) is a model shape with a sequence length. An entry is one way to train it: a
flatout recipe with a set of speedups, or a peer. The recipe defines the shape and peers receive the
same one; a missing recipe is replaced by another with overrides. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from flatout.assembly.recipe import Promise, Speedup, lazy
from flatout.config.schema import RunConfig, load_config
from flatout.registry import RECIPES

VOCABULARY, TINY_VOCABULARY = 50_257, 512
"""Token ids in the dataset; the embedding size comes from the recipe."""
STEPS = {"warmup_steps": 8, "steps": 20}
TINY_STEPS = {"warmup_steps": 2, "steps": 8}
TINY_ROWS = 8
"""Sequences per step at toy shapes: enough for the loss to fall steadily."""
SAME = {
    "schedule.kind": "constant",
    "schedule.warmup": 0,
    "schedule.min_lr": 0.0,
    "optim.lr": 3e-4,
    "optim.clip": 1.0,
}
"""Optimiser settings shared by all entries.

There is no warm-up: in so few steps the loss falls only if the learning rate starts high enough.
"""
TINY_TOKENS = {1_024: 32, 32_768: 64}
"""Toy sequence length for each real one."""
TINY_MODEL = {
    "transformer": {"num_layers": 2, "d_model": 32, "num_heads": 2},
    "eigenstate": {"num_layers": 2, "d_model": 32, "num_eigenstates": 16, "chunk_size": 16},
}

FFT_SCAN = Speedup(
    name="fft-scan",
    fills={"ops.scan": lazy("scan_fft:fft")},
    saves="nothing: a baseline that computes the recurrence by FFT, as public code does",
    promise=Promise.rounding(rtol=1e-3),
)
FFT = "throughput_entries:FFT_SCAN"


@dataclass(frozen=True)
class Work:
    """A model shape and sequence length."""

    name: str
    title: str
    recipe: str
    otherwise: tuple[str, Mapping[str, Any]] | None = None
    """An equivalent recipe with overrides, used when `recipe` does not exist."""

    def config(self) -> RunConfig:
        """Return the config of the recipe."""
        if self.otherwise is None or self.recipe in RECIPES.names():
            return load_config(self.recipe)
        recipe, overrides = self.otherwise
        return load_config(recipe).with_values(dict(overrides))


Role = Literal["ours", "peer"]


@dataclass(frozen=True)
class Entry:
    """One way to train a workload."""

    work: str
    name: str
    title: str
    """Description for tables, without the added speedups."""
    rows: tuple[int | None, ...]
    """Sequences per step to try, most promising first; None is the recipe's own batch."""
    kind: str = "flatout"
    """`flatout`, or the name of a function in throughput_peers."""
    role: Role = "ours"
    """`ours` counts towards targets; `peer` is a baseline, possibly a flatout recipe."""
    adds: tuple[str, ...] = ()
    """Speedups added to auto; names that do not exist are skipped with a message."""
    drops: tuple[str, ...] = ()
    """Speedups removed from auto."""
    about: str | None = None
    """The speedup under test; the entry is skipped where it is unavailable."""
    without: str | None = None
    """The speedup left out; the entry is skipped where that speedup cannot run anyway."""
    micro_batch: int | None = None
    """Rows per micro-batch when the step keeps the recipe's batch.

    Muon entries use this: the cost of Muon's update does not depend on the batch.
    """
    plain: bool = False
    """Use speedups=none instead of auto."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Config overrides."""
    compiled: bool = False
    """For peers: use torch.compile."""
    data: Literal["random", "text"] = "random"
    variant: str | None = None
    """Only targets of the same variant consider this entry."""


WIDE = {"model.num_heads": 6}
LONG = {"data.seq_len": 32_768}
WORKS = (
    Work("gpt2-124m", "GPT-2 124M, T = 1,024, exact fp32 update", "gpt2-124m"),
    Work(
        "gpt2-124m-fast",
        "the same size, free choice: heads of 128, ReLU², Muon",
        "gpt2-124m-fast",
        ("gpt2-124m", WIDE | {"model.activation": "relu2", "optim.kind": "muon"}),
    ),
    Work(
        "gpt2-700m",
        "700M-class (24 layers, d 1536), T = 1,024",
        "gpt2-700m",
        ("gpt2-124m", {"model.num_layers": 24, "model.d_model": 1536, "model.num_heads": 12}),
    ),
    Work(
        "gpt2-124m-32k",
        "GPT-2 124M, T = 32,768, 12 heads of 64",
        "gpt2-124m-32k",
        ("gpt2-124m", LONG),
    ),
    Work(
        "gpt2-124m-32k-wide-heads",
        "the same with 6 heads of 128",
        "gpt2-124m-32k-wide-heads",
        ("gpt2-124m", LONG | WIDE),
    ),
    Work(
        "eigenstate-small-32k", "small_32k eigenstate network, T = 32,768", "eigenstate-small-32k"
    ),
)

FAST = ("compile", "collector", "bf16-stream")
"""Speedups that every `set` entry adds to auto. Weights stay fp32."""
AUTO = "flatout, auto"
NO_BIAS: Mapping[str, Any] = {"model.bias": False}
"""No biases on either side, as in the peers' published figures; `-bias` entries have them."""
ONE_TEXT = {"data.document_mask": False}
ALONE = ("cuda-graphs", "liger-ce")
"""Speedups with an unmeasured gain: each is added to the set alone."""


def _ours(
    work: str,
    rows: tuple[int | None, ...],
    best: int | None,
    *,
    extra: tuple[str, ...] = (),
    micro_batch: int | None = None,
) -> tuple[Entry, ...]:
    """Return the recipe unchanged, the set at several batches, and ablations of the set at one."""
    added = (*FAST, *extra)
    blocks = tuple(
        "compile-blocks" if name == "compile" else name for name in added if name != "fp8"
    )  # fp8 needs compile
    narrow = tuple(name for name in added if name != "bf16-stream")
    ours = partial(Entry, work, title=f"{AUTO}, no biases", values=NO_BIAS, micro_batch=micro_batch)
    return (
        Entry(work, "recipe", "flatout, recipe unchanged", (None,)),
        ours("set", rows=rows, adds=added),
        *(ours(f"set-{name}", rows=(best,), adds=(*added, name), about=name) for name in ALONE),
        ours("set-blocks", rows=(best,), adds=blocks, drops=("compile",), about="compile-blocks"),
        ours("set-fp32-stream", rows=(best,), adds=narrow, drops=("bf16-stream",)),
    )


def _bias(work: str, rows: tuple[int, ...]) -> Entry:
    return Entry(work, "set-bias", AUTO, rows, adds=FAST, variant="bias")


def _peer(
    work: str,
    name: str,
    title: str,
    rows: tuple[int, ...],
    kind: str,
    *,
    compiled: bool = True,
    bias: bool = False,
) -> Entry:
    biases = "" if kind in OWN_BIASES else ", biases" if bias else ", no biases"
    values = {} if bias else NO_BIAS
    return Entry(
        work, name, title + biases, rows, kind=kind, role="peer", compiled=compiled, values=values
    )


OWN_BIASES = ("huggingface", "nanochat")
"""Peers that ignore `model.bias`: Hugging Face's GPT-2 always has biases, nanochat never."""


def _eigenstate(work: str) -> tuple[Entry, ...]:
    chunks = {**ONE_TEXT, "model.chunk_size": 128}
    title, scan = f"{AUTO}, one document per sequence", "fast-scan"
    return (
        Entry(work, "recipe", "flatout, recipe unchanged (document mask)", (None,)),
        Entry(work, "set", title, (4, 1), adds=FAST, values=ONE_TEXT),
        Entry(
            work,
            "set-fast-scan",
            f"{title}, chunks of 128",
            (4, 1),
            adds=(*FAST, scan),
            about=scan,
            values=chunks,
        ),
        Entry(
            work, "set-fp32-stream", title, (4,), adds=FAST[:-1], drops=FAST[-1:], values=ONE_TEXT
        ),
        Entry(
            work,
            "fft",
            "recurrence by FFT, compiled",
            (1,),
            role="peer",
            adds=("compile", FFT),
            values=ONE_TEXT,
        ),
    )


ENTRIES = (
    *_ours("gpt2-124m", (64, 128, 32), 64),
    _bias("gpt2-124m", (64,)),
    _peer("gpt2-124m", "nanogpt", "nanoGPT, compiled", (64, 32, 16), "nanogpt"),
    _peer("gpt2-124m", "nanogpt-bias", "nanoGPT, compiled", (64,), "nanogpt", bias=True),
    _peer(
        "gpt2-124m",
        "huggingface",
        "Hugging Face GPT2LMHeadModel, eager",
        (16, 32, 8),
        "huggingface",
        compiled=False,
    ),
    _peer(
        "gpt2-124m",
        "huggingface-compiled",
        "Hugging Face GPT2LMHeadModel, compiled",
        (32, 16),
        "huggingface",
    ),
    _peer("gpt2-124m", "litgpt", "litgpt, compiled", (32, 16), "litgpt"),
    _peer("gpt2-124m", "nanochat", "nanochat, its own model and Muon, compiled", (32,), "nanochat"),
    _peer("gpt2-124m", "people", "a typical hand-written loop", (8,), "people", compiled=False),
    Entry(
        "gpt2-124m",
        "none",
        "flatout, speedups=none: tokenises in the step",
        (8,),
        role="peer",
        plain=True,
        data="text",
        values=NO_BIAS,
    ),
    *_ours(
        "gpt2-124m-fast",
        (None,),
        None,
        micro_batch=64,
    ),
    *_ours("gpt2-700m", (16, 32, 8), 16, extra=("fp8",)),
    Entry(
        "gpt2-700m",
        "set-no-fp8",
        f"{AUTO}, no biases",
        (16, 32),
        adds=FAST,
        without="fp8",
        values=NO_BIAS,
    ),
    _peer("gpt2-700m", "nanogpt", "nanoGPT, compiled", (16, 8), "nanogpt"),
    *_ours("gpt2-124m-32k", (4, 2, 1), 4),
    _peer("gpt2-124m-32k", "nanogpt", "nanoGPT, compiled", (4, 2, 1), "nanogpt"),
    *_ours("gpt2-124m-32k-wide-heads", (4, 2, 1), 4),
    *_eigenstate("eigenstate-small-32k"),
)


TARGET_GPU, TARGET_TFLOPS = "NVIDIA H200", 790.0
"""The GPU that targets are set for, and its bf16 matmul rate: measured at 781 to 803 TFLOP/s."""


@dataclass(frozen=True)
class Target:
    """A target for the best flatout entry of a workload, on one TARGET_GPU."""

    work: str
    what: Literal["tokens_per_s", "times", "peak_gib"]
    least: float | None
    """Lower bound; for peak_gib the upper bound."""
    aim: float | None = None
    against: str | None = None
    """The baseline entry, for `times`."""
    most_gib: float | None = None
    """Only consider entries below this memory."""
    rows: int | None = None
    """Only consider this batch."""
    variant: str | None = None
    """Only consider entries of this variant."""
    predicted: tuple[float, float] | None = None
    """Predicted range, computed by hand before the speedups above existed."""


TARGETS = (
    Target("gpt2-124m", "tokens_per_s", 590e3, 650e3, predicted=(530e3, 545e3)),
    Target("gpt2-124m", "times", 1.15, against="nanogpt"),
    Target("gpt2-124m", "times", 1.15, against="nanogpt-bias", variant="bias"),
    Target("gpt2-124m", "times", 3.7, against="huggingface", variant="bias"),
    Target("gpt2-124m-fast", "tokens_per_s", 620e3, 700e3, predicted=(570e3, 570e3)),
    Target("gpt2-700m", "tokens_per_s", 115e3, 130e3, predicted=(105e3, 105e3)),
    Target(
        "gpt2-124m-32k", "times", 1.05, against="nanogpt", most_gib=48.0, predicted=(1.02, 1.04)
    ),
    Target("gpt2-124m-32k", "tokens_per_s", None, 175e3),
    Target("gpt2-124m-32k-wide-heads", "tokens_per_s", 190e3, 220e3),
    Target("eigenstate-small-32k", "tokens_per_s", 600e3, 680e3, predicted=(565e3, 585e3)),
    Target("eigenstate-small-32k", "times", 2.5, against="fft"),
    Target("eigenstate-small-32k", "peak_gib", 13.0, rows=1),
    Target("gpt2-124m", "times", 14.0, 15.5, against="people"),
    Target("gpt2-124m", "times", None, 70.0, against="none"),
)


def shape(work: Work, *, tiny: bool) -> RunConfig:
    """Return the config of a workload with the shared optimiser; a toy CPU shape if `tiny`."""
    config = work.config().with_values(SAME)
    if not tiny:
        return config
    tokens = TINY_TOKENS[config.data.seq_len]
    small = {f"model.{key}": value for key, value in TINY_MODEL[config.model.kind].items()}
    stated = {"model.max_seq_len": tokens} if config.model.own().get("max_seq_len") else {}
    batch = {
        "batch.tokens_per_step": TINY_ROWS * tokens,
        "batch.rows_per_device": "auto",
        "batch.accumulate": None,
    }
    return config.with_values(
        small
        | stated
        | batch
        | {
            "model.vocab_size": TINY_VOCABULARY,
            "data.seq_len": tokens,
            "optim.lr": 1e-2,
            "train.device": "cpu",
        }
    )


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
