"""A job: the programs of its roles, and what they need besides. A job's folder is enough to start any role anywhere.

job.json has the configuration, the id of the run, and digests of what it is made of; source/program.gft the program it
was made from; programs/<role>/ program.gft and values.safetensors; data/ arrays that travel with the job; validation/
and prediction/ the like of what it validates and predicts with; storage.json the URL of its storage.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.capture.weights import saved_variables
from graphft.disk.fileio import scratch_folder
from graphft.errors import GraphftError, UsageError
from graphft.ir import Program
from graphft.ir.printer import format_block
from graphft.ir.storage import load_program, save_program
from graphft.ir.verify import VerificationError, verify_job
from graphft.transpiler.config import JobConfig
from graphft.transpiler.differences import differences
from graphft.transpiler.passes import pipeline
from graphft.transpiler.prediction import default_prediction, prediction_of, save_prediction
from graphft.transpiler.programs import Programs, Stage, run_passes
from graphft.transpiler.record import (
    FORMAT,
    MARKER,
    RECORD,
    VALIDATION,
    Fingerprint,
    drawn_without_seed,
    fingerprint_values,
    read_record,
    without_lines,
)
from graphft.transpiler.rules import check_config

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.capture.model import Origin


@dataclass(frozen=True, repr=False)
class Job:
    """Source program, options, and the programs made from them; `transpile` returns it."""

    source: Program
    config: JobConfig
    programs: Programs
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Names the run that begins when this job is saved, or that it was loaded from."""
    evaluation: Program | None = None
    """It is validated with this, as it was captured."""
    prediction: Program | None = None
    """It predicts with this, if that was asked for."""
    origin: Origin | None = None
    """Module that `source` was captured from, in the process that did."""

    @staticmethod
    def make(
        source: Program,
        config: JobConfig,
        evaluation: Program | None = None,
        prediction: Program | None = None,
        origin: Origin | None = None,
    ) -> Job:
        """Runs the passes on a copy of `source`. Raises ProgramError when one cannot be applied."""
        source, evaluation = source.clone(), evaluation.clone() if evaluation is not None else None
        for program in filter(None, (source, evaluation)):
            program.attrs.update(device=config.device, seed=config.seed)
        programs = run_passes(source, pipeline(config), config, evaluation)[-1].programs
        return Job(source, config, programs, evaluation=evaluation, prediction=prediction, origin=origin)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<Job {c.name!r}: {c.trainers} trainers, {c.pservers} pservers, {'sync' if c.sync else c.mode}"
            f"{', ft' if c.ft else ''}, {c.total_steps} steps>"
        )

    def trainer_program(self) -> Program:
        return self.programs.trainer

    def pserver_program(self, index: int) -> Program:
        """Returns the program of shard `index`. Raises GraphftError if there is no such shard."""
        if not 0 <= index < len(self.programs.pservers):
            help = f"the job has pservers 0 to {len(self.programs.pservers) - 1}"
            raise GraphftError(f"there is no pserver {index}", rule="pserver-index", help=help)
        return self.programs.pservers[index]

    def coordinator_program(self) -> Program:
        assert self.programs.coordinator is not None
        return self.programs.coordinator

    def verify(self) -> None:
        """Verifies each program, and what must hold across them. Raises VerificationError."""
        verify_job(self.programs.by_name())
        found = list(check_config(self.programs, self.config))
        if found:
            raise VerificationError(found, f"job '{self.config.name}'")

    @cached_property
    def hash(self) -> str:
        """A sha256 that is the same for the same programs and options, wherever and whenever they are made.

        Initial values and the contents of the data take no part: see `fingerprint`. Neither do lines of the script.
        """
        digest = hashlib.sha256()
        for name, program in self.programs.by_name().items():
            digest.update(f"{name}\n{without_lines(program)}\n".encode())
        digest.update(json.dumps(self.config.hashed(), sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digests of what the job is made of: a script that is run again finds its job by them."""
        data = self.config.data.fingerprint()
        if self.config.validate is not None:
            data |= {f"validation: {name}": of for name, of in self.config.validate.data.fingerprint().items()}
        drawn = drawn_without_seed() and not self.source.loaded_whole
        return Fingerprint(self.hash, data, fingerprint_values(self.programs.by_name()), drawn)

    @property
    def passes(self) -> tuple[Stage, ...]:
        """The programs as captured, and after each pass."""
        return run_passes(self.source, pipeline(self.config), self.config, self.evaluation)

    def diff(self) -> str:
        """Returns what `ft` changes in the trainer's program: a text diff of the blocks without and with it."""
        before, after = (self._step_with(ft) for ft in (False, True))
        return "\n".join(difflib.unified_diff(before, after, "ft=False", "ft=True", lineterm="", n=1))

    def _step_with(self, ft: bool) -> list[str]:
        config = self.config.replace(ft=ft)
        stages = run_passes(self.source, pipeline(config), config, self.evaluation)
        return "\n\n".join(map(format_block, stages[-1].programs.trainer.blocks.values())).splitlines()

    def run(self, **options: Any) -> Any:
        """Runs the job to its end with all roles on this machine; or as the role that the environment names.

        See `graphft.run_job`, which is the runtime's: this package does not know it.
        """
        import graphft

        return graphft.run_job(self, **options)

    def predict(self, data: Any, **options: Any) -> dict[str, Tensor]:
        """Predicts of `data` with the model of this job's newest run in ./jobs: see `graphft.predict`, whose options
        these are. Of a run in a folder of its own (`job_dir=`): `graphft.predict(folder, data)`."""
        import graphft

        predicted: dict[str, Tensor] = graphft.predict(self, data, **options)
        return predicted

    # -- files ------------------------------------------------------------------------------------------------

    def save_prediction(self, path: str | os.PathLike[str]) -> None:
        """Writes what it predicts with into the folder of a run of this job, in the place of what was there. A storage
        that has the run keeps what it had.

        Raises GraphftError for a folder that holds another model's run, or if this job has nothing to predict with.
        """
        folder, program = Path(path), self.prediction or prediction_of(self.origin)
        read_record(folder)
        if saved_variables(load_program(folder / "source")) != saved_variables(self.source):
            text = f"{path} holds a run of another model: its weights have other names, shapes or dtypes"
            raise UsageError(text, rule="predict", help="give the folder of a run of this job")
        save_prediction(program, self.source, folder)

    def save(self, path: str | os.PathLike[str], prepare: Callable[[Path], object] = id) -> None:
        """Writes the job's folder, wholly or not at all. A folder that holds the same job is left as it is.

        `prepare` is called with the folder before it has its name: for what is to be there besides. Raises GraphftError
        when the folder holds anything else, or cannot be written.
        """
        target = Path(path).resolve()  # no folder replaces a link
        if _holds(target, self):
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(target) as scratch:
                new = scratch / "job"
                new.mkdir()
                self._write(new)
                prepare(new)
                new.rename(target)
        except OSError as error:
            if _holds(target, self):  # another process has saved it meanwhile
                return
            text = f"cannot save job '{self.config.name}' to {target}: {error}"
            raise GraphftError(text, rule="save", help="check that its folder can be written, and has room") from error

    def _write(self, folder: Path) -> None:
        for given, path in ((self.source, folder / "source"), (self.evaluation, folder / VALIDATION / "source")):
            if given is not None:
                source = given.clone()
                source.values = {}
                save_program(source, path)
        for name, program in self.programs.by_name().items():
            save_program(program, folder / "programs" / name)
        if (prediction := self.prediction or default_prediction(self.origin)) is not None:
            save_prediction(prediction, self.source, folder)
        self.config.data.store(folder)
        if self.config.validate is not None:
            self.config.validate.data.store(folder / VALIDATION)
        if self.config.storage:
            (folder / MARKER).write_text(json.dumps({"url": self.config.storage}), encoding="utf-8")
        config, fingerprint = self.config.to_json(), asdict(self.fingerprint)
        record = {"format": FORMAT, "run": self.run_id, "fingerprint": fingerprint, "config": config}
        with (folder / RECORD).open("w", encoding="utf-8") as f:
            f.write(json.dumps(record))  # at once, and not indented: data may have a million chunks
            f.flush()
            os.fsync(f.fileno())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Job:
        """Returns the job that `save` wrote. Raises GraphftError for a folder that is missing, damaged or no job's."""
        folder = Path(path)
        record = read_record(folder)
        config = record.config
        trainer, coordinator, *pservers = (
            load_program(folder / "programs" / name)
            for name in ("trainer", "coordinator", *(f"pserver{i}" for i in range(config.pservers)))
        )
        programs, evaluation = Programs(trainer, tuple(pservers), coordinator), None
        if config.validate is not None:
            programs.evaluation = load_program(folder / "programs" / "evaluation")
            evaluation = load_program(folder / VALIDATION / "source")
        job = Job(load_program(folder / "source"), config, programs, record.run_id, evaluation)
        if job.hash != record.hash:
            text = f"{folder} is damaged: its files are of job {job.hash[:12]}, job.json is of {record.hash[:12]}"
            raise GraphftError(text, rule="load", help="transpile and save the job again")
        return job


def _holds(folder: Path, job: Job) -> bool:
    """True if `folder` holds this very job. Raises GraphftError if it holds something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = read_record(folder)
    except GraphftError:
        what = "is not empty, and holds no job"
    else:
        changed = differences(folder, found, job)
        if not changed:
            return True
        what = f"holds another job, which differs in: {', '.join(changed)}"
    help = "choose another folder, or delete this one"
    raise UsageError(f"cannot save a job to {folder}: it {what}", rule="job-directory", help=help)
