"""Trust is stored per run directory, and ends when the run or the trust file changes."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from gifts import WAYS

from flatout import trust
from flatout.errors import UntrustedCode
from flatout.inference.load import load_run
from flatout.training.run_dir import layout


def test_trust_is_given_once_and_stored_outside_the_run(gift, home):
    gift.names(WAYS["model.kind"]("runs.gift.weights"))
    before = {path for path in gift.folder.rglob("*") if "__pycache__" not in path.parts}
    load_run("gift", trust_code=True)
    assert gift.ran
    assert {path for path in gift.folder.rglob("*") if "__pycache__" not in path.parts} == before
    load_run("gift")
    (kept,) = trust.memory().iterdir()
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
    references = layout.read_config(gift.folder).references()
    trust.require_trusted(gift.folder, references, trust_code=True)
    trust.require_trusted(gift.folder, references)
    folder = gift.folder
    if change == "a copy":
        folder = shutil.copytree(folder, tmp_path / "runs" / "copy")
    elif change == "moved":
        folder = folder.rename(tmp_path / "runs" / "moved")
    elif change == "another reference":
        gift.names({"optim": {"kind": "runs.gift.weights:Optimizer"}})
    elif change == "another setting":
        gift.names({"train": {"seed": 5}})
    elif change == "other code":
        (folder / "weights.py").write_text("import os\n")
    elif change == "new code":
        (folder / "torch.so").write_bytes(b"")
    elif change == "a link to a folder":
        (folder / "helpers").symlink_to(tmp_path)
    elif change == "replaced":
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "home", folder)
        (folder / "config.yaml").write_text("model: {kind: 'runs.gift.weights:Model'}\n")
    with pytest.raises(UntrustedCode) as refused:
        layout.trusted_config(folder)
    assert ("was trusted before" in refused.value.what) == (change not in {"a copy", "moved"})


def test_a_link_to_a_trusted_run_is_that_run(gift, tmp_path):
    trust.require_trusted(gift.folder, {"runs.gift.weights:Model"}, trust_code=True)
    (tmp_path / "link").symlink_to(gift.folder)
    trust.require_trusted(tmp_path / "link", {"runs.gift.weights:Model"})


DAMAGED = {
    "empty": "",
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no references": '{"format_version": 1}',
    "no list of references": '{"format_version": 1, "references": "runs.gift.weights:Model"}',
    "numbers": '{"format_version": 1, "references": [1]}',
    "a newer format": '{"format_version": 2, "references": ["runs.gift.weights:Model"]}',
    "no digests": '{"format_version": 1, "references": ["runs.gift.weights:Model"]}',
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_trust_file_is_ignored_and_replaced(gift, how):
    references = {"runs.gift.weights:Model"}
    trust.require_trusted(gift.folder, references, trust_code=True)
    (kept,) = trust.memory().iterdir()
    kept.write_bytes(DAMAGED[how] if isinstance(DAMAGED[how], bytes) else DAMAGED[how].encode())
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.folder, references)
    trust.require_trusted(gift.folder, references, trust_code=True)
    trust.require_trusted(gift.folder, references)


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
    references = {"runs.gift.weights:Model"}
    trust.require_trusted(gift.folder, references, trust_code=True)
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
        trust.require_trusted(gift.folder, references)


def test_without_a_writable_home_the_flag_is_needed_each_time(gift, home, monkeypatch):
    (home / ".cache").write_text("a file")
    trust.require_trusted(gift.folder, {"a.b:C"}, trust_code=True)
    with pytest.raises(UntrustedCode, match="not found here"):
        trust.require_trusted(gift.folder, {"a.b:C"})
    assert not trust.remember(gift.folder, {"a.b:C"})


def test_concurrent_writers_leave_one_valid_file(gift):
    references = [{"a.b:C", f"a.b:D{number}"} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda some: trust.remember(gift.folder, some), references * 4))
    (kept,) = trust.memory().iterdir()
    assert set(json.loads(kept.read_text())["references"]) in references
    trust.require_trusted(gift.folder, {"a.b:C"})


def test_trust_files_are_in_the_cache(home):
    assert trust.memory() == home / ".cache" / "flatout" / "trusted"


def test_trust_files_follow_the_cache_directory(gift, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "elsewhere"))
    trust.require_trusted(gift.folder, {"a.b:C"}, trust_code=True)
    assert len(list((tmp_path / "elsewhere" / "trusted").iterdir())) == 1
    monkeypatch.delenv("FLATOUT_CACHE")
    with pytest.raises(UntrustedCode):
        trust.require_trusted(gift.folder, {"a.b:C"})
