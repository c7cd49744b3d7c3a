"""`graphft slurm JOB`: prints the batch script with which a saved job, or a script, runs on Slurm.

It is `engines/slurm_run.sh` (or `slurm_join.sh`), filled in. Other options of sbatch are given to sbatch.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime import engines
from graphft.runtime.engines.templates import check_endpoints, check_gpus, fill, tell_idle, words
from graphft.runtime.process.role_process import EXIT_OK

LOG = "slurm-%j.log"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("slurm", help="print the batch script that runs a saved job on Slurm: sbatch takes it")
    add = parser.add_argument
    add("job", help="the folder of a saved job (graphft launch --save-only), or the URL of its storage; or a script")
    add("--nodes", default="1", metavar="N[-M]", help="how many nodes; of a range, as many as there are (default: 1)")
    add("--trainers-per-node", type=int, default=1, metavar="N", help="(default: 1)")
    add("--pservers", type=int, metavar="N", help="(default: what the job says)")
    add("--cpus-per-trainer", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus-per-trainer", type=int, default=0, metavar="N", help="(default: 0)")
    add("--time", default="", metavar="LIMIT", help="as sbatch takes it; when it is over, the job is queued again")
    add("--partition", default="", metavar="NAME")
    add("--etcd", default="", metavar="HOST:PORT[,...]", help="(default: the script starts one on its first node)")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    add("--join", action="store_true", help="a script that adds trainers to this job, which runs already")
    parser.set_defaults(command=_slurm)


def _slurm(options: argparse.Namespace) -> int:
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
    template = Path(engines.__file__).with_name("slurm_join.sh" if options.join else "slurm_run.sh")
    print(fill(template, {**same, **values}), end="")
    return EXIT_OK


def _of_job(options: argparse.Namespace) -> dict[str, str]:
    from graphft.runtime.coordination.job_files import is_url, url_of
    from graphft.runtime.coordination.run_record import check_asked_for
    from graphft.runtime.coordination.runs import find_folder
    from graphft.transpiler import read_record

    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    folder = find_folder(options.job)
    record = read_record(folder)
    check_asked_for(record.config, options.job, "print the batch script of that script: graphft slurm SCRIPT.py")
    check_gpus("--gpus-per-trainer", options.gpus_per_trainer, record.config)
    stored = url_of(folder)
    if options.join and stored and not options.etcd:
        raise UsageError(
            f"the job is in {stored}: its nodes have no common folder that says where its etcd is",
            rule="etcd-endpoints",
            help="give --etcd HOST:PORT[,...] here, and for the script that runs the job",
        )
    etcd = options.etcd or ",".join(record.config.etcd_endpoints or ())
    if options.join or options.nodes != "1":
        check_endpoints(etcd)
    more = "" if options.pservers is None else f" --pservers {options.pservers}"
    logs = None if is_url(options.job) else folder.resolve() / "logs"
    output = LOG if logs is None else f"{logs}/".replace("%", "%%") + LOG  # else it begins a replacement symbol
    option = _quoted(f"--output={output}")
    if logs is not None:
        logs.mkdir(exist_ok=True)  # Slurm makes no folder
    tell_idle(options.job if logs is None else str(folder), record)
    return {
        "name": record.config.name,
        "job": shlex.quote(stored or str(folder.resolve())),
        "script": "",
        "etcd": shlex.quote(etcd),
        "more": more + (f" --etcd {shlex.quote(etcd)}" if etcd else ""),
        "output": option,
    }


def _of_script(options: argparse.Namespace) -> dict[str, str]:
    """A script of the user's own, which says itself what it needs."""
    path = Path(options.job)
    if not path.is_file():
        raise UsageError(f"there is no script {path}", rule="option", help="name a Python script, or a saved job")
    for name in ("join", "pservers", "etcd"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is for a saved job, and {path} is a script",
                rule="option",
                help="the script says it: pservers=, etcd_endpoints= of graphft.Trainer or transpile",
            )
    return {
        "name": re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem),
        "job": "",
        "script": shlex.quote(str(path.resolve())),
        "folder": shlex.quote(str(Path.cwd())),
        "arguments": "".join(f" {shlex.quote(word)}" for word in words(options.args)),
        "output": f"--output={LOG}",
    }


def _quoted(option: str) -> str:
    """Returns an option as a line of #SBATCH has it: blanks end it, and `#` begins a comment. Raises UsageError for
    what no line can hold."""
    if not option.isprintable() or "\\" in option or '"' in option:  # with a backslash Slurm replaces no %j
        raise UsageError(f"{option!r} is nothing that sbatch reads", rule="option", help="rename the folder")
    return option if re.fullmatch(r"[^\s'#]+", option) else '"' + re.sub(r"(['#])", r"\\\1", option) + '"'
