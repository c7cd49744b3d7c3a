"""`graphft slurm JOB`: prints the batch script with which a saved job runs on Slurm."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.engines.slurm_script import LOG, SlurmScript
from graphft.runtime.process.role_process import EXIT_OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("slurm", help="print the batch script that runs a saved job on Slurm: sbatch takes it")
    add = parser.add_argument
    add("job", help="the folder of a saved job (graphft launch --save-only), or the URL of its storage")
    add("--nodes", default="1", metavar="N[-M]", help="how many nodes; of a range, as many as there are (default: 1)")
    add("--trainers-per-node", type=int, default=1, metavar="N", help="(default: 1)")
    add("--pservers", type=int, metavar="N", help="(default: what the job says)")
    add("--cpus-per-trainer", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus-per-trainer", type=int, default=0, metavar="N", help="(default: 0)")
    add("--time", default="", metavar="LIMIT", help="as sbatch takes it; when it is over, the job is queued again")
    add("--partition", default="", metavar="NAME")
    add("--signal-seconds", type=int, default=120, metavar="S", help="it drains so long before its time (default: 120)")
    add("--etcd", default="", metavar="HOST:PORT[,...]", help="(default: the script starts one on its first node)")
    add("--join", action="store_true", help="a script that adds trainers to this job, which runs already")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other option: --sbatch=--account=lab")
    parser.set_defaults(command=_slurm)


def _slurm(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.job_storage import is_url, storage_of
    from graphft.runtime.coordination.wanted_passes import check_asked_for
    from graphft.runtime.launcher.folder_status import find_folder
    from graphft.transpiler import read_record

    _check(options)
    folder = find_folder(options.job)
    record = read_record(folder)
    instead = 'submit that script: sbatch --requeue --wrap "GRAPHFT_ENGINE=slurm python SCRIPT"'
    check_asked_for(record.config, options.job, instead)
    stored = storage_of(folder)
    if options.join and stored and not options.etcd:
        raise UsageError(
            f"the job is in {stored}: its nodes have no common folder that says where its etcd is",
            rule="etcd-endpoints",
            help="give --etcd HOST:PORT[,...] here, and for the script that runs the job",
        )
    script = SlurmScript(
        job=stored or str(folder.resolve()),
        title=record.config.name,
        nodes=options.nodes,
        trainers_per_node=options.trainers_per_node,
        pservers=options.pservers,
        cpus=options.cpus_per_trainer,
        gpus=options.gpus_per_trainer,
        time=options.time,
        partition=options.partition,
        signal_seconds=options.signal_seconds,
        etcd=options.etcd or ",".join(record.config.etcd_endpoints or ()),
        join=options.join,
        output=LOG if is_url(options.job) else str(folder.resolve() / "logs" / LOG),
        sbatch=options.sbatch,
        written_by=f"graphft {shlex.join(sys.argv[1:])}",
    )
    if not is_url(options.job):
        Path(script.output).parent.mkdir(exist_ok=True)  # Slurm makes no folder
    print(script.text(), end="")
    return EXIT_OK


def _check(options: argparse.Namespace) -> None:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", options.nodes):
        raise UsageError(
            f"--nodes is {options.nodes!r}, expected N or N-M",
            rule="option",
            help="for two to eight nodes: --nodes 2-8",
        )
    least = {"trainers_per_node": 1, "pservers": 1, "cpus_per_trainer": 1, "gpus_per_trainer": 0, "signal_seconds": 1}
    for name, at_least in least.items():
        value = getattr(options, name)
        if value is not None and value < at_least:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} is {value}, expected {at_least} or more", rule="option", help=f"correct {option}"
            )
    for option in options.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UsageError(
                f"--sbatch is {option!r}, expected an option of sbatch", rule="option", help="--sbatch=--account=lab"
            )
