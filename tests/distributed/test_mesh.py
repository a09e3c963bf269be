import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from flatout.config.sections import ParallelConfig
from flatout.distributed.mesh import Mesh, make_mesh, wrap
from flatout.distributed.rendezvous import Ranks
from flatout.errors import ConfigError


def test_one_process_communicates_with_itself():
    mesh = make_mesh(ParallelConfig(), "cpu")
    tensor = torch.tensor(3.0)
    assert mesh.is_main
    assert mesh.sum(tensor) == (tensor,)
    assert mesh.broadcast_object("word") == "word"
    mesh.barrier()
    assert (mesh.rank, mesh.world_size) == (0, 1)
    assert (mesh.replicate, mesh.shard, mesh.device_mesh) == (1, 1, None)
    assert mesh.device == torch.device("cpu")


def test_the_mesh_follows_from_the_ranks_and_the_settings():
    plain = ParallelConfig()
    assert make_mesh(plain, "cuda", Ranks(5, 8, 1)).device == torch.device("cuda", 1)
    assert make_mesh(plain, "cuda:3").device == torch.device("cuda", 3)
    assert make_mesh(plain, "cpu", Ranks(5, 8, 1, 4)).local_world_size == 4
    assert make_mesh(plain, "cpu").local_world_size == 1
    assert make_mesh(plain, "cpu", Ranks(2, 6, 2)).replicate == 6
    assert make_mesh(ParallelConfig(replicate=6), "cpu", Ranks(2, 6, 2)).replicate == 6


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({"shard": 2}, 1, "parallel.shard=2 does not fit 1 process. .*--nproc-per-node 2"),
        ({"shard": 2}, 3, "parallel.shard=2 does not fit 3 processes"),
        ({"replicate": 2}, 1, "--nproc-per-node 2"),
        ({"replicate": 2, "shard": 2}, 8, "replicate=2 x parallel.shard=2 does not fit 8"),
        ({"replicate": 2}, 4, "parallel.replicate=2 x parallel.shard=1"),
    ],
)
def test_a_product_other_than_the_number_of_processes_is_rejected(settings, world_size, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(ParallelConfig(**settings), "cpu", Ranks(0, world_size, 0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offloads", [True, False])
def test_every_part_is_offloaded_to_memory_that_a_gpu_can_read(monkeypatch, device, offloads):
    given = []
    monkeypatch.setattr(
        torch.distributed.fsdp, "fully_shard", lambda module, **options: given.append(options)
    )
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2, device="meta") for _ in range(3))
    model.layers = [*model.blocks]
    mesh = Mesh(device=torch.device(device), device_mesh={("shard",): None}, offloads=offloads)
    wrap(model, mesh)
    policies = [options["offload_policy"] for options in given]
    assert len(policies) == 4
    for policy in policies:
        assert isinstance(policy, CPUOffloadPolicy) == offloads
        assert not offloads or policy.pin_memory == (device == "cuda")
    assert mesh.weights_device.type == ("cpu" if offloads else device)


def test_a_mac_needs_no_offload():
    with pytest.raises(ConfigError, match="no use on a Mac"):
        make_mesh(ParallelConfig(offload="cpu"), "mps")
