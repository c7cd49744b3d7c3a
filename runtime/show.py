"""`graphft show`: prints the programs of a job, or a saved program."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphft.errors import UsageError
from graphft.ir.graph import to_dot
from graphft.ir.storage import load_program
from graphft.runtime.coordination.job_files import local_folder
from graphft.runtime.coordination.runs import JOBS, run_in
from graphft.transpiler.job import Job
from graphft.transpiler.programs import Stage
from graphft.transpiler.record import RECORD


def show(options: argparse.Namespace) -> int:
    found = run_in(options.path.rstrip("/")) or run_in(str(JOBS / options.path)) or options.path
    path, role = local_folder(found), options.role
    if not (path / RECORD).exists():
        _show_program(path, options)
        return 0
    job = Job.load(path)
    names = job.programs.by_name()
    if role is not None and role not in names:
        raise UsageError(f"the job has no program {role}", rule="role", help=f"it has {', '.join(names)}")
    if options.diff:
        print(job.diff())
        return 0
    for stage in job.passes if options.passes else [Stage("", job.programs)]:
        if options.passes:
            print(f"===== after {stage.after or 'capture'}")
        for name, program in stage.programs.by_name().items():
            if role in (None, name):
                print(to_dot(program) if options.dot else program)
    return 0


def _show_program(path: Path, options: argparse.Namespace) -> None:
    help = "give the folder of a job, or one that graphft.save_program wrote"
    if not path.exists():
        raise UsageError(f"there is no {path}", rule="missing-file", help=help)
    if given := [name for name in ("role", "passes", "diff") if getattr(options, name)]:
        raise UsageError(f"--{given[0]} is for jobs, and {path} holds none", rule="usage", help=help)
    program = load_program(path)
    print(to_dot(program) if options.dot else program)
