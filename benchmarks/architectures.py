"""Base models against transformers, and the time to load 1 GB.

    python benchmarks/architectures.py

It needs transformers. The models are the tiny ones of tests/foreign_models.py, with random weights:
the largest difference of a logit, and the largest difference of a gradient relative to the largest
gradient of its tensor, in fp32. To time loading, a Llama-shaped model of 1 GB in fp32 is written to
a temporary directory, and its tensors are read under flatout's names into a model. The file has
just been written, so it is read from memory rather than from the disk.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measurement import facts, markdown, parser, publish, seconds_of, spread
from safetensors.torch import save_file

from flatout.models.families import llama
from flatout.models.families.source import ForeignWeights, find_model
from flatout.models.transformer import Transformer
from flatout.ops import Ops
from flatout.storage.json_io import write_json

TESTS = Path(__file__).parents[1] / "tests"
REPEATS = 3
LARGE = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
"""A model of 1 GB in fp32: 245 million parameters."""


def compare(name: str) -> dict[str, float]:
    """Return the largest differences of a tiny model from transformers."""
    import transformers
    from foreign_models import DOCUMENTS, TOKENS, foreign_weights, model_with
    from test_families import gradients_of_both, in_transformers

    document = DOCUMENTS[name]
    weights = foreign_weights(document)
    ours, theirs = model_with(document, weights), in_transformers(transformers, document, weights)
    tokens = torch.tensor(TOKENS)
    logits = (ours.logits(tokens) - theirs(tokens).logits).abs().max()
    gradients = max(
        float((actual - expected).abs().max() / expected.abs().max())
        for actual, expected in gradients_of_both(document, ours, theirs).values()
    )
    return {"logits": float(logits.detach()), "gradients": gradients}


def time_loading(folder: Path) -> dict[str, Any]:
    """Write a large model, load it several times, and return the seconds and the memory."""
    keys = llama.ARCHITECTURE.keys(LARGE)
    own = {key: value for key, value in keys.items() if key != "kind"}
    model = Transformer(Transformer.check(own, seq_len=2048), Ops.plain())
    parameters = dict(model.named_parameters())
    parts = {}
    for one in llama.ARCHITECTURE.tensors(model.config):
        assert one.split is not None
        split = one.split(parameters[one.name].detach())
        parts |= dict(zip(one.foreign, (part.contiguous() for part in split), strict=True))
    save_file(parts, folder / "model.safetensors")
    num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
    write_json(folder / "config.json", LARGE)
    del parts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def load() -> None:
        weights = ForeignWeights(find_model(str(folder)), model.config)
        weights.require_fit({name: tuple(p.shape) for name, p in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.read(name))

    seconds = [seconds_of(load) for _ in range(REPEATS)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"bytes": num_bytes, "seconds": seconds, "grown_mib": grown / 1024}


def table(found: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    large = found["loading"]
    return markdown(
        "model | largest difference of a logit | of a gradient, relative",
        [
            (name, f"{row['logits']:.1e}", f"{row['gradients']:.1e}")
            for name, row in found["models"].items()
        ],
        f"Loading {large['bytes'] / 1e9:.2f} GB: {spread(large['seconds'], 2)} s.",
        f"Measured with transformers {found['transformers']} and torch {found['torch']} on "
        f"{found['machine']}, commit {found['commit']}; "
        "`python benchmarks/architectures.py` measures it.",
    )


def measure() -> dict[str, Any]:
    """Return all results."""
    import transformers

    sys.path[:0] = [str(TESTS), str(TESTS / "architectures")]
    from foreign_models import DOCUMENTS

    with tempfile.TemporaryDirectory() as folder:
        large = time_loading(Path(folder))
    return {
        "models": {name: compare(name) for name in DOCUMENTS},
        "loading": large,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        **facts(),
    }


if __name__ == "__main__":
    given = parser(__doc__).parse_args()
    found = measure()
    publish(given.out, "architectures", found, table(found))
