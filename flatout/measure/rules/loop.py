"""The loop: lines that do not train, gradients that nothing uses, slower settings."""

from __future__ import annotations

import re

from flatout.config.schema import RunConfig, parse_overrides
from flatout.measure.rules import Finding, fix, rule
from flatout.measure.rules.table import work_s
from flatout.measure.steps.evidence import Evidence

SLOW = 0.1
"""Share of the step from which lines outside of training, wasted gradients and settings count."""
OF_BACKWARD = 2 / 3
"""Share of the backward pass in forward and backward."""
FORGOTTEN = 0.5
"""Share of the gradients up to which weights without an optimizer are taken to be forgotten. A
model of which less is trained is usually adapted to something new.
"""
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
    ("", "Take it out of the step, do it every few steps, or compute it for whole tensors at "
     "once."),
)  # fmt: skip
"""What to do about a line, by a pattern of its text."""


@rule(site="own", shows=("step_s",), unless=("anomaly-detection",))
def slow_code(evidence: Evidence) -> Finding | None:
    """Lines of the loop take time without training."""
    lines = evidence.sites.get("own", ())
    times_s = {one.line: one.seconds_per_step or 0.0 for one in lines}
    lost_s = sum(times_s.values())
    if evidence.on_gpu:  # they only cost time where the device idles meanwhile
        lost_s = min(lost_s, evidence.host_s or 0.0)
    share = evidence.share(lost_s, SLOW)
    if share is None:
        return None
    site = lines[0]
    first = share if evidence.on_gpu else evidence.share(site.seconds_per_step) or 0.0
    text = next(text for pattern, text in ADVICE if re.search(pattern, site.text))
    called = f" (called at {site.caller.describe()})" if site.caller else ""
    return Finding(
        verdict=f"{first:.0%} of each step goes into {site.describe()}{called}, which is no work "
        "of forward, backward or optimizer.",
        figures={f"ms_at_line_{line}": 1e3 * time_s for line, time_s in [*times_s.items()][:3]},
        share=share,
        fixes=(fix(text, share, "the step without these lines"),),
    )


@rule(site="backward", shows=("wasted_gradients",))
def wasted_gradients(evidence: Evidence) -> Finding | None:
    """Gradients are computed for weights that no optimizer updates."""
    wasted, names = evidence.wasted_gradients or 0.0, evidence.never_updated
    share = evidence.share(OF_BACKWARD * wasted * work_s(evidence), SLOW)
    if names and wasted < FORGOTTEN:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        verdict = f"No optimizer updates {shown}, which have gradients: they never learn."
        whole = fix("Give the optimizer all weights: model.parameters().", same_result=False)
        fixes = (whole, fix("If they must stay as they are, call requires_grad_(False) on them."))
        site = evidence.site("optimizer")
        return Finding(verdict=verdict, harm="spoils", site=site, fixes=fixes)
    if share is None:
        return None
    verdict = f"{wasted:.0%} of the gradients belong to weights that no optimizer updates."
    text = "Call a model that is not trained in torch.no_grad(), and set requires_grad_(False) on "
    text += "weights that stay."
    only = fix(text, share, "their part of the backward pass")
    return Finding(verdict=verdict, share=share, fixes=(only,))


@rule(shows=("step_s",))
def slow_settings(evidence: Evidence) -> Finding | None:
    """Different settings of the recipe make its steps shorter on this CPU."""
    others = {name: s for name, s in evidence.counterfactual_s.items() if "=" in name}
    gains = {name: evidence.share((evidence.step_s or 0.0) - s, SLOW) for name, s in others.items()}
    saved = {name: gain for name, gain in gains.items() if gain is not None}
    if evidence.config is None or not saved:
        return None
    best = max(saved, key=saved.__getitem__)
    fixes = [
        fix(
            f"Set {name}.",
            gain,
            "both in turns",
            overrides=parse_overrides(name.split(), RunConfig),
        )
        for name, gain in saved.items()
    ]
    verdict = f"With {best}, a step takes {saved[best]:.0%} less."
    return Finding(verdict=verdict, share=saved[best], fixes=fixes)
