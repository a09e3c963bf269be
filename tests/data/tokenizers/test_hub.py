"""Hub repositories: huggingface_hub against a local server that answers like the hub."""

import hashlib
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from texts import byte_level_json

from flatout.data import tokenizers as tokenizer_module
from flatout.data.prepare.request import request
from flatout.data.prepare.request.options import Options
from flatout.data.tokenizers import make_tokenizer
from flatout.data.tokenizers.hub import is_repository, repository_file, tokenizer_file
from flatout.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = ["the cat sat on the mat "] * 20


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Let huggingface_hub try again at once where nothing answers."""
    without = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", without)


@pytest.fixture(scope="module")
def content():
    return byte_level_json(TEXTS, 270).encode()


@pytest.fixture
def hub(content):
    """Serve a hub with one usable repository, `org/small`, of `files`.

    `asked` lists the requested paths.
    """
    asked, files = [], {"tokenizer.json": content}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            repository, _, rest = self.path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            code, error = 200, None
            if repository == "org/gated":
                code, error = 403, "GatedRepo"
            elif repository not in ("org/small", "org/empty"):
                code, error = 404, "RepoNotFound"
            elif revision not in ("main", COMMIT):
                code, error = 404, "RevisionNotFound"
            elif repository == "org/empty" or file not in files:
                code, error = 404, "EntryNotFound"
            self.content = files[file] if code == 200 else b""
            self.send_response(code)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
            self.send_header("Content-Length", str(len(self.content)))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(self.content)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.asked, server.files = asked, files
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_repository_names_are_recognised():
    names = f"openai-community/gpt2|org/na.me-1|org/name@main|org/name@{COMMIT}|org/name@refs/pr/1"
    for name in names.split("|"):
        assert is_repository(name), name
    others = "gpt2|byte|a/b/c|./a/b|/a/b|~/a|../a|a/tokenizer.json|a/b.tiktoken|a/|org/name@|a b/c"
    for name in others.split("|"):
        assert not is_repository(name), name


def test_repository_is_downloaded_once(hub, tmp_path, content):
    path = tokenizer_file("org/small", cache=tmp_path, endpoint=hub.address)
    assert path.read_bytes() == content
    assert hub.asked
    hub.asked.clear()
    assert tokenizer_file("org/small", cache=tmp_path, endpoint=hub.address) == path
    assert (
        tokenizer_file(f"org/small@{COMMIT}", cache=tmp_path, endpoint=hub.address).read_bytes()
        == content
    )
    assert hub.asked == [], "a cached file needs no request"


def test_another_file_of_a_repository_may_be_missing(hub, tmp_path, content):
    options = {"cache": tmp_path, "endpoint": hub.address}
    assert repository_file("org/small", "tokenizer_config.json", **options) is None
    found = repository_file("org/small", "tokenizer.json", **options)
    assert found.read_bytes() == content
    asked = list(hub.asked)
    assert repository_file("org/small", "tokenizer_config.json", **options) is None
    assert hub.asked == asked, "that it is missing is cached"
    nowhere = {"cache": tmp_path, "endpoint": "http://127.0.0.1:9"}
    assert repository_file("org/small", "tokenizer.json", **nowhere) == found, "it is cached"


def test_a_file_that_must_be_known_is_not_missing_because_the_hub_is(hub, tmp_path):
    options = {"cache": tmp_path, "otherwise": "do without"}
    nowhere = {**options, "endpoint": "http://127.0.0.1:9"}
    with pytest.raises(
        DataError, match=r"not known whether org/small has a chat_template\.jinja.*Or do without\."
    ):
        repository_file("org/small", "chat_template.jinja", **nowhere)
    there = {**options, "endpoint": hub.address}
    assert repository_file("org/small", "chat_template.jinja", **there) is None
    assert repository_file("org/small", "chat_template.jinja", **nowhere) is None, "it is cached"


def test_revision_is_requested(hub, tmp_path):
    tokenizer_file(f"org/small@{COMMIT}", cache=tmp_path, endpoint=hub.address)
    assert all(f"/resolve/{COMMIT}/tokenizer.json" in path for path in hub.asked)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/smal", "no repository org/smal on the hub"),
        ("org/small@nowhere", "org/small@nowhere has no such revision"),
        ("org/empty", "has no tokenizer.json"),
        ("org/gated", "is gated"),
    ],
)
def test_error_names_what_the_hub_lacks(hub, tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        tokenizer_file(name, cache=tmp_path, endpoint=hub.address)


def test_unwritable_cache_is_reported(hub, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        DataError, match=r"Cannot download org/small: .*Not a directory|File exists"
    ):
        tokenizer_file("org/small", cache=tmp_path / "cache", endpoint=hub.address)


@pytest.fixture
def uses_hub(hub, tmp_path, monkeypatch):
    for function in (tokenizer_file, repository_file):
        local = partial(function, cache=tmp_path, endpoint=hub.address)
        monkeypatch.setattr(tokenizer_module, function.__name__, local)
    monkeypatch.chdir(tmp_path)


def test_the_end_of_text_of_a_repository_is_the_one_that_its_files_state(hub, uses_hub):
    document = json.loads(hub.files["tokenizer.json"])
    end = document["added_tokens"][-1] | {"id": 269, "content": "<stop>"}
    document["added_tokens"].append(end)
    hub.files |= {
        "tokenizer.json": json.dumps(document).encode(),
        "generation_config.json": b'{"eos_token_id": [269, 6]}',
        "config.json": b"{}",
    }
    assert make_tokenizer("org/small", lambda limit: TEXTS).eot_id == 269
    assert any(path.endswith("/generation_config.json") for path in hub.asked)
    assert not any(path.endswith("/config.json") for path in hub.asked), "it is not needed"


def test_the_end_of_text_is_not_replaced_because_the_hub_cannot_be_reached(
    hub, uses_hub, tmp_path, monkeypatch
):
    tokenizer_file("org/small", cache=tmp_path, endpoint=hub.address)
    nowhere = partial(repository_file, cache=tmp_path, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(tokenizer_module, "repository_file", nowhere)
    with pytest.raises(DataError, match=r"has a tokenizer_config\.json: .*--end-of-text"):
        make_tokenizer("org/small", lambda limit: TEXTS)
    known = make_tokenizer("org/small", lambda limit: TEXTS, end_of_text="<|endoftext|>")
    there = partial(repository_file, cache=tmp_path, endpoint=hub.address)
    monkeypatch.setattr(tokenizer_module, "repository_file", there)
    assert make_tokenizer("org/small", lambda limit: TEXTS).eot_id == known.eot_id
    monkeypatch.setattr(tokenizer_module, "repository_file", nowhere)
    assert make_tokenizer("org/small", lambda limit: TEXTS).eot_id == known.eot_id, "it is cached"


def test_a_chat_template_is_not_replaced_because_the_hub_cannot_be_reached(
    hub, uses_hub, tmp_path, monkeypatch
):
    make_tokenizer("org/small", lambda limit: TEXTS)
    nowhere = partial(repository_file, cache=tmp_path, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(request, "repository_file", nowhere)
    with pytest.raises(DataError, match=r"not known whether org/small has a chat_template\.jinja"):
        request.chat_renderer(Options(tokenizer="org/small", chat="auto"))
    assert request.chat_renderer(Options(tokenizer="org/small", chat="plain")).end_token


def test_tokenizer_is_made_from_a_repository_name(uses_hub, tmp_path, content):
    tokenizer = make_tokenizer("org/small", lambda limit: TEXTS)
    assert tokenizer.content == content
    (tmp_path / "org").mkdir()
    with pytest.raises(DataError, match="There is no"):
        make_tokenizer("org/small", lambda limit: TEXTS)
