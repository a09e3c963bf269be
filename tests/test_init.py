"""The public names exist and are loaded lazily."""

import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flatout

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", flatout.__all__)
def test_every_public_name_exists(name):
    assert getattr(flatout, name) is not None
    assert name in dir(flatout)


def test_functions_that_share_a_module_name_stay_callable():
    importlib.import_module("flatout.inference.generate")
    assert callable(flatout.sample)
    assert callable(flatout.train)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = flatout.trian


def test_the_version_is_that_of_the_package():
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        == flatout.__version__
    )


WINDOWS = """
import os, signal, sys
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, "O_NOFOLLOW O_NONBLOCK O_CLOEXEC getuid killpg sched_getaffinity mkfifo sysconf"),
    (signal, "SIGHUP SIGXCPU SIGKILL SIGUSR1 SIGUSR2"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
"""Removes what Python on Windows lacks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "code", "said"),
    [
        ("import flatout; print(flatout.__version__)", 0, ""),
        ("from flatout.cli.main import main; main(['--help'])", 0, ""),
        (
            "from flatout.cli.main import main as m; m(['train', 'demo'])",
            2,
            "Fix: On Windows, install WSL",
        ),
        ("from flatout import train", 1, "HardwareError: flatout needs Linux or macOS"),
        ("import flatout; flatout.watch", 1, "HardwareError: flatout needs Linux or macOS"),
    ],
    ids=["version", "help", "command", "function", "watch"],
)
def test_windows_is_answered_with_a_sentence(use, code, said):
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + use], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1] if said else not done.stderr


@pytest.mark.slow
def test_windows_is_told_the_steps_of_the_page_on_platforms():
    use = "from flatout.cli.main import main; main(['train', 'demo'])"
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + use], capture_output=True, text=True, check=False
    )
    page = (ROOT / "docs" / "platforms.md").read_text()
    steps = page.partition("\n## Windows\n")[2].split("```")[1].splitlines()[1:]
    assert len(steps) == 5
    assert [step for step in steps if f"`{step}`" not in done.stderr] == []


def test_import_loads_no_slow_package():
    program = (
        "import sys, flatout; dir(flatout); print(sorted({'torch', 'rich', 'click', 'pydantic', "
        "'numpy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", [str, Path])
def test_paths_may_be_strings_or_path_objects(form, fox_run, tmp_path):
    root, trained = fox_run
    data, run, recipe = (
        form(root / "data"),
        form(root / "runs/fox"),
        form(root / "runs/fox/config.yaml"),
    )
    assert flatout.evaluate(run, data=[data]).val_loss == trained.val_loss
    assert len(flatout.sample(run, max_tokens=1).samples) == 1
    assert flatout.load_run(run).folder == root / "runs/fox"
    assert flatout.inspect(data).path == str(data)
    assert flatout.verify(data).ok
    assert [item.run for item in flatout.runs(form(root / "runs")).items] == [
        str(root / "runs/fox")
    ]
    assert flatout.list_entries("speedups", recipe).items
    second = flatout.train(
        recipe, [f"train.steps={trained.steps + 1}"], run=form(tmp_path / "second"), resume=run
    )
    assert (second.steps, second.resumed_from) == (
        trained.steps + 1,
        str(root / f"runs/fox/checkpoints/step-{trained.steps}"),
    )
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("Another fox.")
    made = flatout.prepare(
        form(root / "book.txt"),
        form(tmp_path / "data"),
        "char",
        val=[form(held_out)],
        cache=form(tmp_path / "cache"),
    )
    assert made.tokens > 0


@pytest.mark.parametrize("form", [str, Path])
def test_wrong_paths_are_rejected_in_either_form(form, tmp_path, tiny_set):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(flatout.FlatoutError, match="contains no documents"):
        flatout.demo(form(empty))
    with pytest.raises(flatout.FlatoutError, match="did not write it"):
        flatout.bench("demo", [f"data.path={tiny_set}", "data.seq_len=8"], out=form(empty))
    with pytest.raises(flatout.FlatoutError, match="none"):
        flatout.import_chunks(form(tmp_path / "none"), form(tmp_path / "out"), form("byte"))
    with pytest.raises(flatout.FlatoutError, match=r"none\.txt"):
        flatout.prepare(
            "shakespeare",
            form(tmp_path / "out"),
            form("byte"),
            from_file=form(tmp_path / "none.txt"),
        )


@pytest.mark.parametrize(
    "name",
    [
        "bench",
        "demo",
        "evaluate",
        "import_chunks",
        "inspect",
        "list_entries",
        "plan",
        "prepare",
        "profile",
        "runs",
        "sample",
        "train",
        "verify",
    ],
)
def test_path_parameters_accept_text(name):
    """Annotations, which type checkers read, allow `str` wherever they allow `Path`."""
    for parameter in inspect.signature(getattr(flatout, name), eval_str=True).parameters.values():
        words = str(
            parameter.annotation.__origin__
            if hasattr(parameter.annotation, "__metadata__")
            else parameter.annotation
        )
        assert ("Path" in words) <= ("str" in words), parameter
        is_switch = "bool" in words  # `resume` of verify
        if not is_switch and parameter.name in {
            "run",
            "data",
            "path",
            "out",
            "recipe",
            "resume",
            "cache",
            "from_file",
            "file",
            "root",
            "chunks",
            "tokenizer",
        }:
            assert "Path" in words, parameter
