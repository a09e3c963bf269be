"""flatout trains language models and speeds up PyTorch training scripts, with each gain measured.

Every command is a function here (`flatout.prepare`, `flatout.train`, `flatout.evaluate`, ...),
together with the base classes for your own models, sources and observers, and `flatout.watch` for
your own training loops. Names are loaded on first use, so `import flatout` never imports torch. In
a notebook the functions show their progress in the cell. Elsewhere they are silent unless
`progress` and `observers` are passed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from flatout.errors import require_posix

if TYPE_CHECKING:
    from flatout.commands.bench import bench
    from flatout.commands.chat import chat
    from flatout.commands.checkpoints import checkpoints
    from flatout.commands.convert import convert_config as convert
    from flatout.commands.demo import demo
    from flatout.commands.diagnose import diagnose
    from flatout.commands.eval import evaluate
    from flatout.commands.export import export
    from flatout.commands.generate import generate as sample
    from flatout.commands.import_ import import_chunks
    from flatout.commands.inspect import inspect
    from flatout.commands.list import list_entries
    from flatout.commands.plan import plan
    from flatout.commands.prepare import prepare
    from flatout.commands.profile import profile
    from flatout.commands.push import push
    from flatout.commands.report import report
    from flatout.commands.runs import runs
    from flatout.commands.train import train
    from flatout.commands.tune import tune
    from flatout.commands.verify import verify
    from flatout.config.schema import RunConfig, load_config
    from flatout.config.sections import Section
    from flatout.data.store.shards import Dataset
    from flatout.errors import FlatoutError
    from flatout.inference.load import load_run
    from flatout.measure.watch.watch import Watch, watch
    from flatout.models.language_model import LanguageModel
    from flatout.ops import Ops
    from flatout.terminal import RunReport, Terminal
    from flatout.training.metrics.observers import Observer, Quiet
    from flatout.training.run_dir.lookup import metrics

__version__ = "0.2.0"

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
    "checkpoints",
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
    "push",
    "report",
    "runs",
    "sample",
    "train",
    "tune",
    "verify",
    "watch",
]

_HOMES = {
    "Dataset": "flatout.data.store.shards",
    "FlatoutError": "flatout.errors",
    "LanguageModel": "flatout.models.language_model",
    "Observer": "flatout.training.metrics.observers",
    "Ops": "flatout.ops",
    "Quiet": "flatout.training.metrics.observers",
    "RunConfig": "flatout.config.schema",
    "RunReport": "flatout.terminal",
    "Section": "flatout.config.sections",
    "Terminal": "flatout.terminal",
    "Watch": "flatout.measure.watch.watch",
    "bench": "flatout.commands.bench",
    "chat": "flatout.commands.chat",
    "checkpoints": "flatout.commands.checkpoints",
    "convert": "flatout.commands.convert:convert_config",
    "demo": "flatout.commands.demo",
    "diagnose": "flatout.commands.diagnose",
    "evaluate": "flatout.commands.eval",
    "export": "flatout.commands.export",
    "import_chunks": "flatout.commands.import_",
    "inspect": "flatout.commands.inspect",
    "list_entries": "flatout.commands.list",
    "load_config": "flatout.config.schema",
    "load_run": "flatout.inference.load",
    "metrics": "flatout.training.run_dir.lookup",
    "plan": "flatout.commands.plan",
    "prepare": "flatout.commands.prepare",
    "profile": "flatout.commands.profile",
    "push": "flatout.commands.push",
    "report": "flatout.commands.report",
    "runs": "flatout.commands.runs",
    "sample": "flatout.commands.generate:generate",
    "train": "flatout.commands.train",
    "tune": "flatout.commands.tune",
    "verify": "flatout.commands.verify",
    "watch": "flatout.measure.watch.watch",
}
"""The module of each public name, with `:attribute` if the name differs there.

The command `generate` is called `sample`, because `flatout.inference.generate` is the module it
calls.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    require_posix()
    module, _, attribute = _HOMES[name].partition(":")
    found = getattr(importlib.import_module(module), attribute or name)
    return (
        importlib.import_module("flatout.terminal.run").shown_in_cell(found)
        if "IPython" in sys.modules
        else found
    )


def __dir__() -> list[str]:
    return sorted(__all__)
