"""Compilations are counted; recompilations are logged with their step and the compiler's reason."""

import json
import sys
from functools import partial

import pytest
import torch

from flatout.ops import cross_entropy, scan
from flatout.training.evaluation import batch_shapes
from flatout.training.loop import Session, log_evaluation
from flatout.training.metrics.compile_events import CompilationWatch, counts, first_line
from flatout.training.metrics.log import Log
from flatout.training.run import run_training
from flatout.training.step import train_step
from flatout.training.warmup import warm_up

# torch's compiler instantiates its own deprecated functions
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def without_codegen(monkeypatch):
    """Trace without generating C++: these tests check only the traces."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def events(folder, kind):
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


@pytest.fixture
def compiled_run(build_run, tiny_config, tmp_path):
    """Return a function that builds and warms up a run and returns it with its log."""
    (tmp_path / "run").mkdir()
    logs = []

    def make(*speedups, **changes):
        run = build_run(tiny_config(speedups=["pretokenised", *speedups], **changes))
        logs.append(log := Log(run))
        warm_up(run, log, eval_shapes=batch_shapes(run))
        return run, log

    yield make
    for log in logs:
        log.close()


def step(run, log):
    batch = next(run.loader)
    result = train_step(run, batch)
    run.step += 1
    log.step(batch, result)


@pytest.mark.quick_cases("1")
@pytest.mark.parametrize("rows", [1, 4])
def test_training_and_evaluation_use_the_graphs_of_the_warm_up(
    tiny_config, tmp_path, ragged_set, rows
):
    changes = {
        "train__eval_every": 2,
        "train__steps": 4,
        "model__num_layers": 1,
        "batch__rows_per_device": rows,
    }
    config = tiny_config(
        data__path=str(ragged_set), speedups=["pretokenised", "compile"], **changes
    )
    summary = run_training(config, tmp_path / "run")
    (compiled,) = events(tmp_path / "run", "compiled")
    assert compiled["step"] == 0
    assert compiled["graphs"] == 2, "one for training, one for evaluation"
    assert compiled["graph_breaks"] == 0
    assert events(tmp_path / "run", "recompiled") == []
    assert summary["recompiles"] == 0
    assert summary["compile_s"] == pytest.approx(compiled["compile_s"], abs=1e-3)


def test_a_run_that_compiles_nothing_reports_no_compilation(tiny_config, tmp_path):
    summary = run_training(tiny_config(), tmp_path / "run")
    assert summary["compile_s"] is None
    assert summary["recompiles"] is None
    assert events(tmp_path / "run", "compiled") == []


def test_a_batch_of_a_new_shape_is_logged_at_its_step(compiled_run, tmp_path):
    run, log = compiled_run("compile")
    step(run, log)
    batch = next(run.loader)
    object.__setattr__(batch, "sequences_ABW", batch.sequences_ABW[:, :, :-4])
    result = train_step(run, batch)
    run.step += 1
    log.step(batch, result)
    (event,) = events(tmp_path / "run", "recompiled")
    assert event["step"] == 2
    assert event["graphs"] == log.recompiles == 1
    assert "size mismatch" in event["reasons"][0]
    assert log.compile_s > 0
    assert event["compile_s"] > 0
    step(run, log)
    assert len(events(tmp_path / "run", "recompiled")) == 1


def test_all_length_buckets_are_compiled_in_the_warm_up(compiled_run, tmp_path):
    run, log = compiled_run(
        "compile",
        "length-buckets",
        model__num_layers=1,
        data__seq_len=256,
        batch__tokens_per_step=1024,
        batch__rows_per_device=2,
    )
    assert len(run.loader.shapes) > 1
    for _ in range(6):
        step(run, log)
    assert len(events(tmp_path / "run", "compiled")) == 1
    assert events(tmp_path / "run", "recompiled") == []


SHAPES = {
    "gpt2": {"model__positions": "learned", "model__bias": True},
    "llama": {
        "model__norm": "rmsnorm",
        "model__activation": "swiglu",
        "model__qk_norm": True,
        "data__document_mask": True,
    },
    "eigenstate": {"model__kind": "eigenstate", "data__document_mask": True},
}
"""Models that together use all ops that `auto` selects on a GPU."""


@pytest.mark.quick_cases("llama-compile", "eigenstate-compile-blocks")
@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ("gpt2", "compile"),
        ("llama", "compile"),
        ("eigenstate", "compile"),
        ("eigenstate", "compile-blocks"),
    ],
)
def test_no_model_breaks_a_graph(compiled_run, tmp_path, monkeypatch, way, shape):
    # makes several chunks of 4 rows of 16 tokens
    monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", 257 * 20)
    run, log = compiled_run(
        *([] if "model__kind" in SHAPES[shape] else ["fused-attention"]),
        "chunked-ce",
        "bf16",
        way,
        model__num_layers=1,
        train__precision="auto",
        **SHAPES[shape],
    )
    (compiled,) = events(tmp_path / "run", "compiled")
    assert compiled["graph_breaks"] == 0, compiled["first_break"]
    step(run, log)
    assert events(tmp_path / "run", "recompiled") == []


@pytest.mark.quick_cases("transformer")
@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_identical_blocks_share_one_graph(compiled_run, tmp_path, kind):
    run, log = compiled_run("compile-blocks", model__kind=kind, model__num_layers=4)
    (compiled,) = events(tmp_path / "run", "compiled")
    assert compiled["graphs"] == 4, (
        "one for a block and one for the loss, in training and in evaluation"
    )
    step(run, log)
    log_evaluation(Session(run, log))
    assert events(tmp_path / "run", "recompiled") == []


def test_a_graph_break_is_counted_with_its_reason_and_line(compiled_run, tmp_path, monkeypatch):
    # the token-by-token recurrence is excluded from compilation
    monkeypatch.setattr(scan, "chunked", scan.reference)
    compiled_run("compile", model__kind="eigenstate")
    (compiled,) = events(tmp_path / "run", "compiled")
    assert compiled["graph_breaks"] > 0
    assert "eigenstate.py:" in compiled["first_break"]


def test_reaching_the_recompile_limit_is_reported():
    watch = CompilationWatch()
    double = torch.compile(lambda row: row * 2, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        double(torch.ones(2))
        double(torch.ones(3))
    assert watch.changed()
    found = watch.poll()
    assert found.graphs == 1
    assert "size mismatch" in found.reasons[0]
    assert found.reasons[0].endswith(
        "the compiler's limit is reached, so this code runs uncompiled"
    )
    assert not watch.changed()


def test_counting_does_not_import_the_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert not counts()
    assert not CompilationWatch().changed()


def test_reasons_are_shortened_to_one_line():
    assert first_line("  tensor 'x'   size mismatch # file\nand more") == "tensor 'x' size mismatch"
    assert len(first_line("a" * 1000)) == 300
