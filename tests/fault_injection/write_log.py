"""What a disk holds after a power loss: a recorded log of writes, replayed up to any call.

A file that was written but not synced, and a name that was made but whose directory was not
synced, need not survive. `TRACE` are the options of strace that record the log.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TRACE = (
    "-y",
    "-xx",
    "-s",
    str(1 << 24),
    "-e",
    "trace=openat,creat,write,pwrite64,writev,lseek,sendfile,copy_file_range,ftruncate,fallocate,"
    "rename,renameat,renameat2,link,linkat,symlink,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,"
    "fdatasync",
)
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
DESCRIPTOR = re.compile(r"(?:(\d+)|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
Tree = dict[str, bytes | None]
"""The content of each file by its path, and None for each directory."""


def text(hexadecimal: str) -> bytes:
    """Return the bytes that strace -xx wrote."""
    return bytes.fromhex(hexadecimal.replace("\\x", ""))


@dataclass(eq=False)
class Inode:
    """A file or a directory: as programs see it, and as it is on the disk."""

    names: dict[str, Inode] | None = None
    """The entries of a directory; None for a file."""
    data: bytearray = field(default_factory=bytearray)
    synced_names: dict[str, Inode] = field(default_factory=dict)
    synced_data: bytes = b""
    _content: bytes | None = None

    @property
    def content(self) -> bytes:
        """The data; trees share it until it changes."""
        if self._content is None:
            self._content = bytes(self.data)
        return self._content

    def put(self, offset: int, data: bytes) -> None:
        """Write into a file; zeros fill a gap before `offset`."""
        self.data[len(self.data) :] = bytes(max(offset - len(self.data), 0))
        self.data[offset : offset + len(data)] = data
        self._content = None

    def cut(self, size: int) -> None:
        """Set the size of a file."""
        self.data[:] = bytes(self.data[:size]).ljust(size, b"\0")
        self._content = None

    def sync(self) -> None:
        """Write it to the disk."""
        if self.names is None:
            self.synced_data = self.content
        else:
            self.synced_names = dict(self.names)


class Disk:
    """A directory, empty and synced at first, to which calls are applied.

    With `scratch`, files are also copied from that directory, whose files are gone by now.
    """

    def __init__(self, root: Path, scratch: Path | None = None) -> None:
        self.root = str(root)
        self._scratch = Disk(scratch) if scratch is not None else None
        self.top = Inode(names={})
        self._offsets: dict[tuple[str, Inode], int | None] = {}
        """Where a descriptor writes next; None at the end of the file."""

    def apply(self, name: str, arguments: str, result: str, opened: str | None) -> bool:
        """Apply one successful call, and return whether it concerns the directory."""
        if result in ("?", "-1"):
            return False
        if self._scratch is not None:
            self._scratch.apply(name, arguments, result, opened)
        return self._apply(name, arguments, result, opened)

    def _apply(self, name: str, arguments: str, result: str, opened: str | None) -> bool:
        strings = [text(found) for found in STRING.findall(arguments)]
        descriptors = [(number, text(path).decode()) for number, path in _fds(arguments)]
        folders = [path for number, path in descriptors]
        if name == "openat":
            return self._open(text(opened or "").decode(), arguments, result)
        if name in ("rename", "renameat", "renameat2"):
            return self._rename(*_paths(strings, folders))
        if name in ("link", "linkat"):
            return self._link(*_paths(strings, folders))
        if name in ("unlink", "unlinkat", "rmdir"):
            return self._remove(*_paths(strings, folders))
        if name in ("mkdir", "mkdirat"):
            return self._enter(*_paths(strings, folders), Inode(names={}))
        if name in ("creat", "symlink"):
            assert not any(self.root in path.decode() for path in strings), f"{name} is unknown"
            return False
        if not descriptors:  # a pipe or a socket
            return False
        inode = self._at(descriptors[name == "copy_file_range"][1])
        if inode is None:
            return False
        self._change(inode, name, arguments, descriptors, strings, int(result))
        return True

    def _change(self, inode, name, arguments, descriptors, strings, result) -> None:
        """Apply a call on an open file or directory."""
        key = (descriptors[name == "copy_file_range"][0], inode)
        if name in ("fsync", "fdatasync"):
            inode.sync()
        elif name in ("write", "writev"):
            self._write(key, b"".join(strings)[:result])
        elif name == "pwrite64":
            inode.put(int(arguments.rsplit(",", 1)[1]), strings[0][:result])
        elif name == "lseek":
            if self._offsets.get(key) is not None:  # else every write goes to the end
                self._offsets[key] = result
        elif name in ("ftruncate", "fallocate"):
            assert name == "ftruncate", "fallocate is unknown"
            inode.cut(int(arguments.rsplit(",", 1)[1]))
        else:  # sendfile, copy_file_range: of a file that no longer changes
            source = descriptors[name != "copy_file_range"][1]
            found = self._at(source)
            if found is None and self._scratch is not None:
                found = self._scratch._at(source)
            content = Path(source).read_bytes() if found is None else found.content
            begin = self._offsets.get(key) or 0
            self._write(key, content[begin : begin + result])

    def _open(self, path: str, arguments: str, result: str) -> bool:
        if not self._holds(path):
            return False
        inode = self._at(path)
        created = inode is None and "O_CREAT" in arguments
        if created:
            self._enter(path, Inode())
            inode = self._at(path)
        if inode is None:
            return False
        if "O_TRUNC" in arguments:
            inode.cut(0)
        self._offsets[result, inode] = None if "O_APPEND" in arguments else 0
        return created or "O_TRUNC" in arguments

    def _write(self, key, data: bytes) -> None:
        inode, offset = key[1], self._offsets.get(key)
        inode.put(len(inode.data) if offset is None else offset, data)
        if offset is not None:
            self._offsets[key] = offset + len(data)

    def _holds(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    def _at(self, path: str) -> Inode | None:
        """Return what is at a path, or None, also outside the directory."""
        if not self._holds(path):
            return None
        inode: Inode | None = self.top
        for part in path[len(self.root) :].split("/"):
            if part:
                inode = inode.names.get(part) if inode is not None and inode.names else None
        return inode

    def _enter(self, path: str, inode: Inode) -> bool:
        folder, _, name = path.rpartition("/")
        parent = self._at(folder)
        if parent is None or parent.names is None:
            return False
        parent.names[name] = inode
        return True

    def _remove(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        parent = self._at(folder)
        return parent is not None and bool(parent.names and parent.names.pop(name, None))

    def _rename(self, old: str, new: str) -> bool:
        inode = self._at(old)
        if inode is None:
            assert not self._holds(new), f"{new} comes from outside"
            return False
        self._remove(old)
        return self._enter(new, inode)

    def _link(self, old: str, new: str) -> bool:
        inode = self._at(old)
        return inode is not None and self._enter(new, inode)

    def tree(self, survives: Callable[[Inode], tuple[dict[str, Inode], bytes]]) -> Tree:
        """Return what is on the disk, if `survives` says what does of each inode."""
        found: Tree = {}

        def walk(path: str, inode: Inode) -> None:
            names, data = survives(inode)
            found[path] = None if inode.names is not None else data
            for name, entry in names.items():
                walk(f"{path}/{name}", entry)

        walk("", self.top)
        return found


def _fds(arguments: str) -> list[tuple[str, str]]:
    return DESCRIPTOR.findall(arguments)


def _paths(strings: list[bytes], folders: list[str]) -> list[str]:
    """Return the paths of a call; relative ones begin at its descriptors, in their order."""
    paths = [path.decode() for path in strings]
    return [
        path if path.startswith("/") else f"{folders[min(place, len(folders) - 1)]}/{path}"
        for place, path in enumerate(paths)
    ]


def everything(inode: Inode) -> tuple[dict[str, Inode], bytes]:
    """What survives a kill of the process: all of it."""
    return inode.names or {}, inode.content


def only_synced(inode: Inode) -> tuple[dict[str, Inode], bytes]:
    """What survives on the strictest disk."""
    return inode.synced_names, inode.synced_data


def names_first(inode: Inode) -> tuple[dict[str, Inode], bytes]:
    """What survives where names reach the disk before the data: zeros in place of the data."""
    return inode.names or {}, inode.synced_data[: len(inode.data)].ljust(len(inode.data), b"\0")


def torn(draw: random.Random) -> Callable[[Inode], tuple[dict[str, Inode], bytes]]:
    """Return a function by which any directory may be old or new, and any file end anywhere."""

    def survives(inode: Inode) -> tuple[dict[str, Inode], bytes]:
        names = draw.choice([inode.names or {}, inode.synced_names])
        data, synced = inode.content, inode.synced_data
        if data.startswith(synced):
            return names, data[: draw.randint(len(synced), len(data))]
        return names, draw.choice([data, synced])

    return survives


def write(tree: Tree, folder: Path) -> Path:
    """Write a tree into a new directory, and return it."""
    for path, data in tree.items():
        if data is None:
            (folder / path.lstrip("/")).mkdir()
        else:
            (folder / path.lstrip("/")).write_bytes(data)
    return folder
