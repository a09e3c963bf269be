"""Files in the current directory never shadow packages, however flatout is started."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from flatout.__main__ import leave_current_folder
from flatout.config.registry import load_reference
from flatout.training.run_dir import layout

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PLANTED = (
    "torchao",
    "zstandard",
    "ray",
    "tensorflow",
    "sitecustomize",
    "yaml",
    "torch",
    "click",
    "numpy",
)


def run_program(*words, cwd, module=False):
    """Run the program in a process, as the console script or as `python -m flatout`."""
    program = (
        ["-m", "flatout"]
        if module
        else [
            "-c",
            f"import sys\nsys.path[:1] = [{str(ROOT)!r}]\n"
            "from flatout.__main__ import main\nmain()",
        ]
    )
    kept = {key: value for key, value in os.environ.items() if key not in {"RANK", "PYTHONPATH"}}
    path = {"PYTHONPATH": str(ROOT)} if module else {}
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env=kept | path,
    )


@pytest.mark.quick_cases("the console script")
@pytest.mark.parametrize("module", [False, True], ids=["the console script", "python -m flatout"])
def test_files_in_the_current_directory_do_not_shadow_packages(fox_run, tmp_path, module):
    """Files in the current and the run directory are named like packages that flatout imports."""
    run = shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "runs" / "gift")
    marker = tmp_path / "imported"
    for place in (tmp_path, run):
        for name in PLANTED:
            (place / f"{name}.py").write_text(
                f"open({str(marker)!r}, 'a').write({name!r})\nraise ImportError\n"
            )
        (place / "evil-1.0.dist-info").mkdir()
        (place / "evil-1.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
        )
        (place / "evil-1.0.dist-info" / "entry_points.txt").write_text(
            "[torch.backends]\nevil = torchao:run\n[pydantic]\nevil = torchao\n"
        )
    config = layout.read_config(run).with_values({"speedups": "none"}).to_dict()
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    train = ["train", str(tmp_path / "my.yaml"), "--run-dir"]
    lines = [[*train, str(tmp_path / "new")]]
    if not module:
        lines += [["generate", str(run), "--max-tokens", "4"], ["list", "speedups"]]
    for words in lines:
        done = run_program(*words, cwd=run if "new" in words[-1] else tmp_path, module=module)
        assert done.returncode == 0, done.stderr
    assert not marker.exists(), marker.read_text()


@pytest.mark.thorough
def test_a_speedup_imports_its_installed_package(fox_run, tmp_path):
    """The speedup's package would import a file from the current directory if it were searched."""
    run = shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "runs" / "gift")
    (tmp_path / "torchao.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    stored = layout.read_config(run).with_values({"speedups": ["adamw-8bit"], "train.steps": 9})
    asked = stored.with_values({"speedups": "auto"})
    layout.write_config(run, stored, requested=asked)
    (tmp_path / "my.yaml").write_text(
        yaml.safe_dump(asked.to_dict() | {"batch": {"tokens_per_step": 128}})
    )
    done = run_program("train", "my.yaml", "--run-dir", "runs/gift", cwd=tmp_path)
    assert not (tmp_path / "imported").exists()
    if find_spec("torchao"):
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert "torchao" in done.stderr


def test_python_m_flatout_does_not_search_the_current_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert leave_current_folder([str(tmp_path), "b"]) == leave_current_folder(["", "b"]) == ["b"]
    assert leave_current_folder(["b", str(tmp_path)]) == ["b", str(tmp_path)]
    assert leave_current_folder([]) == []
    monkeypatch.chdir(ROOT)  # a checkout that is not installed contains flatout itself
    assert leave_current_folder([str(ROOT), "b"]) == ["b", str(ROOT)]


def test_importing_a_module_does_not_change_the_search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    load_reference("flatout.errors:FlatoutError")
    assert "" not in sys.path


INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            try:
                os.kill(os.getpid(), signal.{name})
            except BaseException as error:
                raise TypeError("not what was raised") from error
sys.meta_path.insert(0, Interrupt())
from flatout.__main__ import main
signal.signal(signal.SIGINT, {handler})
main()
"""


def interrupt(module, words, *, handler="signal.default_int_handler", name="SIGINT"):
    """Run a command that gets a signal while it imports a module in native code."""
    code = INTERRUPTED.format(module=module, handler=handler, name=name)
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("handler", "code", "shown"),
    [("signal.default_int_handler", 130, "Interrupted.\n"), ("signal.SIG_IGN", 0, "")],
    ids=["Ctrl+C", "ignored, as after nohup"],
)
def test_ctrl_c_while_flatout_is_imported_shows_no_traceback(handler, code, shown):
    done = interrupt("flatout.config.registry", ["--version"], handler=handler)
    assert (done.returncode, done.stderr) == (code, shown)
    assert done.stdout.startswith("flatout ") == (code == 0)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_while_torch_is_imported_shows_no_traceback(name, code):
    """Torch's native modules turn a KeyboardInterrupt into a TypeError."""
    done = interrupt("torch._VF", ["plan", "demo", "--json"], name=name)
    assert done.returncode == code
    assert json.loads(done.stdout)["exit_code"] == code
    last = "Next: Run the same command again.\n"
    assert done.stderr.endswith(("Interrupted.\n" if code == 130 else "Terminated.\n") + last)
    assert "Traceback" not in done.stderr
