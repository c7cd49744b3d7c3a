"""`graphft slurm JOB`: prints the batch script with which a saved job runs on Slurm."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import unicodedata
from pathlib import Path
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.engines.saved_job import check_gpus, tell_idle
from graphft.runtime.engines.script_arguments import words
from graphft.runtime.engines.slurm_script import LOG, SlurmScript, file_name
from graphft.runtime.process.role_process import EXIT_OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("slurm", help="print the batch script that runs a saved job on Slurm: sbatch takes it")
    add = parser.add_argument
    add(
        "job",
        help="the folder of a saved job (graphft launch --save-only), or the URL of its storage; or a Python script, "
        "with a graphft.Trainer say",
    )
    add("--nodes", default="1", metavar="N[-M]", help="how many nodes; of a range, as many as there are (default: 1)")
    add("--trainers-per-node", type=int, default=1, metavar="N", help="(default: 1)")
    add("--pservers", type=int, metavar="N", help="(default: what the job says)")
    add("--cpus-per-trainer", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus-per-trainer", type=int, default=0, metavar="N", help="(default: 0)")
    add("--time", default="", metavar="LIMIT", help="as sbatch takes it; when it is over, the job is queued again")
    add("--partition", default="", metavar="NAME")
    add("--signal-seconds", type=int, default=120, metavar="S", help="it drains so long before its time (default: 120)")
    add("--etcd", default="", metavar="HOST:PORT[,...]", help="(default: the script starts one on its first node)")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    add("--join", action="store_true", help="a script that adds trainers to this job, which runs already")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other option: --sbatch=--account=lab")
    parser.set_defaults(command=_slurm)


def _slurm(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.job_storage import is_url, storage_of
    from graphft.runtime.coordination.wanted_passes import check_asked_for
    from graphft.runtime.launcher.folder_status import find_folder
    from graphft.runtime.launcher.options import LaunchOptions
    from graphft.runtime.launcher.process_counts import check_counts
    from graphft.transpiler import read_record

    _check(options)
    if options.job.endswith(".py"):
        print(_of_script(options).text(), end="")
        return EXIT_OK
    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    folder = find_folder(options.job)
    record = read_record(folder)
    instead = "print the batch script of that script: graphft slurm SCRIPT.py"
    check_asked_for(record.config, options.job, instead)
    stored = storage_of(folder)
    if options.join and stored and not options.etcd:
        raise UsageError(
            f"the job is in {stored}: its nodes have no common folder that says where its etcd is",
            rule="etcd-endpoints",
            help="give --etcd HOST:PORT[,...] here, and for the script that runs the job",
        )
    etcd = options.etcd or ",".join(record.config.etcd_endpoints or ())
    if etcd:
        _check_endpoints(etcd, options.join or _most(options.nodes) > 1)
    if not options.join:  # one launch that starts all of the roles
        check_counts(record.config, LaunchOptions(pservers=options.pservers).counts(record.config), embedded=not etcd)
    own = None if is_url(options.job) else _folder(folder)
    check_gpus("--gpus-per-trainer", options.gpus_per_trainer, record.config)
    tell_idle(options.job if is_url(options.job) else str(folder), record)
    script = SlurmScript(
        job=stored or str(folder.resolve()),
        title=record.config.name,
        pservers=options.pservers,
        etcd=etcd,
        join=options.join,
        output=LOG if own is None else f"{file_name(str(own / 'logs'))}/{LOG}",
        **_asked_for(options),
    )
    if own is not None:
        (own / "logs").mkdir(exist_ok=True)  # Slurm makes no folder
    print(script.text(), end="")
    return EXIT_OK


def _asked_for(options: argparse.Namespace) -> dict[str, Any]:
    """Of Slurm."""
    return {
        "nodes": options.nodes,
        "trainers_per_node": options.trainers_per_node,
        "cpus": options.cpus_per_trainer,
        "gpus": options.gpus_per_trainer,
        "time": options.time,
        "partition": options.partition,
        "signal_seconds": options.signal_seconds,
        "sbatch": options.sbatch,
        "written_by": f"graphft {shlex.join(sys.argv[1:])}",
    }


def _of_script(options: argparse.Namespace) -> SlurmScript:
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
    title = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem)
    program = [str(path.resolve()), *words(options.args)]
    return SlurmScript(job="", title=title, program=program, folder=str(Path.cwd()), **_asked_for(options))


def _check(options: argparse.Namespace) -> None:
    _check_characters("JOB", options.job)
    _check_characters("--args", options.args)
    for name in ("nodes", "time", "partition", "etcd"):
        _check_characters(f"--{name}", getattr(options, name))
    for option in options.sbatch:
        _check_characters("--sbatch", option)
    _check_nodes(options.nodes)
    _check_time(options.time, options.signal_seconds)
    least = {"trainers_per_node": 1, "pservers": 1, "cpus_per_trainer": 1, "gpus_per_trainer": 0, "signal_seconds": 1}
    for name, at_least in least.items():
        value = getattr(options, name)
        if value is not None and not at_least <= value <= MOST:
            option = "--" + name.replace("_", "-")
            expected = f"{at_least} or more" if value < at_least else f"{MOST} or fewer"
            raise UsageError(f"{option} is {value}, expected {expected}", rule="option", help=f"correct {option}")
    for option in options.sbatch:
        name = option[:2] if re.match(r"-\w", option) else option.split("=", 1)[0].split(" ", 1)[0]
        if name in _OWN:
            raise UsageError(f"--sbatch is {option!r}", rule="option", help=f"give it as {_OWN[name]} of this command")
        if not option.startswith("-"):
            raise UsageError(
                f"--sbatch is {option!r}, expected an option of sbatch", rule="option", help="--sbatch=--account=lab"
            )


def _check_characters(what: str, text: str) -> None:
    """The end of a line would end an option of the script, and begin a command."""
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text):
        raise UsageError(
            f"{what} is {text!r}, expected one line of UTF-8 without control characters",
            rule="option",
            help="rename the folder" if what == "JOB" else f"correct {what}",
        )


MOST = 65_535
"""What sbatch takes for --signal, and more than a node has of anything that is counted."""
_TIME = re.compile(r"\d{1,9}(:\d{1,9}){0,2}|\d{1,9}-\d{1,9}(:\d{1,9}){0,2}", re.ASCII)
"""As sbatch takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
_UNLIMITED = ("", "INFINITE", "UNLIMITED")
_OWN = {"-t": "--time", "--time": "--time", "--signal": "--signal-seconds"}
"""Options of sbatch that are given as options of the command, which checks them together."""


def _check_time(limit: str, drain: int) -> None:
    """`drain`: for how many seconds the job drains before its time is over."""
    if limit in _UNLIMITED:
        return
    if not _TIME.fullmatch(limit):
        raise UsageError(
            f"--time is {limit!r}, expected minutes, [hours:]minutes:seconds or days-hours[:minutes[:seconds]]",
            rule="option",
            help="for a day and a half: --time 1-12",
        )
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = 86400 * int(days or 0) + sum(unit * part for unit, part in zip(units, parts, strict=False))
    if 0 < seconds <= 2 * drain:  # 0: no limit
        raise UsageError(
            f"--time {limit} is {seconds} s, and it drains {drain} s before its end (--signal-seconds), expected "
            "more than twice that: it would be queued again and again, and hardly train",
            rule="option",
            help="give it more time, or fewer --signal-seconds",
        )


def _check_nodes(nodes: str) -> None:
    found = re.fullmatch(r"([1-9][0-9]{0,6})(?:-([1-9][0-9]{0,6}))?", nodes)
    if not found or int(found[1]) > _most(nodes):
        raise UsageError(
            f"--nodes is {nodes!r}, expected N or N-M, N not above M",
            rule="option",
            help="for two to eight nodes: --nodes 2-8",
        )


def _most(nodes: str) -> int:
    return int(nodes.rpartition("-")[2])


def _check_endpoints(etcd: str, other_nodes: bool) -> None:
    """`other_nodes`: whether processes may run on another node than etcd does."""
    from graphft.runtime.etcd.channel import parse_endpoint
    from graphft.runtime.transport.address import WILDCARDS, is_loopback

    hosts = {e: parse_endpoint(e).host for e in etcd.split(",")}
    local = [e for e, host in hosts.items() if is_loopback(host) or host in WILDCARDS]
    if local and other_nodes:
        raise UsageError(
            f"etcd at {', '.join(local)} is out of reach: on each node that is the node itself, expected an address "
            "that all nodes reach",
            rule="etcd-endpoints",
            help="give --etcd the address that nodes reach it at",
        )


def _folder(folder: Path) -> Path:
    """Where the folder really is. Raises UsageError for what sbatch cannot write to."""
    found = folder.resolve()
    _check_characters("JOB", str(found))
    if "\\" in str(found):
        raise UsageError(
            f"JOB is {str(found)!r}, expected a path without a backslash, with which Slurm replaces no %j",
            rule="option",
            help="rename the folder",
        )
    return found
