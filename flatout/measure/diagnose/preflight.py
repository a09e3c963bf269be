"""What `diagnose` knows before the first step: the resolved run, its memory, data and machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.memory import Workload, estimate, memory_bytes, most_rows
from flatout.assembly.prediction import GIB
from flatout.assembly.preflight import open_dataset
from flatout.assembly.resolve import epoch_tokens, known_peak, resolve, workload_of
from flatout.config.schema import RunConfig, validate
from flatout.data.store.mix import MixedDataset, members_of
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, HardwareError, MissingPackage
from flatout.hardware import ASSUMED_MFU, Machine, pick_device, probe
from flatout.measure.diagnose.failure import failure_of
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.steps.evidence import DataFacts, Evidence, Failure, MemoryFacts, Roof
from flatout.measure.steps.machine import gpu_facts, host_facts
from flatout.models.language_model import model_of
from flatout.optimizers.schedule import warmup_steps
from flatout.training.checkpoint.retention import DISK_BYTES_PER_PARAMETER, most_at_once

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
"""Parts of an estimate; not all of them exist at once."""


@dataclass(frozen=True)
class Prepared:
    """What is known before the first step."""

    evidence: Evidence
    resolved: Resolved | None = None
    """The run; None when it cannot start."""
    warmup_steps: int = 0
    """Steps of the learning rate's warm-up in a run of the requested length."""


def prepare(spec: MeasureSpec) -> Prepared:
    """Resolve the configuration here, and return what is known; a run that cannot start is known.

    Raises: ConfigError when the configuration contradicts itself.
    """
    asked, machine = validate(spec.config), probe()
    known = Evidence(
        source="preflight",
        config=asked,
        machine=machine,
        host=host_facts(Path(spec.folder)),
        device=asked.train.device,
    )
    cache = None if spec.cache is None else Path(spec.cache)
    chosen = False
    try:
        device, reason = pick_device(asked.train.device, machine)
        host = known.host.model_copy(update={"no_gpu_because": reason if device == "cpu" else None})
        known = known.model_copy(
            update={"device": device, "host": host, "gpu": gpu_facts(machine, device)}
        )
        chosen = True
        dataset = open_dataset(asked)
        config, decisions = resolve(
            asked.with_values({"train.device": device}),
            machine=machine,
            dataset=dataset,
            world_size=1,
            cache=cache,
        )
    except DataError as error:
        missing = DataFacts(missing=error.what, missing_fix=error.fix)
        return Prepared(known.model_copy(update={"data": missing}))
    except MissingPackage as error:
        return Prepared(known.model_copy(update={"failure": failure_of(error, 0)}))
    except HardwareError as error:
        # once the device is known, only the memory can be refused
        kind = "out-of-memory" if chosen else "error"
        failure = Failure(kind=kind, message=error.what, fix=error.fix, step=0)
        return Prepared(known.model_copy(update={"failure": failure}))
    resolved = Resolved(config, decisions, machine, dataset)
    return Prepared(
        _known(known, resolved),
        resolved,
        warmup_steps(config.schedule, config.train.steps or 1),
    )


def _known(known: Evidence, resolved: Resolved) -> Evidence:
    """Return the evidence with what the resolved run adds."""
    config, dataset, machine = resolved.config, resolved.dataset, resolved.machine
    workload = workload_of(config)
    model_class, model_config = model_of(config)
    parameters = model_class.num_parameters(model_config)
    tokens_per_step = config.batch.tokens_per_step or 0
    steps = config.train.steps or 0
    per_epoch = max(epoch_tokens(dataset, config.data.seq_len), 1) / max(tokens_per_step, 1)
    most = most_at_once(config.checkpoint, steps, per_epoch)
    needed = DISK_BYTES_PER_PARAMETER * parameters * most
    return known.model_copy(
        update={
            "config": config,
            "speedups": tuple(resolved.speedups),
            "host": known.host.model_copy(update={"disk_needed_gib": needed / GIB}),
            "memory": memory_facts(workload, config, machine),
            "data": data_facts(dataset),
            "parameters": parameters,
            "tokens_per_step": tokens_per_step,
            "planned_steps": steps,
            "epochs": steps / per_epoch,
            "roof": _expected(config, machine),
        }
    )


def memory_facts(workload: Workload, config: RunConfig, machine: Machine) -> MemoryFacts:
    """Return the estimate of the run's memory, and what the device has."""
    device, rows = config.train.device, int(config.batch.rows_per_device)
    available = memory_bytes(machine, device, 1)
    need = estimate(workload, rows, config.batch.accumulate or 1)
    total = machine.gpus[0].memory_gib if device.startswith("cuda") else machine.memory_gib
    return MemoryFacts(
        total_gib=total,
        free_gib=available / GIB,
        estimated_gib=need.total / GIB,
        estimated_parts_gib={name: getattr(need, name) / GIB for name in PARTS},
        rows_that_fit=most_rows(workload, available),
    )


def data_facts(dataset: Dataset | MixedDataset) -> DataFacts:
    """Return the sizes of the dataset."""
    members = [member.dataset for member in members_of(dataset)]
    return DataFacts(
        train_tokens=sum(member.split("train").num_tokens for member in members),
        val_tokens=sum(member.split("val").num_tokens for member in members),
        vocab_size=dataset.vocab_size,
        documents=sum(member.manifest.splits["train"].documents for member in members),
    )


def _expected(config: RunConfig, machine: Machine) -> Roof:
    """Return the throughput that the device should reach."""
    device = config.train.device
    arithmetic = "bf16" if config.train.precision in ("bf16", "fp16") else "fp32"
    peak = known_peak(machine, device, arithmetic)
    if peak is None:
        return Roof()
    if not device.startswith("cuda"):  # how much of it a CPU reaches depends on the model's size
        return Roof(peak_tflops=peak.tflops, peak_source=peak.source)
    model_class, model_config = model_of(config)
    flops = float(model_class.count_flops(model_config, config.data.seq_len).causal_exact)
    return Roof(
        peak_tflops=peak.tflops,
        peak_source=peak.source,
        expected_tokens_per_s=peak.tflops * 1e12 * ASSUMED_MFU / flops,
        expected_from=f"{ASSUMED_MFU:.0%} of the peak, {peak.source}",
    )
