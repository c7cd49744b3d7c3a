"""The ready-made callbacks (`graphft.callbacks`): CSV files, and one log of a tracker's for each run."""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Logger, Run, check_library
from graphft.runtime.coordination.records import Event

TAG = "graphft.run"
"""The tag of an MLflow run that has the id of graphft's run: the next script finds it by this, on any machine."""
MOST_METRICS, MOST_TEXT = 500, 500
"""MLflow's server takes so many in one request, and so many characters of a parameter (and 100 of them)."""
STEPS = {"train": "train/step", "epoch": "epoch/epoch", "validation": "validation/epoch"}
"""Weights & Biases draws each kind of values over these."""


class CSVLogger(Logger):
    """Writes a row for each step, once, into a file of the run's folder; epochs and validations into two beside it,
    `steps-epochs.csv` and `steps-validation.csv`. Numbers have all their digits. `name`: of the steps' file."""

    def __init__(self, name: str = "steps.csv") -> None:
        if Path(name).name != name:
            raise UsageError(
                f"CSVLogger was given {name!r}, which is no plain file name",
                rule="callbacks",
                help="the files are in the run's folder: give a name without folders",
            )
        self._name = Path(name)
        self._tables: dict[str, CsvTable] = {}

    def on_begin(self, run: Run) -> None:
        self._folder = run.folder
        by_steps = run.config.get("validate") and run.config["validate"]["every"] != "epoch"
        self._keys = {"train": "step", "epoch": "epoch", "validation": "step" if by_steps else "epoch"}

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        if kind not in self._tables:
            suffix = {"train": "", "epoch": "-epochs", "validation": "-validation"}[kind]
            path = self._folder / f"{self._name.stem}{suffix}{self._name.suffix}"
            self._tables[kind] = CsvTable(path, self._keys[kind])
        self._tables[kind].write(number, values)

    def flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def on_end(self) -> None:
        while self._tables:
            self._tables.popitem()[1].close()


class CsvTable:
    """A file to which rows are added over many scripts, whichever of them are killed: each number once, in order. The
    first column, `key`, has the number; the others are those of the first row. Raises OSError; UsageError for a file
    that is no such table."""

    def __init__(self, path: Path, key: str) -> None:
        self.key, self.newest = key, -1
        self._columns: list[str] = []
        self._file = path.open("a+b")
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a killed script may leave a part of a line
            self._file.truncate(self._file.tell() - len(lines.pop()))
        if not lines:
            return
        header, last = lines[0].decode(errors="replace"), lines[-1]
        self._columns = next(csv.reader([header]), [])
        number = last.split(b",")[0].decode(errors="replace")
        if self._columns and (self._columns[0] != key or not (number == key or number.isdecimal())):
            raise UsageError(
                f"{path} is not CSVLogger's: it has no column {key!r} of numbers",
                rule="callbacks",
                help="move it away, or give CSVLogger another name",
            )
        self.newest = int(number) if number.isdecimal() else -1

    def write(self, number: int, values: Mapping[str, float | str]) -> None:
        """Adds a row, unless there is one with this number or a later one."""
        if number <= self.newest:
            return
        if not self._columns:
            self._columns = [self.key, *values]
            self._file.write(_line(self._columns))
        row: Mapping[str, float | str] = {**values, self.key: number}
        self._file.write(_line([row.get(name, "") for name in self._columns]))
        self.newest = number

    def flush(self) -> None:
        """All rows so far are on the disk then."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


class TensorBoard(Logger):
    """`train/<name>` has a value for each step, `epoch/<name>` and `validation/<name>` for each epoch, `events` the
    run's events as text. Values are float32. A script that is killed may have its last half second in it twice.

    `folder`: of all runs; each has a folder of its own in it, named after the run's folder and its id.
    """

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        check_library("tensorboard", "TensorBoard")
        self._folder, self._step = Path(folder), 0
        self._open: Any = None

    def on_begin(self, run: Run) -> None:
        self._place = self._folder / f"{run.folder.resolve().name}-{run.id[:8]}"

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        self._step = number if kind == "train" else self._step
        for name, value in values.items():
            self._writer().add_scalar(f"{kind}/{name}", value, number)

    def on_event(self, event: Event) -> None:
        self._writer().add_text("events", f"[{event.who}] {event.text}", self._step, event.at)

    def flush(self) -> None:
        if self._open is not None:
            self._open.flush()

    def on_end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if self._open is None:
            self._open = SummaryWriter(str(self._place))
        return self._open


class MLflow(Logger):
    """`train/<name>` has a value for each step, once, whatever is killed; `epoch/<name>` and `validation/<name>` for
    each epoch. The parameters are the job's options. What the server does not take raises its error.

    `tracking_uri`: as MLflow has it; None: what MLflow is set up for.
    """

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        check_library("mlflow", "MLflow")
        self._experiment, self._uri = experiment, tracking_uri
        self._waiting: list[Any] = []

    def on_begin(self, run: Run) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        self._id = self._run_of(run)
        self._newest = {m.key: m.step for m in self._client.get_run(self._id).data.to_proto().metrics}

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name, value in values.items():
            key = re.sub(r"[^\w\-. /]", "_", f"{kind}/{name}")
            if number > self._newest.get(key, -1):
                self._waiting.append(Metric(key, float(value), now, number))
                self._newest[key] = number

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:MOST_METRICS], synchronous=True)
            del self._waiting[:MOST_METRICS]

    def on_end(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)

    def _run_of(self, run: Run) -> str:
        """Returns the id of the MLflow run, which is made, with its tag, if there is none."""
        from mlflow.entities import Param

        client = self._client
        experiment = client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment is not None else client.create_experiment(self._experiment)
        found = client.search_runs([place], f"tags.`{TAG}` = '{run.id}'")
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        made = str(client.create_run(place, run_name=run.folder.resolve().name, tags={TAG: run.id}).info.run_id)
        params = [Param(key, str(value)[:MOST_TEXT]) for key, value in run.config.items()]
        client.log_batch(made, params=params, synchronous=True)
        return made


class WandB(Logger):
    """`train/<name>` is logged for each step, with `train/step`; `epoch/<name>` and `validation/<name>` for each epoch,
    with `epoch/epoch` and `validation/epoch`. The run's id is that of graphft's run, so the next script goes on with
    it; its configuration are the job's options. Offline, a script that is killed may have its last half second in it
    twice.

    `options`: other ones of `wandb.init`: entity, mode, dir, tags, name, ...
    """

    def __init__(self, project: str, **options: Any) -> None:
        check_library("wandb", "WandB")
        if taken := {"id", "resume", "config"} & options.keys():
            raise UsageError(
                f"callback WandB was given {taken.pop()}, which follows from the run",
                rule="callbacks",
                help="leave it out; name=, entity=, mode=, dir=, tags= and others of wandb.init are yours",
            )
        self._options: dict[str, Any] = {"project": project, **options}
        self._logged_to: Any = None

    def on_begin(self, run: Run) -> None:
        self._run = run
        summary = self._open().summary
        self._newest = {kind: int(summary.get(step, -1)) for kind, step in STEPS.items()}

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        if number > self._newest[kind]:
            self._newest[kind] = number
            self._open().log({STEPS[kind]: number, **{f"{kind}/{name}": value for name, value in values.items()}})

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
