"""Operations on the CPU use fewer threads than there are cores, or more."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.1
"""Share of the step that more threads must save."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the threads do not suit the cores."""
    host = evidence.host
    threads, cores = host.threads, host.cores
    if evidence.device != "cpu" or threads is None or cores is None or threads == cores:
        return None
    if evidence.world_size > 1:  # several processes share the cores
        return None
    others = host.other_busy_cores or 0.0
    if threads > cores:
        return _finding(evidence, f"torch uses {threads} threads on {cores} cores", None)
    more_s = evidence.counterfactual_s.get("all-threads")
    if more_s is None and others > cores - threads - 0.5:
        return None  # the other cores are busy
    share = None
    if more_s is not None and evidence.step_s:
        share = 1 - more_s / evidence.step_s
        if share < WORTH_TELLING:
            return None
    text = f"torch uses {threads} of {cores} cores"
    if share is not None:
        text += f": with all of them, a step takes {share:.0%} less"
    return _finding(evidence, text, share)


def _finding(evidence: Evidence, text: str, share: float | None) -> Finding:
    host = evidence.host
    variables = {
        name: value
        for name, value in (host.environment or {}).items()
        if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    more_s = evidence.counterfactual_s.get("all-threads")
    named = " and ".join(variables)
    fix = f"Unset {named}." if named else f"Call torch.set_num_threads({host.cores})."
    if not named and evidence.config is not None:
        fix = f"Set OMP_NUM_THREADS={host.cores}."
    return Finding(
        verdict=f"{text}.",
        harm="slows",
        figures={
            "threads": host.threads,
            "cores": host.cores,
            "step_with_all_threads_ms": None if more_s is None else 1e3 * more_s,
            **variables,
        },
        share=share,
        fixes=(
            Fix(
                text=fix,
                gain=share,
                gain_from=None if share is None else "the same steps with a thread per core",
            ),
        ),
    )


FINDING = FindingRule(name="cpu-threads", look=look)
