"""Weights & Biases: one remote run per run directory, in files without login or network."""

import json
import sys
from types import SimpleNamespace

import pytest

from flatout.errors import Stopped
from flatout.training.loggers import wandb as logger_module
from flatout.training.loggers.wandb import WeightsAndBiases
from flatout.training.metrics.loggers import RemoteRun
from flatout.training.run import run_training
from flatout.training.run_dir.runlog import RunLog


class FakeRun:
    """What wandb.init returns."""

    def __init__(self, arguments, starting_step):
        self.arguments, self.starting_step = arguments, starting_step
        self.id, self.project, self.entity = arguments["id"], arguments["project"], "team"
        self.url, self.offline = "https://wandb.example/run", arguments["mode"] != "online"
        self.rows, self.summary, self.artifacts, self.exit_code = [], {}, [], None

    def log(self, figures, step):
        self.rows.append((step, figures))

    def log_artifact(self, artifact):
        self.artifacts.append(artifact)

    def finish(self, exit_code):
        self.exit_code = exit_code


class FakeArtifact:
    def __init__(self, name, type):
        self.name, self.type, self.references = name, type, []

    def add_reference(self, uri, *, name, checksum):
        assert checksum is False
        self.references.append((name, uri))


class Fake(SimpleNamespace):
    """The parts of the package that the logger uses."""

    class Error(Exception):
        pass

    Artifact = FakeArtifact

    def __init__(self, **facts):
        super().__init__(
            logged_in=True, reachable=True, mode="online", project=None, runs=[], last_step=-1
        )
        vars(self).update(facts)
        self.Settings = dict

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode, project=self.project))

    def login(self, *, prompt, verify):
        assert prompt is False
        return self.logged_in

    def teardown(self):
        self.tries = 0

    def init(self, *, settings, **arguments):
        assert settings["console"] == "off"
        if arguments["mode"] == "online" and not self.reachable:
            raise self.Error("no answer.\nDetails")
        self.runs.append(FakeRun(arguments, self.last_step + 1))
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch):
    package = Fake()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


@pytest.fixture
def run(tmp_path, tiny_config):
    def make(**changes):
        folder = tmp_path / "first"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").touch()
        machine = SimpleNamespace(describe=lambda: "a machine")
        return SimpleNamespace(
            folder=folder, config=tiny_config(**changes), machine=machine, step=0
        )

    return make


def news(logger):
    return [logger.news.get() for _ in range(logger.news.qsize())]


def test_a_run_is_sent_with_its_config_links_and_numbers(fake, run):
    logger = WeightsAndBiases()
    wanted = run(log__project="mine", log__run_name="named", log__tags=["a", "b"], optim__lr=0.5)
    logger.on_start(wanted)
    logger.on_record({"step": 3, "tokens": 9, "wall_s": 1.0, "train/loss": 2.5})
    logger.on_event({"event": "save", "path": "first/checkpoints/step-3"})
    logger.on_end({"val_loss": 2.0, "weights_sha256": "ab"})
    logger.close("finished")
    (sent,) = fake.runs
    assert sent.arguments["project"] == "mine"
    assert (sent.arguments["name"], sent.arguments["tags"]) == ("named", ["a", "b"])
    assert sent.arguments["config"]["optim"]["lr"] == 0.5
    files = sent.arguments["config"]["files"]
    assert files["run_directory"] == str(wanted.folder.resolve())
    assert sent.rows == [(3, {"train/loss": 2.5, "tokens": 9})]
    assert sent.summary["checkpoint"] == "first/checkpoints/step-3"
    assert sent.summary["result"] == {"val_loss": 2.0, "weights_sha256": "ab"}
    assert sent.artifacts[0].references == [
        ("config.yaml", (wanted.folder / "config.yaml").resolve().as_uri())
    ]
    assert sent.exit_code == 0
    assert news(logger) == ["https://wandb.example/run"]


def test_the_project_of_the_environment_comes_before_the_default(fake, run):
    fake.project = "theirs"
    WeightsAndBiases().on_start(run())
    assert fake.runs[0].arguments["project"] == "theirs"
    assert fake.runs[0].arguments["name"] == "first"


def test_a_resume_continues_the_remote_run_and_repeats_no_step(fake, run):
    first = WeightsAndBiases()
    first.on_start(run(log__project="mine"))
    first.close("stopped")
    fake.last_step = 8
    second = WeightsAndBiases()
    second.on_start(run(log__project="another"))
    second.on_record({"step": 8, "train/loss": 1.0})
    second.on_record({"step": 9, "train/loss": 1.0})
    ids = [one.arguments["id"] for one in fake.runs]
    assert ids[0] == ids[1]
    assert fake.runs[1].arguments["project"] == "mine"
    assert fake.runs[1].arguments["resume"] == "allow"
    assert [step for step, _ in fake.runs[1].rows] == [9]


def test_a_failed_run_is_marked(fake, run):
    logger = WeightsAndBiases()
    logger.on_start(run())
    logger.close("failed")
    assert fake.runs[0].exit_code == 1


@pytest.mark.parametrize("why", ["logged_in", "reachable"])
def test_without_login_or_network_the_run_is_kept_in_files(why, fake, run):
    setattr(fake, why, False)
    logger = WeightsAndBiases()
    logger.on_start(run())
    assert fake.runs[0].arguments["mode"] == "offline"
    (text,) = news(logger)
    assert {"logged_in": "wandb login", "reachable": "(no answer)"}[why] in text
    assert f"wandb sync {run().folder}/wandb/offline-run-*" in text


def test_offline_needs_no_login(fake, run):
    fake.logged_in = False
    logger = WeightsAndBiases()
    logger.on_start(run(log__wandb_mode="offline"))
    assert fake.runs[0].arguments["mode"] == "offline"
    assert news(logger) == []


@pytest.fixture
def package():
    """Skip a test without the package, which keeps settings for the whole process."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("package")
def test_the_package_keeps_a_stopped_and_resumed_run_under_one_id(
    tiny_config, tmp_path, monkeypatch, stop_after
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(train__steps=6, log__to="wandb", log__tags=["tiny"])
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_after(3)])
    assert run_training(config, tmp_path / "run")["steps"] == 6
    known = RemoteRun(tmp_path / "run", "wandb").read()
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(kept) == 2
    assert all(folder.name.endswith(known["id"]) for folder in kept)
    assert all(list(folder.glob("*.wandb")) for folder in kept)
    assert "no_wandb" not in [event["event"] for event in RunLog(tmp_path / "run").events]
    assert "model.safetensors" not in json.dumps([str(p) for p in kept[0].rglob("*")])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("package")
def test_the_package_without_network_keeps_the_run_in_files(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(logger_module, "CONNECT_S", 2.0)
    config = tiny_config(train__steps=2, log__to="wandb")
    assert run_training(config, tmp_path / "run")["steps"] == 2
    texts = [
        event["text"] for event in RunLog(tmp_path / "run").events if event["event"] == "logger"
    ]
    assert any("cannot be reached" in text for text in texts)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
