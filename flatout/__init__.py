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
    from flatout.cli.commands.report import report
    from flatout.cli.commands.runs import runs
    from flatout.cli.commands.train import train
    from flatout.cli.commands.tune import tune
    from flatout.cli.commands.verify import verify
    from flatout.cli.terminal import RunReport, Terminal
    from flatout.config.schema import RunConfig, load_config
    from flatout.config.sections import Section
    from flatout.data.store.shards import Dataset
    from flatout.errors import FlatoutError
    from flatout.inference.load import load_run
    from flatout.measure.watch.watch import Watch, watch
    from flatout.models.language_model import LanguageModel
    from flatout.ops import Ops
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
    "RunReport": "flatout.cli.terminal",
    "Section": "flatout.config.sections",
    "Terminal": "flatout.cli.terminal",
    "Watch": "flatout.measure.watch.watch",
    "bench": "flatout.cli.commands.bench",
    "chat": "flatout.cli.commands.chat",
    "compare": "flatout.cli.commands.compare",
    "convert": "flatout.cli.commands.convert:convert_config",
    "demo": "flatout.cli.commands.demo",
    "diagnose": "flatout.cli.commands.diagnose",
    "evaluate": "flatout.cli.commands.eval",
    "export": "flatout.cli.commands.export",
    "import_chunks": "flatout.cli.commands.import_",
    "inspect": "flatout.cli.commands.inspect",
    "list_entries": "flatout.cli.commands.list",
    "load_config": "flatout.config.schema",
    "load_run": "flatout.inference.load",
    "metrics": "flatout.training.run_dir.lookup",
    "plan": "flatout.cli.commands.plan",
    "prepare": "flatout.cli.commands.prepare",
    "profile": "flatout.cli.commands.profile",
    "report": "flatout.cli.commands.report",
    "runs": "flatout.cli.commands.runs",
    "sample": "flatout.cli.commands.generate:generate",
    "train": "flatout.cli.commands.train",
    "tune": "flatout.cli.commands.tune",
    "verify": "flatout.cli.commands.verify",
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
        importlib.import_module("flatout.cli.terminal.panel").shown_in_cell(found)
        if "IPython" in sys.modules
        else found
    )


def __dir__() -> list[str]:
    return sorted(__all__)
