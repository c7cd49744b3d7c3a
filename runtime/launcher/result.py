"""A completed job's model, its metrics, and what it lost are read from its folder, whoever ran it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphft.disk.fileio import tensor_file_metadata
from graphft.runtime.checkpoint.store import saved_step
from graphft.runtime.coordination.job_files import MODEL
from graphft.runtime.coordination.result_files import Discarded, describe_discarded, read_discarded, read_validations
from graphft.runtime.launcher.process_ends import read_ends
from graphft.runtime.process.metric_table import Rows, read_rows, rows_or_why
from graphft.transpiler.record import read_record

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.runtime.validation.best_model import BestModels
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.criteria import Criterion


@dataclass(frozen=True)
class Best:
    """After how many steps the model was the best, what its metric was, and the file: a safetensors state_dict."""

    step: int
    value: float
    model: Path


@dataclass(frozen=True)
class Result:
    """A completed job. `model` is the trained model's safetensors state_dict; `steps`, of the whole run; `seconds`, of
    this launch. `failures` and `preemptions` have how often processes of a role ended too early, by its name ("trainer
    0"), in all `launches`. `discarded`: what of the data, and why."""

    job_dir: Path
    model: Path
    steps: int
    seconds: float
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    discarded: tuple[Discarded, ...] = ()
    launches: int = 1

    @classmethod
    def of(cls, job_dir: Path, steps: int, seconds: float, discarded: tuple[Discarded, ...] = ()) -> Result:
        """Returns the result of the complete job in this folder. `discarded`: as etcd tells, for a folder without the
        model."""
        ends, found = read_ends(job_dir), read_discarded(job_dir) or discarded
        model = job_dir / MODEL
        return cls(job_dir, model, steps, seconds, ends.failures, ends.preemptions, found, ends.launches)

    @property
    def validations(self) -> dict[int, dict[str, float]]:
        """By step (so many were done), the loss and each metric of `transpile(validate=)`, without those that were no
        number."""
        return {step: dict(row.metrics) for step, row in read_validations(self.job_dir).items()}

    @property
    def best(self) -> Best | None:
        """The best model by its validations, of `Validation(best=...)`. Read from the folder, or its storage."""
        if (found := self._best()) is None or (kept := found[1].best()) is None:
            return None
        model = found[1].fetch(kept)
        return Best(kept.step, kept.value, model) if model is not None else None

    def missing_best(self) -> str:
        """Returns a line if the best model is not there: `best` may be a worse one then. "" if it is, or none was to be
        kept."""
        found, rows = self._best(), self.validations
        if found is None or not rows:
            return ""
        from graphft.runtime.validation.best_model import Kept

        metric, models = found[0].metric, found[1]
        values = ((step, row.get(metric, math.nan)) for step, row in rows.items())
        made = [Kept(step, value) for step, value in values if math.isfinite(value)]
        if not made:
            return f"NO best model is kept: {metric} was not finite in any of {len(rows)} validations"
        best = min(filter(None, (*made, models.best())), key=lambda one: one.rank(models.mode))
        if models.has(best):
            return ""
        return f"the model of step {best.step}, the best one by {metric}, is MISSING from {models.files.folder}"

    def warnings(self, config: JobConfig) -> list[str]:
        return self.lost(config.data.records) + _missing_validations(self.job_dir, config, self.steps)

    def _best(self) -> tuple[Criterion, BestModels] | None:
        validate = read_record(self.job_dir).config.validate
        if validate is None or validate.best is None:
            return None
        from graphft.runtime.validation.best_model import BestModels  # with torch, which a launcher does without

        return validate.best, BestModels(self.job_dir, validate.best.mode or "min")

    @property
    def skipped_steps(self) -> int:
        """Steps (async: batches, units) that were left out because a loss or a gradient was not finite. Raises
        FileNotFoundError if the model is on another machine."""
        return int(tensor_file_metadata(self.model).get("skipped_steps", 0))

    @property
    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """(step, value) of `loss` and of each metric that `loss_fn` returned, in order: means over the samples of all
        slots. Async: of the batches (units) that the first shard has applied."""
        numbers, rows = read_rows(self.job_dir).known()
        return {name: list(zip(numbers.tolist(), rows.values(name).tolist(), strict=True)) for name in rows.names}

    def predict(self, data: Any, **options: Any) -> dict[str, Tensor]:
        """Returns what `graphft.predict` does, whose options these are."""
        import graphft  # what predicts stands above: this room does not know it

        predicted: dict[str, Tensor] = graphft.predict(self.job_dir, data, **options)
        return predicted

    def describe(self, generation: int) -> str:
        failures, preemptions = sum(self.failures.values()), sum(self.preemptions.values())
        _, rows = rows_or_why(self.job_dir)[0].known()
        parts = [
            f"complete: {self.steps} steps" + f" in {self.seconds:.1f} s" * (self.launches == 1),
            *([f"loss {rows.values('loss')[-1]:.4g}"] if len(rows) else []),
            *([f"{self.launches} launches, the last took {self.seconds:.1f} s"] if self.launches > 1 else []),
            f"{preemptions} preemptions",
            f"{failures} failures",
            f"generation {generation}",
        ]
        where = str(self.model) if self.model.exists() else "on the machines of the pservers"
        return f"{', '.join(parts)}\nmodel: {where}"

    def lost(self, records: int, *, losses: bool = True) -> list[str]:
        """Returns what the job did without, a line each. `records`: of its data. `losses`: all of them are looked at,
        too."""
        skipped = self.skipped_steps if self.model.exists() else 0
        bad = tensor_file_metadata(self.model).get("nonfinite") if self.model.exists() else None
        lines = [f"{skipped} of {self.steps} steps were SKIPPED as not finite"] if skipped else []
        if losses:
            rows, why = rows_or_why(self.job_dir)
            lines += _not_finite(rows, bool(skipped)) + ([why] if why else [])
        lines += [f"the model is NOT FINITE: {bad}"] if bad else []
        lines += [describe_discarded(self.discarded, records)] if self.discarded else []
        return lines + ([best] if (best := self.missing_best()) else [])


def steps_of(job_dir: Path, config: JobConfig) -> int:
    """Returns how many steps the complete job in this folder has, which may have ended early."""
    early = config.validate is not None and config.validate.stop is not None
    return (saved_step(job_dir, config) if early else None) or config.total_steps


def _not_finite(rows: Rows, skipped: bool) -> list[str]:
    _, known = rows.known()
    wild = {name: np.count_nonzero(~np.isfinite(known.values(name))) for name in rows.names[skipped:]}
    return [f"{name} was NOT FINITE at {count} of {len(known)} steps" for name, count in wild.items() if count]


def _missing_validations(job_dir: Path, config: JobConfig, steps: int) -> list[str]:
    lacking = sorted({step for step in config.validated if step <= steps} - read_validations(job_dir).keys())
    if not lacking:
        return []
    return [f"the validations of {len(lacking)} steps are MISSING, the first of step {lacking[0]}"]
