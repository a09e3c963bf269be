"""A store in memory whose requests fail as a test asks."""

from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flatout.storage.remote import connection


class FaultyStore(MemoryFileSystem):
    """A store in memory at faulty://; `asked` lists the requests.

    Each request removes the first of `faults`: an error to raise, or None. `tags` returns what the
    description of a file has besides its size.
    """

    protocol = "faulty"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    faults: ClassVar[list] = []
    asked: ClassVar[list] = []
    tags: ClassVar = lambda content: {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def _ask(self, what, path):
        self.asked.append(f"{what} {self._strip_protocol(path)}")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault

    def _tagged(self, found):
        return found | (
            type(self).tags(self.store[found["name"]].getvalue()) if found["type"] == "file" else {}
        )

    def info(self, path, **kwargs):
        return self._tagged(super().info(path, **kwargs))

    def ls(self, path, detail=True, **kwargs):
        found = super().ls(path, detail=True, **kwargs)
        return [self._tagged(one) for one in found] if detail else [one["name"] for one in found]

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._ask("get", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def put_file(self, lpath, rpath, **kwargs):
        self._ask("put", rpath)
        super().put_file(lpath, rpath, **kwargs)


@pytest.fixture
def store(monkeypatch):
    """Return an empty FaultyStore, without pauses between requests."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    yield FaultyStore()
    for left in (FaultyStore.store, FaultyStore.faults, FaultyStore.asked):
        left.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    FaultyStore.tags = lambda content: {}
