"""Fakes for the tests of run directories and checkpoints."""

import json

from flatout.progress import SILENT
from flatout.storage import whole


class Recorder:
    """A progress that records messages."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def task(self, *args, **kwargs):
        return SILENT.task(*args, **kwargs)


def fake_checkpoint(run, step, state=b"x", *, info=None, inside="checkpoints", **more):
    """Create a checkpoint whose files match its manifest; `more` maps stems of files to content."""
    path = run / inside / f"step-{step}"
    path.mkdir(parents=True)
    content = {f"{stem}.safetensors": data for stem, data in more.items()}
    content |= {"state.json": state, "index.json": b'{"tensors": {}, "aliases": {}}'}
    content |= {} if info is None else {"info.json": json.dumps(info).encode()}
    for name, data in content.items():
        (path / name).write_bytes(data)
    manifest = {"kind": "checkpoint", "format_version": 2, "step": step}
    (path / "manifest.json").write_text(json.dumps(manifest))
    restate(path)
    return path


def restate(path):
    """List the files that a checkpoint has now in its manifest."""
    manifest = path / "manifest.json"
    files = [whole.entry_of(file) for file in sorted(path.iterdir()) if file != manifest]
    listed = json.loads(manifest.read_text()) | {"files": [file.model_dump() for file in files]}
    manifest.write_text(json.dumps(listed))
