"""The predicted time of a step on GPUs."""

import sys
from pathlib import Path

import pytest
import yaml

from flatout.config.schema import load_config
from flatout.hardware.machine import machine_named
from flatout.measure.plan.gpu_rate import gpu_time

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHAPE = (
    "model.num_layers=8",
    "model.d_model=1024",
    "model.num_heads=8",
    "model.vocab_size=50304",
    "batch.rows_per_device=8",
    "batch.accumulate=1",
)


def time(machine="8x H100", speedups=("compile",), more=(), **parallel):
    """Return the predicted time of 8 rows of 1,024 tokens per GPU."""
    named = machine_named(machine)
    count = len(named.gpus)
    keys = [f"parallel.{name}={value}" for name, value in parallel.items()]
    tokens = 8 * 1024 * count // parallel.get("context", 1)
    words = [*SHAPE, "data.seq_len=1024", f"batch.tokens_per_step={tokens}", *more]
    config = load_config(None, [*words, *keys])
    return gpu_time(config, named, "bf16", world_size=count, speedups=speedups)


def test_what_is_repeated_or_not_compiled_takes_longer():
    assert time(speedups=()).compute_s > time().compute_s
    more = time(speedups=("compile", "checkpointing")).compute_s / time().compute_s
    assert 1.2 < more < 4 / 3


def test_communication_depends_on_the_mesh_and_on_where_it_crosses_machines():
    assert time("H100").communication_s == {}
    copied, sharded = time(), time(shard=8)
    assert [*copied.communication_s] == ["averaging gradients between replicas"]
    assert [*sharded.communication_s] == ["gathering weights", "reducing gradients"]
    inside = time("2x8 H100, 100 Gb/s", shard=8).communication_s
    across = time("2x8 H100, 100 Gb/s", shard=16).communication_s
    assert across["gathering weights"] > 10 * inside["gathering weights"]
    kept = time(shard=8, reshard="false").communication_s
    assert kept["gathering weights"] == sharded.communication_s["gathering weights"] / 2
    assert time("2x8 H100, 1 Gb/s", shard=16).step_s > 2 * time(shard=8).step_s
    assert "sharing rows" in time(shard=8, context=4).communication_s


def test_an_offloaded_step_copies_weights_and_waits_for_the_cpu():
    one, kept = time("H100", offload="cpu"), time("H100", offload="cpu", shard=1, reshard="false")
    assert [*one.communication_s] == [
        "copying weights from the host",
        "copying gradients to the host",
    ]
    copied, back = one.communication_s.values()
    assert copied == pytest.approx(2 * back)
    assert kept.communication_s["copying weights from the host"] == pytest.approx(back)
    assert one.step_s == pytest.approx(max(one.compute_s, copied + back) + one.host_s)
    assert "ms of AdamW on the CPU" in one.describe()
    assert "AdamW" not in time("H100").describe()
    both = time("2x8 H100, 400 Gb/s", offload="cpu", shard=16)
    assert both.host_s == pytest.approx(one.host_s / 2), "of two machines"


def test_most_published_runs_are_within_a_fifth(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "published", raising=False)
    from published import predicted

    runs = yaml.safe_load((BENCHMARKS / "published.yaml").read_text())
    shared = [run for run in runs if "tensor" in run]
    few = [*[run for run in runs if run not in shared][::6], *shared[::4]]
    errors = [abs(predicted(run) / run["tokens_per_s"] - 1) for run in few]
    within = [error <= 0.2 for error, run in zip(errors, few, strict=True) if run not in shared]
    assert sum(within) >= 0.85 * len(within)
    assert max(errors) < 0.35


def test_shared_layers_exchange_hidden_states_while_nothing_else_runs():
    alone, shared = time(), time(tensor=8)
    assert alone.layers_s == 0
    assert shared.step_s == pytest.approx(shared.compute_s + shared.layers_s)
    assert time("2x8 H100, 100 Gb/s", tensor=16).layers_s > 5 * shared.layers_s
    assert "ms of shared layers" in shared.describe()


def test_a_pipeline_waits_at_the_start_and_the_end_of_a_step_and_for_the_head():
    steps = ("batch.accumulate=16", "batch.rows_per_device=1", "model.tied_head=false")
    alone, two = (time(more=steps, pipeline=size) for size in (1, 2))
    four, halves = (
        time(more=steps, pipeline=4, pipeline_schedule=name) for name in ("1f1b", "interleaved")
    )
    assert [one.idle for one in (alone, two, four, halves)] == [0, 1 / 16, 3 / 16, 3 / 32]
    assert four.step_s == pytest.approx(four.compute_s * (1 + 3 / 16))
    assert "ms of waiting in the pipeline" in four.describe()
    assert "waiting" not in alone.describe()
    # each stage but the last waits while that one computes the head, for all tokens of a GPU
    head = 6 * 50304 * 1024 * 8 * 1024 / (0.5 * 989.5e12)
    long = [time(more=steps[2:], pipeline=size).compute_s for size in (2, 4)]
    assert long[1] - long[0] == pytest.approx(2 * head, rel=0.1)
    sent = [one.communication_s["sending hidden states"] for one in (four, halves)]
    assert sent[1] == 2 * sent[0]
    kept, again = (time(more=steps, pipeline=2, shard=2, reshard=x) for x in ("false", "true"))
    gathered = [one.communication_s["gathering weights"] for one in (kept, again)]
    assert gathered[1] == pytest.approx(32 * gathered[0])
    each = time(more=steps, shard=2).communication_s["reducing gradients"]
    assert kept.communication_s["reducing gradients"] == pytest.approx(each / 16 / 2)


@pytest.mark.parametrize(("kind", "grows"), [("transformer", True), ("eigenstate", False)])
def test_an_eigenstate_network_exchanges_as_much_for_any_length(kind, grows):
    from flatout.models.language_model import model_of
    from flatout.ops import Ops

    model_class, config = model_of(load_config(None, [f"model.kind={kind}", *SHAPE[:4]]))
    model = model_class.on_meta(config, Ops.plain())
    short, long = (model.shared_bytes(tokens) * tokens for tokens in (1024, 1_048_576))
    assert (long > short) == grows
