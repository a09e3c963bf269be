"""Every rule finds what it is named after in planted evidence, and nothing on a healthy run."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

import flatout
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of, edited
from flatout.measure.evidence import CallSite, Evidence, Failure
from flatout.measure.rules import Finding, rules

SITE = CallSite(file="mine.py", line=7, text="while slow():")
TIMED_SITE = SITE.model_copy(update={"seconds_per_step": 0.03})
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
    val_tokens: 100000, tokens_per_step: 128, planned_steps: 1000,
    epochs: 2.0, peak_tflops: 800.0, mfu: 0.5, tokens_per_s: 10000.0, remaining_s: 3600.0,
    counterfactual_s: {synthetic-data: 0.0995}
    }"""
) | {
    "machine": MACHINE,
    "losses": LOSSES,
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
            changes["sites"] = {site: (TIMED_SITE,)}
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
  accumulation-sync: {gradient_syncs: 4.0, transfer_s: 0.01, world_size: 2, site: communication}
  growing-steps: {grows: {seconds: {first: 0.05, last: 0.09, per_1000: 0.1}}, site: data}
  slow-rank: {waiting_s: 0.03, transfer_s: 0.001, slowest: 1, slowest_phase: other, world_size: 2,
    site: rank}
  shared-memory: {workers: 2, shared_gib: 0.0625, course: [[0, 0.1, 5.0e+6]], site: rows}
  workers-memory: {grows: {workers: {first: 50.0, last: 90.0, per_1000: 30.0}}, workers: 2,
    site: rows}
  anomaly-detection: {anomaly_detection: true, site: anomaly}
  broadcast-loss: {site: broadcast}
  busy-machine: {other_busy_cores: 3.0}
  busy-threads: {site: thread}
  compile-failure: {compile_fallback: no compiler}
  cpu-by-mistake: {machine: GPU}
  cpu-threads: {threads: 1}
  decomposition: {kernels: [{kind: decomposition, seconds: 0.02}]}
  created-weights: {site: created}
  discarded-gradients: {site: discarded}
  unclipped-gradients: {site: unclipped}
  unused-results: {site: unused}
  disk-space: {disk_needed_gib: 200.0}
  double-precision: {float64_s: 0.03, site: float64}
  equal-units: {equal_units: hidden.weight, site: optimizer}
  evaluation-mode: {evaluation_mode: 0.9, site: evaluation-mode}
  costly-line: {site: line}
  dropped-graphs: {site: dropped}
  needless-recomputing: {site: recomputed}
  backend-off: {backends_off: [mkldnn]}
  costly-workers: {own_cores: 7.5, worker_cores: 4.0, site: worker}
  repeated-backward: {site: again}
  repeated-work: {site: repeated}
  work-without-effect: {site: unread}
  cleared-gradients: {without_gradients: 1.0, site: step}
  uncleared-gradients: {uncleared: 1.0, site: step}
  unmoved-weights: {unmoved: 0.95, weights_dtype: bfloat16, highest_lr: 1.0e-6, site: step}
  failure: {failure: {kind: error, message: It fails., fix: Correct it., step: 3}}
  few-rows: {rows: 1}
  frequent-evaluation: {evaluation_s: 0.05}
  garbage-collection: {gc_s: 0.02, site: gc}
  memory-leak: {growth_bytes: 1048576}
  growing-hooks: {grown: model._forward_hooks, grown_by: hooks}
  lost-gradients: {site: lost}
  dense-gradients: {full_rows: 0.01, largest_share: 0.9, optimizer_s: 0.03, site: optimizer}
  new-optimizers: {new_optimizers: 1.0, site: optimizer}
  probabilities-as-logits: {site: normalised}
  interleaved-targets: {site: interleaved}
  mixed-rows: {mixes_rows: true, site: padding}
  tiny-updates: {updates: 1.0e-8, highest_lr: 1.0e-9, site: optimizer}
  seen-targets: {looks_ahead: true, site: padding}
  same-batch: {same_rows: 8, dataset_rows: 500, site: padding}
  tracing: {tracer: cProfile}
  many-workers: {workers: 32, site: rows}
  looped-calls: {site: looped}
  vanished-rate: {tiny_rates: 0.9, site: step}
  constant-inputs: {constant_inputs: true, site: padding}
  repeated-steps: {bare_steps: 0.5, site: step}
  rescaled-inputs: {rescaled: 300.0, site: padding}
  same-randomness: {site: seeded}
  sorted-data: {only_classes: 4, site: rows}
  tight-clipping: {clipped_to: 1.0e-5, site: clipped}
  training-mode: {site: training-mode}
  uneven-rows: {ragged: 0.6, site: padding}
  unscaled-inputs: {large_inputs: true, site: padding}
  unshifted-targets: {site: unshifted}
  unreached-weights: {unreached: 0.4, unreached_names: [encoder.weight], site: optimizer}
  unregistered-weights: {unregistered: [layers], wasted_gradients: 0.7}
  growing-memory: {kept_graphs: 1.0, kept_by: total, growth_bytes: 1048576}
  growing-work: {site: growing}
  length: {epochs: 400.0}
  out-of-memory: {failure: {kind: out-of-memory, message: It fails.}}
  padded-targets: {padded_targets: [0, 0.4], site: padded-loss}
  padding: {padding: 0.6, site: padding}
  recompiles: {compile_s: 0.05, recompiles: 0.5, recompile_reason: size mismatch}
  slow-code: {site: own}
  slow-data: {data_wait_s: 0.03, counterfactual_s: {synthetic-data: 0.07}, site: data}
  slow-logging: {logging_s: 0.02, site: logging}
  slow-optimizer: {optimizer_s: 0.03, optimizer_way: own, optimizer: A, tensors: 9, site: optimizer}
  slow-save: {checkpoint_s: 0.03}
  slow-settings: {counterfactual_s: {speedups=none: 0.08, speedups=-tf32: 0.07}}
  tiny-kernels: {tiny_ops: 3000.0, tiny_op_s: 0.06, site: op}
  too-little-memory: {estimated_gib: 57.0}
  unfused-attention: {kernels: [{kind: attention, seconds: 0.02}], site: softmax}
  undone-updates: {undone: 0.99, site: optimizer}
  unlearned-weights: {wasted_gradients: 0.2, never_updated: [a, b, c, d]}
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
  precision: {settings: {train.precision: fp32}, speedups: [prefetch]}
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
    tables = re.findall(r"^\| (`.*) \|.*", page.partition("## For programs")[2], re.MULTILINE)
    fields = re.findall(r"`(\w+)`", " ".join(row.partition("|")[0] for row in tables))
    assert sorted(fields) == sorted([*Diagnosis.model_fields, *Finding.model_fields])


def test_every_rule_is_silent_without_evidence_and_names_others_that_exist():
    known = {one.name for one in rules()}
    assert len(known) == len(rules()) > 40
    for one in rules():
        assert one.look(Evidence(source="preflight")) is None, one.name
        assert {*one.unless.split()} <= known, one.name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_found_on_a_healthy_run(healthy, device):
    found = diagnosis_of(healthy(device))
    assert (found.findings, found.verdict) == ((), "Nothing holds this run back.")


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_cause_is_the_only_finding_and_a_script_needs_no_recipe(healthy, name):
    device, changes = PLANTED[name]
    evidence = healthy(device, **changes)
    found = diagnosis_of(evidence)
    (finding,) = found.findings
    assert (finding.name, found.verdict) == (name, finding.verdict)
    assert finding.site == (TIMED_SITE if "site" in changes else None)
    (fix,) = finding.fixes
    for text in (finding.verdict, fix.text):
        assert text.endswith(".")
        assert not any(word in text for word in ("None", "{", "}"))
    settings = dict(fix.overrides)
    if "speedups" in settings:
        settings["speedups"] = edited(evidence.config.speedups, settings["speedups"])
    changed = evidence.config.with_values(settings)
    assert not fix.overrides or changed != evidence.config, fix.text
    other = {"config": None, "speedups": None, "source": "watched loop"}
    elsewhere = [rule.look(evidence.model_copy(update=other)) for rule in rules()]
    assert not any(fix.overrides for one in elsewhere if one for fix in one.fixes)


GROWING = {"growth_bytes": 2.0**20}
LONGER = {"size": {"first": 64.0, "last": 128.0, "per_1000": 640.0}}
SLOW_DATA = {"data_wait_s": 0.04, "counterfactual_s": {}, "config": None}
ASLEEP = SLOW_DATA | {"cores": 2, "threads": 2, "workers": 0, "reads_ran": 0.1}
SMALL = {"batch.rows_per_device": 1, "batch.accumulate": 8}
STORM = {"gc_s": 0.02, "collections": 2.0}


@pytest.mark.parametrize(
    ("device", "facts", "says", "fix"),
    [
        # says: name, harm (the first letter) and a part of the verdict; fix: a part of its text
        ("cpu", {"estimated_gib": 80.0, "rows_that_fit": 3}, "too-little f 80.0 GiB", "device=2 "),
        ("cpu", {"failure": failed("killed"), "rows_that_fit": 3}, "out-of f It fails.", "=2 "),
        ("cpu", {"estimated_gib": 80.0, "settings": SMALL}, "too-little f", "checkpointing"),
        ("cuda", {"reserved_gib": 70.0, "peak_gib": 69.0}, "full s 109% of", "device=2 "),
        (
            "cuda",
            {"reserved_gib": 61.0, "peak_gib": 60.0, "settings": SMALL},
            "full w",
            "checkpointing",
        ),
        ("cpu", {"machine": "GPU", "sees_gpu": True}, "cpu-by s", "Set train.device=auto."),
        ("cpu", {"machine": "GPU", "sees_gpu": True, "config": None}, "cpu-by s", '.to("cuda")'),
        ("cpu", {"machine": "GPU", "torch_cuda": "13.0"}, "cpu-by s", "CUDA_VISIBLE_DEVICES"),
        ("cuda", {"data_wait_s": 0.03}, "", ""),  # the GPU hides it
        (
            "cuda",
            {"data_wait_s": 0.03, "counterfactual_s": {}},
            "slow-data s 30%",
            "Copy the dataset",
        ),
        ("cpu", {"data_wait_s": 0.03, "speedups": ()}, "slow-data s", "the speedup pretokenised."),
        (
            "cpu",
            {"data_wait_s": 0.03, "disk_stalled_s": 0.025, "read_bytes_per_step": 1e6},
            "slow-data s 30% of each step waits for a disk.",
            "Copy the data to a local disk",
        ),
        ("cpu", SLOW_DATA, "slow-data s", "num_workers=1,"),
        ("cpu", SLOW_DATA | {"workers": 2}, "slow-data s", "num_workers=3,"),
        ("cpu", SLOW_DATA | {"workers": 2, "cores": 2, "threads": 2}, "slow-data s", "__getitem__"),
        ("cpu", ASLEEP | {"data_wait_s": 0.07}, "slow-data s 70%", "num_workers=3,"),
        ("cpu", ASLEEP | {"workers": 2, "worker_cores": 0.2}, "slow-data s", "num_workers=3,"),
        ("cpu", ASLEEP | {"workers": 2, "worker_cores": 1.9}, "slow-data s", "__getitem__"),
        (
            "cpu",
            {"config": None, "workers": 8, "cores": 2, "threads": 2, "worker_cores": 0.5},
            "",
            "",
        ),
        ("cpu", SLOW_DATA | {"dataset": "memory"}, "slow-data s", "rows[indices], with num_w"),
        ("cpu", SLOW_DATA | {"dataset": "iterable"}, "slow-data s", "get_worker_info"),
        ("cpu", SLOW_DATA | {"shared_gib": 1 / 16}, "slow-data s", "--shm-size"),
        (
            "cuda",
            SLOW_DATA | {"data_wait_s": 0.097, "cores": 64},
            "slow-data s 97%",
            "num_workers=20, persistent_workers=True, prefetch_factor=4, pin_memory=True",
        ),
        ("cpu", {"source": "script", "syncs": 31.0}, "", ""),
        ("cpu", {"source": "watched loop", "syncs": 31.0}, "host-sync w (31)", "on the device"),
        ("cpu", {"threads": 4}, "cpu-threads s number of threads, and there are 8 cores", "=8"),
        ("cpu", {"threads": 16}, "cpu-threads s uses 16 as", "=8"),
        ("cpu", {"threads": 4, "other_busy_cores": 4.0}, "", ""),
        ("cpu", {"threads": 4, "worker_cores": 3.8, "workers": 4}, "", ""),
        ("cpu", {"threads": 4, "compute_s": 0.007, "memory_bound_s": 0.0}, "", ""),
        ("cpu", {"threads": 4, "world_size": 2}, "", ""),
        ("cuda", {"environment": {"CUDA_LAUNCH_BLOCKING": "0"}}, "", ""),
        ("cuda", {"environment": {"TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONDEVMODE": ""}}, "", ""),
        ("cpu", {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "", ""),
        ("cuda", {"slowed_by": ("its power cap",), "clock_share": 0.93}, "", ""),
        ("cuda", {"slowed_by": ("its power cap",), "clock_share": 0.7}, "throttling s 70%", ""),
        ("cuda", {"power_limit_share": 0.6}, "throttling w lowered to 60%", "nvidia-smi -pl"),
        ("cpu", {"checkpoint_s": 0.03, "speedups": ()}, "slow-save s", "Save less often"),
        ("cuda", {"checkpoint_s": 0.03}, "slow-save s 30%", "the speedup async-checkpoints."),
        ("cuda", {"checkpoint_s": 0.03, "config": None}, "slow-save s", "background thread"),
        ("cpu", {"evaluation_s": 0.09, "planned_steps": 60}, "frequent s 90%", "on less data"),
        (
            "cpu",
            {"evaluation_s": 0.09, "evaluates_with_gradients": True},
            "frequent s",
            "inference_mode",
        ),
        ("cpu", STORM | {"config": None}, "garbage s 20% of each step", "gc.freeze()"),
        ("cpu", GROWING | {"grown": "self.cache"}, "memory-leak w", "Look at self.cache,"),
        ("cpu", GROWING | {"grown": "maps", "grown_by": "tensors"}, "memory-leak sp", "at maps,"),
        ("cpu", GROWING | {"grown": "a", "kept_by": "a"}, "growing-memory sp kept by a", ""),
        ("cpu", {"grown": "rewards", "kept_by": "rewards"}, "", ""),  # which are cleared
        ("cpu", {"grown": "steps", "kept_by": "logs"}, "", ""),
        ("cpu", GROWING | {"uneven": True, "grown": "losses"}, "", ""),
        ("cpu", {"grows": LONGER, "site": "growing"}, "", ""),  # a curriculum
        ("cpu", {"grows": LONGER, "site": "growing", "grown": "kept"}, "growing-work s", ""),
        ("cpu", GROWING | {"uneven": True, "grown_by": "tensors"}, "memory-leak sp", "Look for"),
        (
            "cpu",
            {
                "grows": {"seconds": {"first": 0.05, "last": 0.09, "per_1000": 0.1}},
                "other_busy_cores": 3.0,
            },
            "busy-machine s",
            "",
        ),
        ("cpu", {"same_rows": 8, "dataset_rows": 8}, "", ""),
        ("cpu", {"unreached": 0.4}, "unreached sp 40% of the weights of the optimizer have", ""),
        ("cpu", {"unreached": 0.01}, "", ""),  # the pooler of a pretrained model
        ("cpu", {"full_rows": 0.01, "largest_share": 0.9, "optimizer_s": 0.005}, "", ""),
        ("cpu", {"workers": 2, "shared_gib": 8.0, "course": ((0, 0.1, 5e6),)}, "", ""),
        ("cpu", GROWING | {"optimizer": "LBFGS"}, "", ""),  # its history
        (
            "cpu",
            {"failure": failed("hang", site=SITE)},
            "failure f It fails.",
            "Look at the output",
        ),
        ("cpu", {"failure": failed("no-data", fix="Make {one}.")}, "failure f It", "Make {one}."),
        ("cuda", {"host_s": 0.05, "speedups": ("tf32",)}, "idle-gpu s 50%", "speedup compile."),
        ("cuda", {"host_s": 0.05, "speedups": (), "remaining_s": 30.0}, "idle-gpu s", "device=8 "),
        ("cuda", {"settings": {"train.precision": "fp32"}}, "", ""),  # tf32 is on
        ("cpu", {"wasted_gradients": 0.2, "never_updated": ("a",)}, "unlearned s updates a,", ""),
        ("cpu", {"skipped_steps": 20}, "unstable s float16 overflowed, and 20 of 100", "optim.lr="),
        (
            "cpu",
            {"skipped_steps": 20, "settings": {"train.precision": "fp16"}},
            "unstable s float16 overflowed, and 20 of 100",
            "Train with train.precision=bf16.",
        ),
        ("cpu", {"losses": ((1, math.nan),)}, "unstable f from step 1.", "no update had been made"),
        ("cpu", {"losses": ((1, 4.0), (2, math.nan))}, "unstable f from step 2.", "optim.lr="),
        (
            "cpu",
            {"losses": ((9, math.nan),), "site": "not-finite"},
            "unstable f from step 9: the first value that is not finite comes from mine.py:7",
            "logsumexp",
        ),
        (
            "cpu",
            {"losses": ((9, math.nan),), "site": "not-finite", "bad_data": True},
            "unstable f from step 9: the data that mine.py:7",
            "torch.isfinite(batch)",
        ),
        ("cpu", {"logging_s": 0.02, "settings": {"log.every": 10}}, "slow-logging s", "(log.to)"),
        ("cpu", {"logging_s": 0.02, "config": None}, "slow-logging s 20%", "every few steps"),
    ],
)
def test_what_is_found_and_how_it_is_mended(healthy, device, facts, says, fix):
    found = diagnosis_of(healthy(device, **facts)).findings
    if not says:
        assert found == ()
        return
    name, harm, *verdict = says.split(" ", 2)
    (finding,) = found
    assert finding.name.startswith(name)
    assert finding.harm.startswith(harm)
    assert " ".join(verdict) in finding.verdict
    assert fix in finding.fixes[0].text


@pytest.mark.parametrize(
    ("line", "fix"),
    [("state, reward = env.step(action)", "environments"), ("envelope.step(2)", "Take it out")],
)
def test_a_line_that_does_not_train_gets_the_advice_of_its_kind(healthy, line, fix):
    site = TIMED_SITE.model_copy(update={"text": line})
    (finding,) = diagnosis_of(healthy(sites={"own": (site,)})).findings
    assert fix in finding.fixes[0].text


STEPS, VALUES = zip(*LOSSES, strict=True)


@pytest.mark.parametrize(
    ("values", "facts", "verdict"),
    [
        (VALUES, {}, None),
        ([*VALUES[:60], VALUES[60] + 3.0, *VALUES[61:]], {}, None),  # it passes with its batch
        ([*VALUES[:60], *(value + 3.0 for value in VALUES[60:])], {}, "The loss rises from"),
        ([v + 0.3 * max(n - 50, 0) for n, v in enumerate(VALUES)], {}, "The loss rises from"),
        ([one - 2.0 for one in VALUES], {}, None),  # a difference, as of rewards
        ([v + 0.3 * max(n - 50, 0) for n, v in enumerate(VALUES)], {"grows": LONGER}, None),
        ([*VALUES[:-1], math.nan], {}, "The loss is not a number from step 990."),
        (VALUES, {"skipped_steps": 50}, "float16 overflowed"),
    ],
)
def test_losses_are_judged_by_their_course(healthy, values, facts, verdict):
    series = tuple(zip(STEPS, values, strict=False))
    found = diagnosis_of(healthy(losses=series, **facts)).findings
    told = [one.verdict for one in found]
    assert told == [] if verdict is None else len(told) == 1 and told[0].startswith(verdict)


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_facts_that_are_missing_are_no_error(healthy, name):
    device, changes = PLANTED[name]
    full = healthy(device, **changes)
    for field, default in Evidence.model_fields.items():
        if field not in ("source", "step_s"):
            diagnosis_of(full.model_copy(update={field: default.default}))


def test_gradients_that_are_not_clipped_come_before_the_loss_that_they_ruin(healthy):
    facts = {"sites": dict.fromkeys(("unclipped", "not-finite"), (SITE,))}
    found = diagnosis_of(healthy(**facts, losses=((1, 4.0), (9, math.nan)))).findings
    assert [one.name for one in found] == ["unclipped-gradients", "unstable-training"]


def test_a_cause_without_a_time_or_a_line_comes_before_those_that_were_measured_beside_it(healthy):
    facts = {"data_wait_s": 0.05, "tracer": "cProfile", "source": "script", "config": None}
    found = diagnosis_of(healthy(site="data", **facts)).findings
    assert [one.name for one in found] == ["tracing", "slow-data"]
