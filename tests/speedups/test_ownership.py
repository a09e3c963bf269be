"""Adding a speedup takes one file or folder, and deleting one touches nothing else."""

import ast
import shutil
from functools import cache
from pathlib import Path

import pytest
from table import tables

import flatout.speedups
from flatout.assembly.choices import all_speedups, assemble, parse_request, select, speedups_for
from flatout.cli.commands.list import list_entries
from flatout.config import registry
from flatout.config.registry import PACKAGE_DIR, RECIPES, SPEEDUPS
from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, Machine
from flatout.measure.moves import ablation
from flatout.measure.resolving import Resolved

MACHINES = {
    "cpu": Machine("a CPU", 2, 8.0, (), "3.11", cpu_multiplies_bf16=True),
    "cuda": Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 141.0, (9, 0), "1"),), "3.11"),
}
CONFIGS = ([], ["optim.kind=muon"], ["model.kind=eigenstate"], ["data.document_mask=true"])
ADDED = '''"""Adds nothing."""

from flatout.assembly.speedup import Off, On, Speedup, Tolerance


def apply(parts):
    parts.cudnn_benchmark = None


SPEEDUP = Speedup(
    name="brand-new",
    apply=apply,
    saves="nothing",
    tolerance=Tolerance.exact(),
    rank=205,
    auto={"cpu": On("it is new"), "cuda": Off("it is not for GPUs")},
)
'''


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of flatout/speedups in a separate package directory, which the registry reads."""
    folder = tmp_path / "speedups"
    shutil.copytree(PACKAGE_DIR / "speedups", folder, ignore=shutil.ignore_patterns("__pycache__"))

    def read_again():
        with monkeypatch.context() as patch:
            patch.setattr(registry, "PACKAGE_DIR", tmp_path)
            found = registry.Folder("speedups", "SPEEDUP", "speedup")._files
        monkeypatch.setitem(vars(SPEEDUPS), "_files", found)

    monkeypatch.setattr(flatout.speedups, "__path__", [*flatout.speedups.__path__, str(folder)])
    return folder, read_again


def require_everything_works(names: set[str]) -> None:
    """Check that listing, selection, recipes, configs, tables and the ablation know `names`."""
    assert {item.name for item in list_entries("speedups").items} == names
    assert {speedup.name for speedup in all_speedups()} == names
    assert all(f"| `{name}` |" in tables() for name in names)
    for device, machine in MACHINES.items():
        for overrides in CONFIGS:
            config = load_config(None, overrides)
            decisions = select(config, machine, device=device, minutes=60.0)
            assert {decision.name for decision in decisions} == names
            assemble(d.name for d in decisions if d.on)
            assert ablation(config, Resolved(config, decisions, machine, None))
    assert {*speedups_for("loader"), *speedups_for("most_rows")} <= names
    for name in names:
        assert parse_request(f"auto,-{name}").dropped == (name,)


def test_every_speedup_is_found_and_works():
    require_everything_works({*SPEEDUPS.names()})


@pytest.mark.parametrize("path", ["brand_new.py", "brand_new/__init__.py"])
def test_a_file_or_a_directory_is_all_that_adding_takes(path, copied):
    folder, read_again = copied
    before = {*SPEEDUPS.names()}
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(ADDED)
    read_again()
    require_everything_works(before | {"brand-new"})
    order = [speedup.name for speedup in all_speedups()]
    assert order.index("micro-batch") < order.index("brand-new") < order.index("tf32")
    machine = MACHINES["cpu"]
    by_auto = {d.name: d for d in select(load_config(), machine)}
    assert by_auto["brand-new"].on
    assert by_auto["brand-new"].reason == "it is new"
    dropped = select(load_config(None, ["speedups=auto,-brand-new"]), machine)
    assert not next(d for d in dropped if d.name == "brand-new").on


@pytest.fixture
def without(monkeypatch):
    """Remove speedups from the registry."""
    whole = dict(SPEEDUPS._files)

    def remove(*names):
        files = {name: path for name, path in whole.items() if name not in names}
        monkeypatch.setitem(vars(SPEEDUPS), "_files", files)
        return {*files}

    return remove


@pytest.mark.slow
def test_deleting_a_speedup_leaves_the_rest_working(without):
    recipes = {name: load_config(name) for name in RECIPES.names()}
    for name in SPEEDUPS.names():
        require_everything_works(without(name))
        with pytest.raises(ConfigError, match="There is no speedup named"):
            parse_request(name)
        for speedup in all_speedups():
            if name in speedup.needs:
                reason = speedup.reason_against(MACHINES["cuda"], load_config())
                assert reason == f"It needs {name}, which is not among the speedups."
        for config in recipes.values():
            if name not in str(config.speedups):  # a recipe that names it depends on it
                select(config, MACHINES["cuda"], device="cuda", minutes=60.0)


def test_without_a_provider_there_is_no_precision(without):
    without("fp16")
    with pytest.raises(ConfigError, match=r"No speedup provides train\.precision=fp16"):
        select(load_config(None, ["train.precision=fp16"]), MACHINES["cuda"], device="cuda")


@cache
def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.slow
def test_nothing_but_its_own_directory_imports_a_speedup():
    for source in SPEEDUPS._files.values():
        module = f"flatout.speedups.{registry._module(source)}"
        own = source.parent if source.name == "__init__.py" else source
        for path in PACKAGE_DIR.rglob("*.py"):
            if path != own and own not in path.parents:
                names = imported_modules(path)
                users = {m for m in names if m == module or m.startswith(f"{module}.")}
                assert not users, f"{path} imports {users}"


@pytest.mark.slow
def test_no_name_of_a_speedup_is_wired_into_another_directory():
    """Names as whole strings; `compile`, `bf16` and the like are also words of torch."""
    words = {"bf16", "checkpointing", "collector", "compile", "cuda-graphs", "fp16", "fp8"}
    words |= {"micro-batch", "onednn", "prefetch", "tf32"}
    # recognises what a checkpoint stores, also without them; constants fitted to published runs
    known = {"optim/moments.py", "measure/plan/gpu_rate.py"}
    names = {*SPEEDUPS.names()} - words
    for path in PACKAGE_DIR.rglob("*.py"):
        place = path.relative_to(PACKAGE_DIR)
        if place.parts[0] != "speedups" and place.as_posix() not in known:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            wired = {node.value for node in nodes if isinstance(node, ast.Constant)} & names
            assert not wired, place
