"""What the user named for a run is stored per run directory. A flag is not remembered."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from gifts import WAYS

from flatout.config import trust
from flatout.errors import UntrustedCode
from flatout.inference.load import load_run
from flatout.training.run_dir import layout

REFERENCES = {"runs.gift.weights:Model"}


def test_the_flag_counts_for_one_command(gift, home):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    load_run("gift", trust_code=True)
    assert gift.ran
    with pytest.raises(UntrustedCode):
        load_run("gift")
    assert not (home / ".cache" / "flatout" / "trusted").exists()


def test_references_are_stored_outside_the_run(gift, home):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    before = {path for path in gift.folder.rglob("*") if "__pycache__" not in path.parts}
    assert trust.remember(gift.folder, REFERENCES)
    load_run("gift")
    assert {path for path in gift.folder.rglob("*") if "__pycache__" not in path.parts} == before
    (kept,) = trust.memory().iterdir()
    assert kept.is_relative_to(home)
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("change", ["a copy", "moved", "another reference", "replaced"])
def test_another_run_is_not_trusted(gift, change, tmp_path):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    trust.remember(gift.folder, REFERENCES)
    layout.trusted_config(gift.folder)
    folder = gift.folder
    if change == "a copy":
        folder = shutil.copytree(folder, tmp_path / "runs" / "copy")
    elif change == "moved":
        folder = folder.rename(tmp_path / "runs" / "moved")
    elif change == "another reference":
        gift.names({"optim": {"kind": "runs.gift.weights:Optimizer"}})
    else:
        shutil.rmtree(folder)
        folder.mkdir()
        stored = "{model: {kind: 'runs.gift.other:Model'}}"
        (folder / "config.yaml").write_text(f"requested: {{}}\nresolved: {stored}\n...\n")
    with pytest.raises(UntrustedCode):
        layout.trusted_config(folder)


def test_a_link_to_a_trusted_run_is_that_run(gift, tmp_path):
    trust.remember(gift.folder, REFERENCES)
    (tmp_path / "link").symlink_to(gift.folder)
    trust.require_trusted(tmp_path / "link", REFERENCES)


def test_references_of_an_earlier_command_stay(gift):
    trust.remember(gift.folder, {"a.b:C"})
    trust.remember(gift.folder, {"a.b:D"})
    trust.require_trusted(gift.folder, {"a.b:C", "a.b:D"})


DAMAGED = {
    "empty": "",
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no references": '{"format_version": 2}',
    "no list of references": '{"format_version": 2, "references": "runs.gift.weights:Model"}',
    "numbers": '{"format_version": 2, "references": [1]}',
    "a newer format": '{"format_version": 3, "references": ["runs.gift.weights:Model"]}',
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_trust_file_is_ignored_and_replaced(gift, how):
    trust.remember(gift.folder, REFERENCES)
    (kept,) = trust.memory().iterdir()
    kept.write_bytes(DAMAGED[how] if isinstance(DAMAGED[how], bytes) else DAMAGED[how].encode())
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.folder, REFERENCES)
    trust.remember(gift.folder, REFERENCES)
    trust.require_trusted(gift.folder, REFERENCES)


@pytest.mark.parametrize(
    "problem",
    [
        "a file that others may write",
        "a directory that others may write",
        "a link",
        "a pipe",
        "a link instead of the directory",
    ],
)
def test_a_trust_file_that_others_may_write_is_ignored(gift, problem, tmp_path):
    trust.remember(gift.folder, REFERENCES)
    memory = trust.memory()
    (kept,) = memory.iterdir()
    if problem == "a file that others may write":
        kept.chmod(0o666)
    elif problem == "a directory that others may write":
        memory.chmod(0o777)
    elif problem == "a link":
        kept.symlink_to(kept.rename(tmp_path / "elsewhere"))
    elif problem == "a pipe":
        kept.unlink()
        os.mkfifo(kept)
    else:
        memory.symlink_to(memory.rename(tmp_path / "elsewhere"))
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.folder, REFERENCES)


def test_without_a_writable_home_nothing_is_stored(gift, home):
    (home / ".cache").write_text("a file")
    assert not trust.remember(gift.folder, {"a.b:C"})
    with pytest.raises(UntrustedCode, match="not found here"):
        trust.require_trusted(gift.folder, {"a.b:C"})


def test_concurrent_writers_leave_one_valid_file(gift):
    references = [{"a.b:C", f"a.b:D{number}"} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda some: trust.remember(gift.folder, some), references * 4))
    (kept,) = trust.memory().iterdir()
    assert "a.b:C" in json.loads(kept.read_text())["references"]
    trust.require_trusted(gift.folder, {"a.b:C"})


def test_trust_files_are_in_the_cache(home):
    assert trust.memory() == home / ".cache" / "flatout" / "trusted"


def test_trust_files_follow_the_cache_directory(gift, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "elsewhere"))
    trust.remember(gift.folder, {"a.b:C"})
    assert len(list((tmp_path / "elsewhere" / "trusted").iterdir())) == 1
    monkeypatch.delenv("FLATOUT_CACHE")
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.folder, {"a.b:C"})
