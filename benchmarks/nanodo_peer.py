"""Train nanodo's model on a CPU with jax; a part of cpu_peers.py.

    python benchmarks/nanodo_peer.py NANODO DTYPE STEPS SHAPE

NANODO is its checkout, SHAPE a JSON object as in cpu_peers.py. A step is one compiled function:
AdamW as in nanodo's optimizer, clipped to a norm of 1. Prints one JSON object. The environment
needs jax, flax and optax, and not flatout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial

import numpy as np

WARM_UP = 3


def main(source: str, dtype: str, steps: str, described: str) -> None:
    import jax
    import optax
    from jax import numpy as jnp

    sys.path.insert(0, source)
    from nanodo.model import DoConfig, TransformerDo

    shape = json.loads(described)
    width, length, vocab = shape["width"], shape["length"], shape["vocab"]
    sizes = {"D": width, "H": shape["heads"], "L": length, "N": shape["layers"], "V": vocab}
    model = TransformerDo(
        DoConfig(**sizes, F=4 * width, dtype=jnp.dtype(dtype), fsdp_enabled=False)
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    weights = model.init(jax.random.PRNGKey(0), jnp.zeros((1, length), jnp.int32))
    state = optimizer.init(weights)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, row):
        def loss_of(weights):
            logits = model.apply(weights, row[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, row[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    rng, marks = np.random.default_rng(0), []
    for _ in range(WARM_UP + int(steps) + 1):
        marks.append(time.perf_counter())
        row = rng.integers(0, vocab // 2, (shape["rows"], length + 1), dtype=np.int32)
        weights, state, loss = step(weights, state, row)
        last = float(loss)
    seconds = statistics.median(np.diff(marks)[WARM_UP:])
    print(json.dumps({"tokens_per_s": shape["rows"] * length / seconds, "loss": last}))


if __name__ == "__main__":
    main(*sys.argv[1:])
