"""One of several processes that save and load: python ranks_worker.py FOLDER REPORT.

RANK and the other variables are set as by torchrun.
"""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
from stand_in import build, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flatout.config.sections import ParallelConfig
from flatout.distributed.mesh import make_mesh
from flatout.distributed.rendezvous import connect, disconnect
from flatout.errors import CheckpointError, RunFailed
from flatout.training.checkpoint import catalog, read_write, savers
from flatout.training.checkpoint import tensors as slices
from flatout.training.checkpoint.savers import in_background
from flatout.training.signals import StopRequests
from flatout.training.step import seed_step


def layouts(world_size):
    return {"ddp": 1, "fsdp": 2} if world_size == 2 else {"fsdp4": 4, "hsdp": 2}


def fresh(folder, mesh, seed):
    if mesh.device_mesh is None:
        run = build(folder, seed=seed, mesh=mesh)
        run.model = DistributedDataParallel(run.core, broadcast_buffers=False)
        return run
    placed = mesh.device_mesh if mesh.replicate > 1 else mesh.device_mesh["shard"]

    def shard(core):
        for block in core.blocks:
            fully_shard(block, mesh=placed)
        fully_shard(core, mesh=placed)

    return build(folder, seed=seed, mesh=mesh, shard=shard)


def local(run):
    """Return this rank's losses and tensor bytes after three more steps."""
    losses = train(run, 3)
    tensors = [
        *run.core.parameters(),
        *(t for o in run.optimizers for p in o.state for _, t in sorted(o.state[p].items())),
    ]
    weights = {
        name: slices.local_part(t).numpy().tobytes() for name, t in run.core.state_dict().items()
    }
    return (losses, sorted(slices.local_part(t).numpy().tobytes() for t in tensors), weights)


def on_all_ranks(mesh, true):
    (total,) = mesh.sum(torch.tensor(float(true)))
    return total.item() == mesh.world_size


def main(folder: Path, report: Path):
    ranks = connect("cpu")
    found = {}
    for layout, shard in layouts(ranks.world_size).items():
        mesh = make_mesh(ParallelConfig(shard=shard), "cpu", ranks)
        run_folder = folder / layout
        run = fresh(run_folder, mesh, seed=1)
        train(run, 3)
        with torch.no_grad():  # an evaluation leaves sharded weights gathered
            run.model(next(run.loader))
        path = savers.save(run)
        unbroken = local(run)
        again = fresh(run_folder, mesh, seed=2)
        differences = read_write.load(again, path)
        found[layout] = {
            "exact": on_all_ranks(mesh, local(again) == unbroken and differences == [])
        }
        # the single process that wrote it reads back what these ranks loaded and saved again
        alone = fresh(folder / f"{layout}-again", mesh, seed=3)
        found[layout]["differences"] = read_write.load(
            alone, folder / "alone" / "checkpoints" / "step-4"
        )
        seed_step(alone)
        found[layout]["apart"] = not on_all_ranks(
            mesh, torch.rand(1).item() == mesh.broadcast_object(torch.rand(1).item())
        )
        savers.save(alone)
        found[layout]["failure"] = failing_save(fresh(folder / f"{layout}-fails", mesh, seed=4))
        found[layout]["beside"] = saved_beside(
            fresh(folder / f"{layout}-beside", mesh, seed=1), run.mesh
        )
        found[layout]["failure_beside"] = failing_save_beside(
            fresh(folder / f"{layout}-fails-beside", mesh, seed=4)
        )
        found[layout]["damage"] = failing_load(fresh(run_folder, mesh, seed=5), path)
    found["stops"] = stops(mesh)
    if ranks.rank == 0:
        report.write_text(json.dumps(found))
    disconnect()


def failing_save(run):
    """Return whether all ranks fail and leave no file when one rank's disk is full."""
    write = slices.write

    def full(path, tensors):
        if run.mesh.rank == 1:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    slices.write = full
    try:
        savers.save(run)
        failed = False
    except RunFailed:
        failed = True
    finally:
        slices.write = write
    run.mesh.barrier()
    return on_all_ranks(run.mesh, failed) and list((run.folder / "checkpoints").iterdir()) == []


def saved_beside(run, mesh):
    """Return whether a background save by ranks of different speed equals one in the loop.

    All ranks must learn of its completion at the same step.
    """
    train(run, 3)
    own, run.folder = run.folder, run.folder.with_name(f"{run.folder.name}-loop")
    wanted = savers.save(run)
    run.folder = own
    gate, write_share = threading.Event(), savers.write_share

    def gated(snapshot, temporary):
        assert snapshot.rank != 1 or gate.wait(60)
        write_share(snapshot, temporary)

    savers.write_share = gated
    saver = in_background()
    saver.save(run, environment={}, keep=1)
    reported = []
    for step in range(4, 2000):
        train(run, 1)
        reported += [(step, saved.path) for saved in saver.finished()]
        if reported:
            break
        if step == 8:
            gate.set()
        assert step > 8 or not any(run.folder.glob("checkpoints/step-3")), "rank 1 has not written"
    savers.write_share = write_share
    ((step, path),) = reported
    same = {p.name: p.read_bytes() for p in path.iterdir()} == {
        p.name: p.read_bytes() for p in wanted.iterdir()
    }
    train(run, 1)
    saver.save(run, environment={}, keep=1)
    saver.wait()
    mesh.barrier()
    return on_all_ranks(
        mesh,
        same
        and step == mesh.broadcast_object(step)
        and step > 8
        and catalog.steps(run.folder) == [run.step],
    )


def failing_save_beside(run):
    """Return whether all ranks learn at the same step that a disk is full, and leave no file."""
    write_share = savers.write_share

    def full(snapshot, temporary):
        if snapshot.rank == 1:
            raise OSError(28, "No space left on device")
        write_share(snapshot, temporary)

    savers.write_share = full
    saver = in_background()
    saver.save(run, environment={}, keep=1)
    failed_at = None
    for step in range(2000):
        try:
            saver.finished()
        except RunFailed:
            failed_at = step
            break
        train(run, 1)
    savers.write_share = write_share
    run.mesh.barrier()
    same = failed_at is not None and failed_at == run.mesh.broadcast_object(failed_at)
    return on_all_ranks(run.mesh, same) and list((run.folder / "checkpoints").iterdir()) == []


def failing_load(run, path):
    """Return whether every rank rejects a checkpoint if one rank finds a damaged file."""
    run.mesh.barrier()
    file = path / f"model-{run.mesh.world_size - 1:05d}.safetensors"
    if run.mesh.is_main and not file.exists():
        file = max(path.glob("model-*"))
    content = file.read_bytes() if file.exists() else b""
    run.mesh.barrier()
    if run.mesh.is_main:
        file.write_bytes(content[:-1])
    run.mesh.barrier()
    try:
        read_write.load(run, path)
        refused = False
    except (CheckpointError, RunFailed):
        refused = True
    run.mesh.barrier()
    if run.mesh.is_main:
        file.write_bytes(content)
    run.mesh.barrier()
    return on_all_ranks(run.mesh, refused)


def stops(mesh):
    """Return the step after which each rank stops when one receives a request."""
    requests = StopRequests()
    run = SimpleNamespace(mesh=mesh)
    for step in range(20):
        if step == 5 and mesh.rank == mesh.world_size - 1:
            requests.signal_number = 15
        if requests.requested(run):
            break
    stopped = torch.zeros(mesh.world_size)
    stopped[mesh.rank] = step
    return mesh.sum(stopped)[0].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
