"""Checks of the commands that print how another machine runs a saved job, or a script."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.data import Reference
from graphft.errors import UsageError
from graphft.runtime.coordination.job_storage import is_complete, is_complete_at, is_url

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig, JobRecord


def check_gpus(option: str, count: int | None, config: JobConfig) -> None:
    """Raises UsageError for GPUs that the job would never use."""
    if count and not config.device.startswith("cuda"):
        raise UsageError(
            f'{option} is {count}, and job {config.name} runs on device "{config.device}"',
            rule="option",
            help=f'transpile it with device="cuda", or leave {option} out',
        )


def check_endpoints(etcd: str) -> None:
    """Raises UsageError for an etcd that other machines do not reach; "": none is given."""
    from graphft.runtime.etcd.channel import parse_endpoint
    from graphft.runtime.transport.address import WILDCARDS, is_loopback

    hosts = {e: parse_endpoint(e).host for e in etcd.split(",")} if etcd else {}
    local = [e for e, host in hosts.items() if is_loopback(host) or host in WILDCARDS]
    if local:
        raise UsageError(
            f"etcd at {', '.join(local)} is out of reach: on each machine that is the machine itself",
            rule="etcd-endpoints",
            help="give --etcd the address that all machines reach it at",
        )


def words(text: str) -> list[str]:
    """A script's arguments, as --args has them. Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--args is {text!r}, expected words as a shell reads them: {error}", rule="option", help="quote it whole"
        ) from error


def tell_idle(job: str, record: JobRecord) -> None:
    """Lines on stderr: of a job that has nothing left to do, and of data and sources that lie on this machine."""
    if is_complete_at(job.rstrip("/")) if is_url(job) else is_complete(Path(job)):
        print(f"{job} is complete: its processes would find nothing to do", file=sys.stderr)
    data = record.config.data
    files = data.fingerprint() if data.kind == "files" else ()
    if local := [url for url in files if not is_url(url) or url.startswith("file:")]:
        print(f"{local[0]} is to be at this path on every machine: data files are not copied", file=sys.stderr)
    if data.kind == "dataset":
        made_by = Reference.from_json(data.source)
        if made_by.file:
            where = f"{made_by.file} is to be at this path on every machine"
            print(f"{where}: {made_by.name} in it makes the job's records", file=sys.stderr)
        elif not Path(made_by.path).is_relative_to(sys.prefix):
            where = f"the module {made_by.module} is to be found on every machine (here it is in {made_by.path})"
            print(f"{where}: its {made_by.name} makes the job's records", file=sys.stderr)
