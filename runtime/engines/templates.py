"""Fills in the templates of commands that print how another machine runs a saved job, or a script.

A template is a file beside the code that a person can read and copy, filled in line by line. `{{name}}` stands for a
value. A line that is nothing but a placeholder stands for the lines of its value, indented as it is. A line that ends
in `#? name` stays only if that value is not empty, and so does a whole document of YAML that begins with such a line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig, JobRecord

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_BLOCK = re.compile(r"( *)\{\{(\w+)\}\}")
_ONLY_IF = re.compile(r" *#\? (\w+)$")
_BETWEEN = "---\n"
"""Stands between documents of YAML."""


def fill(file: Path, values: Mapping[str, object]) -> str:
    """Returns the text of a template with these values."""
    documents = []
    for document in file.read_text(encoding="utf-8").split(_BETWEEN):
        first, _, rest = document.partition("\n")
        only_if = _ONLY_IF.fullmatch(first)
        if only_if is None or values[only_if[1]]:
            documents.append("".join(_lines(document if only_if is None else rest, values)))
    return _BETWEEN.join(documents)


def _lines(text: str, values: Mapping[str, object]) -> list[str]:
    lines = []
    for line in text.splitlines():
        if only_if := _ONLY_IF.search(line):
            if not values[only_if[1]]:
                continue
            line = line[: only_if.start()]
        if block := _BLOCK.fullmatch(line):
            lines += [f"{block[1]}{inner}\n" for inner in str(values[block[2]]).splitlines()]
        else:
            lines.append(_PLACEHOLDER.sub(lambda found: str(values[found[1]]), line) + "\n")
    return lines


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
    """Returns a script's arguments, as --args has them. Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--args is {text!r}, expected words as a shell reads them: {error}", rule="option", help="quote it whole"
        ) from error


def tell_idle(job: str, record: JobRecord) -> None:
    """Prints on stderr that a job has nothing left to do, and which data and sources lie on this machine."""
    from graphft.data import Reference
    from graphft.runtime.coordination.job_files import is_complete, is_complete_at, is_url

    notes = []
    if is_complete_at(job.rstrip("/")) if is_url(job) else is_complete(Path(job)):
        notes.append(f"{job} is complete: its processes would find nothing to do")
    data = record.config.data
    files = data.fingerprint() if data.kind == "files" else ()
    if local := [url for url in files if not is_url(url) or url.startswith("file:")]:
        notes.append(f"{local[0]} is to be at this path on every machine: data files are not copied")
    if data.kind == "dataset":
        made_by = Reference.from_json(data.source)
        if made_by.file:
            where = f"{made_by.file} is to be at this path on every machine"
            notes.append(f"{where}: {made_by.name} in it makes the job's records")
        elif not Path(made_by.path).is_relative_to(sys.prefix):
            where = f"{made_by.module} is to be found on every machine (here: {made_by.path})"
            notes.append(f"{where}: its {made_by.name} makes the job's records")
    for note in notes:
        print(note, file=sys.stderr)
