"""Reading a file of torch.save is bounded by its size, and any damage gives a named error."""

import os
import pickle
import zipfile

import pytest
import torch

from flatout.data.prepare.import_tokens import ImportOptions, import_tokens
from flatout.data.token_formats import Reading
from flatout.data.token_formats.chunks import METADATA, files, read_chunk
from flatout.errors import DataError

TOKENS = torch.arange(40)


def saved(path, what=TOKENS, **options):
    torch.save(what, path, **options)
    return path


def read(path):
    return read_chunk(path, Reading(vocab_size=300))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("tensor", [TOKENS, TOKENS[3:20], TOKENS[::2], TOKENS.int()], ids=str)
def test_a_tensor_is_read_back(tmp_path, zipped, tensor):
    path = saved(tmp_path / "a.pt", tensor, _use_new_zipfile_serialization=zipped)
    assert read(path).tolist() == tensor.tolist()


@pytest.mark.parametrize("zipped", [True, False])
def test_any_changed_byte_gives_a_tensor_or_a_named_error(tmp_path, zipped):
    whole = saved(tmp_path / "a.pt", _use_new_zipfile_serialization=zipped).read_bytes()
    start = whole.index(b"ctorch._utils")
    messages = []
    for offset in range(start - 2, start + 140):
        for bits in (0x01, 0x40, 0xFF):
            (tmp_path / "a.pt").write_bytes(
                whole[:offset] + bytes([whole[offset] ^ bits]) + whole[offset + 1 :]
            )
            try:
                read(tmp_path / "a.pt")
            except DataError as error:
                messages.append(error.what)
    assert len(messages) > 100
    assert all(str(tmp_path / "a.pt") in what and "weights_only" not in what for what in messages)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "call",
    [(bytearray, 1 << 40), (torch.LongTensor, 1 << 40), (set, (1,)), (os.system, "true")],
    ids=lambda call: call[0].__name__,
)
def test_functions_that_allocate_by_a_number_in_the_file_are_never_called(tmp_path, zipped, call):
    path = saved(tmp_path / "a.pt", [Calls(*call)], _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        DataError,
        match=rf"contains more than a tensor: it names \w+\.{call[0].__name__}, and code in a "
        rf"file is never run",
    ):
        read(path)


def rewritten(path, change):
    """Rewrite the archive; `change` returns the content and compression of each entry."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, *change(name, content))
    return path


def test_a_compressed_archive_is_rejected(tmp_path):
    path = saved(tmp_path / "a.pt", torch.zeros(1_000_000, dtype=torch.int64))
    rewritten(path, lambda _, content: (content, zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match="is compressed, or its entries overlap"):
        read(path)


def test_a_pickle_too_large_for_a_tensor_is_rejected(tmp_path):
    path = saved(tmp_path / "a.pt")
    rewritten(
        path,
        lambda name, content: (
            pickle.dumps([0] * 600_000) if name.endswith("data.pkl") else content,
            zipfile.ZIP_STORED,
        ),
    )
    with pytest.raises(DataError, match="contains a pickle of 1,2"):
        read(path)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_special_files_are_rejected_without_waiting(tmp_path, kind):
    path = tmp_path / "chunk_000000.pt"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"chunk_000000\.pt is not a regular file"):
        read(path)
    with pytest.raises(DataError, match=r"chunk_000000\.pt is not a regular file"):
        import_tokens(tmp_path, tmp_path / "out", ImportOptions("byte"))
    assert files(tmp_path) == [path]


def test_special_files_as_metadata_are_rejected_without_waiting(tmp_path):
    saved(tmp_path / "chunk_000000.pt")
    os.mkfifo(tmp_path / METADATA)
    with pytest.raises(DataError, match=r"metadata\.json is not a regular file"):
        import_tokens(tmp_path, tmp_path / "out", ImportOptions("byte"))
