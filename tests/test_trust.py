"""Opening a run, checkpoint, dataset or recipe from elsewhere imports only trusted code."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import flatout
from flatout import trust
from flatout.cache import CACHE
from flatout.commands.train import train_config
from flatout.config.schema import RunConfig, load_config
from flatout.errors import CheckpointError, ConfigError, UntrustedCode
from flatout.inference.load import load_run
from flatout.training.run_dir import layout
from flatout.training.run_dir.config_seal import write_sealed

ROOT = Path(__file__).parents[1]
CODE = """\
from pathlib import Path
Path({marker!r}).touch()
from flatout.models.transformer import MODEL as Model
from flatout.optimizers.adamw import OPTIMIZER as Optimizer
from flatout.assembly.recipe import Promise, Speedup as Kind
Speedup = Kind(name="gift", saves="nothing", promise=Promise.exact())
"""
WAYS = {
    "model.kind": lambda name: {"model": {"kind": f"{name}:Model"}},
    "optim.kind": lambda name: {"optim": {"kind": f"{name}:Optimizer"}},
    "a list of speedups": lambda name: {"speedups": ["tf32", f"{name}:Speedup"]},
    "one speedup": lambda name: {"speedups": f"{name}:Speedup"},
    "an edit of auto": lambda name: {"speedups": f"auto, +{name}:Speedup"},
}
"""How a stored configuration names something to import."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Give the test its own home, working directory and search path; drop what it imports."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = {*sys.modules}
    yield home
    for name in {*sys.modules} - before:
        if name.split(".")[0] in {"runs", "weights"}:
            del sys.modules[name]


class Gift:
    """A run from elsewhere whose config.yaml names code in its directory."""

    def __init__(self, place: Path, fox: Path) -> None:
        self.place, self.marker = place, place.parents[1] / "imported"
        shutil.copytree(fox, place)
        (place / "weights.py").write_text(CODE.format(marker=str(self.marker)))

    def names(self, layer: dict) -> Gift:
        """Merge a layer into config.yaml, but not into asked.yaml, which requests are compared to."""
        document = yaml.safe_load((self.place / "config.yaml").read_text())
        for key, value in layer.items():
            document[key] = document[key] | value if isinstance(value, dict) else value
        write_sealed(self.place / "config.yaml", yaml.safe_dump(document))
        return self

    @property
    def asked(self) -> RunConfig:
        """The request of a user who resumes it without naming code."""
        config = layout.read_config(self.place)
        return config.with_values(
            {
                "model.kind": "transformer",
                "optim.kind": "adamw",
                "speedups": "auto",
                "train.device": "cpu",
            }
        )

    @property
    def ran(self) -> bool:
        """Whether its code was imported."""
        return self.marker.exists()


@pytest.fixture
def gift(tmp_path, fox_run):
    return Gift(tmp_path / "runs" / "gift", fox_run[0] / "runs" / "fox")


def the_program(*words, cwd):
    """Run flatout in a process, like the console script without the current folder in sys.path."""
    program = f"import sys; sys.path[:1] = [{str(ROOT)!r}]; from flatout.cli import main; main()"
    kept = {key: value for key, value in os.environ.items() if key not in {"RANK", "PYTHONPATH"}}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env=kept,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_run_from_elsewhere_is_not_opened(gift, way, tmp_path):
    gift.names(WAYS[way]("runs.gift.weights"))
    calls = [
        lambda: load_run("gift"),
        lambda: flatout.sample(gift.place),
        lambda: flatout.evaluate(gift.place),
    ]
    calls += [
        lambda: train_config(gift.asked, run=gift.place),
        lambda: load_config(gift.place / "config.yaml"),
    ]
    calls += [
        lambda: flatout.train(gift.place / "config.yaml"),
        lambda: flatout.bench(gift.place / "config.yaml"),
    ]
    (tmp_path / "link.yaml").symlink_to(gift.place / "config.yaml")
    calls += [
        lambda: flatout.list_entries("speedups", recipe=gift.place / "config.yaml"),
        lambda: load_config("link.yaml"),
    ]
    for call in calls:
        with pytest.raises(
            UntrustedCode,
            match=r"runs\.gift\.weights:\w+' \(runs/gift/weights\.py\)"
            r".*trust_code=True.*--trust-code",
        ):
            call()
    assert not gift.ran
    assert not (tmp_path / "home" / ".cache").exists()


def test_reading_a_run_never_imports_its_code(gift, fox_run):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    assert [item.state for item in flatout.runs().items] == ["finished"]
    flatout.inspect(fox_run[0] / "data")
    assert flatout.verify(fox_run[0] / "data").ok
    assert layout.read_config(gift.place).model.kind == "runs.gift.weights:Model"
    assert not gift.ran


def test_resuming_from_a_checkpoint_or_its_weights_imports_nothing(gift, tmp_path):
    asked = gift.asked.with_values({"train.steps": 4, "speedups": "none"})
    gift.names(WAYS["an edit of auto"]("runs.gift.weights"))
    assert train_config(asked, run="runs/mine", resume=gift.place).steps == 4
    assert (
        train_config(
            asked.with_values({"train.init_from": str(gift.place)}), run="runs/other"
        ).steps
        == 4
    )
    assert not gift.ran


def test_advice_never_repeats_a_reference_of_an_untrusted_run(gift):
    asked = gift.asked.with_values(
        {"train.init_from": str(gift.place), "model.d_model": 32, "speedups": "none"}
    )
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    with pytest.raises(ConfigError, match="are of another model") as refused:
        train_config(asked, run="runs/mine")
    assert "model.kind=" not in refused.value.fix
    assert not gift.ran


def test_demo_refuses_a_run_directory_that_names_code(gift, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    gift.place.rename(tmp_path / "runs" / "demo")
    with pytest.raises(CheckpointError, match=r"names code of its own.*move it away"):
        flatout.demo()
    assert not gift.ran


def test_trust_is_given_once_and_stored_outside_the_run(gift, home):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    before = {path for path in gift.place.rglob("*") if "__pycache__" not in path.parts}
    load_run("gift", trust_code=True)
    assert gift.ran
    assert {path for path in gift.place.rglob("*") if "__pycache__" not in path.parts} == before
    load_run("gift")
    (kept,) = trust.MEMORY.expanduser().iterdir()
    assert kept.is_relative_to(home)
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(
    "change",
    [
        "a copy",
        "moved",
        "another reference",
        "another setting",
        "other code",
        "new code",
        "a link to a folder",
        "replaced",
    ],
)
def test_a_changed_run_is_not_trusted(gift, change, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    references = layout.read_config(gift.place).references()
    trust.require_trusted(gift.place, references, trust_code=True)
    trust.require_trusted(gift.place, references)
    place = gift.place
    if change == "a copy":
        place = shutil.copytree(place, tmp_path / "runs" / "copy")
    elif change == "moved":
        place = place.rename(tmp_path / "runs" / "moved")
    elif change == "another reference":
        gift.names({"optim": {"kind": "runs.gift.weights:Optimizer"}})
    elif change == "another setting":
        gift.names({"train": {"seed": 5}})
    elif change == "other code":
        (place / "weights.py").write_text("import os\n")
    elif change == "new code":
        (place / "torch.so").write_bytes(b"")
    elif change == "a link to a folder":
        (place / "helpers").symlink_to(tmp_path)
    elif change == "replaced":
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "home", place)
        (place / "config.yaml").write_text("model: {kind: 'runs.gift.weights:Model'}\n")
    with pytest.raises(UntrustedCode) as refused:
        layout.trusted_config(place)
    assert ("was trusted before" in refused.value.what) == (change not in {"a copy", "moved"})


def test_a_link_to_a_trusted_run_is_that_run(gift, tmp_path):
    trust.require_trusted(gift.place, {"runs.gift.weights:Model"}, trust_code=True)
    (tmp_path / "link").symlink_to(gift.place)
    trust.require_trusted(tmp_path / "link", {"runs.gift.weights:Model"})


SPOILED = {
    "empty": "",
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no references": '{"format_version": 1}',
    "references that are none": '{"format_version": 1, "references": "runs.gift.weights:Model"}',
    "numbers": '{"format_version": 1, "references": [1]}',
    "a newer format": '{"format_version": 2, "references": ["runs.gift.weights:Model"]}',
    "no digests": '{"format_version": 1, "references": ["runs.gift.weights:Model"]}',
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_trust_file_counts_for_nothing_and_is_replaced(gift, how):
    references = {"runs.gift.weights:Model"}
    trust.require_trusted(gift.place, references, trust_code=True)
    (kept,) = trust.MEMORY.expanduser().iterdir()
    kept.write_bytes(SPOILED[how] if isinstance(SPOILED[how], bytes) else SPOILED[how].encode())
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.place, references)
    trust.require_trusted(gift.place, references, trust_code=True)
    trust.require_trusted(gift.place, references)


@pytest.mark.parametrize(
    "spoil",
    [
        "others may write it",
        "others may write the folder",
        "a link",
        "a pipe",
        "a link for the folder",
    ],
)
def test_a_trust_file_that_others_may_write_counts_for_nothing(gift, spoil, tmp_path):
    references = {"runs.gift.weights:Model"}
    trust.require_trusted(gift.place, references, trust_code=True)
    memory = trust.MEMORY.expanduser()
    (kept,) = memory.iterdir()
    if spoil == "others may write it":
        kept.chmod(0o666)
    elif spoil == "others may write the folder":
        memory.chmod(0o777)
    elif spoil == "a link":
        kept.symlink_to(kept.rename(tmp_path / "elsewhere"))
    elif spoil == "a pipe":
        kept.unlink()
        os.mkfifo(kept)
    else:
        memory.symlink_to(memory.rename(tmp_path / "elsewhere"))
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.place, references)


def test_without_a_writable_home_the_flag_is_needed_each_time(gift, home, monkeypatch):
    (home / ".cache").write_text("a file")
    trust.require_trusted(gift.place, {"a.b:C"}, trust_code=True)
    with pytest.raises(UntrustedCode, match="not found here"):
        trust.require_trusted(gift.place, {"a.b:C"})
    assert not trust.remember(gift.place, {"a.b:C"})


def test_concurrent_writers_leave_one_valid_file(gift):
    references = [{"a.b:C", f"a.b:D{number}"} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda some: trust.remember(gift.place, some), references * 4))
    (kept,) = trust.MEMORY.expanduser().iterdir()
    assert set(json.loads(kept.read_text())["references"]) in references
    trust.require_trusted(gift.place, {"a.b:C"})


def test_a_users_own_run_needs_no_flag(tmp_path, tiny_config, home):
    (tmp_path / "weights.py").write_text(CODE.format(marker=str(tmp_path / "imported")))
    config = tiny_config(
        model__kind="weights:Model",
        optim__kind="weights:Optimizer",
        speedups="weights:Speedup",
        train__steps=2,
    )
    train_config(config, run="runs/mine")
    (tmp_path / "weights.py").write_text(
        (tmp_path / "weights.py").read_text() + "# worked on since\n"
    )
    load_run("mine")
    shutil.rmtree(home / ".cache")  # as on another machine
    with pytest.raises(UntrustedCode):
        load_run("mine")
    train_config(config, run="runs/mine")  # names the code again
    load_run("mine")


def test_the_flag_lets_a_run_resume(gift):
    gift.names({"speedups": ["runs.gift.weights:Speedup"]})
    with pytest.raises(UntrustedCode):
        train_config(gift.asked, run=gift.place)
    assert train_config(gift.asked, run=gift.place, trust_code=True).steps == 3
    assert gift.ran
    train_config(gift.asked, run=gift.place)


def test_a_users_own_recipe_may_name_code(tmp_path):
    (tmp_path / "my.yaml").write_text("model: {kind: 'weights:Model'}\n")
    (tmp_path / "config.yaml").write_text("model: {kind: 'weights:Model'}\n")
    assert (
        load_config(tmp_path / "my.yaml").references()
        == load_config(tmp_path / "config.yaml").references()
        == {"weights:Model"}
    )


def test_a_reference_on_the_command_line_is_trusted(gift):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    assert load_config(
        gift.place / "config.yaml", ["model.kind=runs.gift.weights:Model"]
    ).references()
    assert load_config(gift.place / "config.yaml", trust_code=True).references()
    with pytest.raises(UntrustedCode):
        load_config(gift.place / "config.yaml", ["optim.kind=runs.gift.weights:Optimizer"])


def test_advice_mentions_compiled_code_beside_the_source(gift):
    (gift.place / "__pycache__").mkdir()
    (gift.place / "__pycache__" / "weights.cpython-312.pyc").write_bytes(b"")
    with pytest.raises(UntrustedCode, match="Delete the __pycache__"):
        trust.require_trusted(gift.place, {"runs.gift.weights:Model"})


@pytest.mark.parametrize(
    ("reference", "file"),
    [
        ("weights:X", "weights.py"),
        ("pack:X", "pack/__init__.py"),
        ("pack.inner:X", "pack/inner.py"),
        ("gone:X", None),
        ("../up:X", None),
        ("..weights:X", None),
    ],
)
def test_the_file_of_a_reference_is_found_without_importing(reference, file, tmp_path):
    for name in ("weights.py", "pack/__init__.py", "pack/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    found = trust.source_of(reference)
    assert (found and found.as_posix()) == file
    assert not (tmp_path / "imported").exists()


def test_control_characters_in_a_reference_are_escaped(gift):
    with pytest.raises(UntrustedCode) as refused:
        trust.require_trusted(gift.place, {"a:\x1b[2J\nFix: all is well"})
    assert refused.value.what.isprintable()


@pytest.mark.parametrize(
    "command",
    [
        "generate runs/gift",
        "eval runs/gift",
        "train my.yaml --run-dir runs/gift",
        "train runs/gift/config.yaml",
    ],
)
def test_the_error_names_the_full_command(gift, command, tmp_path):
    (tmp_path / "my.yaml").write_text(
        yaml.safe_dump(gift.asked.to_dict() | {"batch": {"tokens_per_step": 128}})
    )
    gift.names({"speedups": ["runs.gift.weights:Speedup"]})
    done = the_program(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    name, _, words = command.partition(" ")
    assert f"run `flatout {name} --trust-code {words}`" in done.stderr, done.stderr
    assert not gift.ran
    done = the_program(name, "--trust-code", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert gift.ran


def test_commands_without_the_flag_do_not_offer_it(gift, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    for words in (
        ["bench", "runs/gift/config.yaml"],
        ["list", "speedups", "--recipe", "runs/gift/config.yaml"],
    ):
        done = the_program(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert "copy the recipe out" in done.stderr
        assert "--trust-code" not in done.stderr
    assert not gift.ran


def test_several_ranks_import_nothing(gift, tmp_path):
    config = gift.asked.to_dict() | {"batch": {"tokens_per_step": 128}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    gift.names({"speedups": ["runs.gift.weights:Speedup"]})
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "flatout",
        "train",
        "my.yaml",
        "--run-dir",
        "runs/gift",
    ]
    kept = {key: value for key, value in os.environ.items() if key != "RANK"} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env=kept,
    )
    assert done.returncode != 0
    assert "names code of its own" in done.stderr
    assert not gift.ran


def test_trust_files_are_in_the_cache():
    assert trust.MEMORY.parent == CACHE


def test_every_key_that_can_name_code_is_checked():
    """The help of such a key says so; a new key must be added to trust.REFERENCES."""
    fields = {("speedups",)}
    for section, field in RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        fields |= {
            (section, key)
            for key, entry in inner.items()
            if "package.module:" in (entry.description or "")
        }
    assert fields == set(trust.REFERENCES)


def test_all_readers_of_a_stored_configuration_are_known():
    """Users of one must call `trusted_config` or `require_trusted`; the others import nothing."""
    wanted = re.compile(r"(?:^|\.)(?:read_config|config_to_resume|load_reference)$")
    found = set()
    for path in (ROOT / "flatout").rglob("*.py"):
        calls = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        )
        found |= {
            path.relative_to(ROOT / "flatout").as_posix()
            for call in calls
            if wanted.search(ast.unparse(call.func))
        }
    assert found == {
        "registry.py",
        "assembly/recipe.py",
        "commands/runs.py",
        "training/run_dir/layout.py",
        "training/init_from.py",
        "training/run_dir/resume.py",
        "training/run.py",
    }
