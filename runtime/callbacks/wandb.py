"""`graphft.callbacks.WandB`: a run of Weights & Biases for each run of graphft's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Run, check_library
from graphft.runtime.callbacks.wandb_files import rows_of_offline_runs

STEPS = {"train": "train/step", "epoch": "epoch/epoch", "validation": "validation/epoch"}
"""What each kind of values is drawn over."""
OWN = ("id", "resume", "config")


class WandB:
    """`train/<name>` is logged for each step, with `train/step`; `epoch/<name>` and `validation/<name>` for each epoch,
    with `epoch/epoch` and `validation/epoch`. The run's id is that of graphft's run, so the next script goes on with
    it; its configuration are the job's options.

    `options`: other ones of `wandb.init`: entity, mode, dir, tags, name, ...
    """

    def __init__(self, project: str, **options: Any) -> None:
        check_library("wandb", "WandB")
        if taken := [name for name in OWN if name in options]:
            raise UsageError(
                f"callback WandB was given {taken[0]}, which follows from the run",
                rule="callbacks",
                help="leave it out; name=, entity=, mode=, dir=, tags= and others of wandb.init are yours",
            )
        self._options: dict[str, Any] = {"project": project, **options}
        self._logged_to: Any = None

    def on_begin(self, run: Run) -> None:
        self._run = run
        self._newest = dict.fromkeys(STEPS, -1)
        self._take_in(self._open().summary)
        folder = Path(self._options.get("dir") or os.environ.get("WANDB_DIR") or ".") / "wandb"
        for row in rows_of_offline_runs(folder, run.id):
            self._take_in(row)

    def held(self) -> tuple[int, int]:
        return self._newest["train"] + 1, max(0, self._newest["epoch"])

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log("train", step, metrics)

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._log("epoch", epoch, {name: value for name, value in metrics.items() if name != "epoch"})

    def on_validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._log("validation", epoch, metrics)

    def on_end(self) -> None:
        if self._logged_to is not None:
            self._logged_to.finish()
            self._logged_to = None

    def _open(self) -> Any:
        import wandb

        if self._logged_to is None:
            named = {"name": self._run.folder.resolve().name, **self._options}
            self._logged_to = wandb.init(id=self._run.id, resume="allow", config=dict(self._run.config), **named)
            for kind, step in STEPS.items():
                self._logged_to.define_metric(f"{kind}/*", step_metric=step)
        return self._logged_to

    def _take_in(self, row: Any) -> None:
        """What is there already: a row of the log, or the summary of a run that is gone on with."""
        for kind, name in STEPS.items():
            if (step := row.get(name)) is not None:
                self._newest[kind] = max(self._newest[kind], int(step))

    def _log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step > self._newest[kind]:
            self._newest[kind] = step
            self._open().log({STEPS[kind]: step, **{f"{kind}/{name}": value for name, value in values.items()}})
