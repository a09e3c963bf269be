from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatout.assembly.choices import assemble
from flatout.config.sections import ParallelConfig
from flatout.distributed.mesh import Mesh, make_mesh, wrap
from flatout.models.transformer import Transformer
from flatout.ops import Ops
from flatout.training.step import train_step

pytestmark = pytest.mark.slow

LAYOUTS = {"ddp": (2, 1), "fully_shard": (2, 2), "hsdp": (4, 2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def report(request, launch):
    world_size, shard = LAYOUTS[request.param]
    return {"world_size": world_size, "shard": shard, **launch("proofs.py", world_size, shard)}


def test_gradients_of_uneven_batches_equal_those_of_one_process(report):
    assert report["replicate"] * report["shard"] == report["world_size"]
    assert report["naive"] > 0.1  # so these batches detect the error
    assert report["fp32"] < 2e-6
    assert report["fp64"] < 1e-14


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "muon"])
def test_trained_weights_equal_those_of_one_process(report, optimizer):
    assert report["trained"][optimizer]["weights"] < 1e-12
    assert report["trained"][optimizer]["state"] < 1e-12


@pytest.mark.parametrize("optimizer", ["adamw-fused", "muon"])
def test_a_step_that_the_device_skips_keeps_every_bit_of_the_shards(report, optimizer):
    assert report["skipped"][optimizer]


def test_optimizer_state_resumes_from_its_state_dict(report):
    assert report["resumed"] == 0


def test_sums_are_exact_and_objects_come_from_the_rank_0(report):
    world_size = report["world_size"]
    assert report["exchanges"] == {
        "loss": sum(0.5 + rank for rank in range(world_size)),
        "loss_dtype": "torch.float32",
        "count": [world_size * (2**40 + 1), sum(range(world_size))],
        "count_dtype": "torch.int64",
        "object": {"from": 0},
        "mains": 1,
        "group": world_size,
    }


def test_sampling_gathers_the_weights(report):
    assert report["logits"] < 1e-14


def test_processes_leave_the_group_cleanly(report):
    assert report["left"]


def test_one_process_leaves_the_model_unchanged():
    model = nn.Linear(2, 2)
    assert wrap(model, make_mesh(ParallelConfig(), "cpu")) is model
    assert not isinstance(model.weight, torch.distributed.tensor.DTensor)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_buckets_of_ddp_do_not_change_after_the_first_reduction(group_of_one):
    """Otherwise three or more processes would sum in a different order after a resume."""
    core = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2))
    model = wrap(core, Mesh(world_size=2, replicate=2))
    assert all(not parameter.grad.any() for parameter in core.parameters())
    names, exchanged = {parameter: name for name, parameter in core.named_parameters()}, []

    def recorded(_state, bucket):
        exchanged.append([names[parameter] for parameter in bucket.parameters()])
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, recorded)
    layouts = []
    for _ in range(3):
        exchanged.clear()
        model(torch.ones(1, 300)).sum().backward()
        layouts.append(list(exchanged))
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0] == [["2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]]


def test_gradients_stay_in_the_buckets_of_ddp(group_of_one, build_run, tiny_config):
    """DDP copies a gradient that backward allocates into its bucket."""
    run = build_run(tiny_config(), mesh=Mesh(world_size=2, replicate=2))
    for _ in range(2):  # DDP orders its buckets anew after the first pass
        train_step(run, next(run.loader))
    buckets = {p.grad.untyped_storage().data_ptr() for p in run.trained()}
    assert len(buckets) == 1
    train_step(run, next(run.loader))
    assert {p.grad.untyped_storage().data_ptr() for p in run.trained()} == buckets
    assert not any(p.grad.any() for p in run.trained())


@pytest.fixture
def traced(monkeypatch):
    """Trace without generating code, and count the graphs."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.quick_cases("checkpointing-fully_shard")
@pytest.mark.parametrize("layout", ["plain", "ddp", "fully_shard"])
@pytest.mark.parametrize("kept", [None, "checkpointing", "selective-checkpointing"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_are_recomputed_are_compiled(group_of_one, traced, layout, kept):
    shape = {"vocab_size": 64, "num_layers": 3, "d_model": 16, "num_heads": 2}
    core = Transformer(Transformer.check(shape, seq_len=8), Ops.plain())
    mesh = make_mesh(ParallelConfig(), "cpu")
    sharded = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    if layout != "plain":
        mesh = replace(mesh, world_size=2, device_mesh=sharded if layout != "ddp" else None)
    parts = assemble(filter(None, [kept, "compile-blocks"]))
    if parts.activations:
        parts.activations(core)
    parts.compilation(core, mesh)
    before = traced()
    tokens_BT = torch.zeros(2, 8, dtype=torch.int64)
    wrap(core, mesh)(tokens_BT, tokens_BT.clone())[0].backward()
    assert traced() - before == 2, "one for the blocks, which have one shape, and one for the loss"


@pytest.mark.faults
def test_three_copies_resume_exactly(launch):
    assert launch("exact_resume_proof.py", 3) == [0] * 4
