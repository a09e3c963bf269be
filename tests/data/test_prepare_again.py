"""A prepare that was interrupted and run again."""

import os
import sys

import pytest
from prepared import Listener, content, prepared, write_rows

from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.sources import files
from flatout.data.sources.packed import NotHandedOut
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError, RunFailed
from flatout.storage.remote.connection import Unreachable


def stopping_source(folder, monkeypatch):
    """A source of six read tasks of two documents each that logs reads.

    Task 4 kills its process once a range is recorded and the file `stop` exists.
    """
    (folder / "stopping_source.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\n"
        "from flatout.data.sources import ReadTask\n"
        f"folder = Path({str(folder)!r})\n"
        "def read(number):\n"
        "    with (folder / 'log').open('a') as log:\n        log.write(f'{number}\\n')\n"
        "    if number == 4 and (folder / 'stop').exists():\n"
        "        while not any(folder.rglob('ranges/*.json')):\n            time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    yield f'document {number}'\n    yield f'and {number}'\n"
        "def stopping(more=''):\n    return [ReadTask(read, (number,), f'{number}{more}') for "
        "number in range(6)]\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "stopping_source", raising=False)


@pytest.mark.parametrize("error", [Unreachable, NotHandedOut], ids=lambda error: error.__name__)
def test_finished_ranges_survive_a_rejection_by_a_server_or_the_system(
    tmp_path, monkeypatch, error
):
    (tmp_path / "failing_source.py").write_text(
        f"from pathlib import Path\nfrom flatout.data.sources import ReadTask\nfrom "
        f"{error.__module__} import {error.__name__} as Refused\n"
        f"down = Path({str(tmp_path / 'down')!r})\n"
        "def read(number):\n"
        "    if number == 4 and down.exists():\n        raise Refused('The server does not "
        "answer.', fix='Ask again.')\n"
        "    yield f'document {number}'\n    yield f'and {number}'\n"
        "def failing():\n    return [ReadTask(read, (number,), f'{number}') for number in "
        "range(6)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_source", raising=False)
    options = Options(tokenizer="byte", split="hash 0.3", on_bad_row="skip")
    whole = prepare_dataset(["failing_source:failing"], tmp_path / "whole", options, workers=1)
    (tmp_path / "down").touch()
    with pytest.raises(error, match="does not answer"):
        prepare_dataset(["failing_source:failing"], tmp_path / "out", options, workers=1)
    assert len(list((tmp_path / ".out.part" / "ranges").glob("*.json"))) == 4
    (tmp_path / "down").unlink()
    again = prepare_dataset(["failing_source:failing"], tmp_path / "out", options, workers=1)
    assert again.manifest == whole.manifest


@pytest.mark.slow
def test_a_killed_prepare_resumes_and_repeats_no_work(tmp_path, monkeypatch):
    stopping_source(tmp_path, monkeypatch)
    options = Options(tokenizer="byte", split="hash 0.3")
    whole = prepare_dataset(["stopping_source:stopping"], tmp_path / "whole", options, workers=2)
    (tmp_path / "log").unlink()
    (tmp_path / "stop").touch()
    with pytest.raises(RunFailed, match="it continues where it stopped"):
        prepare_dataset(["stopping_source:stopping"], tmp_path / "out", options, workers=2)
    done = {path.stem for path in (tmp_path / ".out.part" / "ranges").glob("*.json")}
    assert done
    assert not (tmp_path / "out").exists()
    (tmp_path / "stop").unlink()
    before = (tmp_path / "log").read_text().splitlines()
    listener = Listener()
    made = prepare_dataset(
        ["stopping_source:stopping"], tmp_path / "out", options, workers=1, progress=listener
    )
    again = (tmp_path / "log").read_text().splitlines()[len(before) :]
    assert sorted(again) == sorted(
        str(number) for number in range(6) if f"{number:06d}" not in done
    )
    assert listener.said == [f"{len(done)} of 6 ranges are done. {6 - len(done)} remain."]
    assert made.manifest == whole.manifest
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / ".out.part").exists()


def test_a_resumed_prepare_keeps_its_trained_tokenizer(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 700)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1400)
    whole = prepared(rows, out=tmp_path / "whole", tokenizer="train:300", workers=1)
    publish = WorkDir.publish
    monkeypatch.setattr(
        WorkDir, "publish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        prepared(rows, out=tmp_path / "out", tokenizer="train:300", workers=1)
    monkeypatch.setattr(WorkDir, "publish", publish)
    listener = Listener()
    prepared(rows, out=tmp_path / "out", tokenizer="train:300", workers=1, progress=listener)
    assert [task.split()[0] for task in listener.tasks] == ["Tokenising"], (
        "neither counted nor trained again"
    )
    assert content(tmp_path / "out") == content(whole.path)


@pytest.fixture
def spoiled(tmp_path, monkeypatch):
    """A file of 40 rows in ranges of about 5, of which the 33rd is not text."""
    monkeypatch.setattr(files, "PART_BYTES", 100)
    monkeypatch.setattr(make, "range_bytes", lambda _: 100)
    rows = [{"text": f"row {number:09d}"} for number in range(40)]
    rows[32] = {"text": 7}
    return write_rows(tmp_path / "rows.jsonl", rows)


def finished(tmp_path):
    """Return the numbers of the finished ranges, and when each was written."""
    records = (tmp_path / ".out.part" / "ranges").glob("*.json")
    return {path.name: path.stat().st_mtime_ns for path in records}


def test_skipping_a_bad_row_continues_the_work_that_it_ended(tmp_path, spoiled):
    options = {"out": tmp_path / "out", "split": "hash 0.3", "workers": 1}
    with pytest.raises(DataError, match="line 33 has 'text'") as found:
        prepared(spoiled, **options)
    assert "finished parts are kept" in found.value.__notes__[0]
    before = finished(tmp_path)
    assert len(before) > 4
    with pytest.raises(DataError, match="line 33 has 'text'"):
        prepared(spoiled, **options)
    assert finished(tmp_path) == before
    listener = Listener()
    made = prepared(spoiled, on_bad_row="skip", progress=listener, **options)
    assert listener.said[0].startswith(f"{len(before)} of ")
    assert made.manifest.documents == 39
    whole = prepared(spoiled, on_bad_row="skip", **options | {"out": tmp_path / "whole"})
    assert content(tmp_path / "out") == content(whole.path)


@pytest.mark.parametrize("change", ["text", "field"])
def test_after_a_bad_row_a_corrected_text_or_option_starts_over(tmp_path, spoiled, change):
    options = {"out": tmp_path / "out", "split": "hash 0.3", "workers": 1}
    with pytest.raises(DataError, match="line 33"):
        prepared(spoiled, **options)
    assert finished(tmp_path)
    if change == "text":
        rows = [{"text": f"row {number:09d}"} for number in range(40)]
        made = prepared(write_rows(spoiled, rows), **options)
    else:
        made = prepared(spoiled, max_documents=30, **options)
    assert made.manifest.documents == (40 if change == "text" else 30)


def test_rows_that_were_skipped_are_reported_when_bad_rows_are_no_longer(
    tmp_path, spoiled, monkeypatch
):
    publish = WorkDir.publish
    monkeypatch.setattr(
        WorkDir, "publish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    options = {"out": tmp_path / "out", "split": "hash 0.3", "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        prepared(spoiled, on_bad_row="skip", **options)
    monkeypatch.setattr(WorkDir, "publish", publish)
    with pytest.raises(DataError, match="line 33 has 'text'"):
        prepared(spoiled, **options)
    assert prepared(spoiled, on_bad_row="skip", **options).manifest.documents == 39


def test_a_dataset_without_bad_rows_is_what_skipping_them_gives(rows, tmp_path):
    prepared(rows, out=tmp_path / "out")
    assert prepared(rows, out=tmp_path / "out", on_bad_row="skip").existed


def test_leftovers_of_a_finished_dataset_are_removed(rows, tmp_path):
    prepared(rows, out=tmp_path / "out")
    (tmp_path / ".out.part" / "ranges").mkdir(parents=True)
    (tmp_path / ".out.part" / "ranges" / "000000.json").write_text("{}")
    assert prepared(rows, out=tmp_path / "out").existed
    assert not (tmp_path / ".out.part").exists()


@pytest.mark.parametrize("step", ["Counting documents", "Training"])
def test_a_second_prepare_into_the_same_directory_is_rejected_early(rows, tmp_path, step):
    options = Options(tokenizer="train:300")
    refused = []

    class Meddler(Listener):
        def task(self, what, **named):
            if what.startswith(step):
                with pytest.raises(DataError, match=r"Another process is writing .*out"):
                    prepare_dataset([str(rows)], tmp_path / "out", options)
                refused.append(what)
            return super().task(what, **named)

    prepare_dataset([str(rows)], tmp_path / "out", options, progress=Meddler())
    assert len(refused) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_a_dataset_that_another_process_finishes_meanwhile_is_kept(rows, tmp_path, monkeypatch):
    options = Options(tokenizer="byte")
    claim = WorkDir.claim

    def late(work):
        monkeypatch.setattr(WorkDir, "claim", claim)
        prepare_dataset([str(rows)], tmp_path / "out", options)
        claim(work)

    monkeypatch.setattr(WorkDir, "claim", late)
    listener = Listener()
    assert prepare_dataset([str(rows)], tmp_path / "out", options, progress=listener).existed
    assert "Nothing to do" in listener.said[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_a_failed_start_leaves_no_directory(rows, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "far" / "away" / "out"
    for call in (
        lambda: prepared(rows, out=out, tokenizer="nosuch"),
        lambda: prepare_dataset([str(rows)], out, Options(tokenizer="nosuch"), part=WorkPart(1, 2)),
    ):
        with pytest.raises(DataError, match="nosuch"):
            call()
        assert sorted(tmp_path.rglob("*")) == before


def test_a_mount_point_is_rejected_before_anything_is_read(rows, tmp_path, monkeypatch):
    out = tmp_path / "volume"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(out))
    listener = Listener()
    with pytest.raises(DataError, match=r"volume is a mount point.*--out .*volume/NAME"):
        prepared(rows, out=out, progress=listener)
    assert listener.tasks == []
    with pytest.raises(DataError, match="is a mount point"):
        DatasetWriter(out, make_tokenizer("byte", lambda _: ()))
    made = prepared(rows, out=out / "NAME")
    for file in made.path.iterdir():
        file.rename(out / file.name)
    assert prepared(rows, out=out).existed, "a dataset mounted there is complete"


def test_rewritten_text_is_detected_by_its_mtime(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fingerprint", lambda *_: "of blocks that are the same")
    monkeypatch.setattr(files, "PART_BYTES", 700)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1400)
    options, work = Options(tokenizer="byte", split="hash 0.1"), tmp_path / ".out.part"
    prepare_dataset([str(rows)], tmp_path / "out", options, part=WorkPart(1, 2))
    before = rows.stat()
    rows.write_text(rows.read_text().replace("row 7 ", "row X "))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert rows.stat().st_size == before.st_size
    calls = (
        lambda: prepare_dataset([str(rows)], tmp_path / "out", options, part=WorkPart(2, 2)),
        lambda: prepare_dataset([str(rows)], tmp_path / "out", options, join=True),
        lambda: prepare_dataset([str(rows)], tmp_path / "out", options),
    )
    for call in calls:
        with pytest.raises(
            DataError,
            match=rf"The text has changed since the work in {work} started.*remove the "
            rf"directory {work}",
        ):
            call()
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not prepare_dataset([str(rows)], tmp_path / "out", options).existed
