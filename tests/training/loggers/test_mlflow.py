"""MLflow: one remote run per run directory, with parameters, metrics and tags."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from flatout.errors import Stopped
from flatout.training.loggers.mlflow import MLflow
from flatout.training.metrics.loggers import RemoteRun
from flatout.training.run import run_training
from flatout.training.run_dir.runlog import RunLog


class Server:
    """Keeps what a client sends."""

    def __init__(self):
        self.experiments, self.runs = {}, {}


class FakeClient:
    """The methods of MlflowClient that the logger uses."""

    def __init__(self, server):
        self.server = server

    def get_experiment_by_name(self, name):
        known = self.server.experiments.get(name)
        return known and SimpleNamespace(experiment_id=known)

    def create_experiment(self, name):
        self.server.experiments[name] = f"experiment {name}"
        return self.server.experiments[name]

    def create_run(self, experiment_id, tags, run_name):
        name = f"run {len(self.server.runs)}"
        self.server.runs[name] = SimpleNamespace(
            experiment=experiment_id, tags=dict(tags), name=run_name, params={}, metrics=[],
            status="RUNNING",
        )  # fmt: skip
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def update_run(self, run_id, status):
        self.server.runs[run_id].status = status

    def set_terminated(self, run_id, status):
        self.server.runs[run_id].status = status

    def get_run(self, run_id):
        return SimpleNamespace(data=self.server.runs[run_id])

    def get_metric_history(self, run_id, key):
        return [one for one in self.server.runs[run_id].metrics if one.key == key]

    def set_tag(self, run_id, key, value):
        self.server.runs[run_id].tags[key] = value

    def log_batch(self, run_id, metrics=(), params=(), synchronous=False):
        assert synchronous
        assert len(params) <= 100
        for param in params:
            assert param.key not in self.server.runs[run_id].params
            self.server.runs[run_id].params[param.key] = param.value
        self.server.runs[run_id].metrics += metrics


@pytest.fixture
def server(monkeypatch):
    """Replace the package."""
    server = Server()
    package, entities, variables = map(ModuleType, ("mlflow", "mlflow.entities", "mlflow.e"))
    package.MlflowClient = lambda: FakeClient(server)
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(
        key=key, value=value, step=step
    )
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)
    variables.MLFLOW_EXPERIMENT_NAME = SimpleNamespace(get=lambda: None)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.environment_variables", variables)
    return server


@pytest.fixture
def run(tmp_path, tiny_config):
    def make(**changes):
        (tmp_path / "first").mkdir(exist_ok=True)
        return SimpleNamespace(folder=tmp_path / "first", config=tiny_config(**changes), step=0)

    return make


def test_a_run_is_sent_with_its_parameters_numbers_and_tags(server, run):
    logger = MLflow()
    logger.on_start(run(log__project="mine", log__tags=["tiny"], optim__lr=0.5))
    logger.on_record({"step": 3, "tokens": 9, "train/loss": 2.5})
    logger.on_event({"event": "save", "path": "first/checkpoints/step-3"})
    logger.on_end({"weights_sha256": "ab"})
    logger.close("finished")
    (sent,) = server.runs.values()
    assert (sent.experiment, sent.name, sent.status) == ("experiment mine", "first", "FINISHED")
    assert sent.params["optim.lr"] == "0.5"
    assert {(one.key, one.value, one.step) for one in sent.metrics} == {
        ("tokens", 9, 3),
        ("train/loss", 2.5, 3),
    }
    assert sent.tags["tiny"] == "true"
    assert sent.tags["flatout.checkpoint"] == "first/checkpoints/step-3"
    assert sent.tags["flatout.weights_sha256"] == "ab"


def test_a_resume_continues_the_remote_run_and_repeats_no_step(server, run):
    first = MLflow()
    first.on_start(run())
    for step in (1, 2, 3):
        first.on_record({"step": step, "train/loss": 3.0})
    first.close("stopped")
    assert server.runs["run 0"].status == "KILLED"
    second = MLflow()
    second.on_start(run(log__every=5))
    for step in (2, 3, 4):
        second.on_record({"step": step, "train/loss": 3.0})
    (sent,) = server.runs.values()
    assert [one.step for one in sent.metrics] == [1, 2, 3, 4]
    assert sent.status == "RUNNING"
    assert sent.params["log.every"] == "1"


def test_an_existing_experiment_is_used(server, run):
    server.experiments["flatout"] = "known"
    MLflow().on_start(run())
    assert server.runs["run 0"].experiment == "known"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_package_keeps_a_stopped_and_resumed_run_as_one(
    tiny_config, tmp_path, monkeypatch, stop_after
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = tiny_config(train__steps=6, log__to="mlflow", log__project="mine")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_after(3)])
    assert run_training(config, tmp_path / "run")["steps"] == 6
    assert "no_mlflow" not in [event["event"] for event in RunLog(tmp_path / "run").events]
    known, client = RemoteRun(tmp_path / "run", "mlflow").read()["run_id"], mlflow.MlflowClient()
    losses = client.get_metric_history(known, "train/loss")
    assert sorted(one.step for one in losses) == [1, 2, 3, 4, 5, 6]
    stored = client.get_run(known)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["model.d_model"] == "32"
    assert stored.data.tags["flatout.run_directory"] == str((tmp_path / "run").resolve())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_server_that_rejects_does_not_stop_the_run(tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = tiny_config(train__steps=2, log__to="mlflow")
    assert run_training(config, tmp_path / "run")["steps"] == 2
    events = [event["event"] for event in RunLog(tmp_path / "run").events]
    assert events.count("no_mlflow") == 1
