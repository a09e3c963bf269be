"""The code of a loop: what it does besides training, and what it does in a slow way."""

from __future__ import annotations

import math
import re

from flatout.measure.diagnose.diagnosis import Finding, Harm, fix, ms, rule
from flatout.measure.steps.evidence import Evidence

SLOW_CODE = 0.1
"""Share of the step from which lines outside of torch's training work are a finding."""
SLOW_OPTIMIZER = 0.2
"""Share of the step from which an optimizer that updates its tensors one by one is a finding: half
of it can be saved, a tenth of the step as for other findings.
"""
FUSED = 0.5
"""Share of the optimizer's time that one pass over the memory is assumed to save."""
SLOW_ATTENTION = 0.03
"""Share of the step from which a softmax over all pairs of tokens is a finding."""
DOUBLE, OF_DOUBLE = 0.1, 0.5
"""Share of the step from which float64 is a finding, and what half the bytes save of it."""
OF_BACKWARD = 2 / 3
"""Share of the backward pass in forward and backward."""
SLOW_CHECKS = 0.02
"""Share of the step from which the time of anomaly detection is stated."""
MOST_KEPT = 0.5
"""Share of the last steps' graphs that may be in memory."""
OFTEN_RENEWED = 0.1
"""New optimizers per step from which they are a finding."""
OFTEN_EVALUATING = 0.05
"""Share of the steps from which training in evaluation mode is a finding."""
FEW_ROWS = 1
FORGOTTEN = 0.5
"""Share of the gradients up to which weights without an optimizer are taken to be forgotten. A
model of which less is trained is usually adapted to something new.
"""
SLOW_PADDING = 0.25
"""Share of the step from which padding that no row needs is a finding: lengths that are rounded up
to a multiple of 8, which can pay off, stay below it from 16 tokens.
"""
SLOW_DECOMPOSITION = 0.1
"""Share of the step from which decompositions of matrices are a finding."""
SLOW_LOCK = 0.1
"""Share of the step that threads must take from it by Python's lock."""
HIGH_LOSS = 1.5
"""Losses are far above a uniform guess from this multiple of its loss."""
ADVICE = (
    (r"deepcopy\(", "Copy only the weights that must be kept, and only when they are the best."),
    (r"\bsleep\(", "Remove the sleep."),
    (r"next\(iter\(", "Make the iterator once, before the loop."),
    (r"\bprint\(|logg(er|ing)\.|\.write\(|json\.dump", "Write less, or every few hundred steps."),
    (r"\bre\.|json\.loads|Image\.|imread|tokeniz", "Prepare the data once, before training, or in "
     "the workers of a DataLoader."),
    (r"\.cpu\(\)|\.numpy\(\)|\.tolist\(\)|\.item\(\)", "Compute it with operations on whole "
     "tensors, every few steps."),
    (r"torch\.(as_)?tensor\(|FloatTensor\(", "A list of NumPy arrays is converted number by "
     "number: stack it first, torch.from_numpy(np.stack(arrays))."),
    (r"DataLoader\(", "Make the DataLoader once, before the loop."),
    (r"\bgc\.collect", "Remove the call, or make it every few hundred steps."),
    (r"(mul_|lerp_?|add_)\(.*(alpha|decay|beta|ema|0\.9)", "Update all tensors at once: "
     "torch._foreach_lerp_(averages, weights, 1 - decay)."),
    (r"norm\(", "Use torch.nn.utils.get_total_norm, or the norm that clip_grad_norm_ returns."),
)  # fmt: skip
"""What to do about a line, by a pattern of its text."""


@rule(unless=("anomaly-detection",))
def slow_code(evidence: Evidence) -> Finding | None:
    """Lines of the loop take time without training."""
    lines = evidence.sites.get("own", ())
    lost_s = sum(one.seconds_per_step or 0.0 for one in lines)
    if evidence.on_gpu:  # they only cost time where the device idles meanwhile
        lost_s = min(lost_s, evidence.phases.host_s or 0.0)
    share = evidence.lost(lost_s, SLOW_CODE)
    if share is None:
        return None
    site = lines[0]
    first = share if evidence.on_gpu else evidence.share(site.seconds_per_step) or 0.0
    advice = next((text for pattern, text in ADVICE if re.search(pattern, site.text)), None)
    text = advice or "Take it out of the step, do it every few steps, or compute it for whole "
    text += "" if advice else "tensors at once."
    called = f" (called at {site.caller.describe()})" if site.caller else ""
    return Finding(
        verdict=f"{first:.0%} of each step goes into {site.describe()}{called}, which is no work "
        "of forward, backward or optimizer.",
        figures={
            "ms": ms(site.seconds_per_step),
            "step_ms": ms(evidence.step_s),
            **{f"ms_at_line_{one.line}": ms(one.seconds_per_step) for one in lines[1:3]},
        },
        share=share,
        site=site,
        fixes=[fix(text, share, "the step without these lines")],
    )


@rule()
def anomaly_detection(evidence: Evidence) -> Finding | None:
    """torch.autograd.set_detect_anomaly is on, which records and checks every operation."""
    off_s, step_s = evidence.counterfactual_s.get("no-anomaly"), evidence.step_s
    if not evidence.loop.anomaly_detection:
        return None
    share = evidence.saved("no-anomaly", SLOW_CHECKS)
    costs = "" if share is None else f": without it, a step takes {share:.0%} less"
    return Finding(
        verdict=f"Anomaly detection of autograd is on{costs}.",
        figures={"step_without_it_ms": ms(off_s), "step_ms": ms(step_s)},
        share=share,
        site=evidence.site("anomaly"),
        fixes=[fix("Remove it. It is for finding a NaN.", share, "the same steps without it")],
    )


@rule()
def new_optimizer(evidence: Evidence) -> Finding | None:
    """The loop creates a new optimizer, which loses its state."""
    loop = evidence.loop
    if loop.renewals is None or loop.renewals < OFTEN_RENEWED:
        return None
    text = "Make it once, before the loop, and change its param_groups: group['lr'] = ..."
    return Finding(
        verdict=f"A new {loop.optimizer} is made every {1 / loop.renewals:.2g} steps: its averages "
        "of the gradients are lost.",
        harm="spoils",
        figures={"new_per_step": loop.renewals},
        site=evidence.site("optimizer"),
        fixes=[fix(text, same_result=False)],
    )


@rule()
def slow_optimizer(evidence: Evidence) -> Finding | None:
    """The optimizer updates its tensors one by one."""
    loop, share = evidence.loop, evidence.lost(evidence.phases.optimizer_s, SLOW_OPTIMIZER)
    if share is None or loop.optimizer_way not in ("for-loop", "own"):
        return None
    text = "Pass fused=True to the optimizer."
    if loop.optimizer_way == "own":
        text = "Update all tensors at once, with torch._foreach_ functions."
    elif loop.optimizer not in ("Adam", "AdamW", "SGD", "Adagrad"):
        text = "Pass foreach=True to the optimizer."
    return Finding(
        verdict=f"{loop.optimizer} takes {share:.0%} of each step: it updates {loop.tensors} "
        "tensors one by one.",
        figures={"optimizer_ms": ms(evidence.phases.optimizer_s), "tensors": loop.tensors},
        share=share * FUSED,
        site=evidence.site("optimizer"),
        fixes=[fix(text, share * FUSED, "half of its time; one pass over the memory")],
    )


@rule()
def unfused_attention(evidence: Evidence) -> Finding | None:
    """Attention stores the scores of all pairs of tokens in memory."""
    site = evidence.site("softmax")
    spent_s = sum(row.seconds for row in evidence.kernels or () if row.kind == "attention")
    share = evidence.lost(spent_s, SLOW_ATTENTION)
    if site is None or share is None:
        return None
    text = "Use torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)."
    return Finding(
        verdict=f"Attention keeps the scores of all pairs of tokens in memory. Their softmax alone "
        f"takes {share:.0%} of each step.",
        figures={"softmax_ms": ms(spent_s), "calls_per_step": site.count_per_step},
        share=share,
        site=site,
        fixes=[fix(text, share, "the softmax; masks and copies of the scores come on top")],
    )


@rule()
def padding(evidence: Evidence) -> Finding | None:
    """Batches are padded beyond their longest row."""
    # attention costs more than in proportion to the columns
    lost_s = (evidence.loop.padding or 0.0) * _work_s(evidence)
    share = evidence.lost(lost_s, SLOW_PADDING)
    if share is None:
        return None
    text = (
        "Pad each batch to its longest row, in collate_fn or with padding='longest'. Batches of "
        "rows of similar length, or packed rows, need less still."
    )
    return Finding(
        verdict=f"{share:.0%} of each step goes into columns of the batch that are padding in "
        "every row.",
        figures={"padding": evidence.loop.padding, "padding_ms": ms(lost_s)},
        share=share,
        site=evidence.site("padding"),
        fixes=[fix(text, share, "forward and backward in proportion to the columns")],
    )


@rule()
def decomposition(evidence: Evidence) -> Finding | None:
    """Matrix decompositions, such as an SVD, take a large part of each step."""
    site = evidence.site("decomposition")
    share = evidence.lost(site.seconds_per_step if site else None, SLOW_DECOMPOSITION)
    if site is None or share is None:
        return None
    text = (
        "If the largest singular value is enough, use power iteration, as torch.nn.utils."
        "parametrizations.spectral_norm does. Otherwise compute it every few steps."
    )
    return Finding(
        verdict=f"{share:.0%} of each step decomposes matrices, at {site.describe()}.",
        figures={"ms": ms(site.seconds_per_step), "step_ms": ms(evidence.step_s)},
        share=share,
        site=site,
        fixes=[fix(text, share, "the step without it; its backward pass comes on top")],
    )


@rule()
def busy_threads(evidence: Evidence) -> Finding | None:
    """A thread of the script holds the GIL, and the loop waits for it.

    One that computes outside of the lock takes nothing from the loop, and is no finding.
    """
    site, share = evidence.site("thread"), evidence.saved("short-turns", SLOW_LOCK)
    if site is None or share is None:
        return None
    text = (
        "If it polls, let it wait instead: queue.Queue(maxsize=2), threading.Event().wait(). If it "
        "prepares data, do that in processes: DataLoader(num_workers=...)."
    )
    return Finding(
        verdict=f"A step takes {share:.0%} less with shorter turns of Python's lock, which another "
        f"thread holds at {site.describe()}.",
        figures={"step_ms": ms(evidence.step_s)},
        share=share,
        site=site,
        fixes=[fix(text, share, "the same steps with shorter turns of the threads")],
    )


def _work_s(evidence: Evidence) -> float:
    """Return the seconds of forward and backward."""
    return (evidence.phases.compute_s or 0.0) + (evidence.phases.memory_bound_s or 0.0)


@rule()
def wasted_gradients(evidence: Evidence) -> Finding | None:
    """Gradients are computed for weights that no optimizer updates."""
    wasted, names = evidence.loop.wasted_gradients or 0.0, evidence.loop.never_updated
    share = evidence.lost(OF_BACKWARD * wasted * _work_s(evidence), SLOW_CODE)
    if names and wasted < FORGOTTEN:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        return Finding(
            verdict=f"No optimizer updates {shown}, which have gradients: they never learn.",
            harm="spoils",
            figures={"wasted_gradients": wasted},
            site=evidence.site("optimizer"),
            fixes=[
                fix("Give the optimizer all weights: model.parameters().", same_result=False),
                fix("If they must stay as they are, call requires_grad_(False) on them."),
            ],
        )
    if share is None:
        return None
    text = "Call a model that is not trained in torch.no_grad(), and set requires_grad_(False) on "
    return Finding(
        verdict=f"{wasted:.0%} of the gradients belong to weights that no optimizer updates.",
        figures={"wasted_gradients": wasted},
        share=share,
        site=evidence.site("backward"),
        fixes=[fix(f"{text}weights that stay.", share, "their part of the backward pass")],
    )


@rule()
def evaluation_mode(evidence: Evidence) -> Finding | None:
    """The model stays in evaluation mode while it is trained."""
    share, site = evidence.loop.evaluation_mode or 0.0, evidence.site("evaluation-mode")
    if share < OFTEN_EVALUATING or site is None:
        return None
    return Finding(
        verdict=f"In {share:.0%} of the steps the model is in evaluation mode while it is trained: "
        "dropout is off, and batch norm keeps its statistics.",
        harm="spoils",
        figures={"evaluation_mode": share},
        site=site,
        fixes=[
            fix(
                "Call model.train() where the evaluation that starts there ends.", same_result=False
            )
        ],
    )


@rule()
def broadcast_loss(evidence: Evidence) -> Finding | None:
    """The loss broadcasts a column against a row, which compares all pairs of rows."""
    site = evidence.site("broadcast")
    if site is None:
        return None
    return Finding(
        verdict="Tensors of the shapes (n, 1) and (n,) are broadcast to (n, n): every prediction "
        "is compared with every target.",
        harm="spoils",
        site=site,
        fixes=[fix("Give both one shape: predictions.squeeze(1).", same_result=False)],
    )


@rule()
def double_precision(evidence: Evidence) -> Finding | None:
    """The model computes in float64."""
    site, share = evidence.site("float64"), evidence.lost(evidence.loop.float64_s, DOUBLE)
    if site is None or share is None:
        return None
    lost = (evidence.share(_work_s(evidence)) or share) * OF_DOUBLE
    text = "Compute in float32: convert inputs with .float(), and remove .double()."
    return Finding(
        verdict="The model computes in float64, which takes twice the memory and time of float32.",
        figures={"forward_in_float64_ms": ms(evidence.loop.float64_s)},
        share=lost,
        site=site,
        fixes=[fix(text, lost, "half of the work", same_result=False)],
    )


@rule()
def few_rows(evidence: Evidence) -> Finding | None:
    """Each forward pass has a single row."""
    loop, rows = evidence.loop, evidence.loop.rows
    if rows is None or rows > FEW_ROWS:
        return None
    text = "Raise the batch size: each operation and each update then serves more rows."
    number = loop.micro_batches or 1.0
    lost_s = evidence.phases.host_s if evidence.on_gpu else evidence.counts.tiny_op_s
    if number < 2:  # an update for every row
        lost_s = max(lost_s or 0.0, evidence.phases.optimizer_s or 0.0)
    else:
        text = f"Use micro-batches of more rows and fewer of them than {number:.0f} per step."
    return Finding(
        verdict="Each forward pass has 1 row: the cost of starting operations, of reading the "
        "weights and of the update is not shared.",
        figures={"rows": rows, "micro_batches_per_step": loop.micro_batches},
        share=evidence.lost(lost_s, SLOW_CODE),
        site=evidence.site("rows"),
        fixes=[fix(text, same_result=number >= 2)],
    )


@rule()
def growing_memory(evidence: Evidence) -> Finding | None:
    """Each step keeps memory: its graph, or something else."""
    loop, memory, site = evidence.loop, evidence.memory, evidence.site("kept")
    growth = loop.growth_bytes or 0.0
    keeps_graphs = loop.kept_graphs is not None and loop.kept_graphs > MOST_KEPT
    if not keeps_graphs and growth <= 0:
        return None
    harm: Harm = "spoils" if keeps_graphs else "warns"
    verdict = f"Each step takes {growth / 2**20:.2g} MiB of memory that it does not return."
    text = "Look for a list, a cache or an attribute that grows in the loop."
    if keeps_graphs:
        by = f" by {loop.kept_by}" if loop.kept_by else ""
        verdict = f"The graph of each step is kept{by}, so memory and time grow with the steps."
        text = "Keep numbers, not tensors with gradients: add loss.item() or loss.detach()."
    left = (memory.total_gib or 0.0) - (memory.peak_gib or 0.0)
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "mib_per_step": growth / 2**20,
            "kept_graphs": loop.kept_graphs,
            "steps_until_full": left * 2**30 / growth if growth and left > 0 else None,
        },
        site=site,
        fixes=[fix(text)],
    )


@rule()
def high_loss(evidence: Evidence) -> Finding | None:
    """The loss is far above the loss of a uniform guess."""
    classes, losses = evidence.loop.classes, [loss for _, loss in evidence.losses or ()][-20:]
    if not classes or classes < 2 or len(losses) < 5 or not all(map(math.isfinite, losses)):
        return None
    guess, lowest = math.log(classes), min(losses)
    if lowest < HIGH_LOSS * guess:
        return None
    return Finding(
        verdict=f"The loss is {lowest:.3g} and more, and a uniform guess among {classes} classes "
        f"has {guess:.3g}.",
        harm="spoils",
        figures={"loss": lowest, "loss_of_a_guess": guess},
        fixes=[
            fix("Lower the learning rate, or the scale of the initial weights.", same_result=False),
            fix("Check that the targets belong to the inputs.", same_result=False),
        ],
    )
