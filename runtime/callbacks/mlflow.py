"""`graphft.callbacks.MLflow`: an MLflow run for each run of graphft's."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from graphft.runtime.callbacks.callbacks import Run, check_library

TAG = "graphft.run"
"""Of an MLflow run: the id of the run that it is of. By it the next script finds it, on another machine, too."""
KINDS = ("train", "epoch", "validation")
MOST = 500
"""Metrics of one request; the tracking server takes 1000. Parameters: 100, of at most 500 characters each."""
MOST_PARAMS, MOST_TEXT = 100, 500


class MLflow:
    """`train/<name>` has a value for each step, once, whatever is killed; `epoch/<name>` and `validation/<name>` for
    each epoch. The parameters are the job's options.

    `tracking_uri`: as MLflow has it; None: what MLflow is set up for. What the server does not take raises its error.
    """

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        check_library("mlflow", "MLflow")
        self._experiment, self._uri = experiment, tracking_uri
        self._waiting: list[Any] = []
        self._ended = False

    def on_begin(self, run: Run) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        self._id = self._run_of(run)
        self._newest = self._newest_steps()

    def held(self) -> tuple[int, int]:
        newest = {kind: [step for key, step in self._newest.items() if key.startswith(f"{kind}/")] for kind in KINDS}
        return min(newest["train"], default=-1) + 1, min(newest["epoch"], default=0)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add("train", step, metrics)

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._add("epoch", epoch, {name: value for name, value in metrics.items() if name != "epoch"})

    def on_validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._add("validation", epoch, metrics)

    def flush(self) -> None:
        if self._ended and self._waiting:  # a Trainer that was shut down trains on
            self._client.update_run(self._id, status="RUNNING")
            self._ended = False
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:MOST], synchronous=True)
            del self._waiting[:MOST]

    def on_end(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)
        self._ended = True

    def _add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name, value in values.items():
            key = _allowed(f"{kind}/{name}")
            if step > self._newest.get(key, -1):
                self._waiting.append(Metric(key, float(value), now, step))
                self._newest[key] = step

    def _newest_steps(self) -> dict[str, int]:
        """By metric, the newest step that the server has."""
        found = self._client.get_run(self._id).data.to_proto().metrics
        return {metric.key: metric.step for metric in found}

    def _run_of(self, run: Run) -> str:
        """The id of the MLflow run, which is made, with its tag, if there is none."""
        from mlflow.entities import Param

        client = self._client
        experiment = client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment is not None else client.create_experiment(self._experiment)
        found = client.search_runs([place], f"tags.`{TAG}` = '{run.id}'")
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            made = found[0]
        else:
            made = client.create_run(place, run_name=run.folder.resolve().name, tags={TAG: run.id})
        lacking = [
            Param(key, str(value)[:MOST_TEXT]) for key, value in run.config.items() if key not in made.data.params
        ]
        for begin in range(0, len(lacking), MOST_PARAMS):
            client.log_batch(made.info.run_id, params=lacking[begin : begin + MOST_PARAMS], synchronous=True)
        return str(made.info.run_id)


def _allowed(name: str) -> str:
    """With what a metric's name may have."""
    return re.sub(r"[^\w\-. /]", "_", name)
