"""`flatout push`: a run on the hub."""

import pytest
from loopback_hub import running_hub

from flatout.cli.commands.push import push
from flatout.errors import CheckpointError, ConfigError, MissingPackage

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_a_run_is_uploaded_and_nothing_stays_behind(tiny_run, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    before = {path.name for path in tiny_run.iterdir()}
    with running_hub() as hub:
        found = push(tiny_run, "acme/tiny", endpoint=hub.url)
    assert {path.name for path in tiny_run.iterdir()} == before
    files = hub.repositories["acme/tiny"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert (found.repository, found.url) == ("acme/tiny", f"{hub.url}/acme/tiny/commit/{'1' * 40}")
    assert hub.messages == ["Step 2 of tiny"]
    assert found.url in found.summary()


@pytest.mark.parametrize("name", ["tiny", "acme/", "acme/a b", "https://x.org/acme/tiny"])
def test_a_name_that_is_no_repository_is_rejected(tiny_run, name):
    with pytest.raises(ConfigError, match="does not name a repository"):
        push(tiny_run, name)


def test_the_run_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        push("nowhere", "acme/tiny")


def test_without_the_package_the_error_names_the_install_line(tiny_run, monkeypatch):
    from flatout.inference.export import packages

    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as missing:
        push(tiny_run, "acme/tiny")
    assert "flatout[hub]" in missing.value.fix
