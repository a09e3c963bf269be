"""What autograd keeps for a backward pass, counted by its own hooks."""

from torch.autograd.graph import saved_tensors_hooks

from flatout.assembly.memory import storage_id, tensors_in


def kept_bytes(run, *, apart_from):
    """Return the bytes that autograd keeps for the backward pass of `run()`, and its result.

    Each storage counts once; those of `apart_from` (parameters, a block's input) do not count.
    """
    storages = {}
    known = {storage_id(part) for part in tensors_in(apart_from)}

    def keep(tensor):
        if storage_id(tensor) not in known:
            storages[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(storages.values()), result
