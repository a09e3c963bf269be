"""Votes, and work that succeeds on all ranks or on none; test_ranks.py runs several ranks."""

import pytest
import torch
from safetensors import SafetensorError
from stand_in import ALONE

from flatout.distributed.mesh import Mesh
from flatout.distributed.rendezvous import Ranks
from flatout.errors import CheckpointError, DiskFull, RunFailed
from flatout.training import agreement
from flatout.training.agreement import READING, WRITING, Vote, together


class Pair(Mesh):
    """One of two ranks; the other one votes the opposite."""

    def sum(self, *tensors):
        return tuple(tensor + (1 - tensor) for tensor in tensors)


PAIR = Pair(0, 2, 0, 2, 1, torch.device("cpu"))


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_disk_error_becomes_an_error_with_a_fix(error):
    with pytest.raises(RunFailed, match=r"cannot write its files: .*No space left") as failed:
        together(ALONE, lambda: fail(error), WRITING)
    assert failed.value.fix.startswith("Free space")
    assert failed.value.__cause__ is error


class Failing(Mesh):
    """One of two ranks. The other one fails, and not because its disk is full."""

    def sum(self, failed, full):
        return failed + 1, full


def test_a_full_disk_is_named_only_if_no_rank_fails_otherwise():
    full = OSError(28, "No space left on device")
    with pytest.raises(DiskFull):
        together(PAIR, lambda: fail(full), WRITING)
    with pytest.raises(RunFailed, match="No space left") as failed:
        together(Failing(0, 2, 0, 2, 1, torch.device("cpu")), lambda: fail(full), WRITING)
    assert not isinstance(failed.value, DiskFull), "all ranks must decide alike"
    with pytest.raises(DiskFull, match="Another process"):
        together(PAIR, lambda: None, WRITING)


class Recording(Pair):
    """Records the votes that the other rank receives."""

    def sum(self, *tensors):
        SENT.append([float(tensor) for tensor in tensors])
        return super().sum(*tensors)


class Broken(Pair):
    """A device that no longer responds."""

    def sum(self, *tensors):
        raise RuntimeError("the device is gone")


SENT: list[list[float]] = []


@pytest.mark.parametrize(
    "error",
    [
        KeyError("state1"),
        RuntimeError("size mismatch"),
        CheckpointError("torn", fix="Take another."),
    ],
    ids=repr,
)
def test_a_failure_here_is_reported_to_other_ranks(error):
    """Otherwise the other rank would wait forever."""
    SENT.clear()
    with pytest.raises(type(error)) as failed:
        together(Recording(0, 2, 0, 2, 1, torch.device("cpu")), lambda: fail(error), READING)
    assert failed.value is error
    assert SENT == [[1.0, 0.0]]


def test_an_error_is_not_lost_when_reporting_it_fails():
    error = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        together(Broken(0, 2, 0, 2, 1, torch.device("cpu")), lambda: fail(error), WRITING)
    with pytest.raises(RuntimeError, match="device is gone"):
        together(Broken(0, 2, 0, 2, 1, torch.device("cpu")), lambda: None, WRITING)


def test_votes_are_counted_over_all_ranks():
    assert [Vote(ALONE, wanted).count() for wanted in (False, True)] == [0, 1]
    assert [Vote(PAIR, wanted).count() for wanted in (False, True)] == [1, 1]


@pytest.fixture
def check_shared(tmp_path, monkeypatch):
    """Return a check of require_shared with rank 0 in tmp_path and the given answers."""
    (tmp_path / "lock").write_text("process 7")

    def check(rank, folder, answers):
        def broadcast(box, src):
            box[0] = ("process 7", str(tmp_path), "a-host")

        def gather(found, seen):
            found[:] = [seen if number == rank else answers[number] for number in range(2)]

        monkeypatch.setattr(agreement.dist, "broadcast_object_list", broadcast)
        monkeypatch.setattr(agreement.dist, "all_gather_object", gather)
        agreement.require_shared(Ranks(rank, 2, rank, 2), folder / "lock", wait_s=0)

    return check


def test_processes_in_different_directorys_are_an_error_on_each(tmp_path, check_shared):
    for folder in (tmp_path / "elsewhere", tmp_path / "copy"):
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / "lock").write_text("process 6 of an earlier run")
        with pytest.raises(
            RunFailed,
            match=f"Process 1 .* cannot see the run directory of rank 0, {tmp_path} "
            f"on a-host.*{folder.name}",
        ):
            check_shared(1, folder, [True, False])
    with pytest.raises(RunFailed, match=r"Some processes cannot see the run directory .*: 1"):
        check_shared(0, tmp_path, [True, False])


def test_processes_in_one_directory_continue(tmp_path, check_shared):
    check_shared(0, tmp_path, [True, True])
    check_shared(1, tmp_path, [True, True])
    (tmp_path / "lock").write_text("")  # the content may arrive late from another machine
    check_shared(1, tmp_path, [True, True])
