"""`graphft page`: the page of a job, found as `graphft status` finds it, or of all in ./jobs or in an etcd."""

from __future__ import annotations

import argparse
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.page.server import Site

PORTS = range(1 << 16)


def add_parser(commands: Any) -> None:
    page = commands.add_parser("page", help="serve a page that shows a job, whether it runs or not")
    page.add_argument("--job", default="", help="the job's name or folder, or the URL of its storage (default: all)")
    page.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the job's folder says)")
    page.add_argument("--port", default="0", help="on 127.0.0.1 (default: a free one)")
    page.set_defaults(command=serve_page)


def port_of(text: str) -> int:
    """Raises UsageError for what is no port."""
    if not (text.isascii() and text.isdigit() and int(text) in PORTS):
        raise UsageError(
            f"'{text}' is no port", rule="page", help="give a number from 1 to 65535, or 0 for one that is free"
        )
    return int(text)


def serve_page(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises GraphftError when there is no such job, or etcd does not answer."""
    from graphft.runtime.page.server import PageServer

    port = port_of(options.port)
    with contextlib.ExitStack() as stack:
        server = PageServer(_site(options, stack), port)
        stack.callback(server.close)
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # its usual end
            threading.Event().wait()
    return EXIT_OK


def _site(options: argparse.Namespace, stack: contextlib.ExitStack) -> Site:
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.coordination.job_storage import is_url
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.runs import JOBS, find_folder
    from graphft.runtime.coordination.status import list_jobs, read_status
    from graphft.runtime.launcher.folder_status import list_folders
    from graphft.runtime.launcher.page_looks import EtcdLooks, FolderLooks, Folders, JobsOfEtcd
    from graphft.runtime.launcher.status_command import name_of
    from graphft.runtime.page.job_page import JobPage
    from graphft.runtime.page.server import OneJob

    if options.etcd:
        etcd = stack.enter_context(connect(options.etcd))
        if not options.job:
            return JobsOfEtcd(etcd)
        name = name_of(options.job)
        if name not in list_jobs(etcd):
            read_status(etcd, Keys(name), brief=True)  # says which it knows
        return OneJob(JobPage(EtcdLooks(etcd, name)))
    if options.job:
        url = options.job.rstrip("/") if is_url(options.job) else ""
        return OneJob(JobPage(FolderLooks(find_folder(options.job), url)))
    if not list_folders():
        raise UsageError(
            f"there are no jobs in {JOBS.absolute()}",
            rule="unknown-job",
            help="give --job DIR for a job in another folder, or --etcd HOST:PORT for those that an etcd knows",
        )
    return Folders()
