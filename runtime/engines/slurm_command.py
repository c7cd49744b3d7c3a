"""`graphft slurm JOB`: prints the batch script with which a saved job, or a script, runs on Slurm.

It is `engines/slurm_run.sh`, filled in. Other options of sbatch are given to sbatch.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.coordination.job_files import is_url, url_of
from graphft.runtime.coordination.run_record import check_asked_for
from graphft.runtime.coordination.runs import find_folder
from graphft.runtime.engines.templates import check_endpoints, fill
from graphft.runtime.process.role_process import EXIT_OK
from graphft.transpiler.record import read_record

LOG = "slurm-%j.log"


def print_script(options: argparse.Namespace) -> int:
    values = _of_script(options) if options.job.endswith(".py") else _of_job(options)
    same = {
        "nodes": options.nodes,
        "trainers_per_node": options.trainers_per_node,
        "cpus": options.cpus_per_trainer,
        "gpus": options.gpus_per_trainer * options.trainers_per_node,
        "time": options.time,
        "partition": options.partition,
        "python": shlex.quote(sys.executable),
    }
    print(fill(Path(__file__).with_name("slurm_run.sh"), {**same, **values}), end="")
    return EXIT_OK


def _of_job(options: argparse.Namespace) -> dict[str, str]:

    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    folder = find_folder(options.job)
    record = read_record(folder)
    check_asked_for(record.config, options.job, "print the batch script of that script: graphft slurm SCRIPT.py")
    etcd = options.etcd or ",".join(record.config.etcd_endpoints or ())
    if options.nodes != "1":
        check_endpoints(etcd)
    more = "" if options.pservers is None else f" --pservers {options.pservers}"
    logs = None if is_url(options.job) else folder.resolve() / "logs"
    output = LOG if logs is None else f"{logs}/{LOG}"
    if not re.fullmatch(r"[\w./+:,=@~-]*%j\.log", output):
        raise UsageError(f"{logs} is nothing that a line of #SBATCH can name", rule="option", help="rename the folder")
    if logs is not None:
        logs.mkdir(exist_ok=True)  # Slurm makes no folder
    return {
        "name": record.config.name,
        "job": shlex.quote(url_of(folder) or str(folder.resolve())),
        "script": "",
        "more": more + (f" --etcd {shlex.quote(etcd)}" if etcd else ""),
        "output": f"--output={output}",
    }


def _of_script(options: argparse.Namespace) -> dict[str, str]:
    """A script of the user's own, which says itself what it needs."""
    path = Path(options.job)
    if not path.is_file():
        raise UsageError(f"there is no script {path}", rule="option", help="name a Python script, or a saved job")
    for name in ("pservers", "etcd"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is for a saved job, and {path} is a script",
                rule="option",
                help="the script says it: pservers=, etcd_endpoints= of graphft.Trainer or transpile",
            )
    try:
        words = shlex.split(options.args)
    except ValueError as error:
        why = f"--args is {options.args!r}, expected words as a shell reads them: {error}"
        raise UsageError(why, rule="option", help="quote it whole") from error
    return {
        "name": re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem),
        "job": "",
        "script": shlex.quote(str(path.resolve())),
        "folder": shlex.quote(str(Path.cwd())),
        "arguments": "".join(f" {shlex.quote(word)}" for word in words),
        "output": f"--output={LOG}",
    }
