"""flatout trains language models and speeds up PyTorch training scripts, with each gain measured.

Every command is a function here (`flatout.prepare`, `flatout.train`, `flatout.evaluate`, ...),
together with the base classes for your own models, sources and observers, and `flatout.watch` for
your own training loops. Names are loaded on first use, so `import flatout` never imports torch. In
a notebook the functions show their progress in the cell. Elsewhere they are silent unless
`progress` and `observers` are passed.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import require_posix

if TYPE_CHECKING:
    from flatout.cli.commands.bench import bench
    from flatout.cli.commands.chat import chat
    from flatout.cli.commands.compare import compare
    from flatout.cli.commands.convert import convert_config as convert
    from flatout.cli.commands.demo import demo
    from flatout.cli.commands.diagnose import diagnose
    from flatout.cli.commands.eval import evaluate
    from flatout.cli.commands.export import export
    from flatout.cli.commands.generate import generate as sample
    from flatout.cli.commands.import_ import import_chunks
    from flatout.cli.commands.inspect import inspect
    from flatout.cli.commands.list import list_entries
    from flatout.cli.commands.plan import plan
    from flatout.cli.commands.prepare import prepare
    from flatout.cli.commands.profile import profile
    from flatout.cli.commands.pull import pull
    from flatout.cli.commands.push import push
    from flatout.cli.commands.report import report
    from flatout.cli.commands.runs import runs
    from flatout.cli.commands.train import train
    from flatout.cli.commands.tune import tune
    from flatout.cli.commands.verify import verify
    from flatout.cli.terminal import RunReport, Terminal
    from flatout.config.schema import RunConfig, load_config
    from flatout.config.sections import Section
    from flatout.data.prepare.import_tokens import write_dataset
    from flatout.data.store.shards import Dataset
    from flatout.errors import FlatoutError
    from flatout.inference.load import load_run
    from flatout.measure.watch import Watch, watch
    from flatout.models.language_model import LanguageModel
    from flatout.ops import Ops
    from flatout.training.metrics.observers import Observer, Quiet
    from flatout.training.run_dir.lookup import metrics

__version__ = "0.3.0"

__all__ = [
    "Dataset",
    "FlatoutError",
    "LanguageModel",
    "Observer",
    "Ops",
    "Quiet",
    "RunConfig",
    "RunReport",
    "Section",
    "Terminal",
    "Watch",
    "__version__",
    "bench",
    "chat",
    "compare",
    "convert",
    "demo",
    "diagnose",
    "evaluate",
    "export",
    "import_chunks",
    "inspect",
    "list_entries",
    "load_config",
    "load_run",
    "metrics",
    "plan",
    "prepare",
    "profile",
    "pull",
    "push",
    "report",
    "runs",
    "sample",
    "train",
    "tune",
    "verify",
    "watch",
    "write_dataset",
]

_HOMES = {
    name.rpartition(" ")[2]: (module, name.partition(" ")[0])
    for module, names in re.findall(
        r"^    from (\S+) import (.+)", Path(__file__).read_text("utf-8"), re.MULTILINE
    )
    for name in names.split(", ")
}
"""The module of each public name, and its name there: read from the imports for type checkers.

The command `generate` is called `sample`, because `flatout.inference.generate` is the module it
calls.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    require_posix()
    module, attribute = _HOMES[name]
    found = getattr(importlib.import_module(module), attribute)
    if "IPython" not in sys.modules:
        return found
    return importlib.import_module("flatout.cli.terminal.panel").shown_in_cell(found)


def __dir__() -> list[str]:
    return sorted(__all__)
