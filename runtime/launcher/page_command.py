"""`graphft page`, and the page of a launch: of a job that runs, as its etcd tells; of any other, as its folder does."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_files import JOBS, is_complete, is_url
from graphft.runtime.coordination.runs import find_folder
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.folder_status import ask, list_folders, look_at, note_of
from graphft.runtime.launcher.process_ends import ends_as_events
from graphft.runtime.page.job_page import JobPage, Look, running
from graphft.runtime.page.server import PageServer
from graphft.runtime.page.time_keeper import TimeKeeper, read_time, seen_of
from graphft.runtime.process.folder_lock import holder_of
from graphft.runtime.process.role_process import EXIT_OK
from graphft.transpiler.record import read_record

log = logging.getLogger("graphft")


def serve_page(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises GraphftError when there is no such job."""
    server = PageServer(page_of(options.job), options.port)
    try:
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # its usual end
            threading.Event().wait()
    finally:
        server.close()
    return EXIT_OK


def page_of(job: str) -> JobPage:
    """Returns that of the job of this name, folder or URL; "": the one in ./jobs that was worked on last."""
    if job:
        return JobPage(FolderLooks(find_folder(job), job.rstrip("/") if is_url(job) else ""))
    if not (found := list_folders()):
        raise UsageError(
            f"there are no jobs in {JOBS.absolute()}",
            rule="unknown-job",
            help="give --job with the folder of a job, or the URL of its storage",
        )
    return JobPage(FolderLooks(found[-1].folder))


class FolderLooks:
    """Looks at the job in a folder. `kept`: what its launcher knows of its time; `at_work`: True while this process is
    that."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder, self.url = folder, url
        self.kept: Callable[[], Mapping[str, Any] | None] | None = None
        self.at_work = False

    def __call__(self) -> Look:
        record, status = read_record(self.folder), None
        kept = self.kept() if self.kept is not None else read_time(self.folder, record.run_id)
        if not is_complete(self.folder):
            note = note_of(self.folder, record.config)
            answers, status = ask(note, record, brief=False)
            if self.at_work and not answers:
                raise GraphftError("etcd does not answer", rule="etcd-unreachable")  # it is away for a moment
            if status is not None and (not status.idle or self.at_work or holder_of(self.folder)):
                return Look(running(status, note.endpoints), status.events, kept, self.folder, seen_of(status))
        told = look_at(self.folder).to_json() | ({"folder": self.url} if self.url else {})
        return Look(told, ends_as_events(self.folder), kept, self.folder)


class LaunchPage:
    """The page of a launch. Raises UsageError if it cannot be served, before anything of the job is started."""

    def __init__(self, job_dir: Path, port: int) -> None:
        self._looks = FolderLooks(job_dir)
        self._page = JobPage(self._looks)
        self._server = PageServer(self._page, port)
        tell(f"page: {self._server.url}")

    def follow(self, keeper: TimeKeeper) -> None:
        self._looks.kept, self._looks.at_work = keeper.export, True

    def close(self) -> None:
        self._looks.at_work = False
        self._page.look_again()
        try:
            self._server.show_end()
            self._server.close()
        except Exception:
            log.debug("the page could not be closed", exc_info=True)
