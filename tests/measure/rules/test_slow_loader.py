"""A loop that waits for its loader is told how many workers to try."""

from __future__ import annotations

import pytest

from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.steps.evidence import CallSite, Evidence, HostFacts, Phases

SITE = CallSite(file="mine.py", line=7, text="slow()")


@pytest.mark.parametrize(
    ("cores", "workers", "gain"), [(64, 20, 0.95), (8, 7, 0.864), (2, 1, 0.05)]
)
def test_workers_are_advised_with_a_number(cores, workers, gain):
    evidence = Evidence(
        source="watched loop",
        device="cuda",
        step_s=0.1,
        phases=Phases(data_wait_s=0.097, compute_s=0.003),
        host=HostFacts(cores=cores),
        sites={"data": (SITE,)},
    )
    (finding,) = (one for one in diagnosis_of(evidence).findings if one.name == "slow-data")
    (advice,) = (fix for fix in finding.fixes if "DataLoader" in fix.text)
    assert f"num_workers={workers}, pin_memory=True, persistent_workers=True" in advice.text
    assert advice.gain == pytest.approx(gain, abs=0.03)
    assert any("mine.py:7" in fix.text for fix in finding.fixes)
