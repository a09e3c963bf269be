"""Models of the hub: huggingface_hub against a local server that answers like the hub."""

import hashlib
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from foreign_models import LLAMA, write_model

from flatout.errors import CheckpointError, MissingPackage
from flatout.models.families.hub import model_folder, wanted_files

NOWHERE = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ERRORS = {
    "org/gated": (403, "GatedRepo"),
    "org/none": (404, "RepoNotFound"),
    "v2": (404, "RevisionNotFound"),
}
"""How the hub answers for these repositories and revisions."""


@contextmanager
def served(handler):
    """Serve requests on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hub(tmp_path):
    """Serve a hub with one repository, `org/small`; `asked` lists the requested paths."""
    pytest.importorskip("huggingface_hub")
    folder = write_model(tmp_path / "served", LLAMA)
    (folder / "modeling_own.py").write_text("raise AssertionError")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/api/models/"):
                return self.answer_api()
            return self.answer_file()

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def answer_api(self):
            repository, _, revision = self.path.removeprefix("/api/models/").partition("/revision/")
            error = ERRORS.get(repository, ERRORS.get(revision))
            names = sorted(path.name for path in folder.iterdir())
            if "/tree/" in self.path:
                files = [{"type": "file", "path": name, "oid": "0", "size": 1} for name in names]
                return self.send(json.dumps(files).encode(), None)
            found = {"id": repository, "sha": COMMIT}
            found["siblings"] = [{"rfilename": name} for name in names]
            return self.send(json.dumps(found).encode(), error)

        def answer_file(self):
            file = folder / self.path.rpartition("/")[2]
            assert self.path == f"/org/small/resolve/{COMMIT}/{file.name}"
            self.send(file.read_bytes(), None)

        def send(self, content, error):
            self.send_response(error[0] if error else 200)
            if error:
                self.send_header("X-Error-Code", error[1])
                content = b""
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with served(Handler) as server:
        server.asked = asked
        server.folder = folder
        yield server


@pytest.mark.parametrize("name", ["hf:org/small", "hf:org/small@v1", f"hf:org/small@{COMMIT}"])
def test_a_model_is_downloaded_without_its_code(hub, tmp_path, name):
    planned = model_folder(name, whole=False, cache=tmp_path / "plan", endpoint=hub.address)
    assert [path.name for path in planned.iterdir()] == ["config.json"]
    folder = model_folder(name, whole=True, cache=tmp_path / "cache", endpoint=hub.address)
    assert folder.name == COMMIT
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for path in folder.iterdir():
        assert path.read_bytes() == (hub.folder / path.name).read_bytes()
    assert not [path for path in hub.asked if path.endswith((".py", ".bin"))]


def test_an_earlier_download_is_used_without_the_hub(hub, tmp_path, monkeypatch):
    first = model_folder("hf:org/small", whole=True, cache=tmp_path, endpoint=hub.address)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    lines = []
    options = {"cache": tmp_path, "progress": SimpleNamespace(say=lines.append)}
    again = model_folder(f"hf:org/small@{COMMIT}", whole=True, endpoint=NOWHERE, **options)
    assert again == first
    assert "cannot be reached" in lines[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:org/gated", "is gated"),
        ("hf:org/none", "no repository org/none on the hub"),
        ("hf:org/small@v2", "org/small@v2 has no such revision"),
        ("hf:small", "does not name a repository"),
        ("hf:../x/y", "does not name a repository"),
    ],
)
def test_wrong_names_are_rejected(hub, tmp_path, name, message):
    with pytest.raises(CheckpointError, match=message):
        model_folder(name, whole=True, cache=tmp_path, endpoint=hub.address)


def test_a_download_that_fails_is_named(hub, tmp_path, monkeypatch):
    def download(endpoint):
        model_folder("hf:org/small", whole=True, cache=tmp_path, endpoint=endpoint)

    (hub.folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        download(hub.address)
    with pytest.raises(CheckpointError, match=r"Cannot download org/small: .*Fix: Check the conn"):
        download(NOWHERE)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r'pip install "flatout\[hub\]"'):
        download(hub.address)


def test_pickles_are_downloaded_only_without_safetensors():
    both = ["config.json", "model.safetensors", "pytorch_model.bin", "own.py", "onnx/model.onnx"]
    assert wanted_files(both) == ["config.json", "model.safetensors"]
    states_the_end = "special_tokens_map.json"
    assert wanted_files([*both, states_the_end])[0] == states_the_end
    parts = ["model-1.safetensors", "model.safetensors.index.json"]
    assert wanted_files([*both, *parts]) == ["config.json", "model.safetensors"]
    assert wanted_files(["config.json", "pytorch_model.bin", *parts]) == [
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
    ]
    pickled = ["config.json", "pytorch_model-1.bin", "pytorch_model.bin.index.json", "train.bin"]
    assert wanted_files(pickled) == [
        "config.json",
        "pytorch_model.bin.index.json",
        "pytorch_model-1.bin",
    ]
    mistral = ["config.json", "consolidated.safetensors", "model-1.safetensors"]
    assert wanted_files(mistral) == ["config.json", "model-1.safetensors"]
