import json
import subprocess
import sys

import fsspec
import numpy as np
import pytest

from flatout.commands.verify import COMMAND, verify
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer("byte", lambda _: iter([]))
    with DatasetWriter(tmp_path / "set", vocab_size=tokenizer.vocab_size) as writer:
        for split in (writer.train, writer.val):
            split.append(np.array([72, 105, tokenizer.eot_id] * 50), [3, 150], text_bytes=100)
        writer.finish(tokenizer=tokenizer, source={}, split_rule="named")
    return tmp_path / "set"


def test_an_intact_dataset_is_ok(folder):
    result = verify(folder)
    assert result.ok
    assert result.exit_code == 0
    assert result.summary().startswith(f"{folder} is intact: 4 blocks of 5 files read")


@pytest.mark.slow
def test_a_damaged_dataset_gives_exit_code_1_and_lists_the_problems(folder):
    shard = folder / "train-00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "verify", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] is False
    assert found["problems"] == [
        f"{shard}, byte 0: the {shard.stat().st_size}-byte block at this offset fails its checksum."
    ]
    assert "is damaged: 1 problem" in done.stderr
    assert "Fix:" in done.stderr


def test_a_dataset_at_a_url_is_verified(folder):
    result = verify(in_memory(folder))
    assert result.summary().startswith("memory://verify/set is intact: 4 blocks of 5 files read")
    with pytest.raises(DataError, match="must not contain a user, a password"):
        verify("s3://key:hidden@bucket/set")


def in_memory(folder):
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.put_file(str(path), f"memory://verify/set/{path.name}")
    return "memory://verify/set"


def test_a_directory_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match="flatout prepare"):
        verify(tmp_path)


@pytest.mark.slow
def test_verify_does_not_import_torch(folder):
    code = (
        f"import sys; from flatout.commands.verify import verify; verify({str(folder)!r}); "
        f"sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_and_its_example():
    assert COMMAND.call is verify
