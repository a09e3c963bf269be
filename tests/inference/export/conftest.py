"""Runs with random weights in many shapes, saved without training."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def make_run(build_run, tiny_config, tmp_path):
    """Return a function that saves a run with random weights, and returns its directory."""
    from flatout.data.store.manifest import TOKENIZER
    from flatout.training.checkpoint.savers import save
    from flatout.training.run_dir.layout import write_config

    def make(name="run", model=None, **settings):
        keys = {f"model__{key}": value for key, value in (model or {}).items()}
        config = tiny_config(**keys, **settings)
        run = build_run(config, tmp_path / "runs" / name)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in run.core.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
        write_config(run.folder, run.config)
        shutil.copy(Path(config.data.path) / TOKENIZER, run.folder)
        save(run)
        return run.folder

    return make


@pytest.fixture
def export_to(tmp_path):
    """Return a function that exports a run, and returns the directory and what was written."""
    from flatout.inference.export.export import export_run
    from flatout.inference.export.source import open_source

    def export(run, to="huggingface", *, dtype=None, shard_mib=64, **options):
        out = tmp_path / f"{run.name}-{to}"
        made = export_run(open_source(run, dtype=dtype), out, to, shard_mib=shard_mib, **options)
        return out, made

    return export
