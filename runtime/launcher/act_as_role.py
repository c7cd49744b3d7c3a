"""The script as one of the job's roles: `GRAPHFT_ROLE`, or torchrun's RANK, in its environment says which."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_storage import JOBS
from graphft.runtime.coordination.runs import run_in
from graphft.runtime.process.role_process import EXIT_USAGE

if TYPE_CHECKING:
    from graphft.transpiler import Job


def act_as_role(job: Job, overrides: Mapping[str, Any]) -> None:
    """If the environment names a role, this process is that role, and ends with it."""
    from graphft.runtime.roles.environment import role_of_environment, run_as_role

    try:
        role = role_of_environment(os.environ, job.config.pservers, job.config.dispatch == "coordinator")
        if role is None:
            return
        _check_role_options(Path(role.job_dir or run_in(str(JOBS / job.config.name)) or JOBS), overrides)
        status = run_as_role(job, role)
    except GraphftError as error:
        print(error, file=sys.stderr)
        status = EXIT_USAGE
    sys.exit(status)


def _check_role_options(job_dir: Path, overrides: Mapping[str, Any]) -> None:
    """Raises UsageError when `resume` or `fresh` cannot hold: a role shares its folder with the run's other roles."""
    if overrides.get("fresh"):
        raise UsageError(
            "fresh cannot hold for a role: all roles of a run, and those started again, use one folder",
            rule="option",
            help="leave it out, and set GRAPHFT_JOB_DIR to a new folder for a new run",
        )
    if overrides.get("resume") and not (job_dir / "job.json").exists():
        raise UsageError(
            f"there is nothing to resume: {job_dir} holds no job",
            rule="nothing-to-resume",
            help="set GRAPHFT_JOB_DIR to the run's folder, or leave resume out to begin one",
        )
