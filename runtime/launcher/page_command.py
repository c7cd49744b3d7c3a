"""`graphft page`, and the page of a launch: of a job that runs, as its etcd tells; of any other, as its folder does."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.coordination.connect import EtcdNote, connect
from graphft.runtime.coordination.job_storage import JOBS, RUNS, is_complete, is_url
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.runs import find_folder, run_folders
from graphft.runtime.coordination.status import UNKNOWN_JOB, JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.folder_status import ANSWER_SECONDS, list_folders, look_at, note_of
from graphft.runtime.launcher.process_ends import ends_as_events
from graphft.runtime.page.job_page import JobPage, Look, running
from graphft.runtime.page.server import OneJob, PageServer, Site
from graphft.runtime.page.time_keeper import TimeKeeper, read_time, seen_of
from graphft.runtime.process.folder_lock import holder_of
from graphft.runtime.process.role_process import EXIT_OK
from graphft.transpiler.record import JobRecord, read_record

log = logging.getLogger("graphft")


def serve_page(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises GraphftError when there is no such job."""
    server = PageServer(site_of(options.job), options.port)
    try:
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # its usual end
            threading.Event().wait()
    finally:
        server.close()
    return EXIT_OK


def site_of(job: str) -> Site:
    if job:
        return OneJob(JobPage(FolderLooks(find_folder(job), job.rstrip("/") if is_url(job) else "")))
    if not list_folders():
        raise UsageError(
            f"there are no jobs in {JOBS.absolute()}",
            rule="unknown-job",
            help="give --job with the folder of a job, or the URL of its storage",
        )
    return Folders()


class FolderLooks:
    """Looks at the job in a folder. `kept`: what its launcher knows of its time, if this process is that launcher;
    `at_work`: True while it is."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder, self.url = folder, url
        self.kept: Callable[[], Mapping[str, Any] | None] | None = None
        self.at_work = False
        self._etcd: Etcd | None = None
        self._endpoints = ""

    def __call__(self) -> Look:
        """Raises GraphftError."""
        record = read_record(self.folder)
        kept = self.kept() if self.kept is not None else read_time(self.folder, record.run_id)
        status = self._ask(record) if not is_complete(self.folder) else None
        if status is None:
            told = look_at(self.folder).to_json() | ({"folder": self.url} if self.url else {})
            return Look(told, ends_as_events(self.folder), kept, self.folder)
        return Look(running(status, self._endpoints), status.events, kept, self.folder, seen_of(status))

    def _ask(self, record: JobRecord) -> JobStatus | None:
        """Returns what etcd tells of this very run; None if nobody works on it, or that cannot be told."""
        note, held = note_of(self.folder, record.config), self.at_work or bool(holder_of(self.folder))
        try:
            status = read_status(self._client(note), Keys(record.config.name), deadline=ANSWER_SECONDS)
        except GraphftError as error:
            if error.rule != UNKNOWN_JOB:
                self._drop()
            if self.at_work and error.rule != UNKNOWN_JOB:
                raise  # etcd is away for a moment
            return None
        return status if status.spec.get("run") == record.run_id and (held or not status.idle) else None

    def _client(self, note: EtcdNote) -> Etcd:
        """Raises GraphftError."""
        if self._etcd is None or self._endpoints != note.endpoints:
            self._drop()
            if not note.endpoints:
                raise GraphftError("it names no etcd that can be asked from here", rule=UNKNOWN_JOB)
            self._etcd, self._endpoints = connect(note.endpoints, wait=ANSWER_SECONDS), note.endpoints
        return self._etcd

    def _drop(self) -> None:
        if self._etcd is not None:
            self._etcd.close()
        self._etcd = None


class Folders:
    """A site of the jobs in ./jobs, those that are made meanwhile, too."""

    def __init__(self) -> None:
        self._pages: dict[str, JobPage] = {}

    def only(self) -> JobPage | None:
        return None

    def briefs(self) -> list[dict[str, Any]]:
        return [status.to_json() | {"link": _link(status.folder)} for status in reversed(list_folders())]

    def job(self, link: str) -> JobPage | None:
        found = {_link(folder): folder for folder in run_folders()} if link not in self._pages else {}
        if link in found:
            self._pages.setdefault(link, JobPage(FolderLooks(found[link])))
        return self._pages.get(link)


def _link(folder: Path) -> str:
    return plain_text(".".join(part for part in folder.parts if part not in (str(JOBS), RUNS)))


class LaunchPage:
    """The page of a launch: served as long as that lasts, and no harm to it. Raises UsageError if it cannot be served:
    before anything of the job is started."""

    def __init__(self, job_dir: Path, port: int) -> None:
        self._looks = FolderLooks(job_dir)
        self._page = JobPage(self._looks)
        self._server = PageServer(OneJob(self._page), port)
        tell(f"page: {self._server.url}")

    def follow(self, keeper: TimeKeeper) -> None:
        """Shows the account of this launch from now on."""
        self._looks.kept, self._looks.at_work = keeper.export, True

    def close(self) -> None:
        self._looks.at_work = False
        self._page.look_again()
        try:
            self._server.show_end()
            self._server.close()
        except Exception:
            log.debug("the page could not be closed", exc_info=True)
