"""The steps of gpu.py that are not commands of flatout; each prints one JSON object.

    python benchmarks/gpu_worker.py environment
    python benchmarks/gpu_worker.py tests --essential
    python benchmarks/gpu_worker.py data random DIR VOCABULARY TOKENS
    python benchmarks/gpu_worker.py nanogpt gpt2-124m 64 path/to/nanoGPT model.bias=false

A peer's model takes the same step as flatout's (forward, backward, clip at 1.0, its own AdamW) on
random tokens that are already on the device. Its rate is the median of 20 steps after 8 of warm-up,
each from its start on the device to the start of the next.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout import prepare
from flatout.assembly.parts import Parts
from flatout.assembly.speedup import Speedup, Tolerance
from flatout.config.schema import RunConfig, load_config
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.tokenizers.make import of_characters
from flatout.hardware import roofline
from flatout.hardware.machine import fingerprint, probe
from flatout.models.language_model import model_of
from flatout.models.transformer import Transformer
from flatout.ops import Ops, cross_entropy, scan

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "numpy", "pydantic", "torchao", "transformers")
WARM_UP, STEPS = 8, 20
BATCHES = 32
"""Number of different batches that a peer cycles through."""
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
FIRST_CHARACTER = 0x20
"""At least 50,256 characters follow this one, none of them a surrogate."""
LENGTHS = (200, 1800)
"""Minimum and maximum document length in tokens."""
OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|ERROR|SKIPPED)\b")
PYTEST = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default", "--disable-warnings"),
    *("--continue-on-collection-errors", "--timeout-method", "thread", "--timeout", "90"),
)


def _baseline(name: str, apply: Any, how: str, *, rtol: float) -> Speedup:
    saves = f"nothing: a baseline {how}"
    return Speedup(name=name, apply=apply, saves=saves, tolerance=Tolerance.rounding(rtol=rtol))


def _use_fft(parts: Parts) -> None:
    parts.scan = fft


FFT_SCAN = _baseline(
    "fft-scan", _use_fft, "that computes the recurrence by FFT, as public code does", rtol=1e-3
)


def _keep_fp32(parts: Parts) -> None:
    def widen(model: Any) -> None:
        model.embed = super(Transformer, model).embed

    parts.activations = widen


FP32_STATES = _baseline(
    "fp32-states", _keep_fp32, "whose hidden states stay in fp32 beside matmuls in bf16", rtol=2e-2
)


def _round_products(_parts: Parts) -> None:
    summed = cross_entropy._add_product

    def rounded(total: Any, left: Any, right: Any, *, alpha: float, beta: float) -> None:
        if beta:
            total += left @ right
        else:
            summed(total, left, right, alpha=alpha, beta=beta)

    cross_entropy._add_product = rounded


ROUNDED_GRADIENT = _baseline(
    "rounded-gradient",
    _round_products,
    "that rounds each chunk's part of the output weight's gradient",
    rtol=2e-2,
)


def main(words: Sequence[str]) -> None:
    """Run one step and print its results."""
    does = {"environment": environment, "tests": tests, "data": data}
    kind, *rest = words
    found = does[kind](*rest) if kind in does else train_peer(kind, *rest)
    print(json.dumps(found))


def environment() -> dict[str, Any]:
    """Return the machine, the versions, and the rates of a bf16 matmul and of a copy."""
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    found = {
        "machine": probe().describe(),
        "python": platform.python_version(),
        "packages": packages,
        "flatout": version("flatout"),
        "fingerprint": fingerprint(device),
        "matmul_tflops": roofline.measure(device, "bf16" if on_gpu else "fp32")[0],
    }
    if on_gpu:
        found["free_gib"] = torch.cuda.mem_get_info()[0] / 2**30
        one = torch.empty(1 << 32, dtype=torch.uint8, device=device)
        other = torch.empty_like(one)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(13)]
        for event in events:
            other.copy_(one)
            event.record()
        torch.cuda.synchronize()
        found["copy_tb_per_s"] = 10 * 2 * 2**32 / events[2].elapsed_time(events[12]) / 1e9
    return found


def tests(which: str) -> dict[str, Any]:
    """Run GPU tests and return the number of each outcome. What failed is in the log."""
    marker = "gpu_essential" if which == "--essential" else "gpu"
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if f"mark.{marker}" in path.read_text(encoding="utf-8")
    ]
    workers = ("-n", "12", "--dist", "worksteal")
    if which == "--tiny":
        files, workers = ["tests/ops/test_gpu.py"], ("-n", "0")
    command = [sys.executable, *PYTEST, "-m", marker, *workers, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stdout)
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    ended = (line for line in lines if not line.startswith(("FAILED", "ERROR")))  # the summary
    counts = Counter(found[1] for line in ended if (found := OUTCOME.search(line)))
    made: dict[str, Any] = {kind: counts[kind.upper()] for kind in ("passed", "failed", "skipped")}
    made["failed"] += counts["ERROR"]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    error = None
    if made["failed"]:
        error = f"{made['failed']} tests failed: {'; '.join(failed)[:300]}"
    elif not sum(made.values()):
        error = f"pytest exited with code {done.returncode} and ran no tests."
    return made | {"error": error}


def data(kind: str, out: str, vocabulary: str, tokens: str) -> dict[str, Any]:
    """Write a dataset, unless it is there.

    Random tokens are drawn from the first half of the vocabulary, so that the loss of a model that
    trains falls from about ln V towards ln(V / 2). Text is for runs that tokenise in the step.
    """
    path, size, count = Path(out), int(vocabulary), int(tokens)
    if (path / "manifest.json").exists():
        return {"path": out}
    if kind == "text":
        prepare("python-stdlib", path, tokenizer=f"train:{size}", max_bytes=4 * count)
        return {"path": out}
    characters = "".join(map(chr, range(FIRST_CHARACTER, FIRST_CHARACTER + size - 1)))
    tokenizer = of_characters([characters])
    rng = np.random.default_rng(0)
    with DatasetWriter(path, tokenizer) as writer:
        for split, wanted in (("train", count), ("val", 4_096)):
            drawn = rng.integers(0, size // 2, wanted, dtype=np.uint16)
            lengths = np.cumsum(rng.integers(*LENGTHS, wanted // LENGTHS[0] + 1))
            ends = np.append(lengths[lengths < wanted], wanted)
            drawn[ends - 1] = tokenizer.eot_id
            writer.append(split, drawn, ends, text_bytes=2 * wanted)
        writer.finish(source={"kind": "random"}, split_rule="named")
    return {"path": out}


def fft(
    log_decay: Any,
    angle: Any,
    drive_BTE: Any,
    *,
    doc_ids_BT: Any = None,
    start_BE: Any = None,
    chunk_size: int = 128,
) -> Any:
    """Return the states of the recurrence as a convolution, padded to 2 T tokens.

    Public code computes it so; the padding prevents wrap-around.

    Documents, selective eigenvalues and a start are no convolution; `scan.chunked` handles them.

    Shapes:  as `flatout.ops.scan.reference`.
    Returns: as `flatout.ops.scan.reference`.
    Cost:    O(B T K log T) FLOP, in complex tensors of 2 T tokens.
    """
    if log_decay.dim() > 1 or doc_ids_BT is not None or start_BE is not None:
        others = {"doc_ids_BT": doc_ids_BT, "start_BE": start_BE, "chunk_size": chunk_size}
        return scan.chunked(log_decay, angle, drive_BTE, **others)
    with torch.autocast(drive_BTE.device.type, enabled=False):
        drive_BTE = drive_BTE.to(torch.promote_types(drive_BTE.dtype, torch.float32))
        tokens = drive_BTE.shape[1]
        exponents_T1 = torch.arange(tokens, device=angle.device, dtype=torch.float64)[:, None]
        response_TK = torch.polar((log_decay * exponents_T1).exp(), angle * exponents_T1)
        drive_BTK = torch.complex(*drive_BTE.chunk(2, dim=-1))
        spectrum_BTK = torch.fft.fft(drive_BTK, n=2 * tokens, dim=1)
        response_TK = torch.fft.fft(response_TK.to(drive_BTK.dtype), n=2 * tokens, dim=0)
        states_BTK = torch.fft.ifft(spectrum_BTK * response_TK, dim=1)[:, :tokens]
        return torch.cat((states_BTK.real, states_BTK.imag), dim=-1)


def train_peer(kind: str, recipe: str, rows: str, folder: str, *words: str) -> dict[str, Any]:
    """Train a peer's model of a recipe's shape; return its rate, its memory and its last loss."""
    config = load_config(recipe, [word for word in words if word != "--eager"])
    device = torch.device("cpu" if config.train.device == "cpu" else "cuda")
    on_gpu, is_plain = device.type == "cuda", kind == "people"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if is_plain else "high")
    model, loss_of, optimizer = PEERS[kind](model_of(config)[1], config, device, Path(folder))
    called: Any = model
    if on_gpu and not is_plain and "--eager" not in words:
        called = torch.compile(model, dynamic=False)
    T, high = config.data.seq_len, (config.model.vocab_size or 0) // 2
    drawn = [torch.randint(high, (int(rows), T + 1), device=device) for _ in range(BATCHES)]
    losses, marks = [], []
    for number in range(WARM_UP + STEPS + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
        if on_gpu:
            marks[-1].record()  # without waiting for the device
        row = drawn[number % BATCHES]
        with nullcontext() if is_plain else torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(called, row[:, :-1].contiguous(), row[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() if is_plain else loss.detach())
    if on_gpu:
        torch.cuda.synchronize()
    steps_ms = [
        begin.elapsed_time(end) if on_gpu else 1e3 * (end - begin)
        for begin, end in itertools.pairwise(marks[WARM_UP:])
    ]
    step_ms = statistics.median(steps_ms)
    return {
        "tokens_per_s": int(rows) * T / (1e-3 * step_ms),
        "step_ms": step_ms,
        "slowest_step_ms": max(steps_ms),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "train_loss": statistics.fmean(float(loss) for loss in losses[-3:]),
    }


Peer = tuple[Any, Callable[[Any, Any, Any], Any], Any]
"""A model, (it, tokens_BT, targets_BT) -> the mean loss, and an optimizer."""


def sizes_of(shape: Any) -> dict[str, int]:
    """Return the sizes under GPT-2's names."""
    heads = {"n_head": shape.num_heads, "n_embd": shape.d_model}
    return {"n_layer": shape.num_layers, "vocab_size": shape.vocab_size, **heads}


def nanogpt(shape: Any, config: RunConfig, device: torch.device, folder: Path) -> Peer:
    """Return nanoGPT's GPT with its own parameter groups and its fused AdamW."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    settings = {"block_size": config.data.seq_len, "dropout": 0.0, "bias": shape.bias}
    model = module.GPT(module.GPTConfig(**settings, **sizes_of(shape))).to(device)
    optimizer = model.configure_optimizers(WEIGHT_DECAY, 3e-4, BETAS, device.type)
    return model, lambda model, tokens, targets: model(tokens, targets)[1], optimizer


def huggingface(shape: Any, config: RunConfig, device: torch.device, _folder: Path) -> Peer:
    """Return Hugging Face's GPT-2 with scaled-dot-product attention and fused AdamW."""
    transformers: Any = importlib.import_module("transformers")
    settings = {"n_positions": config.data.seq_len, "use_cache": False, **sizes_of(shape)}
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shaped = transformers.GPT2Config(attn_implementation="sdpa", **settings)
    model = transformers.GPT2LMHeadModel(shaped).to(device).train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=BETAS, fused=True)
    # The model shifts the labels itself, so it gets the inputs; the last token has no target.
    return model, lambda model, tokens, _: model(input_ids=tokens, labels=tokens).loss, optimizer


def people(shape: Any, _config: RunConfig, device: torch.device, _folder: Path) -> Peer:
    """Return a typical hand-written model: full attention matrix, unfused AdamW.

    `train_peer` trains it in fp32, eager, and calls `.item()` at each step.
    """
    model = Transformer(shape, Ops.plain(cross_entropy=cross_entropy.fused)).to(device)
    settings = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "foreach": False, "fused": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **settings)

    def loss(model: Any, tokens_BT: Any, targets_BT: Any) -> Any:
        loss_sum, num_valid = model(tokens_BT, targets_BT)
        return loss_sum / num_valid

    return model, loss, optimizer


PEERS = {"nanogpt": nanogpt, "huggingface": huggingface, "people": people}


if __name__ == "__main__":
    main(sys.argv[1:])
