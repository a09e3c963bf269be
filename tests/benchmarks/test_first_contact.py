"""The kit refuses wrong arguments and damaged results, runs the GPU tests, and packs itself."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.hardware import Gpu, probe

FOLDER = Path(__file__).parents[2] / "benchmarks"
H200 = replace(probe(), gpus=(Gpu("NVIDIA H200", 139.0, (9, 0), "580"),))
PARTS = sorted(path.name for path in FOLDER.glob("contact_*.py"))


def test_the_plan_lists_every_call_and_fits(kit, capsys):
    kit.main(["--plan"])
    output = capsys.readouterr().out
    assert all(float(seconds) < 540 for seconds in re.findall(r"steps, about (\d+) s", output))
    assert output.count("--call ") >= 4
    assert "there is no such entry" not in output


def test_a_missing_gpu_and_missing_arguments_are_errors(kit, monkeypatch, tmp_path):
    monkeypatch.setattr(kit, "probe", lambda: replace(probe(), gpus=()))
    with pytest.raises(SystemExit, match="--tiny"):
        kit.main(["--call", "1", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="--plan"):
        kit.main([])


@pytest.fixture
def called(kit, monkeypatch, tmp_path):
    """A function that makes a call without time for any step and returns its error."""

    def call(*words):
        with pytest.raises(SystemExit) as refused:
            kit.main(
                [
                    "--call",
                    "1",
                    "--tiny",
                    "--minutes",
                    "0",
                    "--results",
                    str(tmp_path / "out"),
                    *map(str, words),
                ]
            )
        return str(refused.value)

    monkeypatch.setattr(kit, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(kit.os, "environ", dict(kit.os.environ))
    return call


@pytest.mark.parametrize("name", ["contact.json", "throughput.json"])
@pytest.mark.parametrize("damage", [b"", b'{"tiny": true, "measure', b"[]", b'{"x": 1}', b"\xff"])
def test_damaged_results_are_refused_and_kept(called, tmp_path, name, damage):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    path.write_bytes(damage)
    assert re.search(rf"{name} is damaged.* Fix: ", called())
    assert path.read_bytes() == damage


def test_two_calls_cannot_write_to_one_directory(kit, called, tmp_path):
    with kit.locked(tmp_path / "out"):
        assert "Another call is writing to" in called()
    kit.main(["--call", "1", "--tiny", "--minutes", "0", "--results", str(tmp_path / "out")])


def test_wrong_directories_are_refused_at_once(called, tmp_path):
    assert re.search(r"manifest\.json\. Fix: ", called("--kit", tmp_path))
    assert re.search(r"no model\.py\. Fix: ", called("--nanogpt", tmp_path))
    assert re.search(r"matches nothing\. Fix: ", called("--only", "gpt3"))
    (tmp_path / "file").write_text("")
    assert re.search(
        r"file cannot be written: it is a file\. Fix: ", called("--results", tmp_path / "file")
    )
    assert re.search(r"cannot be written: .*\. Fix: ", called("--results", "/proc/flatout"))
    assert not (tmp_path / "out").exists()


def test_missing_results_are_copied_from_earlier_calls(kit, tmp_path):
    """This includes results that a killed call did not finish copying."""
    seed, out = tmp_path / "seed", tmp_path / "out"
    for folder, files in {
        seed: {"contact.json": "old", "throughput.json": "old", "a.part": ""},
        out: {"contact.json": "new"},
    }.items():
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    kit.copy_missing(seed, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "contact.json": "new",
        "throughput.json": "old",
    }


def test_a_missing_package_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(name='psutil')\n")
    done = subprocess.run(
        [sys.executable, FOLDER / "first_contact.py", "--plan"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.startswith("The package psutil is missing. Fix: ")) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "[gw3] [ 12%] FAILED tests/ops/test_gpu.py::test_a[x-1] ",
            ("FAILED", "tests/ops/test_gpu.py::test_a[x-1]"),
        ),
        (
            "tests/ops/test_gpu.py::test_b PASSED                     [  1%]",
            ("PASSED", "tests/ops/test_gpu.py::test_b"),
        ),
        (
            "tests/ops/test_gpu.py::test_c SKIPPED (needs an NVIDIA GPU)",
            ("SKIPPED", "tests/ops/test_gpu.py::test_c"),
        ),
        ("ERROR: not found", None),
    ],
)
def test_outcomes_of_tests_are_parsed(kit, line, found):
    match = importlib.import_module("contact_steps").OUTCOME.match(line)
    assert (match and (match[1] or match[4], match[2] or match[3])) == found


@pytest.mark.slow
def test_tests_that_finished_before_a_timeout_are_counted(kit, monkeypatch, tmp_path):
    steps = importlib.import_module("contact_steps")
    program = (
        "import time; print('t.py::a PASSED', 't.py::b FAILED [9%]', sep='\\n', flush=True);"
        " time.sleep(60)"
    )
    monkeypatch.setattr(steps, "GPU_TESTS", ("-c", program))
    monkeypatch.setattr(steps, "marked_files", lambda: ["t.py"])
    found = steps.gpu_tests(2.0, tiny=False)
    assert (found["status"], found["passed"], found["failed"]) == ("timed-out", 1, ["t.py::b"])
    monkeypatch.setattr(steps, "GPU_TESTS", ("-c", "raise SystemExit('no such marker')"))
    assert steps.gpu_tests(60.0, tiny=False)["failed"] == [
        "pytest exited with code 1: no such marker"
    ]
    monkeypatch.setattr(steps, "marked_files", list)
    assert steps.gpu_tests(60.0, tiny=False)["status"] == "failed"


@pytest.mark.slow
def test_the_environment_is_recorded(kit):
    found = importlib.import_module("contact_steps").environment(120.0, tiny=True)
    assert (found["status"], found["packages"]["torch"] is not None) == ("ok", True)
    assert found["flatout"].startswith("flatout ")


def test_a_pack_contains_missing_packages_and_prints_the_commands(kit, monkeypatch, tmp_path):
    packing = importlib.import_module("contact_pack")
    wheels = []

    def download(wanted, folder):
        wheels.extend(wanted)
        subprocess.run(
            [
                sys.executable,
                "-c",
                (
                    f"import zipfile; zipfile.ZipFile({str(folder / 'a-1-py3-none-any.whl')!r},"
                    " 'w').writestr('a.py', '')"
                ),
            ]
        )

    monkeypatch.setattr(packing, "download", download)
    (tmp_path / "model.py").write_text("class GPT: ...\n")
    folder = tmp_path / "kit"
    output = "\n".join(
        packing.pack(folder, nanogpt=tmp_path, commit="abc", code="one", minutes=9.0)
    )
    assert {"pydantic==2.14.3", "torchao==0.18.0"} <= {
        re.sub(r"==.*", "", name) + "==" + name.partition("==")[2] for name in wheels
    }
    assert (folder / "site" / "a.py").exists()
    assert (folder / "nanoGPT" / "model.py").exists()
    assert "--call 3 --kit" in output
    assert output.count("--minutes 9\n") == 4
    assert [packing.commit_of(folder, code=code) for code in ("one", "other")] == ["abc", "abc+"]
    with pytest.raises(SystemExit, match=r"no model\.py\. Fix: "):
        packing.pack(folder, nanogpt=tmp_path / "elsewhere", commit="abc", code="one", minutes=9.0)
    assert (folder / "site" / "a.py").exists()
    with pytest.raises(SystemExit, match=r"exceed the limit of 0\.001 MiB"):
        packing.pack(folder, nanogpt=None, commit="abc", code="one", minutes=9.0, max_mib=1e-3)


def test_every_packed_package_is_pinned(kit):
    packing = importlib.import_module("contact_pack")
    pins = packing.pinned((FOLDER.parent / "constraints.txt").read_text())
    assert [name for name in packing.PACKAGES if packing.normalised(name) not in pins] == []


@pytest.mark.parametrize("part", PARTS)
def test_a_part_run_as_a_script_names_the_command(part, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit, match=r"python benchmarks/first_contact\.py --help"):
        runpy.run_path(str(FOLDER / part), run_name="__main__")
    assert capsys.readouterr() == ("", "")
