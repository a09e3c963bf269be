"""Runs from elsewhere that name code."""

from __future__ import annotations

import shutil
from pathlib import Path

import warm
import yaml

from flatout.config.schema import RunConfig
from flatout.training.run_dir import layout

ROOT = Path(__file__).parents[2]


CODE = """\
from pathlib import Path
Path({marker!r}).touch()
from flatout.models.transformer import MODEL as Model
from flatout.optim.adamw import OPTIMIZER as Optimizer
from flatout.assembly.speedup import Speedup as Kind, Tolerance
from flatout.training.metrics.loggers import Logger
Speedup = Kind("gift", lambda parts: None, "nothing", Tolerance.exact())
"""


WAYS = {
    "model.kind": lambda name: {"model": {"kind": f"{name}:Model"}},
    "optim.kind": lambda name: {"optim": {"kind": f"{name}:Optimizer"}},
    "a list of speedups": lambda name: {"speedups": ["tf32", f"{name}:Speedup"]},
    "one speedup": lambda name: {"speedups": f"{name}:Speedup"},
    "an edit of auto": lambda name: {"speedups": f"auto, +{name}:Speedup"},
    "log.to": lambda name: {"log": {"to": ["tensorboard", f"{name}:Logger"]}},
    "log.observers": lambda name: {"log": {"observers": [f"{name}:Logger"]}},
}
"""The ways in which a stored configuration can name code to import."""


class Gift:
    """A run from elsewhere whose config.yaml names code in its directory."""

    def __init__(self, folder: Path, fox: Path) -> None:
        self.folder, self.marker = folder, folder.parents[1] / "imported"
        shutil.copytree(fox, folder)
        (folder / "weights.py").write_text(CODE.format(marker=str(self.marker)))

    def names(self, layer: dict) -> Gift:
        """Merge a layer into what config.yaml resolved, which requests are not compared to."""
        document = yaml.safe_load((self.folder / "config.yaml").read_text())
        section = document["resolved"]
        for key, value in layer.items():
            section[key] = section[key] | value if isinstance(value, dict) else value
        (self.folder / "config.yaml").write_text(f"{yaml.safe_dump(document)}...\n")
        return self

    @property
    def asked(self) -> RunConfig:
        """The request of a user who resumes it without naming code."""
        config = layout.read_config(self.folder)
        return config.with_values(
            {
                "model.kind": "transformer",
                "optim.kind": "adamw",
                "speedups": "auto",
                "train.device": "cpu",
                "log.to": "tensorboard",
                "log.observers": "",
            }
        )

    @property
    def ran(self) -> bool:
        """Whether its code was imported."""
        return self.marker.exists()


def run_program(*words, cwd):
    """Run flatout in a process; `python -m flatout` does not search the working directory."""
    return warm.run(["-m", "flatout", *words], cwd=cwd)
