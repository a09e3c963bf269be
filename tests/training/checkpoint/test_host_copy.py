"""The host copy of the state: the order of waits with a recording CUDA driver, values on a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from stand_in import build, train

from flatout.training.checkpoint import host_copy
from flatout.training.checkpoint.host_copy import HostCopy, bytes_of, free_bytes
from flatout.training.checkpoint.savers import take

CUDA = torch.device("cuda", 0)


class Stream:
    """Records its calls in a list that all streams share."""

    def __init__(self, name, calls):
        self.name, self.calls, self.events = name, calls, 0

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.events += 1
        return f"{self.name} {self.events}"


@pytest.fixture
def calls(monkeypatch):
    """Stand in for CUDA's streams, with tensors that stay on the CPU."""
    calls = []
    training = Stream("training", calls)

    @contextmanager
    def inside(stream):
        calls.append(f"on {stream.name}")
        yield
        calls.append("off")

    copy = host_copy._copy

    def recorded(pairs):
        pairs = list(pairs)
        calls.append(f"copies {len(pairs)}")
        copy(pairs)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("beside", calls))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(host_copy, "_pin", lambda block, device: False)
    monkeypatch.setattr(host_copy, "_copy", recorded)
    return calls


def test_a_copy_keeps_its_values_and_takes_no_more_than_the_state(tmp_path):
    run = build(tmp_path / "run")
    train(run, 2)
    snapshot = take(run, {})
    file = "model-00000.safetensors"
    before = {name: tensor.clone() for name, tensor in snapshot.tensors[file].items()}
    copied = HostCopy().of(snapshot.tensors, snapshot.buffers, run.mesh.device)[file]
    train(run, 1)
    assert all(torch.equal(copied[name], tensor) for name, tensor in before.items())
    now = snapshot.tensors[file]
    assert not all(torch.equal(now[name], tensor) for name, tensor in before.items())
    state_bytes = sum(tensor.nbytes for tensor in before.values())
    most_bytes = state_bytes + host_copy.ALIGNMENT * len(before)
    assert state_bytes <= bytes_of({file: before}) <= most_bytes


def test_room_is_what_the_system_and_the_container_leave(tmp_path, monkeypatch):
    snapshot, machine = take(build(tmp_path / "run"), {}), SimpleNamespace(memory_gib=64)
    run = SimpleNamespace(machine=machine, mesh=SimpleNamespace(local_world_size=2))
    resident = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=63 * 2**30))
    monkeypatch.setattr(host_copy.psutil, "Process", lambda: resident)
    monkeypatch.setattr(
        host_copy.psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * 2**30)
    )
    assert free_bytes(machine) == 2**30
    monkeypatch.setattr(
        host_copy.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=2 * bytes_of(snapshot.tensors)),
    )
    assert HostCopy().has_room(bytes_of(snapshot.tensors), run)
    run.mesh.local_world_size = 3
    assert not HostCopy().has_room(bytes_of(snapshot.tensors), run)


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_gpu_the_copy_is_of_the_values_before_the_update(pinned, monkeypatch):
    if not pinned:
        monkeypatch.setattr(host_copy, "_pin", lambda block, device: False)
    device = torch.device("cuda", torch.cuda.current_device())
    weight, buffer = torch.randn(4096, 4096, device=device), torch.randn(7, 3, device=device).T
    copy = HostCopy()
    for _ in range(3):
        wanted = weight.cpu(), buffer.cpu()
        copied = copy.of({"f": {"weight": weight, "buffer": buffer}}, {"buffer"}, device)["f"]
        buffer += 1
        for _ in range(3):
            weight @ weight
        copy.before_update()
        weight += 1
        copy.wait()
        assert torch.equal(copied["weight"], wanted[0])
        assert torch.equal(copied["buffer"], wanted[1])
        assert copied["weight"].is_pinned() == pinned
    del copied
    copy.make_room(2 * copy._block.numel(), device)
    assert copy._block.is_pinned() == pinned
