"""`graphft status`: one job, found by its name or folder, or all that there are in ./jobs or in an etcd."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.disk.sealed_json import readable_json
from graphft.errors import GraphftError, UsageError
from graphft.runtime.launcher.runs_command import print_table, show_runs
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import JobStatus
    from graphft.runtime.etcd import Etcd

WATCH_SECONDS = 0.5


def add_parser(commands: Any) -> None:
    status = commands.add_parser("status", help="what a job is doing; without --job, as graphft runs")
    which = "the job's name or folder, or the URL of its storage (default: list all in ./jobs)"
    status.add_argument("--job", default="", help=which)
    status.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the job's folder says)")
    status.add_argument("--watch", action="store_true", help="stay and update")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=show_status)


def show_status(options: argparse.Namespace) -> int:
    """Prints what was asked for. Raises GraphftError when there is no such job, or etcd does not answer."""
    if options.etcd:
        from graphft.runtime.coordination.connect import connect

        with connect(options.etcd) as etcd:
            _show_from_etcd(etcd, options)
    elif not options.job:
        _list_folders(options)
    else:
        from graphft.runtime.coordination.runs import find_folder

        _show_folder(find_folder(options.job), options)
    return EXIT_OK


def _show_from_etcd(etcd: Etcd, options: argparse.Namespace) -> None:
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import list_jobs, read_status

    if options.job:
        return _show(etcd, Keys(name_of(options.job)), options)
    names = list_jobs(etcd)
    if len(names) == 1:
        return _show(etcd, Keys(names[0]), options)
    if not names:
        raise UsageError("etcd knows no job", rule="unknown-job", help="start one; or see whether --etcd is right")
    _refuse_watch(options, names)
    found = [read_status(etcd, Keys(name), brief=True) for name in names]
    if options.json:
        print(readable_json([s.in_brief(options.etcd) | {"state": _state(s)} for s in found]))
    else:
        print_table([_row(s) for s in found])
    return None


def _state(status: JobStatus) -> str:
    return "stopped" if status.idle else status.state


def _row(status: JobStatus) -> tuple[str, str, str, str]:
    waiting = f", waiting for {status.waiting}" if status.waiting else ""
    return (
        status.job,
        _state(status) + waiting,
        str(status.step) if status.on_demand else f"{status.step} of {status.total_steps}",
        status.spec.get("folder", ""),
    )


def _list_folders(options: argparse.Namespace) -> None:
    from graphft.runtime.coordination.runs import JOBS, run_folders

    if options.watch:
        _refuse_watch(options, list(map(str, run_folders())))
    show_runs(str(JOBS), as_json=options.json)


def _show_folder(folder: Path, options: argparse.Namespace) -> None:
    """The whole status of a job that runs; of one that does not, what its folder tells."""
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.coordination.job_storage import is_url
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import read_status
    from graphft.runtime.etcd import EtcdUnreachable
    from graphft.runtime.launcher.folder_status import ANSWER_SECONDS, is_copy, look_at, note_of
    from graphft.runtime.process.folder_lock import holder_of
    from graphft.transpiler import read_record

    record = read_record(folder)
    config = record.config
    while True:
        note = note_of(folder, config)
        try:
            if note.endpoints:
                with connect(note.endpoints, wait=None if holder_of(folder) else ANSWER_SECONDS) as etcd:
                    seen = read_status(etcd, Keys(config.name), brief=True)
                    watched = options.watch and holder_of(folder)  # while it starts, too
                    other = seen.spec.get("run") != record.run_id or is_copy(folder, seen)
                    if watched or not (seen.idle or other):
                        return _show(etcd, Keys(config.name), options)
        except EtcdUnreachable:
            pass
        except GraphftError as error:
            if error.rule != "unknown-job":  # it is about to begin there
                raise
        status = dataclasses.replace(look_at(folder), url=options.job.rstrip("/") if is_url(options.job) else "")
        if not (options.watch and status.state == "starting"):
            print(readable_json(status.to_json()) if options.json else status.describe())
            return None
        time.sleep(WATCH_SECONDS)


def _show(etcd: Etcd, keys: Keys, options: argparse.Namespace) -> None:
    from rich.console import Console

    from graphft.runtime.coordination.status import read_status
    from graphft.runtime.etcd import EtcdError
    from graphft.runtime.launcher.display import Panel, render
    from graphft.runtime.page.time_keeper import OwnAccount, left_of, seen_of, time_in_etcd

    own = OwnAccount()

    def left(status: JobStatus) -> float | None:
        kept = None
        with contextlib.suppress(EtcdError):
            kept = time_in_etcd(etcd, keys, str(status.spec.get("run", "")))
        return left_of(kept if kept is not None else own.look(seen_of(status)), status)

    status = dataclasses.replace(read_status(etcd, keys), etcd_full=etcd.is_full())
    if options.json:
        print(status.to_json(",".join(etcd.endpoints), left(status)))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if options.watch:
        panel = Panel(console)
        try:
            while (status := read_status(etcd, keys)).state == "running":
                panel.show(status, left(status))
                time.sleep(WATCH_SECONDS)
        finally:  # also on Ctrl-C: the last one stays
            panel.close()
            console.print(render(status))
    else:
        console.print(render(status, left(status)))


def name_of(job: str) -> str:
    """Of `--job`, beside `--etcd`: the name, or that of the job in the folder."""
    from graphft.runtime.coordination.runs import JOBS, run_in
    from graphft.transpiler import read_record

    folder = run_in(job) or run_in(str(JOBS / job))
    return read_record(Path(folder or job)).config.name if folder or "/" in job else job


def _refuse_watch(options: argparse.Namespace, known: list[str]) -> None:
    if options.watch:
        raise UsageError("--watch is for one job", rule="usage", help=f"give --job, one of {', '.join(known)}")
