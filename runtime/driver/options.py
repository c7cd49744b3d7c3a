"""The arguments of a Trainer become a job whose epochs are on demand; those that make no sense are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphft.capture.loss_fn import check_told, reported
from graphft.errors import UsageError
from graphft.ir import Program
from graphft.options import is_whole
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.engines.base import engine_options
from graphft.runtime.launcher.options import ENGINE
from graphft.transpiler.api import transpile
from graphft.transpiler.job import Job

MAX_EPOCHS, MOST_EPOCHS = 1000, 100_000
"""Each process plans all epochs before it begins."""
BEYOND = 1
"""A pass that is never asked for: so the job never completes, and a script that is run again finds its epochs done."""
_FIXED = ("trainers", "epochs", "passes_on_demand", "validate", "ft", "sync", "fresh")


def make_job(program: Program | Job, options: Mapping[str, Any]) -> Job:
    """Returns the job of a Trainer of a program with these options, or of a job. Raises GraphftError."""
    given = dict(options)
    if isinstance(program, Job):
        return _on_demand(program, given)
    if not isinstance(program, Program):
        raise UsageError(
            f"a Trainer needs a program, got {type(program).__name__}",
            rule="option",
            help="program = graphft.build(model, loss_fn, inputs); graphft.minimize(program, optimizer)",
        )
    check_told(reported(program))
    if fixed := next(filter(given.__contains__, _FIXED), ""):
        raise UsageError(
            f"a Trainer has no option {fixed}",
            rule="option",
            help="num_workers=, max_epochs= and validation= are its own; its job is sync, fault-tolerant, and goes on",
        )
    workers, most = given.pop("num_workers", 1), given.pop("max_epochs", MAX_EPOCHS)
    check_number("num_workers", workers, 1)
    check_number("max_epochs", most, 1)
    if most > MOST_EPOCHS:
        raise UsageError(
            f"max_epochs is {most}, expected {MOST_EPOCHS} or fewer",
            rule="option",
            help="give fewer: each process plans all of them before it begins",
        )
    return transpile(program, trainers=workers, ft=True, epochs=most + BEYOND, passes_on_demand=True, **given)


def _on_demand(job: Job, given: Mapping[str, Any]) -> Job:
    if given:
        raise UsageError(
            f"{min(given)} is given with a job, which has its options already",
            rule="option",
            help="give it to transpile()",
        )
    if not (job.config.ft and job.config.sync) or job.config.validate is not None:
        raise UsageError(
            "the job is async, without fault tolerance, or validates by itself",
            rule="option",
            help="a Trainer needs transpile(sync=True, ft=True) without validate=; it validates when validate() is "
            "called: Trainer(..., validation=graphft.Validation(data=...))",
        )
    config = job.config.replace(passes_on_demand=True, epochs=job.config.epochs + BEYOND)
    return Job.make(job.source, config, prediction=job.prediction, origin=job.origin)


def check_number(name: str, value: object, least: int) -> None:
    """Raises UsageError for what is no whole number of at least so much."""
    if not is_whole(value, least):
        raise UsageError(
            f"{name} is {value!r}, expected a number, {least} or more", rule="option", help=f"correct {name}"
        )


def check_driver(engine: Any) -> None:
    """Raises UsageError for a name of no engine; and in a rank of torchrun, where nobody would ask for an epoch."""
    env = os.environ
    engine_options(engine or env.get(ENGINE) or "local")
    if env.get("RANK") and env.get("WORLD_SIZE") and not (env.get("GRAPHFT_ROLE") or env.get("GRAPHFT_LAUNCH")):
        raise UsageError(
            f"RANK is {env['RANK']}: the ranks of torchrun are a job's roles, and none of them is a Trainer's script",
            rule="environment",
            help="start the script by itself, without RANK and WORLD_SIZE: a Trainer starts its processes",
        )


def check_call(max_retries: object, checkpoint: object, epochs: object) -> None:
    """Raises UsageError for what `train` cannot be called with."""
    check_number("max_retries", max_retries, -1)
    check_number("epochs", epochs, 1)
    if checkpoint is not None and checkpoint != "auto":
        check_number("checkpoint (which may be 'auto', or None)", checkpoint, 1)


def check_place(path: str | os.PathLike[str], job_dir: Path, storage: str) -> None:
    """Raises UsageError for a place in which the run keeps its own checkpoints. `storage`: a URL, or its folder."""
    inside = f"{path}/".startswith(f"{storage}/{FOLDER}/") if "://" in str(path) else False
    if inside or Path(path).resolve().is_relative_to((job_dir / FOLDER).resolve()):
        raise UsageError(
            f"{path} is where the run keeps its own checkpoints",
            rule="option",
            help='give another place, say f"{trainer.storage}/best"',
        )
