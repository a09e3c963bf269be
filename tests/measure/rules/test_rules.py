"""Every rule finds what it is named after in planted evidence, and nothing on a healthy run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import flatout
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.diagnose.alternatives import applied
from flatout.measure.diagnose.diagnosis import diagnosis_of, rules
from flatout.measure.steps.evidence import (
    CallSite,
    Counts,
    DataFacts,
    Evidence,
    Failure,
    GpuFacts,
    HostFacts,
    KernelRow,
    LoopFacts,
    MemoryFacts,
    Phases,
    Roofline,
)

ROW = KernelRow(kind="elementwise", seconds=0.05, share=1.0, calls=300.0, slowest="aten::add")
SITE = CallSite(file="mine.py", line=7, text="slow()")
TIMED_SITE = SITE.model_copy(update={"seconds_per_step": 0.03})
ATTENTION = KernelRow(kind="attention", seconds=0.02, share=0.2, calls=4.0, slowest="aten::softmax")
H200 = Gpu("NVIDIA H200", 140.0, (9, 0), "580.1")
CPU_MACHINE = Machine("a CPU", 8, 64.0, (), "3.12")
GPU_MACHINE = Machine("a CPU", 8, 64.0, (H200,), "3.12")
LOSSES = tuple((10 * n, 4.0 / (1 + 0.1 * n) + 0.02 * math.sin(9 * n)) for n in range(1, 100))


SETTINGS = {
    "batch.tokens_per_step": 128,
    "batch.rows_per_device": 4,
    "batch.accumulate": 2,
    "train.precision": "bf16",
    "train.eval_every": 100,
    "speedups": "auto",
}
ON_A_CPU = {
    "source": "measured run",
    "speedups": ("pretokenised", "prefetch", "no-sync-logging", "compile", "tf32"),
    "machine": CPU_MACHINE,
    "device": "cpu",
    "steps": 100,
    "step_s": 0.1,
    "phases": Phases(
        data_wait_s=0.001,
        host_s=0.004,
        compute_s=0.07,
        memory_bound_s=0.02,
        optimizer_s=0.004,
        logging_s=0.0005,
        gc_s=0.0003,
        compile_s=0.0,
        checkpoint_s=0.0001,
        evaluation_s=0.0001,
    ),
    "counts": Counts(
        ops=500.0,
        tiny_ops=100.0,
        tiny_op_s=0.001,
        syncs=1.0,
        sync_s=0.001,
        expected_syncs=1.0,
        empty_cache=0.0,
        collections=0.2,
        recompiles=0.0,
    ),
    "counterfactual_s": {"synthetic-data": 0.0995},
    "loop": LoopFacts(rows=8, optimizer_way="fused", kept_graphs=0.0, growth_bytes=0.0),
    "memory": MemoryFacts(
        total_gib=64.0,
        free_gib=60.0,
        peak_gib=20.0,
        reserved_gib=22.0,
        estimated_gib=19.0,
        rows_that_fit=12,
    ),
    "host": HostFacts(
        cores=8,
        machine_cores=8,
        threads=8,
        other_busy_cores=0.1,
        environment={},
        torch_version="2.13.0",
        sees_gpu=False,
        disk_free_gib=100.0,
        disk_needed_gib=2.0,
    ),
    "data": DataFacts(train_tokens=10**7, val_tokens=10**5, vocab_size=257),
    "parameters": 10**6,
    "tokens_per_step": 128,
    "planned_steps": 1000,
    "epochs": 2.0,
    "roofline": Roofline(peak_tflops=800.0, mfu=0.5, tokens_per_s=1e4),
    "losses": LOSSES,
    "grad_norms": tuple((step, 1.0) for step, _ in LOSSES),
    "remaining_s": 3600.0,
}
GPU = GpuFacts(
    name="NVIDIA H200",
    other_processes=0,
    other_memory_gib=0.0,
    slowed_by=(),
    clock_share=1.0,
    power_limit_share=1.0,
    supports_bf16=True,
)
ON_A_GPU = ON_A_CPU | {"machine": GPU_MACHINE, "gpu": GPU}


def replaced(fact, **changes):
    return fact.model_copy(update=changes)


@pytest.fixture
def healthy(tiny_config):
    """Return evidence of a healthy run on a CPU or a GPU, with some facts replaced."""

    def make(device="cpu", **changes):
        facts = dict(ON_A_CPU if device == "cpu" else ON_A_GPU)
        facts |= {"config": tiny_config().with_values(SETTINGS), "device": device}
        if device != "cpu":
            facts["host"] = replaced(facts["host"], torch_cuda="13.0", sees_gpu=True)
            facts["phases"] = replaced(facts["phases"], communication_s=0.0)
            facts["counts"] = replaced(facts["counts"], pageable_copies=0.0)
        for key, value in changes.items():
            section, _, name = key.partition("__")
            facts[section] = replaced(facts[section], **{name: value}) if name else value
        return Evidence(**facts)

    return make


def failed(kind, **more):
    return Failure(kind=kind, message="It fails.", step=3, **more)


CPU_CASES = {
    "anomaly-detection": {"loop__anomaly_detection": True},
    "broadcast-loss": {"sites": {"broadcast": (SITE,)}},
    "wasted-gradients": {"loop__wasted_gradients": 0.5},
    "evaluation-mode": {"loop__evaluation_mode": 0.9, "sites": {"evaluation-mode": (SITE,)}},
    "repeated-rows": {"loop__workers": 2, "loop__dataset": "iterable"},
    "busy-threads": {
        "counterfactual_s": {"short-turns": 0.05},
        "sites": {"thread": (TIMED_SITE,)},
    },
    "decomposition": {"sites": {"decomposition": (TIMED_SITE,)}},
    "double-precision": {"loop__float64_s": 0.03, "sites": {"float64": (SITE,)}},
    "few-rows": {"loop__rows": 1},
    "growing-memory": {"loop__kept_graphs": 1.0, "sites": {"kept": (SITE,)}},
    "new-optimizer": {"loop__optimizer": "AdamW", "loop__renewals": 1.0},
    "high-loss": {"loop__classes": 10, "losses": tuple((n, 50.0) for n in range(20))},
    "slow-code": {"sites": {"own": (TIMED_SITE,)}},
    "slow-optimizer": {
        "phases__optimizer_s": 0.03,
        "loop__optimizer": "AdamW",
        "loop__optimizer_way": "for-loop",
        "loop__tensors": 200,
    },
    "unfused-attention": {"kernels": (ATTENTION,), "sites": {"softmax": (SITE,)}},
    "busy-machine": {"host__other_busy_cores": 3.0},
    "compile-failure": {"compile_fallback": "no compiler"},
    "cpu-by-mistake": {"machine": GPU_MACHINE},
    "cpu-threads": {
        "host__threads": 1,
        "counterfactual_s": {"all-threads": 0.05},
        "host__environment": {"OMP_NUM_THREADS": "1"},
    },
    "disk-space": {"host__disk_needed_gib": 200.0},
    "failure": {"failure": failed("error", fix="Correct it.")},
    "frequent-evaluation": {"phases__evaluation_s": 0.05},
    "garbage-collection": {"phases__gc_s": 0.02, "sites": {"gc": (SITE,)}},
    "hang": {"failure": failed("hang", site=SITE)},
    "length": {"epochs": 400.0},
    "missing-package": {"failure": failed("missing-package", fix="Install it.")},
    "no-data": {"data__missing": "There is no dataset."},
    "out-of-memory": {"failure": failed("out-of-memory")},
    "padding": {"loop__padding": 0.6, "sites": {"padding": (SITE,)}},
    "recompiles": {
        "phases__compile_s": 0.05,
        "counts__recompiles": 0.5,
        "recompile_reasons": ("size mismatch at index 0",),
    },
    "slow-data": {
        "phases__data_wait_s": 0.03,
        "counterfactual_s": {"synthetic-data": 0.07},
        "sites": {"data": (SITE,)},
    },
    "slow-disk": {
        "phases__data_wait_s": 0.03,
        "data__disk_stalled_s": 0.025,
        "data__read_bytes_per_step": 1e6,
    },
    "slow-logging": {"phases__logging_s": 0.02, "sites": {"logging": (SITE,)}},
    "slow-save": {"phases__checkpoint_s": 0.03},
    "slow-settings": {"counterfactual_s": {"speedups=none": 0.08}},
    "tiny-kernels": {
        "counts__tiny_ops": 3000.0,
        "counts__tiny_op_s": 0.06,
        "sites": {"op": (SITE,)},
    },
    "unstable-training": {"failure": failed("diverged")},
    "vocabulary": {"config": {"model.vocab_size": 50_304}},
}
GPU_CASES = {
    "communication": {"phases__communication_s": 0.03, "world_size": 4},
    "deterministic": {"config": {"train.deterministic": True}},
    "empty-cache": {"counts__empty_cache": 1.0, "counts__empty_cache_s": 0.01},
    "environment": {"host__environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
    "full-memory": {"memory__reserved_gib": 61.0, "memory__peak_gib": 60.0},
    "fragmentation": {"memory__reserved_gib": 60.0, "memory__peak_gib": 40.0},
    "gpu-shared": {"gpu__other_processes": 1, "gpu__other_memory_gib": 20.0},
    "host-sync": {
        "counts__syncs": 30.0,
        "counts__sync_s": 0.03,
        "phases__host_s": 0.02,
        "sites": {"sync": (SITE,)},
    },
    "idle-gpu": {"phases__host_s": 0.05},
    "memory-bound": {
        "phases__memory_bound_s": 0.05,
        "speedups": ("prefetch",),
        "kernels": (ROW,),
    },
    "pageable-copies": {
        "counts__pageable_copies": 2.0,
        "counts__pageable_copy_s": 0.01,
        "counts__pageable_copy_bytes": 1e8,
        "sites": {"copy": (SITE,)},
    },
    "precision": {"config": {"train.precision": "fp16"}},
    "small-batch": {"roofline__mfu": 0.1},
    "throttling": {"gpu__slowed_by": ("heat (driver)",), "gpu__clock_share": 0.6},
}
PLANTED = {name: ("cpu", facts) for name, facts in CPU_CASES.items()}
PLANTED |= {name: ("cuda", facts) for name, facts in GPU_CASES.items()}


def planted(healthy, name):
    device, changes = PLANTED[name]
    if "config" in changes:
        config = healthy(device).config.with_values(changes["config"])
        changes = changes | {"config": config}
    return healthy(device, **changes)


def test_every_rule_has_a_planted_case():
    assert set(PLANTED) == {rule.name for rule in rules()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_found_on_a_healthy_run(healthy, device):
    found = diagnosis_of(healthy(device))
    assert [finding.name for finding in found.findings] == []
    assert found.verdict.startswith("Nothing holds this run back")


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_cause_is_the_only_finding(healthy, name):
    evidence = planted(healthy, name)
    found = diagnosis_of(evidence)
    assert [finding.name for finding in found.findings] == [name]
    (finding,) = found.findings
    assert finding.verdict.endswith(".")
    assert "\n" not in finding.verdict
    assert found.verdict == finding.verdict
    assert finding.fixes
    if "sites" in PLANTED[name][1]:
        assert finding.site in (SITE, TIMED_SITE)
    for fix in finding.fixes:
        assert fix.text.endswith(".")
        assert fix.gain is None or (0 <= fix.gain <= 1 and fix.gain_from)
        changed = applied(evidence.config, fix.overrides)
        assert not fix.overrides or changed != evidence.config, fix.text


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_finding_about_another_tools_loop_needs_no_recipe(healthy, name):
    changes = {"config": None, "speedups": None, "source": "watched loop"}
    evidence = planted(healthy, name).model_copy(update=changes)
    for finding in filter(None, (rule.look(evidence) for rule in rules())):
        assert not any(fix.overrides for fix in finding.fixes)


def test_more_troubles_that_are_out_of_memory(healthy):
    near = diagnosis_of(healthy(memory__estimated_gib=57.0)).findings[0]
    assert (near.name, near.harm) == ("out-of-memory", "warns")
    over = diagnosis_of(healthy(memory__estimated_gib=80.0, memory__rows_that_fit=3)).findings[0]
    assert over.harm == "fails"
    assert over.verdict == "The run needs about 80.0 GiB, and 60.0 GiB are available."
    assert over.fixes[0].overrides["batch.rows_per_device"] == 2  # 3 does not divide 8
    short = healthy(failure=failed("killed"), memory__rows_that_fit=3)
    thirds = short.config.with_values({"batch.tokens_per_step": 192, "batch.accumulate": 3})
    killed = diagnosis_of(short.model_copy(update={"config": thirds})).findings[0]
    assert (killed.name, killed.harm) == ("out-of-memory", "fails")
    assert killed.fixes[0].overrides["batch.rows_per_device"] == 2  # 3, as estimated, were short


def test_more_troubles_that_are_unstable(healthy):
    steps = [step for step, _ in LOSSES]
    values = [loss for _, loss in LOSSES]

    def verdict(series, **changes):
        found = diagnosis_of(healthy(losses=tuple(zip(steps, series, strict=True)), **changes))
        return found.findings[0].verdict if found.findings else None

    assert verdict(values) is None
    spike = [*values[:60], values[60] + 3.0, *values[61:]]
    assert verdict(spike).startswith("The loss jumps by 2.9")
    assert verdict([1e-7 * one for one in spike]) is None
    assert verdict([one - 2.0 for one in spike]) is None, "a difference, as of rewards"
    lost = [*values[:-1], math.nan]
    assert verdict(lost) == "The loss is not a number from step 990."
    risen = [value if n < 50 else value + 0.06 * (n - 50) for n, value in enumerate(values)]
    assert "rises again" in verdict(risen)
    assert "skipped" in verdict(values, skipped_steps=20)
    unclipped = healthy(failure=failed("diverged"))
    config = unclipped.config.with_values({"optim.clip": 0.0, "schedule.warmup": 0})
    fixes = diagnosis_of(unclipped.model_copy(update={"config": config})).findings[0].fixes
    assert {"optim.clip": 1.0} in [fix.overrides for fix in fixes]
    assert {"schedule.warmup": 0.02} in [fix.overrides for fix in fixes]
    assert not any(fix.same_result for fix in fixes)


def jumping(*after):
    """Return losses that are noisy and then jump."""
    values = [2.0 + 0.05 * math.sin(7 * n) for n in range(60)]
    values[40 : 40 + len(after)] = after
    return tuple(enumerate(values, 1))


@pytest.mark.parametrize("after", [[5.0], [5.0, 4.0, 3.5], [6.0, 2.0, 2.0, 2.0, 6.0, 2.0]])
def test_a_loss_that_jumps_and_returns_is_a_warning_after_what_slows(healthy, after):
    slow = {"sites": {"own": (TIMED_SITE,)}}
    found = diagnosis_of(healthy(losses=jumping(*after), **slow)).findings
    assert [(one.name, one.harm) for one in found] == [
        ("slow-code", "slows"),
        ("unstable-training", "warns"),
    ]
    assert "at step 41." in found[1].verdict


@pytest.mark.parametrize("after", [[4.0] * 20, [4.0, 8.0] * 10, [3.0 + 0.2 * n for n in range(20)]])
def test_a_loss_that_stays_up_spoils_the_run(healthy, after):
    (found,) = diagnosis_of(healthy(losses=jumping(*after))).findings
    assert found.harm == "spoils"
    assert found.verdict.endswith("and stays up.")


def test_a_spike_does_not_hide_what_is_worse(healthy):
    (found,) = diagnosis_of(healthy(losses=jumping(5.0), skipped_steps=50)).findings
    assert (found.harm, found.verdict.split()[0]) == ("spoils", "float16")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"no_gpu_because": "requested", "sees_gpu": True}, "Remove train.device=cpu."),
        ({"torch_cuda": None}, "Install a torch for CUDA"),
        ({"torch_cuda": "13.0", "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "Unset CUDA_VISIBLE"),
        ({"torch_cuda": "13.0"}, "nvidia-smi"),
    ],
)
def test_the_cpu_by_mistake_has_a_fix_for_each_reason(healthy, facts, words):
    host = HostFacts(torch_version="2.13.0", **facts)
    (finding,) = diagnosis_of(healthy(machine=GPU_MACHINE, host=host)).findings
    assert finding.name == "cpu-by-mistake"
    assert words in finding.fixes[0].text


def test_a_wait_that_the_gpu_hides_is_no_finding(healthy):
    waits = {"phases__data_wait_s": 0.03}
    assert diagnosis_of(healthy("cuda", **waits)).is_healthy
    slow = healthy("cuda", **waits, counterfactual_s={"synthetic-data": 0.07})
    assert [one.name for one in diagnosis_of(slow).findings] == ["slow-data"]


def test_all_faster_settings_are_fixes_and_the_best_is_the_verdict(healthy):
    others = {"batch.rows_per_device=8 batch.accumulate=1": 0.06, "speedups=auto": 0.08}
    slower = {"speedups=-checkpointing": 0.12, "synthetic-data": 0.0995}
    (finding,) = diagnosis_of(healthy(counterfactual_s=others | slower)).findings
    assert finding.verdict == (
        "With batch.rows_per_device=8 batch.accumulate=1, a step takes 40% less."
    )
    assert [fix.overrides for fix in finding.fixes] == [
        {"batch.rows_per_device": 8, "batch.accumulate": 1},
        {"speedups": "auto"},
    ]


def test_reads_on_a_cpu_are_mentioned_by_number(healthy):
    found = diagnosis_of(healthy(counts__syncs=31.0, sites={"sync": (SITE,)})).findings[0]
    assert (found.name, found.harm, found.share) == ("host-sync", "warns", None)
    assert "30 values of tensors at mine.py:7: slow()" in found.verdict


@pytest.mark.slow
def test_fewer_threads_are_no_finding_where_others_use_the_cores_or_they_do_not_help(healthy):
    assert diagnosis_of(healthy(host__threads=4, host__other_busy_cores=4.0)).is_healthy
    faster = {"host__threads": 4, "counterfactual_s": {"all-threads": 0.01}}
    assert diagnosis_of(healthy(**faster, host__other_busy_cores=4.0)).is_healthy, "measured busy"
    (finding,) = diagnosis_of(healthy(**faster, host__cores=5)).findings
    assert "20% less" in finding.verdict, "one core more of five saves at most that"
    useless = healthy(host__threads=4, counterfactual_s={"all-threads": 0.099})
    assert diagnosis_of(useless).is_healthy
    other_work = {"phases": Phases(compute_s=0.007, other_s=0.09), "host__threads": 4}
    assert diagnosis_of(healthy(**other_work, counterfactual_s={"all-threads": 0.05})).is_healthy
    assert [one.name for one in diagnosis_of(healthy(host__threads=16)).findings] == ["cpu-threads"]


def advice(evidence):
    """Return the verdict and fixes about the data of a script."""
    evidence = evidence.model_copy(update={"config": None, "source": "script"})
    found = next(f for f in diagnosis_of(evidence).findings if f.name == "slow-data")
    return " ".join([found.verdict, *(one.text for one in found.fixes)])


@pytest.mark.slow
def test_more_workers_are_advised_only_where_they_can_help(healthy):
    waits = {"phases__data_wait_s": 0.04}
    assert "num_workers=1" in advice(healthy(**waits))
    assert "num_workers=3" in advice(healthy(**waits, loop__workers=2))
    assert "num_workers" not in advice(healthy(**waits, loop__workers=2, host__cores=2))
    assert "num_workers=1" in advice(healthy(**waits, loop__workers=0, host__cores=2))
    assert "num_workers" not in advice(healthy(**waits, loop__dataset="memory"))
    assert "num_workers=0" in advice(healthy(**waits, loop__dataset="memory", loop__workers=2))
    assert "get_worker_info" in advice(healthy(**waits, loop__dataset="iterable"))
    assert "get_worker_info" not in advice(healthy(**waits, loop__dataset="divided"))
    assert "has only 64 MiB" in advice(healthy(**waits, host__shared_gib=1 / 16))
    assert "--shm-size" not in advice(healthy(**waits, host__shared_gib=8.0))


def test_environment_variables_that_are_off_are_no_finding(healthy):
    off = {"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert diagnosis_of(healthy("cuda", host__environment=off)).is_healthy
    assert diagnosis_of(healthy(host__environment={"CUDA_LAUNCH_BLOCKING": "1"})).is_healthy
    old = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (finding,) = diagnosis_of(healthy("cuda", host__environment=old)).findings
    assert finding.fixes[0].text == "Write PYTORCH_ALLOC_CONF."


def test_compiling_does_not_pay_off_in_the_last_minute(healthy):
    idle = {"phases__host_s": 0.05, "speedups": ("prefetch",)}
    for remaining_s, is_first in ((3600.0, True), (30.0, False)):
        (finding,) = diagnosis_of(healthy("cuda", **idle, remaining_s=remaining_s)).findings
        assert (finding.fixes[0].overrides == {"speedups": "+compile"}) == is_first


def test_a_full_power_budget_is_no_throttling(healthy):
    def found(**facts):
        evidence = healthy("cuda", gpu=GpuFacts(**facts))
        return next((f for f in diagnosis_of(evidence).findings if f.name == "throttling"), None)

    assert found() is found(slowed_by=("its power cap",), clock_share=0.93) is None
    assert found(slowed_by=("its power cap",), clock_share=0.7).harm == "slows"
    assert found(power_limit_share=0.6).harm == "warns"
    assert found(slowed_by=("heat (driver)",), clock_share=0.95).share is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_thread_that_saves_in_the_background_is_advised_on_a_gpu_only(healthy, device):
    for is_ours in (True, False):
        evidence = healthy(device, phases__checkpoint_s=0.03)
        if not is_ours:
            evidence = evidence.model_copy(update={"config": None, "source": "watched loop"})
        found = next(f for f in diagnosis_of(evidence).findings if f.name == "slow-save")
        assert found.share == pytest.approx(0.3)
        assert any("background" in fix.text for fix in found.fixes) == (device == "cuda")


def test_evaluations_are_not_put_beyond_the_end_of_the_run(healthy):
    def rarer(every):
        evidence = healthy(phases__evaluation_s=0.09, planned_steps=60)
        config = evidence.config.with_values({"train.eval_every": every, "train.steps": 60})
        (finding,) = diagnosis_of(evidence.model_copy(update={"config": config})).findings
        return [fix for fix in finding.fixes if "train.eval_every" in fix.overrides]

    (fix,) = rarer(10)
    assert fix.overrides == {"train.eval_every": 60}
    assert fix.gain == pytest.approx(0.9 * 5 / 6)
    assert rarer(60) == []


def test_the_documentation_lists_every_finding():
    page = (Path(flatout.__file__).parents[1] / "docs" / "diagnose.md").read_text()
    rows = [f"| {one.name} | {one.look.__doc__.splitlines()[0]} |" for one in rules()]
    assert "\n".join(rows) in page
