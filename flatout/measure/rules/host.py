"""The host: cores, environment, what the loop does besides steps, settings slow on a CPU."""

from __future__ import annotations

import math

from flatout.config.schema import RunConfig, parse_overrides
from flatout.measure.diagnose.diagnosis import Finding, Fix, fix, ms, rule, speedup_fixes
from flatout.measure.steps.evidence import Evidence
from flatout.progress import counted

MIN_BUSY_CORES = 0.5
"""Cores that other processes must keep busy."""
MIN_BUSY_SHARE = 0.1
"""Share of a recorded run in which they must."""
CLEAR_GAIN = 0.1
"""Share of the step that more threads, other settings or no callbacks must save."""
SLOW_GC = 0.03
"""Share of the step from which collecting garbage is a finding."""
SLOW_LOGGING = 0.05
"""Share of the step from which logging is a finding."""
SLOW_SAVES = 0.05
"""Share of the run from which saves are a finding."""
SLOW_EVALUATION, ENOUGH_EVALUATION = 0.2, 0.05
"""Share of the run from which evaluations are a finding, and what the fix leaves to them."""
OFF = frozenset({"", "0", "false", "off", "no"})
HARMFUL_ON_A_GPU = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every single kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is requested from the driver",
}
"""Variables that slow a GPU down, and how."""
HARMFUL = {
    "PYTHONTRACEMALLOC": "Python records every allocation",
    "PYTHONDEVMODE": "Python checks everything that it does",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
}
"""Variables that slow down any device, and how."""
OUTDATED = {
    "PYTORCH_CUDA_ALLOC_CONF": "Write PYTORCH_ALLOC_CONF.",
    "TORCH_CUDNN_V8_API_ENABLED": "Remove it.",
}
"""Outdated names, and what to do."""


@rule()
def busy_machine(evidence: Evidence) -> Finding | None:
    """Other processes use the cores on which the run computes."""
    host = evidence.host
    others, cores, threads = host.other_busy_cores, host.cores, host.threads or 1
    if evidence.device != "cpu" or others is None or cores is None or others < MIN_BUSY_CORES:
        return None
    if others + threads <= cores or (host.busy_share or 1.0) < MIN_BUSY_SHARE:
        return None
    text = "Stop them, or wait."
    if threads > 1:
        text = "Stop them, or set OMP_NUM_THREADS=1: threads that wait for each other are slower."
    when = "" if host.busy_share is None else f" for {host.busy_share:.0%} of the run"
    left = max(cores - others, 0.0)
    return Finding(
        verdict=f"Other processes keep {others:.1f} of {cores} cores busy{when}, which leaves "
        f"{left:.1f} for {counted(threads, 'thread')}. Rates measured then are too low.",
        figures={
            "other_busy_cores": others,
            "cores": cores,
            "threads": threads,
            "busy_share": host.busy_share,
        },
        share=(1 - left / threads) * (host.busy_share or 1.0),
        fixes=[fix(text)],
    )


@rule()
def cpu_threads(evidence: Evidence) -> Finding | None:
    """Operations on the CPU use fewer threads than there are cores, or more."""
    host = evidence.host
    threads, cores, more_s = host.threads, host.cores, evidence.counterfactual_s.get("all-threads")
    if evidence.device != "cpu" or threads is None or cores is None or threads == cores:
        return None
    if evidence.world_size > 1:  # several processes share the cores
        return None
    if threads < cores and (host.other_busy_cores or 0.0) > cores - threads - 0.5:
        return None  # the other cores are busy
    share = None
    if threads > cores:
        verdict = f"torch uses {threads} threads on {cores} cores."
    elif more_s is not None:
        work = evidence.phases
        work_s = sum(filter(None, (work.compute_s, work.memory_bound_s, work.optimizer_s)))
        saved = min(evidence.saved("all-threads", CLEAR_GAIN) or 0.0, 1 - threads / cores)
        share = min(saved, evidence.share(work_s) or 0.0)
        if share < CLEAR_GAIN:
            return None
        verdict = f"torch uses {threads} of {cores} cores: with all of them, a step takes "
        verdict += f"{share:.0%} less."
    else:
        verdict = f"torch uses {threads} of {cores} cores."
    variables = {
        name: value
        for name, value in (host.environment or {}).items()
        if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    if variables:
        text = f"Unset {' and '.join(variables)}."
    elif evidence.config is not None:
        text = f"Set OMP_NUM_THREADS={cores}."
    else:
        text = f"Call torch.set_num_threads({cores})."
    return Finding(
        verdict=verdict,
        figures={
            "threads": threads,
            "cores": cores,
            "step_with_all_threads_ms": ms(more_s),
            **variables,
        },
        share=share,
        site=evidence.site("threads"),
        fixes=[fix(text, share, "the same steps with a thread per core")],
    )


@rule()
def environment(evidence: Evidence) -> Finding | None:
    """An environment variable slows training down or no longer has an effect."""
    stated = evidence.host.environment or {}
    known = HARMFUL | (HARMFUL_ON_A_GPU if evidence.on_gpu else {})
    harmful = {
        name: why
        for name, why in known.items()
        if name in stated and stated[name].lower() not in OFF
    }
    if evidence.on_gpu and stated.get("NVIDIA_TF32_OVERRIDE") == "0":
        harmful["NVIDIA_TF32_OVERRIDE"] = "matmuls in fp32 cannot use TF32"
    if harmful:
        name, why = next(iter(harmful.items()))
        return Finding(
            verdict=f"{name}={stated[name]} is set: {why}.",
            figures={name: stated[name] for name in harmful},
            fixes=[fix(f"Unset {' '.join(harmful)}, which is meant for debugging.")],
        )
    old = next((name for name in OUTDATED if name in stated), None)
    if old is None or not evidence.on_gpu:
        return None
    return Finding(
        verdict=f"{old} is an outdated name.",
        harm="warns",
        figures={old: stated[old]},
        fixes=[fix(OUTDATED[old])],
    )


@rule(unless=("recompiles",))  # torch.compile collects garbage
def garbage_collection(evidence: Evidence) -> Finding | None:
    """Python's garbage collector takes a noticeable share of each step."""
    found, site = evidence.counts, evidence.site("gc")
    share = evidence.lost(evidence.phases.gc_s, SLOW_GC)
    if share is None:
        return None
    fixes, why = [], (share, "the time of the collector")
    if site is not None and "collect" in site.text:
        text = f"Remove the call at {site.describe()}, or make it every few hundred steps."
        fixes.append(fix(text, *why))
    fixes += speedup_fixes(evidence, "gc", "Collect at fixed steps only", *why)
    if evidence.config is None:
        text = "Call gc.freeze() and gc.disable() before the loop, and gc.collect() every few "
        fixes.append(fix(f"{text}hundred steps.", *why))
    often = f" in {found.collections:.2g} collections" if found.collections else ""
    return Finding(
        verdict=f"Python's garbage collector takes {share:.0%} of each step{often}.",
        figures={
            "gc_ms": ms(evidence.phases.gc_s),
            "collections_per_step": found.collections,
            "full_collections_per_step": found.full_collections,
        },
        share=share,
        site=site,
        fixes=fixes,
    )


@rule()
def slow_logging(evidence: Evidence) -> Finding | None:
    """Logging and callbacks take a noticeable share of each step."""
    share, site = evidence.lost(evidence.phases.logging_s, SLOW_LOGGING), evidence.site("logging")
    if share is None:
        return None
    fixes, why = [], (share, "the time of logging")
    if site is not None:
        fixes.append(fix(f"Do less at {site.describe()}, or do it every few steps.", *why))
    fixes += speedup_fixes(evidence, "readback", "Read values one step late", *why)
    every = evidence.setting("log.every")
    if every is not None and every < 10:
        text, gain = "Write fewer records: log.every=10.", share * (1 - every / 10)
        fixes.append(fix(text, gain, "fewer records", overrides={"log.every": 10}))
    return Finding(
        verdict=f"Logging and callbacks take {share:.0%} of each step.",
        figures={"logging_ms": ms(evidence.phases.logging_s)},
        share=share,
        site=site,
        fixes=fixes or [fix("Log less often.", *why)],
    )


@rule()
def slow_settings(evidence: Evidence) -> Finding | None:
    """Different settings of the recipe make its steps shorter on this CPU."""
    found = evidence.counterfactual_s
    saved = {name: evidence.saved(name, CLEAR_GAIN) or 0.0 for name in found if "=" in name}
    best = max(saved, key=saved.__getitem__, default="")
    if evidence.config is None or not saved.get(best):
        return None
    return Finding(
        verdict=f"With {best}, a step takes {saved[best]:.0%} less.",
        figures={"step_ms": ms(evidence.step_s), "step_with_it_ms": ms(found[best])},
        share=saved[best],
        fixes=[
            fix(
                f"Set {name}.",
                gain,
                "both in turns",
                overrides=parse_overrides(name.split(), RunConfig),
            )
            for name, gain in saved.items()
            if gain
        ],
    )


@rule()
def slow_save(evidence: Evidence) -> Finding | None:
    """Saves block the loop for a noticeable share of the run."""
    share, config = evidence.lost(evidence.phases.checkpoint_s, SLOW_SAVES), evidence.config
    if share is None:
        return None
    fixes: list[Fix] = []
    if config is None:
        background = ", or copy the state and write it in a background thread"
        text = f"Save less often{background if evidence.on_gpu else ''}."
        fixes.append(fix(text, share, "the time of the saves"))
    else:
        if evidence.on_gpu:  # on a CPU, the writing thread takes the cores that train
            text, why = "Write checkpoints in the background", "the time of the saves, without the"
            why += " copy that remains"
            fixes += speedup_fixes(evidence, "state_saver", text, 0.8 * share, why)
        factor = max(round(share / 0.01), 2)
        for key in ("every_steps", "every_minutes", "every_epochs"):
            every = getattr(config.checkpoint, key)
            if every is not None:
                fixes.append(
                    fix(
                        f"Save less often: checkpoint.{key}={every * factor:g}.",
                        share * (1 - 1 / factor),
                        f"1 save instead of {factor}",
                        overrides={f"checkpoint.{key}": every * factor},
                    )
                )
        fixes.append(fix("Set checkpoint.dir to a faster disk."))
    return Finding(
        verdict=f"Saving checkpoints takes {share:.0%} of the run.",
        figures={
            "save_ms_per_step": ms(evidence.phases.checkpoint_s),
            "step_ms": ms(evidence.step_s),
        },
        share=share,
        site=evidence.site("save"),
        fixes=fixes,
    )


@rule()
def frequent_evaluation(evidence: Evidence) -> Finding | None:
    """Evaluations take a noticeable share of the run."""
    share = evidence.lost(evidence.phases.evaluation_s, SLOW_EVALUATION)
    every, steps = evidence.setting("train.eval_every"), evidence.planned_steps
    val_tokens = evidence.data.val_tokens
    if share is None:
        return None
    fixes = []
    if every:
        left = ENOUGH_EVALUATION
        factor = math.ceil(share * (1 - left) / (left * max(1 - share, 1e-6)))
        rarer = every * factor if steps is None else min(every * factor, steps)
        if rarer > every:
            fixes.append(
                fix(
                    f"Evaluate less often: train.eval_every={rarer}.",
                    share * (1 - every / rarer),
                    f"1 evaluation instead of {round(rarer / every)}",
                    overrides={"train.eval_every": rarer},
                )
            )
        tokens = (val_tokens or 0) // factor
        if evidence.setting("train.eval_tokens") == "all" and tokens:
            fixes.append(
                fix(
                    f"{'Or score' if fixes else 'Score'} a part of the validation text: "
                    f"train.eval_tokens={tokens}.",
                    share * (1 - 1 / factor),
                    f"1/{factor} of the text",
                    overrides={"train.eval_tokens": tokens},
                )
            )
    elif evidence.loop.evaluates_with_gradients:
        fixes.append(fix("Evaluate in torch.no_grad(): its passes build graphs for nothing."))
        fixes.append(fix("Then evaluate less often, or on less data."))
    else:
        fixes.append(fix("Evaluate less often, or on less data.", share))
    return Finding(
        verdict=f"Evaluations take {share:.0%} of the run.",
        figures={
            "evaluation_ms_per_step": ms(evidence.phases.evaluation_s),
            "train.eval_every": every,
            "val_tokens": val_tokens,
        },
        share=share,
        site=evidence.site("evaluation"),
        fixes=fixes,
    )
