"""Open settings are resolved, and contradictory sizes are rejected."""

import math
from dataclasses import replace

import pytest

from flatout.assembly import resolve as module
from flatout.assembly.batch import for_world_size, sizes_of
from flatout.assembly.memory import memory_bytes
from flatout.assembly.resolve import epoch_tokens, resolve
from flatout.assembly.shape import with_shape
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, HardwareError
from flatout.hardware.machine import Gpu, Machine

pytestmark = pytest.mark.slow

MACHINE = Machine("a CPU", 2, 8.0, (), "3.11")


@pytest.fixture
def resolved(tiny_config):
    """Return a function that resolves a tiny configuration with the given settings."""
    blank = {"batch__tokens_per_step": None, "batch__accumulate": None}

    def run(*, world_size=1, machine=MACHINE, local_world_size=None, **changes):
        config = tiny_config(**blank | {"batch__rows_per_device": "auto"} | changes)
        return resolve(
            config,
            machine=machine,
            dataset=Dataset.open(config.data.path),
            world_size=world_size,
            local_world_size=local_world_size,
        )[0]

    return run


def sizes(config):
    return config.batch.tokens_per_step, config.batch.rows_per_device, config.batch.accumulate


@pytest.mark.parametrize(
    ("stated", "world_size", "expected"),
    [
        ((256, 4, None), 1, (256, 4, 4)),
        ((256, "auto", 2), 1, (256, 8, 2)),
        ((None, 4, 3), 1, (192, 4, 3)),
        ((None, 4, 3), 2, (384, 4, 3)),
        ((None, 4, None), 1, (64, 4, 1)),
        ((256, 4, 4), 1, (256, 4, 4)),
        ((256, "auto", None), 1, (256, 8, 2)),
        ((256, "auto", None), 4, (256, 4, 1)),
        ((384, "auto", None), 1, (384, 12, 2)),
        ((256, 16, None), 1, (256, 16, 1)),
    ],
)
def test_two_of_the_batch_keys_give_the_third(resolved, stated, world_size, expected):
    keys = ("batch__tokens_per_step", "batch__rows_per_device", "batch__accumulate")
    batch = dict(zip(keys, stated, strict=True))
    assert sizes(resolved(world_size=world_size, speedups="none", **batch)) == expected


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"batch__tokens_per_step": 100},
            r"tokens_per_step=100 does not fit data\.seq_len=16.*Set batch\.tokens_per_step=96",
        ),
        (
            {"batch__tokens_per_step": 256, "batch__rows_per_device": 3},
            r"rows_per_device=3.*Set batch\.tokens_per_step=240",
        ),
        (
            {"batch__tokens_per_step": 256, "batch__rows_per_device": 4, "batch__accumulate": 3},
            r"Set batch\.tokens_per_step=192",
        ),
        (
            {"batch__tokens_per_step": 16, "world_size": 2},
            r"2 processes.*Set batch\.tokens_per_step=32",
        ),
        ({"model__vocab_size": 100}, r"vocab_size=100 is smaller than the vocabulary.*257"),
        ({"model__num_heads": 5}, r"model\.d_model=32 is not divisible by model\.num_heads=5"),
        ({"model__max_seq_len": 8}, r"data\.seq_len=16 exceeds the model.s 8 positions"),
        ({"optim__kind": "adam"}, r"no optimizer named 'adam'.*adamw"),
    ],
)
def test_invalid_sizes_and_names_are_rejected_with_valid_ones(resolved, stated, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**stated)


def test_the_model_gets_the_vocabulary_of_the_data_and_its_defaults(resolved):
    model = resolved().model
    assert model.vocab_size == 257
    assert (model.own()["max_seq_len"], model.own()["norm"]) == (16, "layernorm")
    eigenstate = {"model__kind": "eigenstate", "model__num_layers": 1, "model__d_model": 8}
    assert resolved(**eigenstate).model.own()["chunk_size"] == "auto"
    assert resolved(**eigenstate, model__chunk_size=256).model.own()["chunk_size"] == 256


def test_tokens_and_epochs_are_converted_to_whole_steps(resolved, tiny_config):
    def steps(**length):
        return resolved(train__steps=None, batch__tokens_per_step=128, **length).train.steps

    assert steps(train__tokens=300) == 3
    per_epoch = epoch_tokens(Dataset.open(tiny_config().data.path), 16)
    for epochs in (None, 2.0):
        assert steps(train__epochs=epochs) == -(-int((epochs or 1.0) * per_epoch) // 128)


@pytest.mark.parametrize("share", [1.0, 2.5])
def test_length_buckets_convert_epochs_and_tokens_to_the_steps_that_read_them(
    resolved, build_run, tiny_config, share
):
    changes = {"speedups": "auto,-compile,+length-buckets", "data__seq_len": 64}
    changes["batch__tokens_per_step"] = 512
    reader = build_run(tiny_config(**changes)).loader._steps
    assert reader.tokens_per_epoch < 512 * reader.num_steps, "some of it is padding"
    wanted = math.ceil(share * reader.num_steps)
    assert resolved(**changes, train__eval_every_epochs=share).train.eval_every == wanted
    tokens = int(share * reader.tokens_per_epoch)
    for length in ({"train__epochs": share}, {"train__tokens": tokens}):
        assert resolved(**changes, train__steps=None, **length).train.steps == wanted


@pytest.mark.parametrize(
    ("device", "gib", "speedups", "rows"),
    [
        ("cuda", 8.0, "auto", 512),
        ("cuda", 0.03, "auto", 128),
        ("cuda", 0.03, "none", 8),
        ("cuda", 1e-4, "auto", 1),
        ("cpu", 1e-4, "auto", 256),
    ],
)
def test_the_rows_of_a_gpu_fit_by_estimate(resolved, monkeypatch, device, gib, speedups, rows):
    monkeypatch.setattr(module, "memory_bytes", lambda *_: int(gib * 2**30))
    machine = replace(MACHINE, gpus=(Gpu("NVIDIA H200", 141.0, (9, 0), "1"),))
    changes = {"train__device": device, "speedups": speedups, "batch__tokens_per_step": 8192}
    assert resolved(machine=machine, **changes).batch.rows_per_device == rows


def test_an_apple_gpu_gets_rows_too(resolved):
    config = resolved(train__device="mps", speedups="auto", batch__tokens_per_step=8192)
    assert sizes(config) == (8192, 256, 2), "micro-batches of 4,096 tokens"


def test_memory_is_divided_among_the_processes_of_one_machine():
    assert memory_bytes(MACHINE, "cpu", 4) == 2 * 2**30


def test_a_resolved_configuration_resolves_to_itself(resolved):
    once = resolved(train__steps=None, train__epochs=1.0)
    again = resolve(once, machine=MACHINE, dataset=Dataset.open(once.data.path), world_size=1)[0]
    assert again == once


def test_another_number_of_processes_divides_the_same_step(resolved):
    config = resolved(batch__tokens_per_step=256, batch__rows_per_device=4)
    two = for_world_size(config, 2)
    assert (sizes(two), two.parallel.replicate) == ((256, 4, 2), 2)
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes"):
        for_world_size(config, 3)
    large = resolved(batch__tokens_per_step=128, batch__rows_per_device=8)
    assert sizes(for_world_size(large, 2)) == (128, 4, 1), "a smaller micro-batch"


def test_processes_that_share_rows_divide_a_step_as_one(resolved):
    config = resolved(
        batch__tokens_per_step=256,
        batch__rows_per_device=4,
        parallel__shard=2,
        parallel__context=2,
        world_size=4,
    )
    assert sizes(config) == (256, 4, 2), "two groups of two"
    assert sizes_of(config) == [2, 4, 8, 16, 32]
    assert sizes(for_world_size(config, 2)) == (256, 4, 4)
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes"):
        for_world_size(config, 3)


def test_a_run_on_the_cpu_of_a_gpu_machine_uses_no_gpu_speedups(resolved):
    gpu = Gpu("NVIDIA H200", 141.0, (9, 0), "1")
    config = resolved(machine=replace(MACHINE, gpus=(gpu,)))
    assert config.train.precision == "fp32"
    assert not {"bf16", "tf32"} & set(config.speedups)


def test_a_model_larger_than_memory_is_rejected_before_it_is_built(build_run, tiny_config):
    words = r"weights alone take [\d,.]+ GiB, and only [\d,.]+ GiB are available"
    with pytest.raises(HardwareError, match=words) as refused:
        build_run(tiny_config(model__vocab_size=10**13))
    assert "model.vocab_size" in refused.value.fix


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 .* model.norm=rmsnorm or model.qk_norm=true"),
        ({"rms_norm_eps": 1e-6, "qk_norm": True}, None),
        ({"rms_norm_eps": 1e-6, "norm": "rmsnorm"}, None),
        ({"layer_norm_eps": 1e-6, "norm": "rmsnorm"}, "layer_norm_eps=1e-06 .* model.norm=layer"),
        ({"layer_norm_eps": 1e-5, "norm": "rmsnorm"}, None),
        ({"layer_norm_eps": 1e-6}, None),
        ({"rotary_factor": 4.0}, "rotary_factor=4.0 .* model.rotary_scaling=linear or"),
        ({"rotary_base": 5e5, "positions": "learned"}, "rotary_base=.* model.positions=rotary"),
        ({"kind": "eigenstate", "memory": 64, "initialisation": "published"}, "memory=64 .*=long"),
        ({"kind": "eigenstate", "memory": 64}, None),
    ],
    ids=str,
)
def test_a_key_of_the_model_without_effect_is_an_error(changes, said):
    shape = {"vocab_size": 300, "num_layers": 1, "d_model": 32, "num_heads": 2} | changes
    config = load_config().with_values({f"model.{key}": value for key, value in shape.items()})
    if said is None:
        found = with_shape(config, None)
        assert with_shape(found, None).to_dict() == found.to_dict(), "it is valid once resolved"
    else:
        with pytest.raises(ConfigError, match=rf"model\.{said}.* Fix: Remove it"):
            with_shape(config, None)


def test_a_published_network_has_no_memory_to_draw():
    config = load_config().with_values(
        {"model.kind": "eigenstate", "model.initialisation": "published", "model.vocab_size": 9}
    )
    found = with_shape(config, None)
    assert found.model.own()["memory"] is None
    assert with_shape(found, None).to_dict() == found.to_dict()
