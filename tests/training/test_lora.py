"""Runs that train adapters: what changes, what is saved, resuming, merged weights, errors."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from warm import run_ranks

from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.export import export
from flatout.cli.commands.generate import generate
from flatout.config.schema import load_config
from flatout.errors import CheckpointError, ConfigError, Stopped
from flatout.inference.export.source import open_source
from flatout.inference.load import load_run
from flatout.models.lora import adapters_of, with_adapters
from flatout.storage import whole
from flatout.storage.files import folder_bytes
from flatout.training import init_from
from flatout.training.checkpoint import catalog, contents
from flatout.training.checkpoint.catalog import read_index
from flatout.training.checkpoint.merged import MergedWeights, read_merged
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

LORA = {"lora__rank": 2, "lora__alpha": 8.0}


@pytest.fixture(scope="module")
def source(tiny_set, tiny, tmp_path_factory):
    """Return a run of six steps."""
    folder = tmp_path_factory.mktemp("lora") / "source"
    run_training(load_config().with_values({**tiny, "data.path": str(tiny_set)}), folder)
    return folder


@pytest.fixture
def lora_config(tiny_config, source):
    """Return a function that makes the configuration of a LoRA run."""
    return lambda **changes: tiny_config(**{"train__init_from": str(source)} | LORA | changes)


def last(folder):
    return catalog.latest(folder)


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_has_the_adapters_alone(lora_config, source, tmp_path, events, messages):
    run_training(lora_config(checkpoint__keep=9), tmp_path / "run", progress=messages)
    checkpoint = last(tmp_path / "run")
    stored = MergedWeights(checkpoint).stored()
    assert stored
    assert all(".adapters." in name for name in stored)
    assert folder_bytes(checkpoint) < folder_bytes(last(source)) / 2
    base = read_index(checkpoint).base
    kept = tmp_path / "run" / "base" / base.digest[:16] / last(source).name
    assert base.path == str(kept)
    names = {path.name for path in last(source).iterdir()}
    optimizer = {name for name in names if name.startswith("optimizer-")}
    assert optimizer
    assert {path.name for path in kept.iterdir()} == names - optimizer
    assert all(path.samefile(last(source) / path.name) for path in kept.iterdir()), "no copies"
    assert base.scale == 4.0
    assert read_index(last(source)).base is None
    (event,) = events(tmp_path / "run", "lora")
    assert event["trained"] == sum(tensor.numel() for tensor in stored.values())
    assert any(line.startswith("LoRA: ") for line in messages.lines)


def test_training_starts_at_the_base_and_changes_adapters_alone(
    lora_config, source, tmp_path, losses
):
    run_training(lora_config(checkpoint__keep=9, train__eval_every=1), tmp_path / "run")
    first, final = (catalog.checkpoint_path(tmp_path / "run", step) for step in (0, 6))
    base = MergedWeights(last(source)).stored()
    assert equal(read_merged(first), base)
    merged = read_merged(final)
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    matrices = ("qkv.weight", "output.weight", "up.weight", "down.weight")
    assert changed == {name for name in merged if name.endswith(matrices)}
    assert losses(tmp_path / "run", "val/loss")[-1] < evaluate(source).val_loss


def test_a_base_is_hashed_once_when_its_run_is_loaded(lora_config, tmp_path, monkeypatch):
    run_training(lora_config(), tmp_path / "run")
    hashed, sha256 = [], whole.sha256
    monkeypatch.setattr(whole, "sha256", lambda path: hashed.append(path) or sha256(path))
    load_run(tmp_path / "run", device="cpu")
    of_base = [path for path in hashed if path.is_relative_to(tmp_path / "run" / "base")]
    assert any(path.suffix == ".safetensors" for path in of_base)
    assert len(of_base) == len({*of_base})


def test_a_resumed_run_is_the_same(lora_config, tmp_path, stop_at):
    config = lora_config(lora__dropout=0.1)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[stop_at(3)])
    assert run_training(config, tmp_path / "parts")["weights_sha256"] == whole["weights_sha256"]
    for name in ("whole", "parts"):
        base, same = (read_index(last(tmp_path / run)).base for run in (name, "whole"))
        assert base.model_copy(update={"path": same.path}) == same


def test_merged_weights_compute_the_same_loss_and_text(lora_config, tmp_path):
    summary = run_training(lora_config(), tmp_path / "run")
    found = evaluate(tmp_path / "run", checkpoint="last")
    assert found.val_loss == pytest.approx(summary["val_loss"], rel=1e-6)
    loaded = load_run(tmp_path / "run", "last", device="cpu")
    assert adapters_of(loaded.model) == {}
    config = lora_config()
    unmerged = with_adapters(type(loaded.model)(loaded.model.config, loaded.model.ops), config.lora)
    base = read_index(last(tmp_path / "run")).base
    weights = MergedWeights(last(tmp_path / "run")).stored() | read_merged(Path(base.path))
    unmerged.load_state_dict(weights)
    tokens_BT = torch.arange(12)[None] + 60
    with torch.no_grad():
        wanted, got = (model.eval().logits(tokens_BT) for model in (unmerged, loaded.model))
    assert (wanted - got).abs().max() < 1e-6 * wanted.abs().max()
    assert generate(tmp_path / "run", prompt="the ", max_tokens=4).samples


def test_an_export_has_the_merged_weights(lora_config, tmp_path):
    run_training(lora_config(), tmp_path / "run")
    source = open_source(tmp_path / "run", "last")
    merged = read_merged(last(tmp_path / "run"))
    assert source.weights.shapes.keys() == merged.keys()
    assert equal({name: source.weights.read(name) for name in source.weights.shapes}, merged)
    assert {source.dtype_of(name) for name in merged} == {torch.float32}


@pytest.mark.parametrize("speedup", ["compile", "checkpointing"])
def test_compiled_and_checkpointed_runs_have_the_same_losses(
    lora_config, tmp_path, losses, speedup, monkeypatch
):
    compiled = torch.compile
    traced = []

    def without_code(function, *, options=None, **how):
        traced.append(function)
        return compiled(function, backend="aot_eager", **how)

    monkeypatch.setattr(torch, "compile", without_code)
    for name, speedups in (("plain", "none"), ("fast", [speedup])):
        run_training(lora_config(speedups=speedups), tmp_path / name)
    plain, fast = (losses(tmp_path / name) for name in ("plain", "fast"))
    assert fast == pytest.approx(plain, rel=1e-4)
    assert bool(traced) is (speedup == "compile")


@pytest.mark.quick_cases("fully-shard")
@pytest.mark.parametrize("overrides", [(), ("parallel.shard=2",)], ids=["ddp", "fully-shard"])
def test_two_processes_have_the_losses_of_one_and_its_checkpoints(
    lora_config, tmp_path, losses, overrides
):
    config = lora_config(batch__rows_per_device=2, train__eval_every=2, checkpoint__keep="all")
    run_training(config, tmp_path / "one")
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(config.to_dict()))
    words = ["-m", "flatout", "train", tmp_path / "lora.yaml", *overrides]
    done = run_ranks([*words, "--run-dir", tmp_path / "two"])
    assert done.returncode == 0, done.stderr
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    for step in catalog.steps(tmp_path / "one"):  # of which some are saved after an evaluation
        paths = [catalog.checkpoint_path(tmp_path / name, step) for name in ("one", "two")]
        mine, theirs = (read_index(path).tensors for path in paths)
        assert mine.keys() == theirs.keys()
    mine, theirs = (read_merged(last(tmp_path / name)) for name in ("one", "two"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_lora_run_is_a_base_too(lora_config, tiny_config, tmp_path):
    run_training(lora_config(), tmp_path / "first")
    first = read_merged(last(tmp_path / "first"))
    again = lora_config(
        train__init_from=str(tmp_path / "first"), lora__targets=["q"], schedule__kind="constant"
    )
    run_training(again, tmp_path / "second")
    assert equal(read_merged(catalog.checkpoint_path(tmp_path / "second", 0)), first)
    whole = tiny_config(train__init_from=str(tmp_path / "first"), checkpoint__keep=9)
    run_training(whole, tmp_path / "third")
    assert equal(MergedWeights(catalog.checkpoint_path(tmp_path / "third", 0)).stored(), first)


def test_another_run_continues_with_the_adapters(lora_config, tiny_config, tmp_path):
    run_training(lora_config(), tmp_path / "first")
    longer = tiny_config(**LORA, train__steps=8)
    summary = run_training(longer, tmp_path / "second", resume=str(tmp_path / "first"))
    assert (summary["steps"], summary["resumed_from"]) == (8, str(last(tmp_path / "first")))
    base, same = (read_index(last(tmp_path / name)).base for name in ("second", "first"))
    assert base.model_copy(update={"path": same.path}) == same
    shutil.rmtree(tmp_path / "first")
    assert evaluate(tmp_path / "second").val_loss == pytest.approx(summary["val_loss"], rel=1e-6)


def test_adapters_outlive_the_runs_of_their_bases(lora_config, source, tmp_path, monkeypatch):
    """The base trains on, and rotates its checkpoint away. The adapters move to another machine."""
    shutil.copytree(source, tmp_path / "whole")
    run_training(lora_config(train__init_from=str(tmp_path / "whole")), tmp_path / "first")
    shutil.rmtree(tmp_path / "whole" / "checkpoints")
    monkeypatch.setattr(contents.os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "")))
    again = lora_config(
        train__init_from=str(tmp_path / "first"), lora__targets=["q"], schedule__kind="constant"
    )
    summary = run_training(again, tmp_path / "second")
    for name in ("whole", "first"):
        shutil.rmtree(tmp_path / name)
    moved = tmp_path / "elsewhere" / "adapters"
    shutil.copytree(tmp_path / "second", moved)
    shutil.rmtree(tmp_path / "second")
    assert evaluate(moved).val_loss == pytest.approx(summary["val_loss"], rel=1e-6)
    run_training(again.with_values({"train.init_from": None, "train.steps": 8}), moved)
    weights = next((moved / "base").glob("*/step-6/model-*"))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no model-|is missing|does not exist"):
        evaluate(moved)


def test_a_model_of_another_tool_is_a_base_too(lora_config, source, tmp_path, stop_at):
    export(str(source), to="huggingface", out=tmp_path / "model", checkpoint="best")
    config = lora_config(train__init_from=str(tmp_path / "model"))
    whole = run_training(config, tmp_path / "whole")
    base = read_index(last(tmp_path / "whole")).base
    assert base.path == str((tmp_path / "model").resolve())
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[stop_at(3)])
    assert run_training(config, tmp_path / "parts")["weights_sha256"] == whole["weights_sha256"]
    found = evaluate(tmp_path / "whole", checkpoint="last")
    assert found.val_loss == pytest.approx(whole["val_loss"], rel=1e-6)
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="have changed since the LoRA adapters"):
        evaluate(tmp_path / "whole")


def test_the_files_of_a_base_are_read_once_per_start(
    lora_config, source, tmp_path, stop_at, monkeypatch
):
    export(str(source), to="huggingface", out=tmp_path / "model", checkpoint="best")
    config = lora_config(train__init_from=str(tmp_path / "model"))
    read = []

    def counted(path):
        read.append(path)
        return digest(path)

    digest = contents.digest_of
    monkeypatch.setattr(contents, "digest_of", counted)
    monkeypatch.setattr(init_from, "digest_of", counted)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    assert read == [tmp_path / "model"]
    run_training(config, tmp_path / "run")
    assert read == [tmp_path / "model"] * 2


def test_other_ranks_are_told_the_base_and_read_none_of_its_files():
    base = {"path": "model", "digest": "0"}
    mesh = SimpleNamespace(
        is_main=False, world_size=1, broadcast_object=lambda _value: (None, base)
    )
    run = SimpleNamespace(mesh=mesh)  # no configuration, so it cannot look for the base
    init_from.load_initial(run, None)
    assert run.base == base


def test_a_run_without_a_base_is_rejected(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"lora\.rank=2 .*train\.init_from names none") as refused:
        run_training(tiny_config(**LORA), tmp_path / "run")
    assert "train.init_from=RUN" in refused.value.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_a_checkpoint_of_another_kind_is_rejected(lora_config, tiny_config, source, tmp_path, kind):
    if kind == "whole":
        config, resume = tiny_config(**LORA, train__steps=8), source
    else:
        run_training(lora_config(), tmp_path / "lora")
        config, resume = tiny_config(train__steps=8), tmp_path / "lora"
    with pytest.raises(CheckpointError, match=f"contains {kind}|contains LoRA {kind}") as refused:
        run_training(config, tmp_path / "run", resume=str(resume))
    assert f"train.init_from={last(resume)}" in refused.value.fix


@pytest.mark.parametrize("rows", [[0, 9999], [4, 4], None])
def test_rows_that_the_weight_lacks_are_rejected(lora_config, tmp_path, rows):
    run_training(lora_config(), tmp_path / "run")
    path = last(tmp_path / "run") / catalog.INDEX
    index = json.loads(path.read_text())
    known = index["base"]["rows"]
    name = min(known)
    del known[name]
    if rows is not None:
        known[name] = rows
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"the rows of {name} are not those"):
        MergedWeights(path.parent)
