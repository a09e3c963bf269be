"""A disk that rejects a run's small files ends it with a message, except for exit_code."""

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.errors import DiskFull, RunFailed
from flatout.training.checkpoint import catalog, savers
from flatout.training.run import run_training
from flatout.training.run_dir import layout, runlog
from flatout.training.run_dir.runlog import Lines

pytestmark = pytest.mark.slow


def refusing(error):
    def refuse(*_args, **_kwargs):
        raise OSError(error, os.strerror(error))

    return refuse


def test_a_run_whose_exit_code_cannot_be_written_still_finishes(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        layout,
        "write_text",
        lambda path, text: (
            refusing(errno.ENOSPC)() if path.name == layout.EXIT_CODE else path.write_text(text)
        ),
    )
    assert run_training(tiny_config(train__steps=2), tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize(
    ("error", "fix"),
    [(errno.ENOSPC, "Free space"), (errno.EIO, "failed to read or write")],
    ids=["full", "broken"],
)
def test_a_rejected_summary_is_named_and_the_same_command_completes_the_run(
    error, fix, tiny_config, tmp_path, monkeypatch
):
    config, write = tiny_config(train__steps=2), os.write

    def reject_the_end(descriptor, data):
        return refusing(error)() if b'"event": "end"' in data else write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(runlog, "os", SimpleNamespace(**vars(os) | {"write": reject_the_end}))
        with pytest.raises(RunFailed, match="Cannot write") as failed:
            run_training(config, tmp_path / "run")
    assert fix in failed.value.fix
    assert run_training(config, tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_lines_that_the_disk_rejects_are_written_later_and_training_continues(
    name, tiny_config, tmp_path, monkeypatch, messages, records, events
):
    """The disk rejects the file from its third line to its sixth, of which it takes a part."""
    write, tries = os.write, []

    def sometimes(descriptor, data):
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            return write(descriptor, data)
        tries.append(len(data))
        if len(tries) == 3:
            return write(descriptor, data[:5])
        if len(tries) in range(4, 7):
            refusing(errno.ENOSPC)()
        return write(descriptor, data)

    run = tmp_path / "run"
    monkeypatch.setattr(runlog, "os", SimpleNamespace(**vars(os) | {"write": sometimes}))
    assert run_training(tiny_config(), run, progress=messages)["steps"] == 6
    assert len(tries) > 7
    assert [record["step"] for record in records(run) if "train/loss" in record] == [*range(1, 7)]
    assert all(len(events(run, kind)) == 1 for kind in ("start", "end", "refused"))
    (said,) = (line for line in messages.lines if name in line)
    assert "cannot be written (No space left on device). Training continues" in said


def test_a_disk_that_never_accepts_the_records_costs_only_them(
    tiny_config, tmp_path, monkeypatch, messages
):
    write = os.write

    def reject_records(descriptor, data):
        is_record = os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl")
        return refusing(errno.ENOSPC)() if is_record else write(descriptor, data)

    monkeypatch.setattr(runlog, "os", SimpleNamespace(**vars(os) | {"write": reject_records}))
    result = run_training(tiny_config(), tmp_path / "run", progress=messages)
    assert result["steps"] == 6
    assert any("metrics.jsonl lacks lines" in line for line in messages.lines)


def test_a_line_that_a_kill_left_unfinished_stays_apart(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "sta')
    events = Lines(tmp_path / "events.jsonl")
    events.append({"event": "resume"})
    events.close()
    assert (tmp_path / "events.jsonl").read_text().splitlines()[1:] == ['{"event": "resume"}']


def test_a_full_disk_in_a_save_leaves_training_and_earlier_checkpoints(
    tiny_config, tmp_path, monkeypatch, messages, events
):
    write = savers.write_share

    def full(snapshot, temporary):
        if snapshot.documents[catalog.STATE]["step"] == 4:
            refusing(errno.ENOSPC)()
        write(snapshot, temporary)

    monkeypatch.setattr(savers, "write_share", full)
    config = tiny_config(checkpoint__every_steps=2, checkpoint__keep=9)
    assert run_training(config, tmp_path / "run", progress=messages)["steps"] == 6
    assert catalog.steps(tmp_path / "run") == [2, 6]
    (failed,) = events(tmp_path / "run", "save_failed")
    assert failed["text"].startswith("At step 4, a checkpoint cannot write its files: [Errno 28]")
    assert " free. Training continues" in failed["text"]
    assert failed["text"].endswith("Training continues. The newest checkpoint is that of step 2.")
    assert failed["text"] in messages.lines


def test_a_limit_of_file_size_is_not_called_a_full_disk(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(savers, "write_share", lambda *_: refusing(errno.EFBIG)())
    with pytest.raises(DiskFull, match=r"^At step 6, a checkpoint cannot write") as raised:
        run_training(tiny_config(), tmp_path / "run")
    assert "are free" not in raised.value.what
    assert "`ulimit -f`" in raised.value.fix


def test_a_full_disk_while_locking_is_named_and_leaves_nothing(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(train__steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refusing(errno.ENOSPC))
        with pytest.raises(RunFailed, match="Cannot write"):
            run_training(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run_training(config, tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EBUSY], ids=errno.errorcode.get)
def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    number, tiny_config, tmp_path, monkeypatch
):
    """NFS keeps a file that a process reads (ENOTEMPTY), SMB one that is open (EBUSY)."""
    config = tiny_config(checkpoint__every_steps=1, checkpoint__keep=1, checkpoint__best=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refusing(number))
        assert run_training(config, tmp_path / "run")["steps"] == 6
    folder = tmp_path / "run" / "checkpoints"
    assert catalog.steps(tmp_path / "run") == [6]
    assert any(".part-" in path.name for path in folder.iterdir())
    run_training(config, tmp_path / "run")
    assert [path.name for path in folder.iterdir()] == ["step-6"], "swept at the next start"


def test_a_file_system_that_cannot_sync_a_directory_is_used_without(
    tiny_config, tmp_path, monkeypatch
):
    fsync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refusing(errno.EINVAL)()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    assert run_training(tiny_config(), tmp_path / "run")["steps"] == 6


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EBUSY, "Another process uses files there"),
        (errno.EXDEV, "The file system there lacks this operation"),
        (errno.EMFILE, "`ulimit -n 4096`"),
        (errno.ENOSPC, "Free space"),
    ],
    ids=["EBUSY", "EXDEV", "EMFILE", "ENOSPC"],
)
def test_only_a_full_disk_is_told_to_free_space(number, fix, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(savers, "write_share", lambda *_: refusing(number)())
    with pytest.raises(RunFailed) as raised:
        run_training(tiny_config(), tmp_path / "run")
    assert fix in raised.value.fix
    assert ("Free space" in raised.value.fix) == (number == errno.ENOSPC)


HERE = Path(__file__).parent
NETWORK = (errno.EBUSY, errno.ENOTEMPTY, errno.EXDEV, errno.ESTALE, errno.EOPNOTSUPP, errno.EPERM)
"""What file systems of a network, of containers and of other systems answer."""
DISKS = {errno.ENOSPC: "full", errno.EIO: "broken"} | dict.fromkeys(NETWORK, "network")
SMALL = [
    *("model.num_layers=1", "model.d_model=16", "model.num_heads=1", "data.seq_len=32"),
    *("batch.rows_per_device=4", "batch.tokens_per_step=128", "train.steps=2", "train.device=cpu"),
    *("train.eval_every=1", "train.eval_tokens=128", "log.every=1", "speedups=none"),
    *("checkpoint.every_steps=1", "checkpoint.keep=1"),
]


@pytest.fixture(scope="session")
def refusing_disk(tmp_path_factory):
    """Return the path of a library that, when preloaded, rejects one file operation."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("disk") / "refusing_disk.so"
    options = ["-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(["cc", *options, str(HERE / "refusing_disk.c"), "-ldl"], check=True)
    return library


def run_with_each_operation_refused(survived, library, disk, error, start, stride, *words):
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": str(HERE.parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [HERE / "refused_files.py", disk, error, start, stride, *words]
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *problems, counts = done.stdout.splitlines()
    refused, wrong = map(int, re.findall(r"\d+", counts))
    assert wrong == 0 or problems, done.stdout
    survived(DISKS[error], refused, problems[:wrong])


@pytest.mark.faults
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("share", range(4))
def test_a_run_ends_cleanly_whichever_file_operation_is_rejected(
    error, share, refusing_disk, tiny_set, tmp_path, survived
):
    disk = tmp_path / "disk"
    words = ["train", "shakespeare-char", f"data.path={tiny_set}", "--run-dir", disk / "run"]
    words += ["--json", *SMALL]
    run_with_each_operation_refused(survived, refusing_disk, disk, error, share, 4, *words)


@pytest.mark.faults
@pytest.mark.parametrize("error", NETWORK, ids=errno.errorcode.get)
def test_a_run_on_a_network_disk_ends_cleanly_whichever_file_operation_is_rejected(
    error, refusing_disk, tiny_set, tmp_path, survived
):
    disk = tmp_path / "disk"
    words = ["train", "shakespeare-char", f"data.path={tiny_set}", "--run-dir", disk / "run"]
    words += ["--json", *SMALL]
    run_with_each_operation_refused(survived, refusing_disk, disk, error, 0, 4, *words)


@pytest.mark.faults
@pytest.mark.parametrize("error", DISKS, ids=errno.errorcode.get)
def test_a_prepare_ends_cleanly_whichever_file_operation_is_rejected(
    error, refusing_disk, tmp_path, survived
):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    disk = tmp_path / "disk"
    words = ["prepare", tmp_path / "book.txt", "--out", disk / "data", "--tokenizer", "byte"]
    words += ["--workers", "1", "--json"]
    run_with_each_operation_refused(survived, refusing_disk, disk, error, 0, 1, *words)


@pytest.mark.faults
@pytest.mark.parametrize("error", DISKS, ids=errno.errorcode.get)
def test_an_export_ends_cleanly_whichever_file_operation_is_rejected(
    error, refusing_disk, fox_run, tmp_path, survived
):
    disk = tmp_path / "disk"
    words = ["export", fox_run[0] / "runs" / "fox", "--out", disk / "data", "--overwrite", "--json"]
    run_with_each_operation_refused(survived, refusing_disk, disk, error, 0, 1, *words)
