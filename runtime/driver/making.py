"""What a Trainer is given becomes a job whose passes are on demand, and options of its launch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphft.capture.loss_results import check_told, reported
from graphft.errors import UsageError
from graphft.ir import Program
from graphft.option_names import is_whole, unknown_option
from graphft.runtime.driver.checks import check_retries
from graphft.runtime.driver.train_configs import run_options, scaling_options
from graphft.runtime.engines.base import engine_options
from graphft.runtime.launcher.options import ENGINE, LaunchOptions
from graphft.runtime.process.role_process import ROLES
from graphft.transpiler import Job, transpile
from graphft.transpiler.api import NAMED, OPTIONS

MAX_EPOCHS, MOST_EPOCHS = 1000, 100_000
"""Each process plans all epochs before it begins."""
MAX_RETRIES = 3
_OWN = {"num_workers", "max_epochs", "max_retries", "engine", "resources", "callbacks", "validation", "data", "job_dir"}
"""What train() returns beside the metrics."""
BEYOND = 1
"""A pass that is never asked for: so the job never completes, and a script that is run again finds its epochs done."""


@dataclass(frozen=True)
class Made:
    """`resources`: by role."""

    job: Job
    max_retries: int
    resources: Mapping[str, Mapping[str, float]]

    def launch(self, **options: Any) -> LaunchOptions:
        return LaunchOptions(resources=self.resources, **options)


def make(
    program: Program | Job, resources: Mapping[str, Mapping[str, float]] | None, options: Mapping[str, Any]
) -> Made:
    """`options`: of the Trainer, beside those of its launch. Raises GraphftError."""
    given = dict(options)
    scaling, run = given.pop("scaling_config", None), given.pop("run_config", None)
    found = (scaling_options(scaling) if scaling is not None else {}) | (run_options(run) if run is not None else {})
    if twice := found.keys() & given.keys():
        raise UsageError(f"{min(twice)} is given twice, by itself and in a config", rule="option", help="give it once")
    given |= found
    resources = {**given.pop("resources", {}), **(resources or {})}
    _check_resources(resources)
    retries, most = given.pop("max_retries", MAX_RETRIES), given.pop("max_epochs", MAX_EPOCHS)
    check_retries(retries)
    _check_numbers(num_workers=given.get("num_workers", 1), max_epochs=most)
    if most > MOST_EPOCHS:
        raise UsageError(
            f"max_epochs is {most}, expected {MOST_EPOCHS} or fewer",
            rule="option",
            help="give fewer: each process plans all of them before it begins",
        )
    for name, wrong in _OTHERWISE.items():
        if name in given:
            raise UsageError(f"a Trainer has no option {name}", rule="option", help=wrong)
    workers = given.pop("num_workers", None)
    if isinstance(program, Job):
        return Made(_of_job(program, given, workers), retries, resources)
    _check_program(program)
    _check_options(given)
    slots = workers if workers is not None else 1
    job = transpile(program, trainers=slots, ft=True, passes=most + BEYOND, passes_on_demand=True, **given)
    return Made(job, retries, resources)


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not is_whole(value, 1):
            raise UsageError(
                f"{name} is {value!r}, expected a number, 1 or more",
                rule="option",
                help=f"correct {name}, or leave it out",
            )


def _check_program(program: object) -> None:
    if not isinstance(program, Program):
        raise UsageError(
            f"a Trainer needs a program, got {type(program).__name__}",
            rule="option",
            help="program = graphft.build(model, loss_fn, inputs); graphft.minimize(program, optimizer)",
        )
    check_told(reported(program))


def _check_options(given: Mapping[str, Any]) -> None:
    for names in (("data", "chunks"), ("batch_size",)):
        if not given.keys() & set(names):
            raise UsageError(
                f"a Trainer of a program needs {names[0]}=",
                rule="option",
                help="data=graphft.arrays(x=x, y=y, chunk_size=256), batch_size=32",
            )
    own = {*OPTIONS, *NAMED, *_OWN} - _OTHERWISE.keys()
    if unknown := given.keys() - own - {"chunks"}:
        raise unknown_option("a Trainer", min(unknown), sorted(own))


def _check_resources(resources: Mapping[str, Any]) -> None:
    for role, wants in resources.items():
        if role not in ROLES or not isinstance(wants, Mapping):
            raise UsageError(
                f"resources has {role}={wants!r}, expected a role ({', '.join(ROLES)}) and what a process of it takes",
                rule="option",
                help='resources={"trainer": {"CPU": 2, "GPU": 1}}',
            )


def check_driver(engine: Any) -> None:
    """Raises UsageError for a name of no engine; and in a rank of torchrun: all of them would be roles, and nobody
    would ask for an epoch."""
    env = os.environ
    engine_options(engine or env.get(ENGINE) or "local")
    if env.get("RANK") and env.get("WORLD_SIZE") and not (env.get("GRAPHFT_ROLE") or env.get("GRAPHFT_LAUNCH")):
        raise UsageError(
            f"RANK is {env['RANK']}: the ranks of torchrun are a job's roles, and none of them is a Trainer's script",
            rule="environment",
            help="start the script by itself, without RANK and WORLD_SIZE: a Trainer starts its processes",
        )


_OTHERWISE = {
    "trainers": "num_workers= says how many",
    "etcd": 'an etcd that runs already is etcd_endpoints=("host:2379",)',
    "fresh": "graphft launch --fresh SCRIPT begins a new run; so does another name=",
    "resume": "an unfinished run of the same script is always gone on with",
    "passes": "each train() is one; max_epochs= is the most there can be",
    "epochs": "each train() is one; max_epochs= is the most there can be",
    "passes_on_demand": "they are, always",
    "validate": "a Trainer validates when validate() is called: validation=graphft.Validation(data=...)",
    "ft": "a Trainer's job is fault-tolerant, always",
    "sync": "a Trainer's job is sync: an async one runs with graphft.transpile(sync=False).run()",
}


def _of_job(job: Job, given: Mapping[str, Any], workers: int | None) -> Job:
    """The same job with its passes on demand."""
    if given or workers is not None:
        name = "num_workers" if workers is not None else min(given)
        raise UsageError(
            f"{name} is given with a job, which has its options already", rule="option", help="give it to transpile()"
        )
    if not (job.config.ft and job.config.sync):
        raise UsageError(
            "the job is " + ("async" if not job.config.sync else "without fault tolerance"),
            rule="option",
            help="a Trainer needs transpile(sync=True, ft=True)",
        )
    if job.config.validate is not None:
        raise UsageError(
            "the job validates by itself (transpile(validate=)), and a Trainer does when validate() is called",
            rule="option",
            help="leave validate out of transpile(); Trainer(..., validation=graphft.Validation(data=...))",
        )
    config = job.config.replace(passes_on_demand=True, passes=job.config.passes + BEYOND)
    return Job.make(job.source, config, prediction=job.prediction, origin=job.origin)
