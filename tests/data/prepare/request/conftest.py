import hashlib
from pathlib import Path

import pytest
from corpora import TEXT

from flatout.data.prepare.request import inputs, request


class Folder:
    """A registry of cards in memory."""

    def __init__(self, known):
        self.known = known

    def names(self):
        return sorted(self.known)

    def get(self, name):
        return self.known[name]

    def path(self, name):
        return Path(f"{name}.yaml")


@pytest.fixture
def cards(monkeypatch):
    """A card `play` of a file whose SHA-256 is that of TEXT, at a URL that does not answer."""
    known = {
        "play": {
            "url": "http://127.0.0.1:9/play/input.txt",
            "revision": "1",
            "license": "public domain",
            "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
            "num_bytes": len(TEXT),
            "split": "tail 0.2",
        }
    }
    for module in (request, inputs):
        monkeypatch.setattr(module, "DATASETS", Folder(known))
    return known
