"""Every rule finds what it is named after in planted evidence, and nothing on a healthy run."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import yaml

import flatout
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.diagnose.alternatives import applied
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.rules import rules
from flatout.measure.steps.evidence import CallSite, Evidence, Failure

SITE = CallSite(file="mine.py", line=7, text="slow()")
TIMED_SITE = SITE.model_copy(update={"seconds_per_step": 0.03})
POLLING = TIMED_SITE.model_copy(update={"text": "while queue.empty():"})
MACHINE = Machine("a CPU", 8, 64.0, (), "3.12")
GPU_MACHINE = Machine("a CPU", 8, 64.0, (Gpu("NVIDIA H200", 140.0, (9, 0), "580.1"),), "3.12")
LOSSES = tuple((10 * n, 4.0 / (1 + 0.1 * n) + 0.02 * math.sin(9 * n)) for n in range(1, 100))
SETTINGS = {
    "batch.tokens_per_step": 128,
    "batch.rows_per_device": 4,
    "batch.accumulate": 2,
    "train.precision": "bf16",
    "train.eval_every": 100,
    "speedups": "auto",
}
ON_A_CPU = yaml.safe_load(
    """{
    source: measured run, speedups: [pretokenised, prefetch, no-sync-logging, compile, tf32],
    device: cpu, steps: 100, step_s: 0.1, data_wait_s: 0.001, host_s: 0.004, compute_s: 0.07,
    memory_bound_s: 0.02, optimizer_s: 0.004, logging_s: 0.0005, gc_s: 0.0003, compile_s: 0.0,
    checkpoint_s: 0.0001, evaluation_s: 0.0001, ops: 500.0, tiny_ops: 100.0, tiny_op_s: 0.001,
    syncs: 1.0, sync_s: 0.001, expected_syncs: 1.0, empty_cache: 0.0, collections: 0.2,
    recompiles: 0.0, rows: 8, optimizer_way: fused, kept_graphs: 0.0, growth_bytes: 0.0,
    total_gib: 64.0, free_gib: 60.0, peak_gib: 20.0, reserved_gib: 22.0, estimated_gib: 19.0,
    rows_that_fit: 12, cores: 8, threads: 8, other_busy_cores: 0.1, torch_version: 2.13.0,
    sees_gpu: false, disk_free_gib: 100.0, disk_needed_gib: 2.0, train_tokens: 10000000,
    val_tokens: 100000, parameters: 1000000, tokens_per_step: 128, planned_steps: 1000,
    epochs: 2.0, peak_tflops: 800.0, mfu: 0.5, tokens_per_s: 10000.0, remaining_s: 3600.0,
    counterfactual_s: {synthetic-data: 0.0995}
    }"""
) | {
    "machine": MACHINE,
    "losses": LOSSES,
    "grad_norms": tuple((step, 1.0) for step, _ in LOSSES),
}
ON_A_GPU = (
    ON_A_CPU
    | {"machine": GPU_MACHINE}
    | yaml.safe_load(
        """{
        device: cuda, torch_cuda: "13.0", sees_gpu: true, gpu_others: 0, gpu_others_gib: 0.0,
        slowed_by: [], clock_share: 1.0, power_limit_share: 1.0, supports_bf16: true,
        communication_s: 0.0, pageable_copies: 0.0
        }"""
    )
)


@pytest.fixture
def healthy(tiny_config):
    """Return evidence of a healthy run on a CPU or a GPU, with some facts replaced."""

    def make(device="cpu", settings=None, site=None, **changes):
        config = tiny_config().with_values(SETTINGS | (settings or {}))
        if site is not None:
            changes["sites"] = {site: (POLLING if site == "thread" else TIMED_SITE,)}
        if changes.get("machine") == "GPU":
            changes["machine"] = GPU_MACHINE
        for row in changes.get("kernels", ()):
            row.update(share=0.2, calls=4.0)
        facts = ON_A_CPU if device == "cpu" else ON_A_GPU
        return Evidence(**{**facts, "config": config} | changes)

    return make


def failed(kind, **more):
    return Failure(kind=kind, message="It fails.", step=3, **more)


CASES = yaml.safe_load("""
cpu:
  anomaly-detection: {anomaly_detection: true, site: anomaly}
  broadcast-loss: {site: broadcast}
  busy-machine: {other_busy_cores: 3.0}
  busy-threads: {site: thread}
  compile-failure: {compile_fallback: no compiler}
  cpu-by-mistake: {machine: GPU}
  cpu-threads: {threads: 1, environment: {OMP_NUM_THREADS: "1"}}
  decomposition: {kernels: [{kind: other, seconds: 0.03, slowest: "aten::_linalg_svd"}]}
  disk-space: {disk_needed_gib: 200.0}
  double-precision: {float64_s: 0.03, site: float64}
  evaluation-mode: {evaluation_mode: 0.9, site: evaluation-mode}
  failure: {failure: {kind: error, message: It fails., fix: Correct it.}}
  few-rows: {rows: 1}
  frequent-evaluation: {evaluation_s: 0.05}
  garbage-collection: {gc_s: 0.02, site: gc}
  growing-memory: {kept_graphs: 1.0, site: kept}
  length: {epochs: 400.0}
  out-of-memory: {failure: {kind: out-of-memory, message: It fails.}}
  padding: {padding: 0.6, site: padding}
  recompiles: {compile_s: 0.05, recompiles: 0.5, recompile_reason: size mismatch}
  repeated-rows: {workers: 2, dataset: iterable}
  slow-code: {site: own}
  slow-data: {data_wait_s: 0.03, counterfactual_s: {synthetic-data: 0.07}, site: data}
  slow-logging: {logging_s: 0.02, site: logging}
  slow-optimizer: {optimizer_s: 0.03, optimizer_way: own, optimizer: A, tensors: 9, site: optimizer}
  slow-save: {checkpoint_s: 0.03}
  slow-settings: {counterfactual_s: {speedups=none: 0.08}}
  tiny-kernels: {tiny_ops: 3000.0, tiny_op_s: 0.06, site: op}
  unfused-attention: {kernels: [{kind: attention, seconds: 0.02, slowest: softmax}], site: softmax}
  unstable-training: {failure: {kind: diverged, message: It fails.}}
  wasted-gradients: {wasted_gradients: 0.5, site: backward}
cuda:
  communication: {communication_s: 0.03, world_size: 4}
  empty-cache: {empty_cache: 1.0, empty_cache_s: 0.01}
  environment: {environment: {CUDA_LAUNCH_BLOCKING: "1"}}
  fragmentation: {reserved_gib: 60.0, peak_gib: 40.0}
  full-memory: {reserved_gib: 61.0, peak_gib: 60.0}
  gpu-shared: {gpu_others: 1, gpu_others_gib: 20.0}
  host-sync: {syncs: 30.0, sync_s: 0.03, host_s: 0.02, site: sync}
  idle-gpu: {host_s: 0.05}
  memory-bound: {memory_bound_s: 0.05, speedups: [prefetch]}
  pageable-copies: {pageable_copies: 2.0, pageable_copy_s: 0.01, site: copy}
  precision: {settings: {train.precision: fp16}}
  small-batch: {mfu: 0.1}
  throttling: {slowed_by: [heat (driver)], clock_share: 0.6}
""")
PLANTED = {
    name: (device, facts) for device, cases in CASES.items() for name, facts in cases.items()
}


def test_every_rule_has_a_planted_case_and_a_row_in_the_documentation():
    assert set(PLANTED) == {rule.name for rule in rules()}
    page = (Path(flatout.__file__).parents[1] / "docs" / "diagnose.md").read_text()
    assert "\n".join(f"| {one.name} | {one.summary} |" for one in rules()) in page


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_found_on_a_healthy_run(healthy, device):
    found = diagnosis_of(healthy(device))
    assert [finding.name for finding in found.findings] == []
    assert found.verdict.startswith("Nothing holds this run back")


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_cause_is_the_only_finding_and_a_script_needs_no_recipe(healthy, name):
    device, changes = PLANTED[name]
    evidence = healthy(device, **changes)
    found = diagnosis_of(evidence)
    (finding,) = found.findings
    assert (finding.name, found.verdict) == (name, finding.verdict)
    assert finding.verdict.endswith(".")
    assert "None" not in finding.verdict
    assert finding.fixes
    assert finding.site == (evidence.site(changes["site"]) if "site" in changes else None)
    for fix in finding.fixes:
        assert fix.text.endswith(".")
        assert fix.gain is None or (0 <= fix.gain <= 1 and fix.gain_from)
        changed = applied(evidence.config, fix.overrides)
        assert not fix.overrides or changed != evidence.config, fix.text
    other = {"config": None, "speedups": None, "source": "watched loop"}
    elsewhere = [rule.look(evidence.model_copy(update=other)) for rule in rules()]
    assert not any(fix.overrides for one in elsewhere if one for fix in one.fixes)


def only(evidence, name=None):
    """Return the only finding, or that of a name, or None."""
    found = diagnosis_of(evidence).findings
    if name is None:
        assert len(found) <= 1, [one.name for one in found]
    return next((one for one in found if name in (None, one.name)), None)


@pytest.mark.parametrize(
    ("facts", "verdict", "harm", "rows"),
    [
        ({"estimated_gib": 57.0}, "about 57.0 of 60.0 GiB: it may", "warns", 2),
        ({"estimated_gib": 80.0, "rows_that_fit": 3}, "and 60.0 GiB are available", "fails", 2),
        ({"failure": failed("killed"), "rows_that_fit": 3}, "It fails.", "fails", 2),
    ],
)
def test_too_little_memory_advises_rows_that_divide_the_step(healthy, facts, verdict, harm, rows):
    found = only(healthy(**facts))
    assert (found.name, found.harm) == ("out-of-memory", harm)
    assert verdict in found.verdict
    assert found.fixes[0].overrides["batch.rows_per_device"] == rows


@pytest.mark.parametrize(
    ("rows", "facts", "harm", "words"),
    [
        (256, {"held": 15.0}, "warns", ("96% of the GPU's memory", "rows_per_device=128")),
        (256, {"held": 15.5, "rate": 15_200.0}, "slows", ("128 rows reached 364,000", "=128")),
        (256, {"held": 19.0}, "slows", ("the GPU's memory", "=128")),
        (1, {"held": 15.0}, "warns", ("96%", "checkpointing")),
        (128, {"held": 10.0}, None, ()),
        (128, {"held": 10.0, "rate": 364_000.0}, None, ()),
    ],
)
def test_a_batch_that_fills_the_memory_is_a_finding(healthy, rows, facts, harm, words):
    batch = {"batch.rows_per_device": rows, "batch.tokens_per_step": 256 * 16}
    evidence = healthy(
        "cuda",
        settings=batch | {"batch.accumulate": 256 // rows},
        reserved_gib=facts["held"],
        peak_gib=facts["held"] - 0.3,
        total_gib=15.6,
        tokens_per_s=facts.get("rate"),
        rates_by_rows={64: 300_000.0, 128: 364_000.0, 256: 15_000.0},
    )
    found = only(evidence, "full-memory")
    assert (found and found.harm) == harm
    assert not found or words[0] in found.verdict
    assert not found or words[1] in found.fixes[0].text


STEPS, VALUES = zip(*LOSSES, strict=True)
SPIKE = [*VALUES[:60], VALUES[60] + 3.0, *VALUES[61:]]


@pytest.mark.parametrize(
    ("values", "facts", "verdict"),
    [
        (VALUES, {}, None),
        (SPIKE, {}, "The loss jumps by 2.9"),
        ([1e-7 * one for one in SPIKE], {}, None),
        ([one - 2.0 for one in SPIKE], {}, None),  # a difference, as of rewards
        ([*VALUES[:-1], math.nan], {}, "The loss is not a number from step 990."),
        ([v + 0.06 * max(n - 50, 0) for n, v in enumerate(VALUES)], {}, "The loss rises again"),
        (VALUES, {"skipped_steps": 20}, "float16 overflowed"),
        (SPIKE, {"skipped_steps": 50}, "float16 overflowed"),
        ([1.0 + 0.02 * n for n in range(63)], {}, None),  # too few to tell
        ([1.0 + 0.02 * n for n in range(64)], {}, "The loss rises again"),
    ],
)
def test_losses_are_judged_by_their_course(healthy, values, facts, verdict):
    series = tuple(zip(STEPS, values, strict=False))
    found = only(healthy(losses=series, **facts))
    assert found is None if verdict is None else found.verdict.startswith(verdict)


def test_noise_without_progress_does_not_rise(healthy):
    evidence, (judge,) = healthy(), (one for one in rules() if one.name == "unstable-training")
    for seed in range(200):
        noise = random.Random(seed)
        values = tuple((step, 2.0 + 0.3 * noise.gauss()) for step in range(64))
        found = judge.look(evidence.model_copy(update={"losses": values}))
        assert found is None or "rises" not in found.verdict, seed


def test_calmer_settings_change_the_result(healthy):
    settings = {"optim.clip": 0.0, "schedule.warmup": 0}
    fixes = only(healthy(settings=settings, failure=failed("diverged"))).fixes
    overrides = [fix.overrides for fix in fixes]
    assert {"optim.clip": 1.0} in overrides
    assert {"schedule.warmup": 0.02} in overrides
    assert not any(fix.same_result for fix in fixes)


@pytest.mark.parametrize(
    ("after", "harm"),
    [
        ([5.0], "warns"),
        ([5.0, 4.0, 3.5], "warns"),
        ([6.0, 2.0, 2.0, 2.0, 6.0, 2.0], "warns"),
        ([4.0] * 20, "spoils"),
        ([4.0, 8.0] * 10, "spoils"),
        ([3.0 + 0.2 * n for n in range(20)], "spoils"),
    ],
)
def test_a_jump_that_returns_is_a_warning_after_what_slows(healthy, after, harm):
    values = [2.0 + 0.05 * math.sin(7 * n) for n in range(60)]
    values[40 : 40 + len(after)] = after
    evidence = healthy(losses=tuple(enumerate(values, 1)), site="own")
    found = diagnosis_of(evidence).findings
    assert [one.harm for one in found] == (["slows", harm] if harm == "warns" else [harm, "slows"])
    (jump,) = (one for one in found if one.name == "unstable-training")
    assert jump.verdict.endswith("at step 41." if harm == "warns" else "and stays up.")


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
    assert words in only(healthy(machine=GPU_MACHINE, **facts)).fixes[0].text


@pytest.mark.parametrize(
    ("text", "polls"),
    [
        ("while len(kept) < 9: pass", True),
        ("pass", True),
        ("while True: data = connection.recv(1)", False),
        ("batch = next(batches)", False),
    ],
)
def test_a_thread_polls_where_its_line_does_nothing_else(healthy, text, polls):
    site = POLLING.model_copy(update={"text": text})
    assert bool(only(healthy(sites={"thread": (site,)}))) == polls


def test_a_wait_that_the_gpu_hides_is_no_finding(healthy):
    assert only(healthy("cuda", data_wait_s=0.03)) is None
    slow = healthy("cuda", data_wait_s=0.03, counterfactual_s={"synthetic-data": 0.07})
    assert only(slow).name == "slow-data"


def test_a_wait_for_a_slow_disk_says_so(healthy):
    found = only(healthy(data_wait_s=0.03, disk_stalled_s=0.025, read_bytes_per_step=1e6))
    assert found.verdict == "30% of each step waits for a disk that delivers 33.3 MB/s."


def test_all_faster_settings_are_fixes_and_the_best_is_the_verdict(healthy):
    many = "batch.rows_per_device=8 batch.accumulate=1"
    others = {many: 0.06, "speedups=auto": 0.08, "speedups=-checkpointing": 0.12}
    found = only(healthy(counterfactual_s=others | {"synthetic-data": 0.0995}))
    assert found.verdict == f"With {many}, a step takes 40% less."
    overrides = [fix.overrides for fix in found.fixes]
    assert overrides == [{"batch.rows_per_device": 8, "batch.accumulate": 1}, {"speedups": "auto"}]


@pytest.mark.parametrize("source", ["watched loop", "script"])
def test_reads_on_a_cpu_are_a_warning_except_in_scripts(healthy, source):
    found = only(healthy(source=source, syncs=31.0, sites={"sync": (SITE,)}))
    assert (found and (found.name, found.harm, found.share)) == (
        ("host-sync", "warns", None) if source == "watched loop" else None
    )


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"threads": 4}, "torch uses 4 of 8 cores: all of them save up to 47% of each step."),
        ({"threads": 16}, "torch uses 16 threads on 8 cores."),
        ({"threads": 4, "other_busy_cores": 4.0}, None),
        ({"threads": 4, "compute_s": 0.007, "memory_bound_s": 0.0, "other_s": 0.09}, None),
        ({"threads": 4, "world_size": 2}, None),
    ],
)
def test_threads_are_a_finding_where_more_could_help(healthy, facts, verdict):
    found = only(healthy(**facts))
    assert (found and found.verdict) == verdict


@pytest.mark.parametrize(
    ("facts", "has", "lacks"),
    [
        ({}, "num_workers=1,", "/dev/shm"),
        ({"workers": 2}, "num_workers=3,", "get_worker_info"),
        ({"workers": 2, "cores": 2}, "__getitem__", "num_workers"),
        ({"dataset": "memory"}, "rows[indices]", "num_workers"),
        ({"dataset": "memory", "workers": 2}, "num_workers=0", "num_workers=3"),
        ({"dataset": "iterable"}, "get_worker_info", "num_workers=0"),
        ({"shared_gib": 1 / 16}, "has only 64 MiB", "num_workers=0"),
        ({"data_wait_s": 0.097, "cores": 64, "device": "cuda"}, "num_workers=20, pin_mem", "shm"),
        ({"data_wait_s": 0.097, "cores": 2}, "num_workers=1,", "pin_memory"),
    ],
)
def test_workers_are_advised_with_a_number_where_they_can_help(healthy, facts, has, lacks):
    known = {"data_wait_s": 0.04, "source": "script", "counterfactual_s": {}} | facts
    evidence = healthy(**known).model_copy(update={"config": None})
    text = " ".join(one.text for one in only(evidence, "slow-data").fixes)
    assert has in text
    assert lacks not in text


def test_variables_that_are_off_or_of_another_device_are_no_finding(healthy):
    off = {"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert only(healthy("cuda", environment=off)) is None
    assert only(healthy(environment={"CUDA_LAUNCH_BLOCKING": "1"})) is None


def test_compiling_does_not_pay_off_in_the_last_minute(healthy):
    for remaining_s, is_first in ((3600.0, True), (30.0, False)):
        evidence = healthy("cuda", host_s=0.05, speedups=("prefetch",), remaining_s=remaining_s)
        assert (only(evidence).fixes[0].overrides == {"speedups": "+compile"}) == is_first


@pytest.mark.parametrize(
    ("facts", "harm"),
    [
        ({}, None),
        ({"slowed_by": ("its power cap",), "clock_share": 0.93}, None),
        ({"slowed_by": ("its power cap",), "clock_share": 0.7}, "slows"),
        ({"power_limit_share": 0.6}, "warns"),
        ({"slowed_by": ("heat (driver)",), "clock_share": 0.95}, "slows"),
    ],
)
def test_a_full_power_budget_is_no_throttling(healthy, facts, harm):
    found = only(healthy("cuda", **facts))
    assert (found and found.harm) == harm


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_thread_that_saves_in_the_background_is_advised_on_a_gpu_only(healthy, device, is_ours):
    evidence = healthy(device, checkpoint_s=0.03)
    if not is_ours:
        evidence = evidence.model_copy(update={"config": None, "source": "watched loop"})
    texts = [fix.text for fix in only(evidence, "slow-save").fixes]
    assert any("background" in text for text in texts) == (device == "cuda")


@pytest.mark.parametrize(("every", "rarer"), [(10, 60), (60, None)])
def test_evaluations_are_not_put_beyond_the_end_of_the_run(healthy, every, rarer):
    settings = {"train.eval_every": every, "train.steps": 60}
    found = only(healthy(settings=settings, evaluation_s=0.09, planned_steps=60))
    assert [one.overrides.get("train.eval_every") for one in found.fixes if one.overrides] == (
        [rarer] if rarer else []
    )


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"growth_bytes": 2.0**20}, "Each step takes 1 MiB of memory that it does not return."),
        ({"growth_bytes": 2.0**20, "optimizer": "LBFGS"}, None),  # its history
        ({"kept_graphs": 1.0, "kept_by": "total", "optimizer": "LBFGS"}, "The graph of each step"),
    ],
)
def test_memory_that_grows_is_a_finding_but_not_a_history(healthy, facts, verdict):
    found = only(healthy(**facts))
    assert found is None if verdict is None else found.verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (failed("error"), "The run fails at step 3: It fails."),
        (failed("hang", site=SITE), "It fails. It was at mine.py:7: slow()."),
        (failed("no-data", fix="Prepare one."), "It fails."),
        (failed("missing-package", fix="Install it."), "It fails."),
    ],
)
def test_what_ends_a_run_is_one_finding(healthy, failure, verdict):
    found = only(healthy(failure=failure))
    assert (found.name, found.harm, found.verdict) == ("failure", "fails", verdict)
