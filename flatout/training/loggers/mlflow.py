"""MLflow: curves, the config as parameters, and tags that name the run's files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout.config.schema import flat
from flatout.storage.json_io import JsonObject
from flatout.training.metrics.loggers import Logger, Outcome, RemoteRun, links_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run

PACKAGE = "mlflow"
STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_CHARACTERS = 500
"""Longest value of a parameter that every version of the server accepts."""
MOST_PARAMETERS = 100
"""Parameters of one request."""


class MLflow(Logger):
    """Sends records to the server that MLFLOW_TRACKING_URI names.

    The package reads that and its other variables. Nothing is uploaded but metrics and text. Tags
    name the run directory and the newest checkpoint.
    """

    def on_start(self, run: Run) -> None:
        """Create the run, or continue the one that this run directory belongs to."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient()
        remote = RemoteRun(run.folder, "mlflow")
        known = remote.read().get("run_id")
        self._first_step = 0
        if known:
            client.update_run(known, status="RUNNING")
            history = client.get_metric_history(known, "train/loss")
            self._first_step = max((one.step for one in history), default=-1) + 1
        self._id = known or self._create(run)
        remote.write(run_id=self._id)
        for key, value in links_of(run).items():
            client.set_tag(self._id, f"flatout.{key}", value)
        sent = client.get_run(self._id).data.params  # which cannot be changed
        params = [
            Param(key, str(value)[:MOST_CHARACTERS])
            for key, value in flat(run.config.to_dict()).items()
            if key not in sent
        ]
        for start in range(0, len(params), MOST_PARAMETERS):
            batch = params[start : start + MOST_PARAMETERS]
            client.log_batch(self._id, params=batch, synchronous=True)

    def on_record(self, record: Mapping[str, float]) -> None:
        """Send a record, unless MLflow has its step from before a crash."""
        from mlflow.entities import Metric

        step, now_ms = int(record["step"]), int(time.time() * 1000)
        if step >= self._first_step:
            figures = {key: value for key, value in record.items() if key != "step"}
            sent = [Metric(key, value, now_ms, step) for key, value in figures.items()]
            self._client.log_batch(self._id, metrics=sent, synchronous=True)

    def on_event(self, event: JsonObject) -> None:
        """Tag the run with its newest checkpoint."""
        if event["event"] == "save":
            self._client.set_tag(self._id, "flatout.checkpoint", str(event["path"]))

    def on_end(self, summary: JsonObject) -> None:
        """Tag the run with the digest of its weights."""
        self._client.set_tag(self._id, "flatout.weights_sha256", summary["weights_sha256"])

    def close(self, outcome: Outcome) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, STATUS[outcome])

    def _create(self, run: Run) -> str:
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        log = run.config.log
        name = log.project or MLFLOW_EXPERIMENT_NAME.get() or "flatout"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(name)
        tags: dict[str, Any] = dict.fromkeys(log.tags, "true")
        run_name = log.run_name or run.folder.resolve().name
        created = self._client.create_run(experiment_id, tags=tags, run_name=run_name)
        return str(created.info.run_id)


LOGGER = MLflow
