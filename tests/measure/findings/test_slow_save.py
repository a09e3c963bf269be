"""Saves that block: what is advised depends on the device."""

from __future__ import annotations

import pytest

from flatout.measure.findings.slow_save import look
from flatout.measure.instruments.evidence import Evidence, Phases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["recipe", "watched"])
def test_a_thread_that_saves_in_the_background_is_advised_on_a_gpu_only(
    tiny_config, device, is_ours
):
    evidence = Evidence(
        source="measured run",
        config=tiny_config() if is_ours else None,
        device=device,
        step_s=0.1,
        phases=Phases(checkpoint_s=0.03),
    )
    found = look(evidence)
    assert found.share == pytest.approx(0.3)
    assert any("background" in fix.text for fix in found.fixes) == (device == "cuda")
