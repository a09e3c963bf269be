"""Evidence: what is unknown stays None, also on its way between processes."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import flatout
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.evidence import CallSite, Evidence

GPU = Gpu("NVIDIA H200", 140.0, (9, 0), "580.1")
MACHINE = Machine("a CPU", 2, 24.0, (GPU,), "3.12")


def test_nothing_is_known_until_it_is_filled_in():
    found = Evidence(source="preflight")
    assert found.phase_shares() == {}
    assert found.share(1.0) is found.site("sync") is found.setting("optim.lr") is None
    assert not found.on_gpu
    found = Evidence(source="measured run", step_s=0.2, data_wait_s=0.05, compute_s=0.1)
    assert found.phase_shares() == pytest.approx({"data_wait": 0.25, "compute": 0.5})
    assert (found.share(None), found.share(0.3)) == (None, 1.0)
    assert CallSite(file="a.py", line=3, text="x.item()").describe() == "a.py:3: x.item()"
    assert CallSite(file="a.py", line=3, text="").describe() == "a.py:3"
    with pytest.raises(ValidationError):
        Evidence(source="preflight", speed=3)
    with pytest.raises(ValidationError):
        found.step_s = 1.0


def test_evidence_passes_between_processes_unchanged(tiny_config):
    site = CallSite(file="a.py", line=3, text="x.item()")
    found = Evidence(
        source="measured run",
        config=tiny_config(),
        machine=MACHINE,
        device="cuda:1",
        step_s=0.1,
        sites={"sync": (site,)},
        losses=((1, 2.5), (2, math.inf)),
        counterfactual_s={"synthetic-data": 0.08},
    )
    again = Evidence.model_validate_json(found.model_dump_json())
    assert again == found
    assert again.on_gpu
    assert again.setting("train.steps") == 6
    assert again.site("sync") == site
    lost = found.model_copy(update={"losses": ((3, math.nan),)})
    assert math.isnan(Evidence.model_validate_json(lost.model_dump_json()).losses[0][1])


@pytest.mark.slow
def test_evidence_and_every_finding_load_without_torch():
    program = (
        "import sys; from flatout.measure.diagnose.diagnosis import diagnosis_of;"
        " from flatout.measure import evidence; from flatout.measure.attach import lines;"
        " from flatout.training.metrics import phases;"
        " diagnosis_of(evidence.Evidence(source='preflight')); assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(flatout.__file__).parents[1],
        check=True,
        timeout=120,
    )
