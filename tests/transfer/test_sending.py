"""Directories at a URL that are written to."""

import errno
import os

import pytest

from flatout.errors import DataError
from flatout.transfer import connection
from flatout.transfer.sending import RemoteFolder


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_a_directory_that_cannot_be_written_is_not_tried_again(tmp_path, monkeypatch, number):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    pauses = []
    monkeypatch.setattr(connection, "sleep", pauses.append)
    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(DataError, match=f"Cannot write file://.*{os.strerror(number)}") as raised:
        folder.put_text("a", "b")
    assert raised.value.fix == "Make it writable for this user, or name another directory."
    assert pauses == []


def test_credentials_that_only_read_are_a_possible_cause(monkeypatch, tmp_path):
    folder = RemoteFolder(f"file://{tmp_path}/there")
    folder.url = "gs://bucket/there"

    def refuse(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(DataError, match=r"Writing gs://bucket/there is not allowed") as raised:
        folder.put_text("a", "b")
    assert raised.value.fix.endswith("The account must be allowed to write.")
