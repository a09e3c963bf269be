"""A run with checkpoints and without its config.yaml is not taken for a new one."""

from __future__ import annotations

import pytest

from flatout.errors import ConfigError
from flatout.training.run import run_training
from flatout.training.run_dir.layout import CONFIG


def test_a_run_without_its_settings_is_rejected(tiny_config, tmp_path):
    config = tiny_config(train__steps=4)
    run = tmp_path / "run"
    run_training(config, run)
    (run / "summary.json").unlink()
    (run / CONFIG).unlink()
    with pytest.raises(ConfigError, match=rf"contains checkpoints, but no {CONFIG}"):
        run_training(config.with_values({"optim.lr": 0.5}), run)
    with pytest.raises(ConfigError, match="--run-dir DIR"):
        run_training(config, run)
