"""The first call of a compiled model, made before training so that its cost is named and its failure is harmless."""

from __future__ import annotations

import torch

from flatout.progress import SILENT, Progress
from flatout.registry import SPEEDUPS
from flatout.run import Run
from flatout.selection import Decision
from flatout.training.metrics import Log


def warm_up(run: Run, log: Log, *, progress: Progress = SILENT) -> None:
    """Compile now: a pass of training and one of evaluation in the run's own shapes, leaving RNG, weights and gradients as they were.

    torch.compile is lazy: its errors come at the first call. If that call fails on any rank and the plain model works, the
    run goes on without compile, and says so.
    """
    compiled = [d.name for d in run.decisions if d.on and _compiles(d.name)]
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
    first_line = str(failure).splitlines()[0] if str(failure) else ""
    reason = (
        f"compiling failed, running eager: {type(failure).__name__}: {first_line}" if failure else "compiling failed on another rank, running eager"
    )
    run.decisions = [Decision(d.name, False, reason) if d.name in compiled else d for d in run.decisions]
    for name in compiled:
        log.event("speedup", name=name, on=False, reason=reason)
    progress.say(reason[0].upper() + reason[1:])


def _compiles(name: str) -> bool:
    transform = SPEEDUPS.get(name).transform
    return transform is not None and transform.stage == "compile"


def _try_step(run: Run) -> Exception | None:
    """Return what passes on made-up tokens raised, or None.

    The core is called past DDP's wrapper, so that a rank that fails leaves no other waiting for its gradients.
    """
    device = run.mesh.device
    tokens_BT = torch.zeros(run.rows_per_device, run.config.data.seq_len, dtype=torch.int64, device=device)
    doc_ids_BT = torch.zeros_like(tokens_BT, dtype=torch.int32) if run.config.data.document_mask else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with run.autocast():
                loss_sum, _ = run.core(tokens_BT, tokens_BT, doc_ids_BT)
            loss_sum.backward()
            run.core.eval()
            with torch.no_grad(), run.autocast():
                run.core(tokens_BT, tokens_BT, doc_ids_BT)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail with any type of error; the caller tries the plain model before it goes on
        return error
    finally:
        run.core.train()
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return None
