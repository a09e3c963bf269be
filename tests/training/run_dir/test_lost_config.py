"""A run with checkpoints and without its config.yaml is not taken for a new one."""

from __future__ import annotations

import shutil

import pytest

from flatout.errors import ConfigError
from flatout.training.run import run_training
from flatout.training.run_dir.config_seal import COPY
from flatout.training.run_dir.layout import CONFIG


def test_a_run_without_its_settings_is_rejected_with_the_command_that_restores_them(
    tiny_config, tmp_path
):
    config = tiny_config(train__steps=4)
    whole = run_training(config, tmp_path / "whole")
    run = tmp_path / "run"
    run_training(config, run)
    (run / "summary.json").unlink()
    (run / CONFIG).unlink()
    with pytest.raises(ConfigError, match=rf"contains checkpoints, but no {CONFIG}") as refused:
        run_training(config.with_values({"optim.lr": 0.5}), run)
    assert f"cp {run / COPY} {run / CONFIG}" in refused.value.fix
    shutil.copyfile(run / COPY, run / CONFIG)
    assert run_training(config, run)["weights_sha256"] == whole["weights_sha256"]
    (run / CONFIG).unlink()
    (run / COPY).unlink()
    with pytest.raises(ConfigError, match="--run-dir DIR"):
        run_training(config, run)
