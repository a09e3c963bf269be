"""Trace every set of throughput.py as on an H200, on a machine without a GPU.

    # every flatout entry, about 20 s each
    python benchmarks/fake_gpu.py
    python benchmarks/fake_gpu.py --only gpt2-124m/set

Finds graph breaks, wrong branches and rejected shapes. It needs a CUDA build of torch, but no GPU.
Tensors have shapes, dtypes and a CUDA device, but no storage (torch's FakeTensorMode), and
fake_gpu_driver.c answers torch's calls to the driver. The model is compiled with `fullgraph`, so a
graph break is an error, up to the graphs that Inductor would receive; backward and the optimizer
step are traced too. Shapes are the real ones, with two layers. For each entry it prints the graphs
and their attention, loss, scan and low-precision operations.

It does not cover Inductor itself, nor the results or speed of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from throughput import Session, is_selected
from throughput import parser as throughput_parser
from throughput_entries import ENTRIES, WORKS, Entry, shape

from flatout.config.schema import RunConfig
from flatout.hardware import Gpu, probe

HERE = Path(__file__).parent
H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))
SMALLER = {"model.num_layers": 2}
MAX_ROWS = 4
LIMIT_S = 600
READ_BACK = ("liger-ce",)
"""Speedups that break the graph by design.

Liger's loss reads the number of targets back from the device, and fake tensors have no values.
"""
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Unsupported)\b: ")
"""Matches the name of a Python error; torch's compiler adds lines of advice after it."""
SHOWN_OPERATIONS = ("attention", "flatout", "_scaled_mm", "torchao")
"""Operations to print: those chosen by a branch on the device."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="*", help="works or work/entry, with * and ?, separated by commas"
    )
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        print(json.dumps(traced(arguments.trace)))
        return
    reason = why_not()
    if reason:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="flatout-fake-gpu-") as scratch:
        environment = with_driver(build_driver(Path(scratch)))
        failed = 0
        for entry in ENTRIES:
            if entry.kind == "flatout" and is_selected(entry, arguments.only):
                found = trace_apart(entry, environment)
                failed += found["status"] == "failed"
                print(line(entry, found), flush=True)
    raise SystemExit(failed and f"{failed} entries cannot be traced.")


def why_not() -> str | None:
    """Return why this machine cannot trace, or None."""
    import torch

    if torch.version.cuda is None:
        return "This trace needs a CUDA build of torch; the installed build is for CPUs."
    if torch.cuda.is_available():
        return (
            "This machine has a GPU: run the benchmark itself, python benchmarks/throughput.py"
            " --only ..."
        )
    return None


def build_driver(folder: Path) -> Path:
    """Compile fake_gpu_driver.c against torch's CUDA headers; return the library."""
    includes = [
        path
        for name in ("nvidia", "triton")
        for path in package_folder(name).glob("**/include")
        if (path / "driver_types.h").exists()
    ]
    crt = [
        path
        for path in package_folder("triton").glob("**/include")
        if (path / "crt" / "host_defines.h").exists()
    ]
    library = folder / "libcuda.so.1"
    flags = [f"-I{path}" for path in [*includes[:1], *crt]]
    subprocess.run(
        ["cc", "-shared", "-fPIC", *flags, "-o", library, HERE / "fake_gpu_driver.c"], check=True
    )
    return library


def package_folder(name: str) -> Path:
    """Return the folder of a package without importing it."""
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise SystemExit(f"The package {name} is missing; it comes with a CUDA build of torch.")
    return Path(folders[0])


def with_driver(library: Path) -> dict[str, str]:
    """Return an environment in which torch loads that library instead of CUDA's own."""
    paths = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": ":".join(paths)}


def trace_apart(entry: Entry, environment: dict[str, str]) -> dict[str, Any]:
    """Trace in a separate process, since unexpected driver calls end the process."""
    command = [sys.executable, __file__, "--trace", f"{entry.work}/{entry.name}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"It did not finish within {LIMIT_S} s."}
    if done.returncode:
        return {"status": "failed", "reason": reason_in(done.stderr)}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def reason_in(output: str) -> str:
    """Return why a process failed: its last error line, else its last non-empty line."""
    lines = [
        text for text in output.splitlines() if text.strip() and not text.startswith("frame #")
    ]
    errors = [text for text in lines if ERROR.match(text)]
    return (errors or lines or ["no output"])[-1]


def line(entry: Entry, found: dict[str, Any]) -> str:
    """Return the line printed for an entry."""
    name = f"{entry.work}/{entry.name}"
    if found["status"] != "ok":
        return f"{name}: {found['status']}: {found['reason']}"
    return f"{name}: {found['graphs']} graphs; " + ", ".join(
        f"{count} {op}" for op, count in found["operations"].items()
    )


def traced(name: str) -> dict[str, Any]:
    """Return the operations in an entry's graphs; the name is `work/entry`."""
    entry = next(entry for entry in ENTRIES if f"{entry.work}/{entry.name}" == name)
    work = next(work for work in WORKS if work.name == entry.work)
    if entry.plain or set(entry.adds) & set(READ_BACK):
        return {"status": "not traced", "reason": "it reads values back from the device, by design"}
    session = Session(throughput_parser().parse_args([]), H200, Path(), Path())
    config = session.available.config(entry, shape(work, tiny=False))
    if config is None:
        return {"status": "skipped", "reason": "it tests a package that is not installed"}
    rows = min(entry.rows[0] or MAX_ROWS, MAX_ROWS)
    graphs = trace(config.with_values(SMALLER), rows)
    operations = Counter(
        op for graph in graphs for op in graph if any(part in op for part in SHOWN_OPERATIONS)
    )
    return {"status": "ok", "graphs": len(graphs), "operations": dict(operations)}


def trace(config: RunConfig, rows: int) -> list[list[str]]:
    """Trace one training step; return the operations of each graph."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flatout.assembly.resolve import ops_of
    from flatout.assembly.selection import assemble, select
    from flatout.optimizers.groups import OptimizerParts
    from flatout.registry import MODELS, OPTIMIZERS

    recipe = assemble(select(config, H200, device="cuda", minutes=60.0))
    model_class, seq_len = MODELS.get(config.model.kind), config.data.seq_len
    model_config = model_class.check(
        config.model.own() | {"vocab_size": config.model.vocab_size}, seq_len=seq_len
    )
    mesh = SimpleNamespace(shard=1, replicate=1, world_size=1, device=torch.device("cuda"))
    with (
        recorded_compiler() as graphs,
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device("cuda"),
    ):
        core = model = model_class(model_config, ops_of(recipe))
        for transform in recipe.transforms():
            model = transform(model, mesh)
        parts = OptimizerParts(recipe.optimizer, recipe.ops.newton_schulz)
        optimizers = OPTIMIZERS.get(config.optim.kind)(core, config.optim, parts)
        tokens_BT, targets_BT = (torch.zeros(rows, seq_len, dtype=torch.int64) for _ in range(2))
        doc_ids_BT = (
            torch.zeros(rows, seq_len, dtype=torch.int32) if config.data.document_mask else None
        )
        with recipe.precision.context("cuda"):
            loss_sum, _ = model(tokens_BT, targets_BT, doc_ids_BT)
        loss_sum.backward()
        for optimizer in optimizers:
            optimizer.step()
    return graphs


@contextmanager
def recorded_compiler() -> Iterator[list[list[str]]]:
    """Make torch.compile trace whole graphs and record operations instead of generating code."""
    import torch
    import torch.cuda.amp.common
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def record(graph: Any, _inputs: Any) -> Any:
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        )
        return graph.forward

    compile_ = torch.compile

    def traced_compile(function: Any = None, **options: Any) -> Any:
        return compile_(
            function,
            backend=aot_autograd(fw_compiler=record, bw_compiler=record),
            fullgraph=True,
            dynamic=options.get("dynamic"),
        )

    torch.compile = traced_compile
    # Otherwise the first fake tensor would create a real one to start the driver. autocast must
    # still see a GPU.
    torch.cuda.is_available = lambda: False
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_: True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield graphs


if __name__ == "__main__":
    main()
