"""Steps wait for data."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix, speedup_fixes
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.1
"""Share of the step from which waiting for data is a finding."""
MIN_SHARE_CONFIRMED = 0.3
"""Share of the wait that must disappear with synthetic data, if that was measured."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when steps wait for data."""
    share = lost_to_data(evidence)
    if share is None or share < WORTH_TELLING:
        return None
    wait_ms = 1e3 * (evidence.phases.data_wait_s or 0.0)
    return Finding(
        verdict=f"{share:.0%} of each step waits for data: {wait_ms:.3g} ms.",
        harm="slows",
        figures=data_figures(evidence),
        share=share,
        site=evidence.site("data"),
        fixes=_fixes(evidence, share),
    )


def lost_to_data(evidence: Evidence) -> float | None:
    """Return the share of a step that is lost to waiting for data; None: unknown.

    If the same steps are no faster on synthetic data, the GPU works while the host waits.
    """
    wait_s = evidence.phases.data_wait_s
    synthetic_s = evidence.counterfactual_s.get("synthetic-data")
    if wait_s is None or evidence.step_s is None:
        return None
    if evidence.on_gpu and synthetic_s is not None:
        gained_s = evidence.step_s - synthetic_s
        return evidence.share(wait_s) if gained_s >= MIN_SHARE_CONFIRMED * wait_s else 0.0
    return evidence.share(wait_s)


def data_figures(evidence: Evidence) -> dict[str, float | None]:
    """Return the numbers that show where data is slow."""
    synthetic_s = evidence.counterfactual_s.get("synthetic-data")
    data = evidence.data
    return {
        "step_ms": 1e3 * (evidence.step_s or 0.0),
        "data_wait_ms": 1e3 * (evidence.phases.data_wait_s or 0.0),
        "step_on_synthetic_data_ms": None if synthetic_s is None else 1e3 * synthetic_s,
        "read_from_disk_kib_per_step": None
        if data.read_bytes_per_step is None
        else data.read_bytes_per_step / 2**10,
    }


def _fixes(evidence: Evidence, share: float) -> tuple[Fix, ...]:
    fixes: list[Fix] = []
    measured = "the step without its wait for data"
    if evidence.config is not None:
        tokens = "Read tokens instead of text"
        fixes += speedup_fixes(evidence, "reader", tokens, gain=share, gain_from=measured)
        fixes += speedup_fixes(
            evidence,
            "feed",
            "Read ahead in the background",
            gain=share,
            gain_from=f"{measured}, if the device takes longer than reading",
        )
        fixes.append(Fix(text="Copy the dataset to a local disk.", gain=share, gain_from=measured))
    site = evidence.site("data")
    if site is not None:
        fixes.insert(
            0,
            Fix(
                text=f"Move the work of {site.describe()} out of the step: do it once, before "
                "training.",
                gain=share,
                gain_from=measured,
            ),
        )
    elif evidence.config is None:
        fixes.append(
            Fix(
                text="Prepare the data before training, or give the DataLoader more workers.",
                gain=share,
                gain_from=measured,
            )
        )
    return tuple(fixes)


FINDING = FindingRule(name="slow-data", look=look, unless=("slow-disk",))
