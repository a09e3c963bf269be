"""The first call of a compiled model, made before training so that its cost is named and its failure is harmless."""

from __future__ import annotations

import torch

from flatout.progress import SILENT, Progress
from flatout.run import Run
from flatout.selection import Decision
from flatout.training.metrics import Log


def warm_up(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Compile now: one forward and backward pass of the run's own shapes, which leaves RNG, weights and gradients as they were.

    torch.compile is lazy: its errors come at the first call. If that call fails on any rank and the plain model works, the
    run goes on without compile, and says so.
    """
    compiled = [d for d in run.decisions if d.on and d.name == "compile"]
    if not compiled:
        return
    with progress.task("Compiling the model (once, often 20 to 60 s)"):
        failure = _try_step(run)
    if not float(run.mesh.sum(torch.tensor(float(failure is not None), device=run.mesh.device))[0]):
        return
    for module in run.core.modules():
        module._compiled_call_impl = None  # what Module.compile set; there is no public way back
    torch._dynamo.reset()
    plain_failure = _try_step(run)
    if plain_failure is not None:
        raise plain_failure
    reason = f"compiling failed, running eager: {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    run.decisions = [Decision(d.name, False, reason) if d.name == "compile" else d for d in run.decisions]
    log.event("speedup", name="compile", on=False, reason=reason)
    progress.say(reason[0].upper() + reason[1:])


def _try_step(run: Run) -> Exception | None:
    """Return what a forward and backward pass on made-up tokens raised, or None."""
    device = run.mesh.device
    tokens_BT = torch.zeros(run.rows_per_device, run.config.data.seq_len, dtype=torch.int64, device=device)
    doc_ids_BT = torch.zeros_like(tokens_BT, dtype=torch.int32) if run.config.data.document_mask else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with run.autocast():
                loss_sum, _ = run.model(tokens_BT, tokens_BT, doc_ids_BT)
            loss_sum.backward()
    except Exception as error:  # compilers fail with any type of error; the caller tries the plain model before it goes on
        return error
    finally:
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return None
