"""Opening a run, checkpoint, dataset or recipe from elsewhere imports only trusted code."""

import ast
import re
import shutil

import pytest
import yaml
from gifts import CODE, ROOT, WAYS, run_program
from warm import run_ranks

import flatout
from flatout.cli.commands.train import train
from flatout.config import trust
from flatout.config.schema import RunConfig, load_config
from flatout.errors import ConfigError, UntrustedCode
from flatout.inference.load import load_run
from flatout.training.run_dir import layout

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
def test_a_run_from_elsewhere_is_not_opened(gift, way, tmp_path):
    gift.names(WAYS[way]("runs.gift.weights"))
    calls = [
        lambda: load_run("gift"),
        lambda: flatout.sample(gift.folder),
        lambda: flatout.evaluate(gift.folder),
    ]
    calls += [
        lambda: train(gift.asked, run=gift.folder),
        lambda: load_config(gift.folder / "config.yaml"),
    ]
    calls += [
        lambda: flatout.train(gift.folder / "config.yaml"),
        lambda: flatout.bench(gift.folder / "config.yaml"),
    ]
    (tmp_path / "link.yaml").symlink_to(gift.folder / "config.yaml")
    calls += [
        lambda: flatout.list_entries("speedups", recipe=gift.folder / "config.yaml"),
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
    assert layout.read_config(gift.folder).model.kind == "runs.gift.weights:Model"
    assert not gift.ran


def test_resuming_from_a_checkpoint_or_its_weights_imports_nothing(gift, tmp_path):
    asked = gift.asked.with_values({"train.steps": 4, "speedups": "none"})
    gift.names(WAYS["an edit of auto"]("runs.gift.weights"))
    assert train(asked, run="runs/mine", resume=gift.folder).steps == 4
    assert (
        train(asked.with_values({"train.init_from": str(gift.folder)}), run="runs/other").steps == 4
    )
    assert not gift.ran


def test_advice_never_repeats_a_reference_of_an_untrusted_run(gift):
    asked = gift.asked.with_values(
        {"train.init_from": str(gift.folder), "model.d_model": 32, "speedups": "none"}
    )
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    with pytest.raises(ConfigError, match="belong to a different model") as refused:
        train(asked, run="runs/mine")
    assert "model.kind=" not in refused.value.fix
    assert not gift.ran


def test_demo_rejects_a_run_directory_that_names_code(gift, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    gift.folder.rename(tmp_path / "runs" / "demo")
    with pytest.raises(UntrustedCode, match="names code that opening"):
        flatout.demo()
    assert not gift.ran


def test_a_users_own_run_needs_no_flag(tmp_path, tiny_config, home):
    (tmp_path / "weights.py").write_text(CODE.format(marker=str(tmp_path / "imported")))
    config = tiny_config(
        model__kind="weights:Model",
        optim__kind="weights:Optimizer",
        speedups="weights:Speedup",
        train__steps=2,
    )
    train(config, run="runs/mine")
    (tmp_path / "weights.py").write_text((tmp_path / "weights.py").read_text() + "# edited since\n")
    load_run("mine")
    shutil.rmtree(home / ".cache")  # as on another machine
    with pytest.raises(UntrustedCode):
        load_run("mine")
    train(config, run="runs/mine")  # names the code again
    load_run("mine")


def test_the_flag_lets_a_run_resume(gift):
    gift.names({"speedups": ["runs.gift.weights:Speedup"]})
    with pytest.raises(UntrustedCode):
        train(gift.asked, run=gift.folder)
    assert train(gift.asked, run=gift.folder, trust_code=True).steps == 3
    assert gift.ran
    with pytest.raises(UntrustedCode):
        train(gift.asked, run=gift.folder)


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
        gift.folder / "config.yaml", ["model.kind=runs.gift.weights:Model"]
    ).references()
    assert load_config(gift.folder / "config.yaml", trust_code=True).references()
    with pytest.raises(UntrustedCode):
        load_config(gift.folder / "config.yaml", ["optim.kind=runs.gift.weights:Optimizer"])


def test_advice_mentions_compiled_code_beside_the_source(gift):
    (gift.folder / "__pycache__").mkdir()
    (gift.folder / "__pycache__" / "weights.cpython-312.pyc").write_bytes(b"")
    with pytest.raises(UntrustedCode, match="Delete the __pycache__"):
        trust.require_trusted(gift.folder, {"runs.gift.weights:Model"})


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
        trust.require_trusted(gift.folder, {"a:\x1b[2J\nFix: all is well"})
    assert refused.value.what.isprintable()


@pytest.mark.quick_cases("generate runs/gift", "train my.yaml --run-dir runs/gift")
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
    done = run_program(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    name, _, words = command.partition(" ")
    assert f"run `flatout {name} --trust-code {words}`" in done.stderr, done.stderr
    assert not gift.ran
    done = run_program(name, "--trust-code", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert gift.ran


def test_commands_without_the_flag_do_not_offer_it(gift, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    for words in (
        ["bench", "runs/gift/config.yaml"],
        ["list", "speedups", "--recipe", "runs/gift/config.yaml"],
    ):
        done = run_program(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert "copy the recipe out" in done.stderr
        assert "--trust-code" not in done.stderr
    assert not gift.ran


def test_several_ranks_import_nothing(gift, tmp_path):
    config = gift.asked.to_dict() | {"batch": {"tokens_per_step": 128}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    gift.names({"speedups": ["runs.gift.weights:Speedup"]})
    words = ["-m", "flatout", "train", "my.yaml", "--run-dir", "runs/gift"]
    done = run_ranks(words, cwd=tmp_path)
    assert done.returncode != 0
    assert "names code that opening" in done.stderr
    assert not gift.ran


def test_every_key_that_can_name_code_is_checked():
    """The help text of such a key mentions it. A new key must be added to trust.REFERENCES."""
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
    """Those that import code must call `trusted_config` or `require_trusted`."""
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
        "config/registry.py",
        "assembly/parts.py",  # imports parts that speedups name, which have been checked
        "cli/commands/runs.py",
        "cli/commands/train.py",  # reads the sizes of a step
        "cli/commands/verify.py",  # imports nothing that the configuration names
        "inference/export/source.py",  # reads the name of the base's base, and imports nothing
        "measure/diagnose/recorded.py",  # imports nothing that the configuration names
        "measure/resume.py",  # of a run that it has just trained
        "measure/trial.py",  # of a run that it has just started
        "training/run.py",  # compares its digest
        "training/out_of_memory.py",  # writes another micro-batch, in the run that is training
        "training/upload/restore.py",
        "training/metrics/loggers.py",  # after training/run_plan.py has checked
        "training/run_dir/layout.py",
        "training/run_dir/lookup.py",  # only to skip a damaged run
        "training/init_from.py",
        "training/run_dir/resume.py",
        "training/run_dir/start.py",
        "training/run_plan.py",
    }
