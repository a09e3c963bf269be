"""A server on this machine that speaks as much of the Hugging Face hub as an upload needs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """The server, and what was uploaded."""

    daemon_threads = True

    def __init__(self, refuses=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.refuses = refuses
        """A status with which every request is answered, if any."""
        self.repositories = {}
        """The files of each repository, by name."""
        self.private = {}
        self.messages = []
        self.objects = {}
        """Contents that were uploaded by digest."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        name = self.path.removeprefix("/api/models/")
        self.answer({"id": name, "sha": "0" * 40, "siblings": []}, self.server.refuses or 200)

    def do_PUT(self):
        data = self.body()
        digest = hashlib.sha256(data).hexdigest()
        assert self.path == f"/objects/{digest}"
        self.server.objects[digest] = data
        self.answer({})

    def do_POST(self):
        data, path = self.body(), self.path.partition("?")[0]
        if self.server.refuses:
            self.answer({"error": "refused"}, self.server.refuses)
        elif path == "/api/repos/create":
            self.create(json.loads(data))
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self.answer({"files": [mode_of(one["path"]) for one in json.loads(data)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            self.answer({"transfer": "basic", "objects": self.uploads(json.loads(data))})
        else:
            self.commit(path, [json.loads(line) for line in data.splitlines()])

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        self.server.repositories.setdefault(name, {})
        self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
        self.answer({"url": f"{self.server.url}/{name}", "id": name, "name": name})

    def uploads(self, asked):
        return [
            {**one, "actions": {"upload": {"href": f"{self.server.url}/objects/{one['oid']}"}}}
            for one in asked["objects"]
        ]

    def commit(self, path, lines):
        name, found, _ = path.removeprefix("/api/models/").partition("/commit/")
        assert found, path
        files = self.server.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.server.objects[value["oid"]]
        oid = "1" * 40
        url = f"{self.server.url}/{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url})


def mode_of(path):
    """Return how the hub wants a file to be sent."""
    mode = "lfs" if path.endswith((".safetensors", ".gguf")) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def running_hub(refuses=None):
    """Yield a hub at a local address."""
    with Hub(refuses) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
