"""What five datasets and five runs are, to the bit, and what `auto` decides for each recipe.

    python tests/reference/record.py runs         prints the digests as JSON; see runs.json
    python tests/reference/record.py decisions    prints the decisions as JSON; see decisions.json

A change that should not alter results leaves both files as they are. Datasets are compared by their
tokens, their masks and the ends of their documents, runs by their losses and by the bytes of each
tensor of the last checkpoint. So neither depends on how files are laid out.
The environment below makes the arithmetic of a CPU the same on every x86 machine: one thread, and
no instructions that only some processors have. The decisions take some two minutes.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "CUDA_VISIBLE_DEVICES": "",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "XDG_CACHE_HOME": "cache",
}
"""The environment of a recording. The cache is empty, so nothing measured earlier counts."""

WORDS = "the river ran under a stone bridge and nobody in the small town could say how old it was"
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "data.seq_len": 32,
    "batch.tokens_per_step": 256,
    "train.steps": 12,
    "train.eval_every": 6,
    "train.eval_tokens": 512,
    "train.device": "cpu",
    "train.precision": "fp32",
    "checkpoint.every_steps": 6,
    "log.every": 1,
}
HEADS = {"model.num_heads": 2}
RUNS: dict[str, dict[str, Any]] = {
    "transformer": {**HEADS, "data.path": "data/bytes", "speedups": "none"},
    "muon": {
        **HEADS,
        "data.path": "data/trained",
        "optim.kind": "muon",
        "batch.rows_per_device": 4,
        "batch.accumulate": 2,
        "model.norm": "rmsnorm",
        "speedups": ["prefetch", "fused-attention", "fused-adamw"],
    },
    "eigenstate": {
        "model.kind": "eigenstate",
        "model.num_eigenstates": 8,
        "model.num_heads": 2,
        "data.path": "data/characters",
        "speedups": "none",
    },
    "masked": {
        **HEADS,
        "data.path": "data/answers",
        "data.document_mask": True,
        "speedups": ["prefetch", "chunked-ce"],
    },
    "mix": {**HEADS, "data.mix": {"data/bytes": 2, "data/answers": 1}, "speedups": "none"},
}


def numbers(seed: int):
    """Yield the numbers of a linear congruential generator, which no library changes."""
    while True:
        seed = (seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        yield seed >> 33


def write_corpora() -> None:
    """Write the texts that the datasets are made of into the current directory."""
    draw, words = numbers(1), WORDS.split()

    def sentence(length: int) -> str:
        return " ".join(words[next(draw) % len(words)] for _ in range(length)) + "."

    documents = [sentence(5 + next(draw) % 60) for _ in range(200)]
    Path("text.txt").write_text("\n".join(documents), encoding="utf-8")
    rows = [{"text": text} for text in documents]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    pairs = [{"question": sentence(4), "answer": sentence(6)} for _ in range(150)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), "utf-8")
    chats = [
        {
            "messages": [
                {"role": "user", "content": sentence(3)},
                {"role": "assistant", "content": sentence(5)},
            ]
        }
        for _ in range(150)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats), "utf-8")


def prepare_all() -> dict[str, Any]:
    """Prepare the five datasets, and return the digests of each split."""
    import flatout

    flatout.prepare("text.txt", out="data/characters", tokenizer="char", split="tail 0.1")
    flatout.prepare("rows.jsonl", out="data/bytes", tokenizer="byte", split="hash 0.1")
    flatout.prepare("rows.jsonl", out="data/trained", tokenizer="train:320", split="hash 0.1")
    flatout.prepare(
        "pairs.jsonl",
        out="data/answers",
        tokenizer="byte",
        text_field="answer",
        mask_field="question",
        split="hash 0.1",
    )
    flatout.prepare(
        "chats.jsonl", out="data/chats", tokenizer="train:320", chat="chatml", split="hash 0.1"
    )
    return {path.name: dataset_digests(path) for path in sorted(Path("data").iterdir())}


def dataset_digests(path: Path) -> dict[str, Any]:
    """Return the number of tokens and the digests of what a dataset holds, by split."""
    import flatout

    dataset, found = flatout.Dataset.open(path), dict[str, Any]()
    for name in ("train", "val"):
        split = dataset.split(name)
        tokens, has_masks = split.num_tokens, split.has_mask
        parts = [split.read_tokens(0, tokens).astype("<u4"), split.document_ends.astype("<u8")]
        if has_masks:
            parts.append(split.read_mask_range(0, tokens))
        digest = hashlib.sha256(b"".join(part.tobytes() for part in parts))
        found[name] = {"tokens": tokens, "sha256": digest.hexdigest()}
    return found


def train_all() -> dict[str, Any]:
    """Train the five runs, and return the losses and the digest of the tensors of each."""
    import flatout

    found = {}
    for name, values in RUNS.items():
        config = flatout.load_config(None).with_values(SMALL | values)
        result = flatout.train(config, run=f"runs/{name}")
        run = Path(result.run)
        losses = {
            key: [value for value in flatout.metrics(run)[key] if value is not None]
            for key in ("train/loss", "val/loss")
        }
        found[name] = losses | {"tensors": tensor_digest(run / "checkpoints" / "step-12")}
    return found


def tensor_digest(checkpoint: Path) -> str:
    """Return one digest over the names and bytes of all tensors of a checkpoint of one process."""
    from safetensors.numpy import load_file

    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def decisions_of(recipe: str, machine: str) -> dict[str, Any]:
    """Return what `auto` decides for a recipe on a machine: speedups, precision and rows."""
    import flatout
    from flatout.errors import FlatoutError
    from flatout.measure.plan.plan import Target, target_machine

    try:
        requested = flatout.load_config(recipe)
        if getattr(requested.model, "vocab_size", None) is None:  # known from the dataset
            requested = requested.with_values({"model.vocab_size": 4096})
        target = Target(*target_machine(requested, machine), dataset=None, cache=None)
        config, decisions = target.resolve(requested)
    except FlatoutError as error:
        return {"error": str(error).splitlines()[0]}
    return {
        "speedups": [one.name for one in decisions if one.on],
        "precision": config.train.precision,
        "rows_per_device": config.batch.rows_per_device,
        "accumulate": config.batch.accumulate,
        "eval_every": config.train.eval_every,
    }


def decide_all() -> dict[str, Any]:
    """Return the decisions for each recipe: each different one with the machines it holds for."""
    from flatout.config.registry import MACHINES, RECIPES

    found: dict[str, Any] = {}
    for recipe in RECIPES.names():
        groups: dict[str, list[str]] = {}
        for machine in MACHINES.names():
            groups.setdefault(json.dumps(decisions_of(recipe, machine)), []).append(machine)
        found[recipe] = [
            {**json.loads(decision), "machines": machines} for decision, machines in groups.items()
        ]
    return found


def compact(found: dict[str, Any]) -> str:
    """Return JSON with a line for each value at the second level and below, which diffs well."""

    def lines(value: Any, depth: int) -> str:
        if depth == 2 or not isinstance(value, dict | list) or not value:
            return json.dumps(value)
        items = (
            [f"{json.dumps(key)}: {lines(one, depth + 1)}" for key, one in value.items()]
            if isinstance(value, dict)
            else [lines(one, depth + 1) for one in value]
        )
        start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
        pad = "\n" + " " * (depth + 1)
        return start + pad + f",{pad}".join(items) + "\n" + " " * depth + end

    return lines(found, 0) + "\n"


if __name__ == "__main__":
    stages = {
        "runs": lambda: {"datasets": prepare_all(), "runs": train_all()},
        "decisions": decide_all,
    }
    if {name: os.environ.get(name) for name in PORTABLE} != PORTABLE:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PORTABLE})
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        write_corpora()
        found = stages[sys.argv[1]]()
    sys.stdout.write(compact(found))
