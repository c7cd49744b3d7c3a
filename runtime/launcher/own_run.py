"""The run of a job that a script has made: to be found again without its folder's name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.connect import is_complete
from graphft.runtime.coordination.job_storage import is_complete_at, stored_run
from graphft.runtime.launcher.folder_status import copy_of
from graphft.runtime.launcher.job_folder import places

if TYPE_CHECKING:
    from graphft.transpiler import Job


def run_of(job: Job) -> str:
    """The folder in ./jobs, or the URL of the storage, with the newest run of this very job; a complete one, if there
    is any. Raises UsageError[unknown-job] where there is none, with what is there and how it differs."""
    runs, others = list[tuple[bool, int, str]](), list[str]()
    for number, (complete, where, differs) in enumerate(_runs(job)):
        if differs:
            others.append(f"{where} {differs}")
        else:
            runs.append((complete, number, where))
    if runs:
        return max(runs)[2]
    raise UsageError(
        f"there is no run of this job: {'; '.join(others) or f'no jobs/{job.config.name}'}",
        rule="unknown-job",
        help="run it first: job.run(); or name the folder: graphft.predict(FOLDER, data)",
    )


def _runs(job: Job) -> Iterator[tuple[bool, str, str]]:
    """Of each run that may be the job's: whether it is complete, where it is, and what it holds instead."""
    from graphft.transpiler import read_record
    from graphft.transpiler.differences import differences

    for chosen, path in places(job):
        url = chosen.config.storage
        if here := os.path.exists(path / "job.json"):
            folder = path
        elif url and stored_run(url):
            folder = copy_of(url)
        else:
            return
        try:
            found = read_record(folder)
        except GraphftError as error:
            yield False, str(path), f"cannot be read ({error.message})"
            continue
        same = replace(chosen, config=chosen.config.replace(storage=found.config.storage))  # it may have been moved
        differs = ", ".join(differences(folder, found, same))
        complete = is_complete(folder) if here else is_complete_at(url)
        yield complete, str(path) if here else url, f"differs in: {differs}" if differs else ""
