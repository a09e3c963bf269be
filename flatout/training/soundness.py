"""Whether weights and moments are sound: finite, and equal on the ranks that hold copies of them.

Processors compute a wrong value now and then without an error (Hochschild et al. 2021, "Cores that
don't count"; Dixit et al. 2021, arXiv:2102.11245). What they hit spreads with each step, so it is
looked for before it is saved or evaluated.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatout.distributed.tensor import is_shared, local
from flatout.errors import RunFailed
from flatout.storage.streams import shortened
from flatout.training.checkpoint.state import optimizer_tensors
from flatout.training.metrics.log import Log
from flatout.training.run_dir.runlog import DIVERGENCE

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.distributed.mesh import Mesh

Value = TypeVar("Value")
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PRIME, MODULUS = 1_000_003, 2**61 - 1
"""Of the digest of several tensors, in which each has another factor."""
JUMP = 100.0
"""Times that the largest weight may grow between two looks. More is an alarm."""
MOST_NAMED = 3
AGAIN = (
    "Run the same command again, which continues from the last checkpoint, and from the one before "
    "if that leads to a bad step twice."
)
"""What to do about values that may be those of a processor."""


class Look(NamedTuple):
    """One tensor of this rank, in numbers."""

    place: str
    """Which part of the whole tensor it is: equal on ranks that hold copies."""
    digest: int
    """The sum of its bits, as integers of 64 bits."""
    largest: float
    """The largest absolute value. NaN or infinite if some value is."""


def require_sound(run: Run, log: Log) -> None:
    """Check the weights and moments of all ranks, and raise an alarm if the largest weight jumped.

    All ranks call it. A second call at the same step, as in the save that follows an evaluation,
    does nothing. Cost: two passes over what a checkpoint contains, some tenths of a second for a
    gigabyte, and a hundred bytes from each rank.
    Raises: RunFailed, on all ranks, with the names of tensors and ranks.
    """
    looked, before = run.largest_weight or (None, 0.0)
    if looked == run.step:
        return
    looks = looks_of(run)
    totals = dict[str, int]()
    for look in looks.values():
        totals[look.place] = (totals.get(look.place, 0) * PRIME + look.digest) % MODULUS
    broken = [name for name, look in looks.items() if not math.isfinite(look.largest)]
    weights = ((one.largest, name) for name, one in looks.items() if "/" not in name)
    largest, name = max(weights, default=(0.0, ""))
    every = gathered(run.mesh, (broken, totals, largest, name))
    if names := {name: None for broken, *_ in every for name in broken}:
        what = f"Not finite at step {run.step}: {shortened(list(names), 3)}. Nothing was saved."
        log.event(DIVERGENCE, reason=what)
        raise RunFailed(what, fix=AGAIN)
    places = {place for _, totals, *_ in every for place in totals}
    if any(len({totals.get(place) for _, totals, *_ in every} - {None}) > 1 for place in places):
        require_equal_copies(run, looks, log)
    largest, name = max((largest, name) for *_, largest, name in every)
    run.largest_weight = (run.step, largest)
    if before and largest > JUMP * before:
        text = f"The largest weight has grown from {before:.3g} to {largest:.3g}, in {name}."
        log.event(
            "alarm",
            kind="largest weight",
            since_step=looked,
            usual=before,
            now=largest,
            text=text,
        )


def require_equal_copies(run: Run, looks: dict[str, Look], log: Log) -> None:
    """Check that tensors of the same place are equal on all ranks that have them.

    Raises: RunFailed with the tensors that are not, and the ranks whose copies differ from most.
    """
    host = socket.gethostname()
    every = gathered(run.mesh, ({name: one[:2] for name, one in looks.items()}, host))
    names, odd = dict[str, None](), dict[int, None]()
    for name, (place, _) in every[run.mesh.rank][0].items():
        copies = {
            rank: found[name][1]
            for rank, (found, _) in enumerate(every)
            if name in found and found[name][0] == place
        }
        (usual, count), *others = Counter(copies.values()).most_common(2)
        if others:
            is_clear = count > others[0][1]
            names[name] = None
            odd |= {rank: None for rank, copy in copies.items() if not is_clear or copy != usual}
    everywhere = gathered(run.mesh, (list(names), sorted(odd)))
    names = {name: None for found, _ in everywhere for name in found}
    ranks = sorted({rank for _, found in everywhere for rank in found})
    if not names:
        return
    where = ", ".join(f"rank {rank} ({every[rank][1]})" for rank in ranks)
    what = (
        f"Ranks have different copies of {shortened(list(names), 3)} at step {run.step}: "
        f"see {where}. Nothing was saved."
    )
    log.event(DIVERGENCE, reason=what)
    raise RunFailed(
        what,
        fix="A device or its memory computes wrong values: test these machines if it happens "
        f"again. {AGAIN}",
    )


def looks_of(run: Run) -> dict[str, Look]:
    """Return a look at each weight, and at each tensor of the optimizers, in order of their names.

    Values are read once, when all are computed.
    """
    run.core.state_dict()  # frees weights that fully_shard has gathered, as after an evaluation
    named: dict[str, Tensor] = dict(run.core.named_parameters()) | optimizer_tensors(run)
    stage = run.mesh.rank * run.mesh.pipeline // run.mesh.world_size
    places: list[tuple[str, str]] = []
    sums, norms = list[Tensor](), list[Tensor]()
    for name in sorted(named):
        for part in parts_of(named[name].detach()):
            places.append((name, f"{stage} {place_of(named[name])}"))
            whole = torch.view_as_real(part) if part.is_complex() else part
            flat = whole.reshape(-1)
            if int(flat.storage_offset()) * flat.element_size() % 8:  # words would not be aligned
                flat = flat.clone()
            words = flat.view(WORDS[flat.element_size()] if flat.nbytes % 8 else torch.int64)
            sums.append(words.sum(dtype=torch.int64).to(run.mesh.device))
            low, high = flat.aminmax() if flat.dtype in FLOATS else [torch.zeros(())] * 2
            norms.append(torch.maximum(-low, high).to(run.mesh.device, torch.float32))
    looks = dict[str, Look]()
    for (name, place), total, norm in zip(
        places, torch.stack(sums).tolist(), torch.stack(norms).tolist(), strict=True
    ):
        _, digest, largest = looks.get(name, Look(place, 0, 0.0))
        largest = norm if math.isnan(norm) else max(largest, norm)
        looks[name] = Look(place, digest * PRIME + total, largest)
    return looks


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of this rank that a tensor consists of. None is empty.

    Shapes:  any.
    """
    tensor = local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.numel():
        yield tensor


def place_of(tensor: Tensor) -> str:
    """Return which part of a tensor this rank has: its place among ranks that divide it.

    Shapes:  any.
    """
    if not is_shared(tensor):
        return ""
    at = tensor.device_mesh.get_coordinate() or ()
    placed = zip(at, tensor.placements, strict=True)
    return str([i for i, one in placed if not one.is_replicate()])  # also in strides


def gathered(mesh: Mesh, value: Value) -> list[Value]:
    """Return the values of all ranks."""
    every: list[Any] = [value] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(every, value)
    return every
