"""A run directory with fake checkpoints, and uploaders that end with their test."""

import shutil

import pytest
from fakes import fake_checkpoint

from flatout.config.schema import load_config
from flatout.config.sections import CheckpointConfig
from flatout.progress import SILENT
from flatout.storage.whole import name_of
from flatout.training.run_dir import layout
from flatout.training.upload.uploader import Uploader

URL = "faulty://bucket/runs"


class Directory:
    """A run directory that uploads to `URL/run`; `events` lists what was reported."""

    def __init__(self, path):
        self.path = path
        self.url = f"{URL}/{path.name}"
        self.events = []
        self.uploaders = []
        layout.write_config(path, load_config(None, [f"checkpoint.upload={URL}"]))
        (path / "metrics.jsonl").write_text('{"step": 1}\n')
        layout.append_event(path, "start")

    def checkpoint(self, step, **content):
        """Write a fake checkpoint."""
        return fake_checkpoint(self.path, step, **{"model": b"weights of %d" % step, **content})

    def there(self, step):
        """Return the directory of a checkpoint in the store."""
        manifest = self.path / "checkpoints" / f"step-{step}" / "manifest.json"
        return f"/bucket/runs/run/{name_of(f'step-{step}', manifest.read_bytes())}"

    def report(self, kind, **fields):
        """Record an event."""
        self.events.append((kind, fields))

    def started(self, **options):
        """Return a claimed and started uploader."""
        config = CheckpointConfig(**{"upload": URL, "keep": 1} | options)
        uploader = Uploader(self.path, self.url, config)
        uploader.claim()
        uploader.start(self.report)
        self.uploaders.append(uploader)
        return uploader

    def send(self, **options):
        """Send everything, and return the events."""
        self.events.clear()
        self.started(**options).close(SILENT)
        return list(self.events)

    def of_kind(self, kind, field="step"):
        """Return a field of the events of one kind."""
        return [fields[field] for found, fields in self.events if found == kind]

    def delete(self, step):
        """Delete a checkpoint, as pruning does."""
        shutil.rmtree(self.path / "checkpoints" / f"step-{step}")


@pytest.fixture
def run(tmp_path, store):
    """A run directory that uploads to the faulty store."""
    directory = Directory(tmp_path / "run")
    yield directory
    for uploader in directory.uploaders:
        uploader._given_up.set()
        uploader._wake.set()
        uploader._thread.join(60)
        assert not uploader._thread.is_alive()


@pytest.fixture
def uploaded(store):
    """Return a function that lists the uploaded files, or those of one step there."""

    def names(step=None):
        start = "/bucket/runs/run/"
        paths = {path.removeprefix(start) for path in store.store if path.startswith(start)}
        if step is None:
            return paths
        return {path.partition("/")[2] for path in paths if path.startswith(f"step-{step}-")}

    return names


@pytest.fixture
def refusing(store, monkeypatch):
    """Return a function that makes the store reject files of a name, or none."""
    put_file = type(store).put_file

    def refuse(name):
        def put(self, lpath, rpath, **options):
            if name and rpath.endswith(name):
                raise PermissionError("not today")
            put_file(self, lpath, rpath, **options)

        monkeypatch.setattr(type(store), "put_file", put)

    return refuse
