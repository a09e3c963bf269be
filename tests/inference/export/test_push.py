"""Uploads arrive whole, and refusals are answered."""

import socket

import pytest
from loopback_hub import running_hub

from flatout.errors import ConfigError, RunFailed
from flatout.inference.export.push import push_folder

constants = pytest.importorskip("huggingface_hub.constants")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def plain_http(monkeypatch):
    """Upload by plain HTTP, with a token."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "README.md").write_text("---\ntags: [flatout]\n---\n# demo\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return tmp_path


def test_every_file_arrives_in_one_commit(folder):
    with running_hub() as hub:
        url = push_folder(
            folder, "acme/demo", private=True, message="Step 3 of demo", endpoint=hub.url
        )
    assert hub.repositories["acme/demo"] == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert (hub.messages, hub.private["acme/demo"]) == (["Step 3 of demo"], True)
    assert url.startswith(f"{hub.url}/acme/demo/commit/")


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, ConfigError, "needs a token"),
        (403, ConfigError, "may not write"),
        (400, ConfigError, "The hub rejects acme/demo"),
    ],
)
def test_a_rejection_is_explained(folder, status, error, words):
    with running_hub(refuses=status) as hub, pytest.raises(error) as refused:
        push_folder(folder, "acme/demo", private=False, message="x", endpoint=hub.url)
    assert words in refused.value.what


def test_a_name_that_the_hub_forbids_is_a_mistake(folder):
    with running_hub() as hub, pytest.raises(ConfigError, match="The hub rejects acme/demo--x"):
        push_folder(folder, "acme/demo--x", private=False, message="x", endpoint=hub.url)


def test_a_hub_that_cannot_be_reached_is_a_failed_run(folder):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RunFailed, match="Cannot push to acme/demo"):
        push_folder(folder, "acme/demo", private=False, message="x", endpoint=url)
