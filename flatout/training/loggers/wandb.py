"""Weights & Biases: curves, the config, and references to the run's files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout.storage.json_io import JsonObject
from flatout.training.checkpoint import catalog
from flatout.training.metrics.loggers import Logger, Outcome, RemoteRun, links_of
from flatout.training.run_dir.layout import WANDB_FILES

if TYPE_CHECKING:
    from flatout.assembly.run import Run

PACKAGE = "wandb"
CONNECT_S, FINISH_S = 30.0, 50.0
"""How long to try to reach the server before the run is kept in files, and to send the rest."""
POSITIONS = ("tokens", "elapsed_s")
"""Names without a slash that are sent as metrics. W&B has its own step and time."""


class WeightsAndBiases(Logger):
    """Sends records to W&B, or keeps them in RUN/wandb for `wandb sync`.

    The package reads WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other
    variables. Weights are not uploaded: an artifact refers to the run's files.
    """

    def on_start(self, run: Run) -> None:
        """Start the run at W&B, or continue the one that this run directory belongs to."""
        import wandb

        self._folder, log, remote = run.folder, run.config.log, RemoteRun(run.folder, "wandb")
        known, settings = remote.read(), wandb.setup().settings
        mode = log.wandb_mode or settings.mode
        folder = self._folder / WANDB_FILES
        kept = f"the metrics are kept in {folder}. `wandb sync {folder}/offline-run-*` sends them."
        if mode == "online" and not wandb.login(prompt=False, verify=False):  # asks nobody
            mode = "offline"
            self.say(f"You are not logged in to W&B (`wandb login`), so {kept}")
        wanted: dict[str, Any] = {
            "id": known.get("id") or uuid.uuid4().hex[:12],
            "entity": known.get("entity"),
            "project": known.get("project") or log.project or settings.project or "flatout",
            "name": log.run_name or run.folder.resolve().name,
            "tags": list(log.tags) or None,
            "config": run.config.to_dict()
            | {"machine": run.machine.describe(), "files": links_of(run)},
            "dir": str(run.folder),
            "resume": "allow",
            "reinit": "create_new",
            "allow_val_change": True,
            "settings": wandb.Settings(
                silent=True, console="off", init_timeout=CONNECT_S, finish_timeout=FINISH_S
            ),
        }
        try:
            self._run = wandb.init(**wanted, mode=mode)
        except wandb.Error as error:
            if mode != "online":
                raise
            reason = (str(error).strip().splitlines() or ["no answer"])[0].rstrip(".")
            self.say(f"W&B cannot be reached ({reason}), so {kept}")
            wandb.teardown()  # its service still holds the id
            self._run = wandb.init(**wanted, mode="offline")
        remote.write(id=self._run.id, project=self._run.project, entity=self._run.entity or None)
        if not self._run.offline and self._run.url:
            self.say(self._run.url)
        self._first_step = int(self._run.starting_step)

    def on_record(self, record: Mapping[str, float]) -> None:
        """Send a record, unless W&B has its step from before a crash."""
        step = int(record["step"])
        if step >= self._first_step:
            figures = {key: value for key, value in record.items() if "/" in key}
            figures |= {key: record[key] for key in POSITIONS if key in record}
            self._run.log(figures, step=step)

    def on_event(self, event: JsonObject) -> None:
        """Show where the newest checkpoint is."""
        if event["event"] == "save":
            self._run.summary["checkpoint"] = event["path"]

    def on_end(self, summary: JsonObject) -> None:
        """Show the metrics of the summary under `result`."""
        plain = {k: v for k, v in summary.items() if isinstance(v, int | float | str)}
        self._run.summary.update({"result": plain})

    def close(self, outcome: Outcome) -> None:
        """Refer to the run's files, and wait until everything is sent."""
        import wandb

        names = ("config.yaml", "metrics.jsonl", "report.html")
        files = [self._folder / name for name in names if (self._folder / name).exists()]
        files += [
            catalog.checkpoint_path(self._folder, step) for step in catalog.steps(self._folder)
        ]
        artifact = wandb.Artifact(f"run-{self._run.id}", type="flatout-run")
        for path in files:
            artifact.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
        self._run.log_artifact(artifact)
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


LOGGER = WeightsAndBiases
