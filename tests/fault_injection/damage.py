"""Damage to files, and how a command should answer it."""

import random
from pathlib import Path

PERCENT = (0, 50, 99)


def damages(data):
    """Yield the damages that change a file's content: it is cut short, or a bit is flipped."""
    for percent in PERCENT:
        short = data[: len(data) * percent // 100]
        if short != data:
            yield f"cut to {percent}%", short
    if data:
        changed, draw = bytearray(data), random.Random(len(data))
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield "a flipped bit", bytes(changed)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def tries(folder, changes):
    """Yield the path below a folder, the change, and the new content, for every file there."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            for what, content in changes(path.read_bytes()):
                yield path.relative_to(folder), what, content


def refusal(ended, name, *, must=False):
    """Return what is wrong with how a command rejected a file; [] also when it went on instead."""
    said = ended.out + ended.err
    if "Traceback" in said or ended.code not in (0, 1, 2):
        return [f"ended in {ended.code}: {said[-2000:]}"]
    if (ended.code or must) and name not in said:
        return [f"does not name the file: {said[-2000:]}"]
    if ended.code and "Fix:" not in said:
        return [f"names no fix: {said[-2000:]}"]
    return []
