"""Running a job that was saved in a folder, without its script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.callbacks.told import Told
from graphft.runtime.coordination.connect import is_complete
from graphft.runtime.coordination.job_storage import MODEL, fetch_result
from graphft.runtime.coordination.wanted_passes import check_asked_for
from graphft.runtime.launcher.job_folder import continued_in, saved_folder
from graphft.runtime.launcher.launch import check_passes, check_processes, launch_directory
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.launcher.tell import tell

if TYPE_CHECKING:
    from graphft.transpiler import JobRecord


def launch_saved(path: Path, options: LaunchOptions) -> None:
    """Runs the job in a folder to its end, without its script. Raises GraphftError if it cannot, or fails."""
    from graphft.transpiler import read_record

    record = read_record(path)
    folder = saved_folder(path, resume=options.resume, fresh=options.fresh)
    check_processes(record, options)
    check_passes(record, options)
    if options.passes is None and not options.endpoints(record.config) and not is_complete(path):
        check_asked_for(
            record.config, path, "run that script again; or give --passes N: how many there are to be in all"
        )
    if is_complete(path):
        fetch_result(path)
        print(f"{path} is complete: {path / MODEL}")
    else:
        if went_on := continued_in(path):
            tell(f"{path} went on in {went_on}: what is trained here is another course of that run")
        _tell_of_callbacks(path, record)
        launch_directory(record, folder, options)


def _tell_of_callbacks(path: Path, record: JobRecord) -> None:
    """They are objects of the script."""
    plan = record.config.plan
    try:
        told = Told.read(path, record.run_id, plan.total_steps, plan.passes)
    except (UsageError, OSError) as error:
        tell(f"callbacks of the script that began {path} are NOT called here; {error}")
        return
    if told != Told(record.run_id):
        later = (
            "they are told of these steps and epochs when that script goes on"
            if record.config.passes_on_demand
            else "end this, and run that script instead, if they are to be told of the rest"
        )
        tell(
            f"the callbacks of the script that began {path} are NOT called here; they were told of {told.step} steps "
            f"and {told.epoch} epochs: {later}"
        )
